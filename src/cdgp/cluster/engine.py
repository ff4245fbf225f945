"""Ray: connects, keeps workers busy, replaces those that end, and halves what ends them."""

import os
import re
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from cdgp.cluster.scorer import Facts, Model, Piece, Scorer, Tally
from cdgp.cluster.store import Store
from cdgp.errors import CdgpError, SettingsError
from cdgp.runtimes.base import cores, require_package
from cdgp.streaming import Threads

KILLS = 3
"""So often a shard may end its worker before it is halved."""
KILLS_ALONE = 2
"""So often an image that is left alone may. What lies between is halved at once."""
OBJECTS = 2**28
"""Bytes of Ray's object store on one machine, beside the model."""
HOST_PORT = re.compile(r"(?P<host>[^\s:/]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")
SMALL_SHARE = 0.5
"""Of a processor that a worker asks for where there are too few for all threads."""


@contextmanager
def connected(address: str, model_bytes: int) -> Iterator[Any]:
    """Ray, connected to a cluster, or started on this machine and stopped afterwards.

    Args:
        address: ``HOST:PORT`` of a cluster, ``auto`` for the one that this machine is part of,
            ``local`` for one that is started here; where empty, the environment's RAY_ADDRESS, or
            else ``local``. A connection that the process has already is used and kept.
        model_bytes: for which there must be room.

    Raises:
        SettingsError: Ray is not installed, or there is no such cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = require_package("ray")
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS", "") or "local"
    check_address(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address == "local":
        options |= {
            "include_dashboard": False,
            "num_cpus": cores(),
            "object_store_memory": OBJECTS + 2 * model_bytes,
        }
    try:
        ray.init(address=address, **options)
    except Exception as error:  # ConnectionError, RuntimeError, ValueError: by Ray's version
        raise SettingsError(
            f"--ray {address}: Ray cannot connect: {first_line(error)}; the command must run on a "
            "node of the cluster, with the same versions of Ray and Python"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Raise SettingsError where an address is none, or nothing answers there."""
    if address in ("local", "auto"):
        return
    found = HOST_PORT.fullmatch(address)
    if found is None:
        raise SettingsError(
            f"--ray {address}: is no address of a Ray cluster; give HOST:PORT, auto for the "
            "cluster that this machine is part of, or --ray alone to use this machine"
        )
    try:
        socket.create_connection((found["host"].strip("[]"), int(found["port"])), 10).close()
    except (OSError, OverflowError) as error:
        raise SettingsError(
            f"--ray {address}: nothing answers there ({error}); start a cluster with ray start "
            "--head, or look for its address with ray status"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of a message of Ray, which writes many."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def workers_of(ray: Any, threads: Threads, wanted: int | None) -> tuple[int, float]:
    """How many workers there are, and the processors that each asks for.

    Raises:
        SettingsError: fewer than one is wanted, or the cluster has no processor.
    """
    if wanted is not None and wanted < 1:
        raise SettingsError(f"--actors {wanted}: at least 1 is needed")
    processors = ray.cluster_resources().get("CPU", 0)
    if not processors:
        raise SettingsError("--ray: the cluster has no processors that Ray may use; add a node")
    number = wanted or max(1, int(processors // threads.workers))
    return number, threads.workers if number * threads.workers <= processors else SMALL_SHARE


class Engine:
    """Workers on a cluster; each scores one piece at a time.

    Args:
        ray: as ``connected`` gives it.
        model: is sent to every worker once.
        threads: of each worker.
        out: where results go.
        number: of workers.
        processors: that each asks for.
    """

    def __init__(
        self, ray: Any, model: Model, threads: Threads, out: Store, number: int, processors: float
    ) -> None:
        self._ray, self._number = ray, number
        self._actor = ray.remote(Scorer).options(
            num_cpus=processors, num_gpus=0, max_restarts=0, max_task_retries=0,
            scheduling_strategy="SPREAD",
        )  # fmt: skip
        self._arguments = ray.put(model), threads, out.place
        self._actors: list[Any] = []
        self._working: dict[Any, tuple[Any, Piece | None]] = {}
        """What is being done, by the reference to its result; loading has no piece."""
        self.facts: Facts | None = None
        self.ended = 0
        """Workers that ended before their work was done."""

    def score(
        self, pieces: Iterator[Piece], blame: Callable[[Piece], Tally]
    ) -> Generator[tuple[Piece, Tally]]:
        """Score pieces on all workers; each comes with its sums once its rows are written.

        Args:
            pieces: taken only as workers become free.
            blame: called for an image that ended its workers; writes its row.

        Raises:
            CdgpError: what a worker raised, or workers end before they have loaded the model.
        """
        first = next(pieces, None)
        if first is None:
            return
        for _ in range(self._number):
            self._start()
        try:
            yield from self._scored(chain([first], pieces), blame)
        finally:  # stopped by the user, or by an error
            while self._actors:
                self._end(self._actors[-1])

    def _scored(
        self, pieces: Iterator[Piece], blame: Callable[[Piece], Tally]
    ) -> Iterator[tuple[Piece, Tally]]:
        again: deque[Piece] = deque()
        failures = 0
        while self._working:
            (done, *_), _ = self._ray.wait(list(self._working))
            actor, piece = self._working.pop(done)
            try:
                found = self._ray.get(done)
            except self._ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, CdgpError) else error from None
            except self._ray.exceptions.RayError as error:  # the worker, or its node, is gone
                self._end(actor)
                self.ended += 1
                if piece is not None:
                    again.extend(after_kill(piece))
                elif (failures := failures + 1) > max(KILLS, self._number):
                    raise CdgpError(
                        f"the workers end before they have loaded the model: {reason(error)}; they "
                        "need cdgp with the extra ray, and memory for the model, on every node"
                    ) from error
                self._start()
                continue
            if piece is None:
                self.facts, failures = found, 0
            else:
                yield piece, found
            while again and is_culprit(again[0]):
                alone = again.popleft()
                yield alone, blame(alone)
            following = again.popleft() if again else next(pieces, None)
            if following is None:
                self._end(actor)
            else:
                self._working[actor.score.remote(following)] = actor, following

    def _start(self) -> None:
        actor = self._actor.remote(*self._arguments)
        self._actors.append(actor)
        self._working[actor.load.remote()] = actor, None

    def _end(self, actor: Any) -> None:
        """Free what a worker holds at once; without the last handle, Ray would take its time."""
        self._ray.kill(actor)
        self._actors.remove(actor)


def after_kill(piece: Piece) -> list[Piece]:
    """What to score after a worker ended on a piece: itself again, or its halves."""
    again = piece._replace(kills=piece.kills + 1)
    if len(piece.places) == 1 or (piece.whole and again.kills < KILLS):
        return [again]
    middle = len(piece.places) // 2
    return [
        piece._replace(places=piece.places[:middle], whole=False, kills=0),
        piece._replace(
            start=piece.start + middle, places=piece.places[middle:], whole=False, kills=0
        ),
    ]


def is_culprit(piece: Piece) -> bool:
    """Whether a piece is one image that ended its workers too often."""
    return len(piece.places) == 1 and piece.kills >= (KILLS if piece.whole else KILLS_ALONE)


def reason(error: BaseException) -> str:
    """Why a worker ended, in one line: Ray's last line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
