"""What a prediction has finished so far, on disk: it can stop at any moment and be resumed.

An SQLite file beside the results. An image is added once its overlay is written. After a kill the
images of the last second are missing, and are scored again.

A second file names the images that are being worked on, so that an image that ends the process
does not end every later one: those that were in work are tried one by one, and at the third start
the one that has ended two processes is listed as unreadable. It is written without waiting for the
disk, since the death of a process loses nothing that it has written.
"""

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cdgp.errors import OutputError
from cdgp.evaluation import ScoredImage
from cdgp.files import path_cell, printable, write_csv
from cdgp.inference import Region
from cdgp.run_folder import LEDGER, WORKING

COMMIT_SECONDS = 1.0
MOST_ENDS = 2
"""An image is not tried again after the process has ended so many times while it was in work. A
single end may have had another reason."""
LAYOUT = 3
"""Version of the tables; SQLite stores it as ``user_version``."""
TABLES = (
    "CREATE TABLE cache_key (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE images (name BLOB PRIMARY KEY, path BLOB NOT NULL,"
    " score REAL, label INTEGER, regions TEXT, warnings TEXT, problem TEXT) WITHOUT ROWID",
    "CREATE TABLE ends (name BLOB PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID",
    f"PRAGMA user_version = {LAYOUT}",
)


