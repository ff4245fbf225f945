"""Watched folders: images that machines write there are taken in, and stay where they are."""

import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import insert, select, update

from cdgp.data.decode import EXTENSIONS
from cdgp.errors import CdgpError, ImageError
from cdgp.station import trail
from cdgp.station.config import Watch
from cdgp.station.intake import (
    BacklogFullError,
    Facts,
    Intake,
    NoRoomError,
    add_line,
    clean,
    line_named,
)
from cdgp.station.schema import watched

SETTLED = 1.0
"""A file is whole when neither its size nor its time has changed for so many seconds."""
EVERY = 1.0
"""Seconds between two looks; looking works on network shares, which tell nobody of a change."""
SHARE = 0.2
"""Looking takes at most this share of the time, however many files there are."""
CHUNK = 2**20

log = logging.getLogger(__name__)
Stamp = tuple[int, int]
"""Size in bytes and time of the last change, in ns."""


class Watcher:
    """Takes in what appears below the configured folders. Links are never followed.

    A file that was seen is not read again while its size and time stay. Where the disk or the
    backlog is full, files wait where they are.
    """

    def __init__(self, intake: Intake) -> None:
        self.intake = intake
        self.problem = ""
        """Why files wait, or a folder cannot be read; empty where all is well."""
        self._pending: dict[Path, tuple[Stamp, float]] = {}
        with intake.store.read() as connection:
            rows = connection.execute(select(watched))
            self._seen: dict[str, Stamp] = {row.path: (row.size, row.mtime_ns) for row in rows}

    def run(self, stop: threading.Event) -> None:
        """Look at the folders until ``stop`` is set."""
        pause = 0.0
        while self.intake.config.watch and not stop.wait(pause):
            begun = time.monotonic()
            try:
                self.look(begun)
            except Exception as error:  # a full disk under the database
                log.exception("watching stopped for a moment")
                self.problem = f"watched folders: {type(error).__name__}: {error}"
            pause = max(EVERY, (time.monotonic() - begun) / SHARE)

    def look(self, now: float) -> int:
        """Take in what is whole; returns how many files. ``now`` in seconds, of a steady clock."""
        problem, taken = "", 0
        for folder in self.intake.config.watch:
            try:
                for path in self._whole(folder.folder, now):
                    try:
                        self._take(folder, path)
                        taken += 1
                    except FileNotFoundError:  # taken away meanwhile
                        self._pending.pop(path, None)
                    except OSError as error:  # tried again: a share may be back soon
                        problem = f"{path}: cannot be read: {error.strerror or error}"
            except (NoRoomError, BacklogFullError) as error:
                problem = f"{folder.folder}: files wait: {error}"
            except OSError as error:
                problem = f"{folder.folder}: cannot be read: {error.strerror or error}"
        if problem and problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem
        return taken

    def _whole(self, folder: Path, now: float) -> Iterator[Path]:
        for path, stamp in _files(folder):
            if self._seen.get(clean_path(path)) == stamp:
                continue
            before, since = self._pending.get(path, (None, now))
            if before != stamp:
                self._pending[path] = (stamp, now)
            elif now - since >= SETTLED:
                yield path

    def _take(self, folder: Watch, path: Path) -> None:
        self.intake.check_backlog()
        stamp, problem = self._pending[path][0], ""
        try:
            if not self._enter(folder, path, stamp):
                return
        except (NoRoomError, BacklogFullError):  # it is whole, and is tried at the next look
            raise
        except CdgpError as error:
            # Until it changes: it would be the same again and again.
            problem = str(error)
            log.warning("%s: is not taken in: %s", path, error)
        self._remember(path, stamp, problem)

    def _enter(self, folder: Watch, path: Path, stamp: Stamp) -> bool:
        """Whether the file was entered; not where it changes while it is read."""
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode) or not _inside(path, folder.folder):
                raise ImageError("it is a link, or no file")
            with self.intake.receiving() as incoming:
                while chunk := file.read(CHUNK):
                    incoming.add(chunk)
                after = os.fstat(handle)
                if (after.st_size, after.st_mtime_ns) != stamp:
                    return False
                facts = Facts(camera=folder.camera, label=clean(path.name))
                self.intake.enter(incoming, self._line(folder.line), facts)
        return True

    def _line(self, name: str) -> int:
        with self.intake.store.read() as connection:
            found = line_named(connection, name)
        if found is not None:
            return found
        with self.intake.store.write() as connection:
            return add_line(connection, trail.STATION, name)

    def _remember(self, path: Path, stamp: Stamp, problem: str) -> None:
        values = {"size": stamp[0], "mtime_ns": stamp[1], "problem": problem}
        key = clean_path(path)
        with self.intake.store.write() as connection:
            changed = connection.execute(
                update(watched).where(watched.c.path == key).values(**values)
            )
            if not changed.rowcount:
                connection.execute(insert(watched).values(path=key, **values))
        self._seen[key] = stamp
        self._pending.pop(path, None)


def clean_path(path: Path) -> str:
    """A path as the database can keep it; bytes that are no UTF-8 are escaped."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def _files(folder: Path) -> Iterator[tuple[Path, Stamp]]:
    """Image files below a folder, with their stamps; links and hidden names are passed over."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.startswith(".") or entry.is_symlink():
            continue
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _files(path)
        elif entry.is_file(follow_symlinks=False) and path.suffix.lower() in EXTENSIONS:
            try:
                facts = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield path, (facts.st_size, facts.st_mtime_ns)


def _inside(path: Path, folder: Path) -> bool:
    """Whether no link has led out of the folder since it was listed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
