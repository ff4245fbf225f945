"""The images of a job: streamed from folders and lists into one table, and from it in shards."""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from cdgp.cluster.store import Store, as_place, is_url, open_url
from cdgp.data.walk import IMAGES, Notice, Search
from cdgp.errors import DataError, OutputError
from cdgp.files import lies_in
from cdgp.workflows.predict import common_folder, outermost, searched

LIST = "_list.parquet"
"""The images of a job, in their order. Readers of the results skip a name that begins so."""
COLUMN = "path"
"""Of a Parquet file that names images."""
LISTS = (".parquet", ".txt")
"""Suffixes of files that name images: a table, or a path a line."""
GROUP = 4096


def images_of(given: Sequence[str], notices: list[Notice]) -> Iterator[str]:
    """The place of every image, as ``as_place`` makes them, one after another.

    Args:
        given: images, folders, and lists of images: paths and URLs.
        notices: what the search leaves out is added at its end.

    Raises:
        DataError: no such place, or a list that cannot be used.
    """
    places = [as_place(text) for text in given]
    lists = [place for place in places if place.lower().endswith(LISTS)]
    local = [Path(place) for place in places if place not in lists and not is_url(place)]
    missing = [place for place in (*local, *lists) if not _exists(str(place))]
    if missing:
        raise DataError(f"{missing[0]}: no such file or folder")
    for place in lists:
        yield from _listed(place)
    if local:
        tops = outermost(local)
        root = common_folder(tops)
        search = Search(tops, root)
        for path in searched(tops, search):
            yield str(path)
        notices += search.unused.notices(root or tops[0])
    for place in places:
        if place not in lists and is_url(place):
            yield from _remote(place)


def check_outside(given: Sequence[str], out: Store) -> None:
    """Raise OutputError where results would lie in a folder that is scored."""
    folders = [Path(place) for place in map(as_place, given) if not is_url(place)]
    if out.local is not None and any(f.is_dir() and lies_in(out.local, f) for f in folders):
        raise OutputError(f"{out.place}: lies in a folder that is scored; choose another --out")
    for url in (place for place in map(as_place, given) if is_url(place)):
        if out.place == url or out.place.startswith(f"{url}/"):
            raise OutputError(f"{out.place}: lies in a place that is scored; choose another --out")


def write_list(out: Store, places: Iterable[str]) -> int:
    """Write the images of a job; returns how many there are. Memory does not grow with them."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema([(COLUMN, pa.binary())])  # a name on Linux need not be text
    count, left = 0, iter(places)
    with out.writing(LIST) as file, parquet.ParquetWriter(
        file, schema, write_statistics=False
    ) as table:  # fmt: skip
        while group := [os.fsencode(place) for place in islice(left, GROUP)]:
            table.write_table(pa.table([group], schema=schema))
            count += len(group)
    return count


def shards(out: Store, size: int) -> Iterator[list[str]]:
    """The images of a job in lists of ``size``, in their order."""
    with out.reading(LIST) as file:
        names = (os.fsdecode(name) for name in _column(file, LIST))
        while shard := list(islice(names, size)):
            yield shard


def _exists(place: str) -> bool:
    if not is_url(place):
        return Path(place).exists()
    filesystem, path = open_url(place)
    return bool(filesystem.exists(path))


def _listed(place: str) -> Iterator[str]:
    """The images that a list names; a relative path is relative to the folder of the list."""
    folder = place.rpartition("/")[0]
    with _opened(place) as file:
        names = _column(file, place) if place.lower().endswith(".parquet") else _lines(file)
        for name in names:
            text = os.fsdecode(name)
            yield text if is_url(text) or os.path.isabs(text) else f"{folder}/{text}"  # noqa: PTH117


def _opened(place: str) -> IO[bytes]:
    if not is_url(place):
        return Path(place).open("rb")
    filesystem, path = open_url(place)
    opened: IO[bytes] = filesystem.open(path, "rb")
    return opened


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    return (line for raw in file if (line := raw.rstrip(b"\r\n")))


def _column(file: IO[bytes], source: str) -> Iterator[str | bytes]:
    """The names in a Parquet file, streamed."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table: Any = parquet.ParquetFile(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{source}: is no Parquet file, or was cut off ({error})") from error
    columns = table.schema_arrow.names
    if COLUMN not in columns:
        raise DataError(
            f"{source}: has no column {COLUMN!r} that names the images; it has "
            f"{', '.join(columns) or 'none'}; rename the column of paths"
        )
    row = 0
    for batch in table.iter_batches(batch_size=GROUP, columns=[COLUMN]):
        for name in batch.column(0).to_pylist():
            row += 1
            if not isinstance(name, str | bytes) or not name:
                raise DataError(
                    f"{source}: row {row} of the column {COLUMN!r} is {name!r}, no path; remove it"
                )
            yield name


def _remote(url: str) -> Iterator[str]:
    """The images in a folder of another file system, by their names; or the one image there."""
    filesystem, top = open_url(url)
    if filesystem.isfile(top):
        yield url
        return
    found = False
    for folder, _, files in filesystem.walk(top):
        for name in sorted(files):
            if Path(name).suffix.lower() in IMAGES and not name.startswith("."):
                found = True
                yield filesystem.unstrip_protocol(f"{folder}/{name}")
    if not found:
        raise DataError(f"{url}: there are no images; check the place and your rights there")