class Ledger:
    """Scored and unreadable images of one prediction, as rows on disk.

    Iterating gives the scored images by name, as often as needed, one in memory at a time.

    Args:
        folder: of the results.
        cache_key: everything the rows depend on: model, options, list of images. A prediction
            is resumed only with the same.

    Raises:
        OutputError: the file cannot be used, or was begun with another key.
    """

    def __init__(self, folder: Path, cache_key: Mapping[str, str]) -> None:
        self.path, working = folder / LEDGER, folder / WORKING
        with self._output_errors():
            self.path.touch()  # SQLite by itself would let the group read alone, whatever the umask
            self._rows = sqlite3.connect(self.path)
            begun = self._begin(cache_key)
        changed = [name for name, value in cache_key.items() if begun.get(name) != value]
        if changed:
            self._rows.close()
            raise OutputError(
                f"{folder}: was begun with another {' and '.join(changed)}; give the same to "
                "resume, or start again with --overwrite"
            )
        self._saved = time.monotonic()
        with self._output_errors():
            self._count_end(working)
            self._working = working.open("wb", buffering=0)
        self._in_work: dict[str, None] = {}

    def _count_end(self, working: Path) -> None:
        """Note in which images the process before this one has ended, if it did."""
        names = working.read_bytes().partition(b"\0\0")[0] if working.is_file() else b""
        for name in names.split(b"\0"):
            if name and not self.has(os.fsdecode(name)):
                self._rows.execute(
                    "INSERT INTO ends VALUES (?, 1) "
                    "ON CONFLICT (name) DO UPDATE SET count = count + 1",
                    (name,),
                )
        self._rows.commit()

    @property
    def suspected(self) -> set[str]:
        """Images in which a process has ended, and that are not done: to be tried one by one."""
        rows = self._all("SELECT name FROM ends WHERE name NOT IN (SELECT name FROM images)")
        return {os.fsdecode(name) for (name,) in rows}

    def begin(self, name: str) -> bool:
        """Note that an image is worked on; False where it has ended two processes."""
        ends = self._all("SELECT count FROM ends WHERE name = ?", os.fsencode(name))
        if ends and ends[0][0] >= MOST_ENDS:
            return False
        self._in_work[name] = None
        self._note_work()
        return True

    def _note_work(self) -> None:
        with self._output_errors():
            self._working.seek(0)
            # Two ends in a row are the end: what an earlier, longer list leaves is behind them.
            self._working.write(b"".join(os.fsencode(n) + b"\0" for n in self._in_work) + b"\0")

    def _begin(self, cache_key: Mapping[str, str]) -> dict[str, str]:
        """Make the tables of a new file; returns the key that the file was begun with."""
        layout = self._rows.execute("PRAGMA user_version").fetchone()[0]
        tables = self._rows.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if not tables:
            with self._rows:  # all of it or nothing
                self._rows.execute("BEGIN")
                for statement in TABLES:
                    self._rows.execute(statement)
                self._rows.executemany("INSERT INTO cache_key VALUES (?, ?)", cache_key.items())
        elif layout != LAYOUT:
            self._rows.close()
            raise OutputError(
                f"{self.path}: was begun by another version of cdgp; finish it with that version, "
                "or start again with --overwrite"
            )
        return dict(self._rows.execute("SELECT name, value FROM cache_key"))

    def has(self, name: str) -> bool:
        """Whether an image is scored, or listed as unreadable."""
        return bool(self._all("SELECT 1 FROM images WHERE name = ?", os.fsencode(name)))

    def __contains__(self, row: object) -> bool:
        return isinstance(row, ScoredImage) and self.has(row.name)

    def __len__(self) -> int:
        return self._count("problem IS NULL")

    def __iter__(self) -> Iterator[ScoredImage]:
        query = (
            "SELECT name, path, score, label, regions, warnings FROM images "
            "WHERE problem IS NULL ORDER BY name"
        )
        for name, path, score, label, regions, warnings in self._each(query):
            yield ScoredImage(
                os.fsdecode(name), Path(os.fsdecode(path)), None, None, score, bool(label),
                tuple(Region(**region) for region in json.loads(regions)),
                tuple(json.loads(warnings)),
            )  # fmt: skip

    @property
    def rejected(self) -> int:
        """Number of images that were called defective."""
        return self._count("label = 1")

    @property
    def unreadable(self) -> int:
        """Number of images that could not be read."""
        return self._count("problem IS NOT NULL")

    @property
    def warned(self) -> int:
        """Number of scored images with warnings."""
        return self._count("warnings != '[]'")

    def problems(self) -> Iterator[tuple[str, str]]:
        """(name, message) of the images that could not be read, by name."""
        query = "SELECT name, problem FROM images WHERE problem IS NOT NULL ORDER BY name"
        for name, problem in self._each(query):
            yield os.fsdecode(name), problem

    def write_unreadable(self, path: Path, run_id: str) -> None:
        """Write ``unreadable.csv``: image, problem, run_id."""
        rows = ((path_cell(printable(name)), problem, run_id) for name, problem in self.problems())
        write_csv(path, ["image", "problem", "run_id"], rows)

    def add(self, row: ScoredImage) -> None:
        """Add an image whose files are written."""
        regions = json.dumps([asdict(region) for region in row.regions])
        warnings = json.dumps(row.warnings)
        self._put(
            row.name, row.path, row.pred_score, int(row.pred_label), regions, warnings, None
        )  # fmt: skip

    def add_unreadable(self, name: str, path: Path, problem: str) -> None:
        """Add an image that cannot be read, with the reason."""
        self._put(name, path, None, None, None, None, printable(problem))

    def forget_unreadable(self) -> None:
        """Remove the images that could not be read, so that they are tried again."""
        self._all("DELETE FROM images WHERE problem IS NOT NULL")
        self.save()

    def save(self) -> None:
        """Write to disk what is still in memory."""
        with self._output_errors():
            self._rows.commit()
        self._saved = time.monotonic()

    def close(self) -> None:
        """Save and close the files; the process did not end in an image."""
        self._working.close()
        (self.path.parent / WORKING).unlink(missing_ok=True)
        self.save()
        self._rows.close()

    def _put(self, name: str, path: Path, *values: float | str | None) -> None:
        query = "INSERT OR REPLACE INTO images VALUES (?, ?, ?, ?, ?, ?, ?)"
        self._all(query, os.fsencode(name), os.fsencode(path), *values)
        self._in_work.pop(name, None)
        self._note_work()
        if time.monotonic() - self._saved > COMMIT_SECONDS:
            self.save()

    def _count(self, which: str) -> int:
        return int(self._all(f"SELECT COUNT(*) FROM images WHERE {which}")[0][0])

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._output_errors():
            return self._rows.execute(query, values).fetchall()

    def _each(self, query: str) -> Iterator[tuple[Any, ...]]:
        with self._output_errors():
            yield from self._rows.execute(query)

    @contextmanager
    def _output_errors(self) -> Iterator[None]:
        """Errors of SQLite and the disk (full, damaged) as ours, with the file's name."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise OutputError(
                f"{self.path}: cannot be used: {error}; repair that and resume, or start again "
                "with --overwrite"
            ) from error
