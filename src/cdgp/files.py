"""Files written whole or not at all; digests, paths, and texts that any reader can show."""

import csv
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cdgp.errors import ImageError, OutputError, SettingsError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path``; rename it to ``path`` once the block has succeeded.

    Whenever the program is killed, a reader finds the old file, the new one, or none.

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
    """Write a safetensors file whole; errors as ``atomic_write``."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    stored = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
    with atomic_write(path) as temporary:
        try:
            save_file(stored, temporary, metadata=dict(metadata))
        except SafetensorError as error:  # a full disk, for one, is no OSError there
            raise OutputError(f"{path}: cannot be written: {error}") from error


def printable(text: str) -> str:
    """The text with bytes of file names that are no UTF-8 escaped, so that any reader shows it."""
    return text.encode("utf-8", "backslashreplace").decode()


def shortened(text: str, most: int = 400) -> str:
    """The text, cut after ``most`` characters."""
    return text if len(text) <= most else f"{text[:most].rstrip()} …"


def write_text(path: Path, text: str, errors: str = "strict") -> None:
    """Write a UTF-8 text file whole, its line ends as they are."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors=errors, newline="")


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table whole, row by row, so that it need not fit into memory."""
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as f:
        table = csv.writer(f)
        table.writerow(header)
        table.writerows(rows)


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
