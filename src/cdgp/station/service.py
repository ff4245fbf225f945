"""A station that runs: its store, and the threads that take in, score and clear."""

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cdgp import run_folder
from cdgp.station import resetting, retention
from cdgp.station.alarms import Drift
from cdgp.station.candidates import Trials
from cdgp.station.config import read_config
from cdgp.station.intake import Intake
from cdgp.station.outbox import Outbox, senders
from cdgp.station.pipeline import LiveModel, Pipeline, load_model
from cdgp.station.retraining import Retraining
from cdgp.station.store import Store
from cdgp.station.watching import Watcher

CANDIDATES = "candidates"
"""Folder of a home into which model files are laid, so that they can be chosen."""
CLEAR_EVERY, CLEAR_PAUSE = 600.0, 5.0
"""Seconds between two removals of old files: at most, and at least where space is short."""

log = logging.getLogger(__name__)


class Station:
    """Everything behind the pages. ``start`` begins the work, ``close`` ends it."""

    def __init__(
        self,
        home: Path,
        url: str | None = None,
        load: Callable[[Path], LiveModel] = load_model,
    ) -> None:
        """Open a home; errors as of ``read_config`` and ``Store``.

        Args:
            home: the folder; made where it is missing.
            url: of a PostgreSQL database; SQLite in the home where None.
            load: makes a live model of a file.
        """
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.config = read_config(home)
        send = senders(self.config, os.environ)
        self.store = Store(home, url)
        self.outbox = Outbox(self.store, send, self.config.outbox)
        self.candidates = self.store.home / CANDIDATES
        self.candidates.mkdir(exist_ok=True)
        self.intake = Intake(self.store, self.config)
        self.pipeline = Pipeline(self.store, self.intake, self.config, load)
        self.watcher = Watcher(self.intake)
        self.trials = Trials(self.pipeline)
        self.retraining = Retraining(self.pipeline)
        self.drift = Drift(self.store)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to take in, to score and to clear."""
        works: list[tuple[str, Callable[[threading.Event], None]]] = [
            ("score", self.pipeline.run), ("watch", self.watcher.run), ("clear", self._clear),
            ("try", self.trials.run), ("train", self.retraining.run),
            ("drift", self.drift.run), ("reset", partial(resetting.answer, self.store)),
            *((f"tell {name}", partial(self.outbox.run, name)) for name in self.outbox.send),
        ]  # fmt: skip
        for name, work in works:
            thread = threading.Thread(target=work, args=(self._stop,), name=f"station {name}")
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """End the work, after what was begun, and let go of the home."""
        self._stop.set()
        self.pipeline.wake()
        self.trials.wake.set()
        self.intake.short.set()
        for thread in self._threads:
            thread.join()
        self.intake.decoder.close()
        self.store.close()

    def models_to_choose(self) -> list[str]:
        """Names of the model files that were laid into ``CANDIDATES``."""
        return sorted(
            path.name
            for path in self.candidates.iterdir()
            if path.is_file() and not path.is_symlink() and not path.name.startswith(".")
        )

    def runs_to_choose(self) -> list[str]:
        """Names of the run folders that were laid into ``CANDIDATES``."""
        return sorted(
            path.name
            for path in self.candidates.iterdir()
            if not path.is_symlink() and (path / run_folder.MODEL).is_file()
        )

    def problems(self) -> list[str]:
        """What is wrong right now, in sentences."""
        parts = (
            self.pipeline, self.watcher, self.trials, self.retraining, self.drift, self.outbox
        )  # fmt: skip
        return [text for part in parts if (text := part.problem)]

    def _clear(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self.intake.short.clear()
            try:
                retention.clear(self.pipeline)
            except Exception:
                log.exception("old files are not removed")
            if not stop.wait(CLEAR_PAUSE):
                self.intake.short.wait(CLEAR_EVERY)
