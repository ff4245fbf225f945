"""Files written whole or not at all; digests, paths, and texts that any reader can show."""

import csv
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cdgp.errors import ImageError, OutputError, SettingsError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""A spreadsheet program runs a cell that begins with one of these as a formula."""
CONTROL = re.compile("(?!\n  )[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that steer a terminal or turn the direction of what follows; not the indented lines
that ``manifest.listed`` makes."""
IN_PAGE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
"""The same in a page, whose own lines stay."""


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path``; rename it to ``path`` once the block has succeeded.

    Whenever the program is killed, a reader finds the old file, the new one, or none. The umask
    alone sets the permissions: some shares refuse a chmod.

    Raises:
        OutputError: the place cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(exist_ok=False)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def save_tensors(path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whole; errors as ``atomic_write``."""
    from safetensors.torch import save

    stored = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
    with atomic_write(path) as temporary:
        # Not save_file: it writes a temporary file of its own, which is private for ever.
        temporary.write_bytes(save(stored, metadata=dict(metadata)))


def printable(text: str) -> str:
    """The text with bytes of file names that are no UTF-8 escaped, so that any reader shows it."""
    return text.encode("utf-8", "backslashreplace").decode()


def visible(text: str, what: re.Pattern[str] = CONTROL) -> str:
    """The text with control characters escaped, so that a name cannot steer what shows it.

    Example:
        >>> print(visible("a\\x1b[2J.png"))
        a\\x1b[2J.png
    """
    return what.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, most: int = 400) -> str:
    """The text, cut after ``most`` characters."""
    return text if len(text) <= most else f"{text[:most].rstrip()} …"


def write_text(path: Path, text: str, errors: str = "strict") -> None:
    """Write a UTF-8 text file whole, its line ends as they are."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors=errors, newline="")


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table whole, row by row, so that it need not fit into memory.

    A text that a spreadsheet program would run gets an apostrophe in front; give paths as
    ``path_cell`` makes them.
    """
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as f:
        table = csv.writer(f)
        table.writerow(header)
        for row in rows:
            table.writerow([text_cell(cell) if isinstance(cell, str) else cell for cell in row])


def text_cell(text: str) -> str:
    """A text as a cell of a table: one that begins like a formula gets an apostrophe in front.

    Example:
        >>> text_cell("=1+1"), text_cell("'=1+1"), text_cell("line 2")
        ("'=1+1", "''=1+1", 'line 2')
    """
    return f"'{text}" if text.lstrip("'").startswith(FORMULA) else text


def cell_text(cell: str) -> str:
    """The text that ``text_cell`` made a cell of."""
    made = cell.startswith("'") and cell.lstrip("'").startswith(FORMULA)
    return cell[1:] if made else cell


def path_cell(name: str) -> str:
    """A path as a cell of a table: one that begins like a formula gets ``./`` in front."""
    return f"./{name}" if name.startswith(FORMULA) else name


def lies_in(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or lies in it, by whatever names: links, ``..``, mounts."""
    resolved = path.resolve()
    return any(is_same(place, folder) for place in (resolved, *resolved.parents))


def is_same(path: Path, other: Path) -> bool:
    """Whether two paths mean one file or folder; it need not exist."""
    try:
        return path.samefile(other)
    except OSError:
        return path.resolve() == other.resolve()


def path_of(value: object, name: str) -> Path:
    """The path that a caller gives; SettingsError, with its name, where it is no path."""
    if isinstance(value, str | os.PathLike) and isinstance(path := os.fspath(value), str) and path:
        return Path(path)
    raise SettingsError(f"{name} = {value!r}: expected a path, as str or os.PathLike")


def absolute(path: Path) -> Path:
    """The path made absolute, without `..`; symbolic links are kept."""
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
