"""A scorer that tells what it does, and ends its process where it is told to.

Workers import this module, so it imports nothing of the tests.
"""

import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from cdgp.cluster.scorer import Piece, Scorer, Tally

CRASH = "crash"
"""An image with this in its name ends the process, as a decoder may."""
SLOW = "slow"
FULL = "full"
HELD = "held"


class Deadly(Scorer):
    """Notes every piece in a file ``began`` beside the results, and every written one in ``ended``.

    A folder of results named ``slow…`` is written slowly; in one named ``full…`` no file may be
    larger than a few bytes; for one named ``held…``, workers wait until somebody makes a
    file ``free`` beside it.
    """

    def score(self, piece: Piece) -> Tally:
        assert self.out.local is not None
        folder = self.out.local
        note(folder, "began", piece.name, os.getpid())
        if any(CRASH in Path(place).name for place in piece.places):
            os.kill(os.getpid(), signal.SIGKILL)
        if folder.name.startswith(SLOW):
            time.sleep(0.15)
        while folder.name.startswith(HELD) and not beside(folder, "free").exists():
            time.sleep(0.02)
        if folder.name.startswith(FULL):
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
            try:
                return super().score(piece)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        done = super().score(piece)
        note(folder, "ended", piece.name, os.getpid())
        return done


def beside(folder: Path, what: str) -> Path:
    """A file beside a folder of results."""
    return folder.with_name(f"{folder.name}.{what}")


def note(folder: Path, what: str, name: str, pid: int) -> None:
    """Add a line to the notes on a folder."""
    with beside(folder, what).open("a") as file:
        file.write(f"{name} {pid}\n")


def noted(folder: Path, what: str) -> Iterator[tuple[str, int]]:
    """The pieces and processes in the notes on a folder."""
    path = beside(folder, what)
    for line in path.read_text().splitlines() if path.exists() else ():
        name, pid = line.split()
        yield name, int(pid)
