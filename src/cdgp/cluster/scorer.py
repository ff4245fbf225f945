"""Scores the images of a shard and writes them as one Parquet file."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

from cdgp.cluster.store import Store, is_url, open_url
from cdgp.errors import CdgpError, DataError, ImageError
from cdgp.files import digest, printable
from cdgp.inference import Detector, Prediction, Prepared
from cdgp.prefetch import in_order
from cdgp.streaming import Threads, load_for, stream

Row: TypeAlias = dict[str, Any]

FETCHES = 8
"""Images that are fetched from another file system at the same time."""
SHOWN = 20
"""Messages about unreadable images that a result holds; the rows have them all."""
ABOUT_ONE = (FileNotFoundError, PermissionError, IsADirectoryError)
"""What a file system raises about an image; anything else ends the job, which is resumed later."""


class Model(NamedTuple):
    """A model file as it is sent to the workers."""

    name: str
    """Of the file, with its suffix."""
    files: Mapping[str, bytes]
    """The content of the file, and of what lies beside it and belongs to it, by name."""
    source: str
    """Where it was read, for messages."""
    sha256: str
    defect_rate: float | None

    def load(self, threads: Threads) -> Detector:
        """The detector; errors as ``inference.load``, with the path that the model came from."""
        with TemporaryDirectory(prefix="cdgp-model-") as folder:
            for name, content in self.files.items():
                (Path(folder) / name).write_bytes(content)
            try:
                return load_for(Path(folder) / self.name, threads, self.defect_rate)
            except CdgpError as error:
                here = str(Path(folder) / self.name)
                raise type(error)(str(error).replace(here, self.source)) from None


class Facts(NamedTuple):
    """What all scores of a model share."""

    score_kind: str
    rests_on: str
    refers_to: str
    threshold: float
    notes: tuple[str, ...]

    @classmethod
    def of(cls, detector: Detector) -> "Facts":
        card = detector.card
        return cls(
            detector.score_kind, detector.rests_on, card.decision.refers_to,
            detector.threshold, tuple(card.image.notes),
        )  # fmt: skip


class Piece(NamedTuple):
    """Images that are scored together: a shard, or a part of one that ends its workers."""

    shard: str
    """The digest of its shard: of the model, and of the places in their order."""
    start: int
    """Where it begins in its shard."""
    places: Sequence[str]
    whole: bool
    """Whether it is the whole shard."""
    kills: int = 0
    """How often a worker ended on it."""

    @property
    def name(self) -> str:
        """Of the file that holds its rows."""
        return part_name(self.shard, None if self.whole else (self.start, self.stop))

    @property
    def stop(self) -> int:
        return self.start + len(self.places)


class Tally(NamedTuple):
    """What the rows of a piece amount to."""

    images: int
    rejected: int
    unreadable: int
    warned: int
    problems: tuple[str, ...]
    """The first of them."""


def part_name(shard: str, part: tuple[int, int] | None) -> str:
    """The name of the file of a shard, or of the rows from one number to another of it."""
    return f"part-{shard}.parquet" if part is None else f"part-{shard}-{part[0]}-{part[1]}.parquet"


class Scorer:
    """Scores pieces, one after another; a Ray actor is made of it.

    Args:
        model: as it was sent.
        threads: how its images are streamed.
        out: where the rows go.
    """

    def __init__(self, model: Model, threads: Threads, out: str) -> None:
        self.model, self.threads, self.out = model, threads, Store(out)

    def load(self) -> Facts:
        """Load the model; errors as ``Model.load``."""
        self.detector = self.model.load(self.threads)
        return Facts.of(self.detector)

    def score(self, piece: Piece) -> Tally:
        """Score a piece and write its rows.

        Raises:
            OutputError: they cannot be written.
            DataError: images cannot be fetched.
        """
        rows = list(rows_of(self.detector, piece.places, self.threads, self.model.sha256))
        write_rows(self.out, piece.name, rows, Facts.of(self.detector))
        return tally(rows)


def rows_of(
    detector: Detector, places: Sequence[str], threads: Threads, model: str
) -> Iterator[Row]:
    """A row for each image, in their order; one that cannot be scored has a problem instead."""

    def finish(item: tuple[int, str], image: Prepared, found: Prediction) -> Row:
        index, place = item
        return row(
            place,
            model,
            sha256=digest(files[index]),
            score=found.pred_score,
            label=found.pred_label,
            regions=[asdict(region) for region in found.regions],
            warnings=list(found.warnings),
        )

    files: dict[int, Path] = {}
    with TemporaryDirectory(prefix="cdgp-images-") as folder, ThreadPoolExecutor(FETCHES) as pool:

        def fetched(item: tuple[int, str]) -> tuple[int, str, Path]:
            index, place = item
            return index, place, fetch(place, Path(folder) / str(index))

        def images() -> Iterator[tuple[tuple[int, str], Path]]:
            for index, place, path in in_order(
                pool, fetched, enumerate(places), lambda: 2 * FETCHES
            ):
                files[index] = path
                yield (index, place), path

        with closing(stream(detector, images(), finish, threads)) as scored:
            for (index, place), found in scored:
                path = files.pop(index)
                yield found if isinstance(found, dict) else failed(place, path, model, found)
                if is_url(place):
                    path.unlink(missing_ok=True)


def fetch(place: str, folder: Path) -> Path:
    """The local file of an image; one of another file system is copied.

    Where there is no such image, or no right to read it, the path leads nowhere.

    Raises:
        DataError: the file system does not answer as it should.
    """
    if not is_url(place):
        return Path(place)
    filesystem, path = open_url(place)
    local = folder.with_name(f"{folder.name}{Path(path).suffix}")
    try:
        filesystem.get_file(path, str(local))
    except ABOUT_ONE:
        local.unlink(missing_ok=True)
    except Exception as error:
        raise DataError(
            f"{place}: cannot be fetched ({type(error).__name__}: {error}); check the storage and "
            "the credentials of the workers, then go on with --resume"
        ) from error
    return local


def failed(place: str, path: Path, model: str, error: Exception) -> Row:
    """The row of an image that cannot be scored.

    Raises:
        CdgpError: the error is not about this image.
    """
    if isinstance(error, ImageError):
        problem = str(error).replace(str(path), place)
    elif isinstance(error, CdgpError):
        raise error
    else:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        problem = f"{place}: cannot be scored: {reason}"
    return row(place, model, sha256=readable_digest(path), problem=printable(problem))


def culprit(piece: Piece, model: str) -> Row:
    """The row of the one image of a piece, on which the workers ended."""
    (place,) = piece.places
    problem = f"{place}: the process ended while this image was scored, {piece.kills} times"
    return row(place, model, problem=printable(f"{problem}; look at it alone, apart from others"))


def readable_digest(path: Path) -> str | None:
    """The digest of a file; None where it cannot be read."""
    try:
        return digest(path)
    except ImageError:
        return None


def row(place: str, model: str, **found: Any) -> Row:
    """A row of the results; what is not given is missing."""
    empty: Row = {"sha256": None, "score": None, "label": None, "regions": [], "warnings": []}
    return {"path": printable(place), **empty, "model": model, "problem": None, **found}


def schema() -> Any:
    """Of the rows; docs/cluster.md describes it."""
    import pyarrow as pa

    region = pa.struct(
        [(name, pa.int32()) for name in ("x", "y", "width", "height", "area")]
        + [("peak", pa.float64())]
    )
    return pa.schema(
        [
            pa.field("path", pa.string(), nullable=False),
            ("sha256", pa.string()),
            ("score", pa.float64()),
            ("label", pa.bool_()),
            ("regions", pa.list_(region)),
            ("warnings", pa.list_(pa.string())),
            pa.field("model", pa.string(), nullable=False),
            ("problem", pa.string()),
        ]
    )


def write_rows(out: Store, name: str, rows: Sequence[Row], facts: Facts | None) -> None:
    """Write rows as a Parquet file, whole; errors as ``Store.writing``."""
    import pyarrow as pa
    from pyarrow import parquet

    known = {} if facts is None else facts._asdict()
    described = json.dumps({"version": version("cdgp"), **known})
    table = pa.Table.from_pylist(list(rows), schema=schema().with_metadata({"cdgp": described}))
    with out.writing(name) as file:
        parquet.write_table(table, file)


def tally(rows: Sequence[Mapping[str, Any]]) -> Tally:
    """The sums of rows that have at least ``label``, ``warnings`` and ``problem``."""
    problems = [row["problem"] for row in rows if row["problem"] is not None]
    return Tally(
        len(rows),
        sum(1 for row in rows if row["label"]),
        len(problems),
        sum(1 for row in rows if row["warnings"]),
        tuple(problems[:SHOWN]),
    )


def tally_of(out: Store, name: str) -> Tally:
    """The sums of rows that were written before."""
    from pyarrow import parquet

    with out.reading(name) as file:
        table = parquet.read_table(file, columns=["label", "warnings", "problem"])
    return tally(table.to_pylist())


def shard_digest(model: str, defect_rate: float | None, number: int, places: Sequence[str]) -> str:
    """What names the file of a shard: the model, and the images in their order."""
    listed = "\0".join((model, repr(defect_rate), str(number), *places))
    return hashlib.sha256(listed.encode("utf-8", "surrogateescape")).hexdigest()[:32]
