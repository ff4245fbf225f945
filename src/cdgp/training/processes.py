"""The processes of a training on several devices: started, listened to, and ended together.

The calling process only waits. It shows what the first process reports, and ends all of them as
soon as one fails or the user interrupts; they end by themselves when the calling process is gone.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec

import torch
from lightning_fabric.plugins.environments.lightning import find_free_network_port

from cdgp.errors import CdgpError, SettingsError, TrainingError
from cdgp.presets import Settings
from cdgp.progress import Advance, Quiet
from cdgp.training.context import TrainingContext, new_fabric
from cdgp.training.devices import Share

P = ParamSpec("P")
Work = Callable[Concatenate[TrainingContext, P], None]

Message = tuple[str, Any]
"""What it is, and what goes with it."""

NAME = "cdgp training process"
START: Final = "spawn"
"""How processes begin: with nothing of the calling one, which may use a GPU and threads."""
ENDS = ("done", "error", "lost")
"""Of a process: as it should, with an exception, or without a word."""
GO_ON = "What is saved is kept: go on with --resume, with any number of devices"
GRACE_SECONDS = 2.0
"""So long the others may report why, once a process has failed: one failure causes others."""

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """What a process needs to know of itself and the others."""

    share: Share
    port: int
    """On which they find each other on this machine."""
    threads: int
    """That it computes with on a processor."""
    checkpoints: Path | None


def check_devices(devices: int, settings: Settings) -> None:
    """Check that a training can be split over so many devices.

    Raises:
        SettingsError: it cannot; the message says what to change.
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise SettingsError(f"--devices {devices}: give a whole number, at least 1")
    if devices == 1:
        return
    if multiprocessing.current_process().name.startswith(NAME):
        raise SettingsError(
            f"devices = {devices}: every process of the training runs the calling script once "
            'more; put what it does below: if __name__ == "__main__":'
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else None
    if gpus is not None and devices > gpus:
        raise SettingsError(f"--devices {devices}: this machine has {gpus} GPU(s)")
    for name in ("dual_gp", "student"):
        batch = getattr(settings, name).batch_size
        if batch < devices:
            raise SettingsError(
                f"--devices {devices}: {name}.batch_size = {batch} leaves some of them without an "
                f"image; at most --devices {batch}, or --set {name}.batch_size={devices}"
            )
        if batch % devices:
            split = " + ".join(map(str, Share(0, devices).sizes(batch)))
            log.warning(
                "--devices %d: the %d images of a batch (%s.batch_size) are split %s, so that some "
                "devices wait for others", devices, batch, name, split,
            )  # fmt: skip
    if settings.backbone.weights == "random":
        raise SettingsError(
            f"--devices {devices}: backbone.weights = 'random' gives every process other weights; "
            "name a file, or leave --devices out"
        )


def run_on_devices(
    work: Work[P], context: TrainingContext, *args: P.args, **kwargs: P.kwargs
) -> None:
    """Call ``work(context, ...)`` in ``context.devices`` processes, and wait for them.

    Each gets a context of its own, in which the first one's log and progress are the caller's.
    Function and arguments are pickled, so the function is one of a module.

    Raises:
        CdgpError: as a process raised it.
        TrainingError: a process ended in another way.
    """
    spawn, port = multiprocessing.get_context(START), find_free_network_port()
    threads = max(1, torch.get_num_threads() // context.devices)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        with _without_interrupts():  # which a process would show before it can handle them
            for rank in range(context.devices):
                share = Share(rank, context.devices)
                place = Place(share, port, threads, context.checkpoints)
                receiving, sending = spawn.Pipe(duplex=False)
                started = spawn.Process(
                    target=_run, args=(sending, place, work, args, kwargs), daemon=True,
                    name=f"{NAME} {rank + 1}",
                )  # fmt: skip
                started.start()
                sending.close()
                processes.append(started)
                pipes.append(receiving)
        _replay(_messages(processes, pipes), context, lambda note="": None)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _replay(messages: Iterator[Message], context: TrainingContext, advance: Advance) -> None:
    """Show and log what the first process reports, up to the end of the phase."""
    for kind, value in messages:
        if kind == "phase":
            with context.progress.phase(*value) as inner:
                _replay(messages, context, inner)
        elif kind == "advance":
            advance(value)
        elif kind == "log":
            context.log(value)
        else:
            return


def _messages(processes: list[BaseProcess], pipes: list[Connection]) -> Iterator[Message]:
    """What processes report until all of them have ended well; errors as ``run_on_devices``."""
    working = list(pipes)
    while working:
        for pipe in wait(working):
            assert isinstance(pipe, Connection)
            kind, value = _received(pipe)
            if kind not in ENDS:
                yield kind, value
            elif kind == "done":
                working.remove(pipe)
            else:
                raise _cause({pipes.index(pipe): (kind, value)}, processes, pipes)


def _received(pipe: Connection) -> Message:
    try:
        kind, value = pipe.recv()
    except (EOFError, ConnectionError):
        return "lost", None
    return kind, value


def _cause(
    found: dict[int, Message], processes: list[BaseProcess], pipes: list[Connection]
) -> CdgpError:
    """The error to show of those of several processes, given how the first one ended.

    An error of ours comes first, then a process that is gone: the others lose their connection to
    it, which is no cause.
    """
    last = time.monotonic() + GRACE_SECONDS
    left = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in found}
    while left and (ready := wait(list(left), max(0.0, last - time.monotonic()))):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            kind, value = _received(pipe)
            if kind in ENDS:
                found[left.pop(pipe)] = kind, value
    errors = [value for kind, value in found.values() if kind == "error"]
    for error in errors:
        if isinstance(error, CdgpError):
            return error
    for rank, (kind, _) in sorted(found.items()):
        if kind == "lost":
            processes[rank].join(GRACE_SECONDS)
            code = processes[rank].exitcode
            killed = code == -signal.SIGKILL
            why = "the memory may not have sufficed" if killed else "it may have said why, above"
            return TrainingError(
                f"{processes[rank].name} of {len(processes)} ended by itself ({_ending(code)}); "
                f"{why}. {GO_ON}"
            )
    return TrainingError(f"{errors[0]}{GO_ON}")


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Within it, Ctrl-C does nothing, in new processes neither; where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# In each process


def _run(pipe: Connection, place: Place, work: Callable[..., None], args: Any, kwargs: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends all of them
    threading.Thread(target=_end_with_parent, daemon=True).start()
    share = place.share
    try:
        torch.set_num_threads(place.threads)
        context = _context(pipe, place)
        work(context, *args, **kwargs)
        if share.count > 1:
            context.fabric.barrier()  # the first process holds what the others are connected by
            torch.distributed.destroy_process_group()
        pipe.send(("done", None))
    except CdgpError as error:
        pipe.send(("error", error))
    except Exception:
        # As text: what another library raises need not pass from process to process.
        text = traceback.format_exc()
        pipe.send(("error", RuntimeError(f"{NAME} {share.rank + 1} of {share.count}: {text}")))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _context(pipe: Connection, place: Place) -> TrainingContext:
    """The context of one of several processes, connected to the others."""
    share = place.share
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    # Of weights of 1 x 1, whose layout in memory has two descriptions.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place.port), "NODE_RANK": "0",
        "LOCAL_RANK": str(share.rank),
    }  # fmt: skip
    fabric = new_fabric(share.count)
    if share.rank:
        logging.disable(logging.WARNING)
        return TrainingContext(fabric, place.checkpoints, lambda record: None, Quiet())

    def append(record: Mapping[str, Any]) -> None:
        pipe.send(("log", dict(record)))

    return TrainingContext(fabric, place.checkpoints, append, Relayed(pipe))


class Relayed:
    """Progress that another process shows."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Advance]:
        self.pipe.send(("phase", (name, total, done)))
        yield lambda note="": self.pipe.send(("advance", note))
        self.pipe.send(("end", None))
