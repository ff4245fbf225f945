"""Files that are whole or not there."""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cdgp.errors import ImageError, OutputError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its name once the block has ended well.

    Whatever kills the program, a reader finds the old file, the new one, or none.

    Raises:
        OutputError: the place cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent
        )
        os.close(handle)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def save_tensors(path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whole.

    Raises:
        OutputError: the place cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    copies = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
    with atomic_write(path) as temporary:
        try:
            save_file(copies, temporary, metadata=dict(metadata))
        except SafetensorError as error:  # a full disk, for one, is no OSError there
            raise OutputError(f"{path}: cannot be written: {error}") from error


LEFTOVER = re.compile(r"\..+(\.[^.]+)\.[a-z0-9_]{8}\1")
"""How ``atomic_write`` names what it has not finished: .NAME.SUFFIX.12345678.SUFFIX"""
RESULT_FOLDERS = ("overlays", "maps")
RESULT_FILES = (
    "scores.csv", "metrics.json", "report.html", "suspects.csv", "check.json", "unreadable.csv",
    "unfinished.sqlite", "unfinished.sqlite-journal",
)  # fmt: skip


def check_not_replaced(folder: Path, names: Iterable[str], paths: Iterable[Path]) -> None:
    """Sub-folders that are about to be replaced must hold nothing that is read.

    Raises:
        OutputError: one of the paths lies in ``folder / name``.
    """
    own = [Path(os.path.normpath((folder / name).absolute())) for name in names]
    for path in paths:
        if any(path.is_relative_to(place) for place in own):
            raise OutputError(
                f"{folder}: holds {path} where a run keeps its own files; choose another --out"
            )


def remove_results(folder: Path) -> None:
    """Take away what an earlier scoring left in a folder; everything else stays."""
    for name in RESULT_FILES:
        (folder / name).unlink(missing_ok=True)
    for name in RESULT_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Take away what a kill left of files that ``atomic_write`` was writing; others stay."""
    places = [folder.glob(".*"), *((folder / name).rglob(".*") for name in RESULT_FOLDERS)]
    for path in (path for place in places for path in place):
        if LEFTOVER.fullmatch(path.name) and path.is_file():
            path.unlink()


def printable(text: str) -> str:
    """The text with bytes of names that are no UTF-8 escaped, so that any reader can show it."""
    return text.encode("utf-8", "backslashreplace").decode()


def write_text(path: Path, text: str, errors: str = "strict") -> None:
    """Write a UTF-8 text file whole, its line ends as they are."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors=errors, newline="")


def absolute(path: Path) -> Path:
    """The path made absolute and freed of `..`, symbolic links kept."""
    return Path(os.path.normpath(path.absolute()))


def digest(path: Path) -> str:
    """SHA-256 of the file's bytes, in hex."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ImageError(f"{path}: cannot be read: {error.strerror}") from error


def subsample_evenly(items: Sequence[T], count: int) -> list[T]:
    """At most ``count`` of the items, evenly spaced."""
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]
