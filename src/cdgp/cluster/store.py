"""A folder of results in any file system that fsspec knows: local, s3://, gs:// and others."""

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from cdgp.errors import CdgpError, OutputError, SettingsError
from cdgp.files import absolute, atomic_write
from cdgp.runtimes.base import require_package

URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")


def is_url(place: str) -> bool:
    """Whether a place is a URL of fsspec; else it is a path of this machine."""
    return URL.match(place) is not None


def as_place(given: str) -> str:
    """A URL as it is given, or the absolute path of this machine."""
    path = given.removeprefix("file://")
    return given.rstrip("/") if is_url(path) else str(absolute(Path(path)))


def open_url(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it.

    Raises:
        SettingsError: nothing is installed that reads such URLs.
    """
    fsspec = require_package("fsspec")
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise SettingsError(
            f"{url}: cannot be opened: {error}; s3:// needs the package s3fs, gs:// gcsfs, on all "
            "nodes"
        ) from error
    return filesystem, path


class Store(NamedTuple):
    """A folder that files are written into, each whole or not at all."""

    place: str
    """As ``as_place`` gives it."""

    @property
    def local(self) -> Path | None:
        """Its path on this machine; None where it is a URL."""
        return None if is_url(self.place) else Path(self.place)

    def names(self) -> set[str]:
        """The names of the files in it; empty where there is no such folder.

        Raises:
            OutputError: it cannot be listed.
        """
        with self._errors("cannot be listed"):
            if self.local is not None:
                return {p.name for p in self.local.iterdir()} if self.local.exists() else set()
            filesystem, folder = open_url(self.place)
            filesystem.invalidate_cache(folder)
            try:
                found = filesystem.ls(folder, detail=False)
            except FileNotFoundError:
                return set()
            return {path.rstrip("/").rpartition("/")[2] for path in found}

    def has(self, name: str) -> bool:
        """Whether there is a file of this name, as another node would see it."""
        with self._errors("cannot be read"):
            if self.local is not None:
                return (self.local / name).is_file()
            filesystem, folder = open_url(self.place)
            filesystem.invalidate_cache(folder)
            return bool(filesystem.isfile(f"{folder}/{name}"))

    @contextmanager
    def reading(self, name: str) -> Iterator[IO[bytes]]:
        """A file of it, open to be read."""
        with self._errors("cannot be read"):
            if self.local is not None:
                with (self.local / name).open("rb") as file:
                    yield file
            else:
                filesystem, folder = open_url(self.place)
                with filesystem.open(f"{folder}/{name}", "rb") as file:
                    yield file

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """A file to write, which has its name once the block has succeeded.

        Raises:
            OutputError: it cannot be written.
        """
        if self.local is not None:
            with atomic_write(self.local / name) as temporary, temporary.open("wb") as file:
                yield file
            return
        with self._errors("cannot be written"):
            filesystem, folder = open_url(self.place)
            filesystem.makedirs(folder, exist_ok=True)
            path = f"{folder}/.{name}.{secrets.token_hex(4)}{Path(name).suffix}"
            try:
                with filesystem.open(path, "wb") as file:
                    yield file
                filesystem.mv(path, f"{folder}/{name}")
            except BaseException:
                if filesystem.exists(path):
                    filesystem.rm_file(path)
                raise

    def remove(self, name: str) -> None:
        """Remove a file of it, where there is one."""
        with self._errors("cannot be removed"):
            if self.local is not None:
                (self.local / name).unlink(missing_ok=True)
                return
            filesystem, folder = open_url(self.place)
            if filesystem.exists(f"{folder}/{name}"):
                filesystem.rm_file(f"{folder}/{name}")

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Whatever a file system raises, as ours: each has errors of its own."""
        try:
            yield
        except CdgpError:
            raise
        except Exception as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise OutputError(
                f"{self.place}: {what}: {reason}; check the place, its rights and its room"
            ) from error
