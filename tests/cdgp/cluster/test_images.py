"""The images of a job: lists of every kind, folders here and elsewhere, one list of them all."""

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.helpers import noise_image, raised

from cdgp.cluster.images import LIST, check_outside, images_of, shards, write_list
from cdgp.cluster.store import Store
from cdgp.data.walk import Notice
from cdgp.errors import DataError, OutputError
from cdgp.workflows.predict import named_images

ODD = os.fsdecode(b"odd\xff\n.png")
NAMES = ["a.png", "sub/b.png", "/elsewhere/c.png", "s3://bucket/d.png", ODD.replace("\n", "")]


def listed(*given: object) -> list[str]:
    return list(images_of([str(place) for place in given], []))


def table(path: Path, /, **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), path)
    return path


def as_text(folder: Path) -> Path:
    (folder / "list.txt").write_bytes(os.fsencode("\r\n".join(NAMES) + "\n\n"))
    return folder / "list.txt"


def as_binary(folder: Path) -> Path:
    return table(folder / "list.parquet", n=[1] * 5, path=[os.fsencode(name) for name in NAMES])


def as_column(folder: Path) -> Path:
    names = pa.array([*NAMES[:4], "last.png"], pa.string()).dictionary_encode()
    return table(folder / "list.parquet", path=names)


@pytest.mark.parametrize("make", [as_text, as_binary, as_column])
def test_lists(make: Callable[[Path], Path], tmp_path: Path) -> None:
    last = "last.png" if make is as_column else NAMES[4]
    assert listed(make(tmp_path)) == [
        f"{tmp_path}/a.png", f"{tmp_path}/sub/b.png", *NAMES[2:4], f"{tmp_path}/{last}",
    ]  # fmt: skip


def test_list_elsewhere_names_images_beside_it() -> None:
    memory = fsspec.filesystem("memory")
    with memory.open("/lists/some.txt", "wb") as file:
        file.write(b"a.png\ndeep/b.png")
    assert listed("memory://lists/some.txt") == [
        "memory://lists/a.png", "memory://lists/deep/b.png",
    ]  # fmt: skip


def test_folder_elsewhere() -> None:
    memory = fsspec.filesystem("memory")
    for name in ("2.png", "1.JPG", "sub/3.tif", "notes.txt", ".hidden.png"):
        memory.pipe_file(f"/folder/{name}", b"x")
    assert sorted(listed("memory://folder")) == [
        "memory:///folder/1.JPG", "memory:///folder/2.png", "memory:///folder/sub/3.tif",
    ]  # fmt: skip
    assert listed("memory://folder/2.png") == ["memory://folder/2.png"]
    memory.pipe_file("/other/notes.txt", b"x")
    raised(lambda: listed("memory://other"), "memory://other", "no images")


def test_folder_here_is_searched_as_predict_does(surfaces: object, tmp_path: Path) -> None:
    for name in ("b/1.png", "a.png", "b/1_mask.png"):
        noise_image(tmp_path / "x" / name)
    (tmp_path / "x/notes.pdf").write_bytes(b"")
    notices: list[Notice] = []
    found = list(images_of([str(tmp_path / "x")], notices))
    assert found == [str(path) for _, path in named_images([tmp_path / "x"])] != []
    assert any("notes.pdf" in notice.text for notice in notices)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"image": ["a.png"], "n": [1]}, ["has no column 'path'", "image, n"]),
        ({"path": ["a.png", None]}, ["row 2", "None"]),
        ({"path": ["a.png", ""]}, ["row 2", "''"]),
        ({"path": [1]}, ["row 1", "1, no path"]),
    ],
)
def test_tables_that_name_no_images(
    columns: dict[str, list[object]], words: list[str], tmp_path: Path
) -> None:
    path = table(tmp_path / "list.parquet", **columns)
    raised(lambda: listed(path), str(path), *words)


def test_lists_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "list.parquet"
    raised(lambda: listed(path), str(path), "no such file")
    raised(lambda: listed("memory://none/list.txt"), "memory://none/list.txt", "no such file")
    whole = table(tmp_path / "whole.parquet", path=["a"] * 9).read_bytes()
    for content in (b"", b"no table", whole[:-9]):
        path.write_bytes(content)
        raised(lambda: listed(path), str(path), "is no Parquet file")


def test_list_of_a_job_gives_shards(tmp_path: Path) -> None:
    """In their order, whatever the bytes of a name; more than one group of rows."""
    names = [f"/x/{i}.png" for i in range(9000)] + [f"/x/{ODD}"]
    out = Store(str(tmp_path / "out"))
    assert write_list(out, iter(names)) == 9001
    found = list(shards(out, 1000))
    assert [len(shard) for shard in found] == [1000] * 9 + [1]
    assert [name for shard in found for name in shard] == names


def test_ten_thousand_images_in_one_folder(tmp_path: Path) -> None:
    folder, out = tmp_path / "many", Store(str(tmp_path / "out"))
    folder.mkdir()
    for i in range(10_000):
        (folder / f"{i}.png").touch()
    assert write_list(out, images_of([str(folder)], [])) == 10_000
    found = [name for shard in shards(out, 1024) for name in shard]
    assert len(set(found)) == 10_000 and set(found) == {str(p) for p in folder.iterdir()}


def test_list_that_fails_leaves_nothing(tmp_path: Path) -> None:
    out = Store(str(tmp_path / "out"))
    names = (f"/x/{1 // (5000 - i)}.png" for i in count())
    with pytest.raises(ZeroDivisionError):
        write_list(out, names)
    assert LIST not in out.names() and not list((tmp_path / "out").iterdir())


def test_results_do_not_lie_among_the_images(tmp_path: Path) -> None:
    noise_image(tmp_path / "x/a.png")
    for given, out in [
        (tmp_path / "x", tmp_path / "x/out"), ("memory://x", "memory://x/out"),
        ("memory://x/", "memory://x"),
    ]:  # fmt: skip
        raised(lambda: check_outside([str(given)], Store(str(out))),  # noqa: B023
               "lies in a", "choose another --out", error=OutputError)  # fmt: skip
    check_outside([str(tmp_path / "x"), "memory://x"], Store("memory://xy"))
    with pytest.raises(DataError):
        listed(tmp_path / "none")
