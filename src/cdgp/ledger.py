"""What a prediction has finished, on disk, so that it can stop anywhere and go on.

An SQLite file beside the results; an image is in it once its overlay is written whole. A kill
loses the images of the last second, which are scored again.
"""

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cdgp.errors import ImageError, OutputError
from cdgp.evaluation import OnPrediction, ScoredImage
from cdgp.files import printable
from cdgp.inference import Detector, Region

LEDGER = "unfinished.sqlite"
COMMIT_SECONDS = 1.0


class Ledger:
    """Scored and unreadable images of one prediction, as rows on disk.

    Iterating gives the scored images by name, as often as wanted, one in memory at a time.

    Args:
        folder: of the results.
        marks: what must be the same to go on: model, options.

    Raises:
        OutputError: the file cannot be used, or was begun with other marks.
    """

    def __init__(self, folder: Path, marks: Mapping[str, str]) -> None:
        self.path = folder / LEDGER
        with self._told():
            self._rows = sqlite3.connect(self.path)
            self._rows.executescript(
                "CREATE TABLE IF NOT EXISTS marks (key TEXT PRIMARY KEY, value TEXT NOT NULL);"
                "CREATE TABLE IF NOT EXISTS images (name BLOB PRIMARY KEY, path BLOB NOT NULL,"
                " score REAL, label INTEGER, regions TEXT, problem TEXT) WITHOUT ROWID;"
            )
            begun = dict(self._rows.execute("SELECT key, value FROM marks"))
            if not begun:
                with self._rows:
                    self._rows.executemany("INSERT INTO marks VALUES (?, ?)", marks.items())
        changed = [key for key, value in marks.items() if begun and begun.get(key) != value]
        if changed:
            self._rows.close()
            raise OutputError(
                f"{folder}: was begun with another {' and '.join(changed)}; give the same to "
                "resume, or start again with --overwrite"
            )
        self._saved = time.monotonic()

    def has(self, name: str) -> bool:
        """Whether an image is finished, or known to be unreadable."""
        query = "SELECT 1 FROM images WHERE name = ?"
        return bool(self._all(query, os.fsencode(name)))

    def __contains__(self, row: object) -> bool:
        return isinstance(row, ScoredImage) and self.has(row.name)

    def __len__(self) -> int:
        return self._count("problem IS NULL")

    def __iter__(self) -> Iterator[ScoredImage]:
        query = (
            "SELECT name, path, score, label, regions FROM images WHERE problem IS NULL "
            "ORDER BY name"
        )
        for name, path, score, label, regions in self._each(query):
            yield ScoredImage(
                os.fsdecode(name), Path(os.fsdecode(path)), None, None, score, bool(label),
                tuple(Region(**region) for region in json.loads(regions)),
            )  # fmt: skip

    @property
    def rejected(self) -> int:
        """How many images were called defective."""
        return self._count("label = 1")

    @property
    def unreadable(self) -> int:
        """How many images could not be read."""
        return self._count("problem IS NOT NULL")

    def problems(self) -> Iterator[tuple[str, str]]:
        """(name, message) of the images that could not be read, by name."""
        query = "SELECT name, problem FROM images WHERE problem IS NOT NULL ORDER BY name"
        for name, problem in self._each(query):
            yield os.fsdecode(name), problem

    def add(self, row: ScoredImage) -> None:
        """An image whose results are written."""
        regions = json.dumps([asdict(region) for region in row.regions])
        self._put(row.name, row.path, row.pred_score, int(row.pred_label), regions, None)

    def refuse(self, name: str, path: Path, error: ImageError) -> None:
        """An image that cannot be read."""
        self._put(name, path, None, None, None, printable(str(error)))

    def forget_unreadable(self) -> None:
        """Let images that could not be read be tried again."""
        self._all("DELETE FROM images WHERE problem IS NOT NULL")
        self.save()

    def save(self) -> None:
        """Put down what is not on disk yet.

        Raises:
            OutputError: a full disk, for one.
        """
        with self._told():
            self._rows.commit()
        self._saved = time.monotonic()

    def close(self) -> None:
        """Save and let go of the file."""
        self.save()
        self._rows.close()

    def _put(self, name: str, path: Path, *values: float | str | None) -> None:
        query = "INSERT OR REPLACE INTO images VALUES (?, ?, ?, ?, ?, ?)"
        self._all(query, os.fsencode(name), os.fsencode(path), *values)
        if time.monotonic() - self._saved > COMMIT_SECONDS:
            self.save()

    def _count(self, which: str) -> int:
        return int(self._all(f"SELECT COUNT(*) FROM images WHERE {which}")[0][0])

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._told():
            return self._rows.execute(query, values).fetchall()

    def _each(self, query: str) -> Iterator[tuple[Any, ...]]:
        with self._told():
            yield from self._rows.execute(query)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """A full disk, a damaged file, another process: all with the file's name."""
        try:
            yield
        except sqlite3.Error as error:
            raise OutputError(
                f"{self.path}: cannot be used: {error}; mend that and resume, or start again with "
                "--overwrite"
            ) from error


def predict_into(
    ledger: Ledger,
    detector: Detector,
    named: Iterator[tuple[str, Path]],
    on_prediction: OnPrediction,
    advance: Callable[[], object],
) -> None:
    """Score images, (name, path) each, that the ledger does not have yet.

    What cannot be read is put down with the reason, and the others go on.

    Raises:
        OutputError: results cannot be written.
    """
    for name, path in named:
        if not ledger.has(name):
            try:
                prediction = detector.predict(path)
                row = ScoredImage.of(prediction, name, path)
                on_prediction(row, prediction)
            except ImageError as error:
                ledger.refuse(name, path, error)
            else:
                ledger.add(row)
        advance()
