"""How everything is measured: turns, processes of their own, peak memory, and the machine.

Imports no torch by itself, so that a process which measures another runtime does not load it.
"""

import ctypes
import functools
import gc
import multiprocessing
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Self, TypeVar

from cdgp.errors import CdgpError
from cdgp_bench.errors import LatencyError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch

T = TypeVar("T")
P = ParamSpec("P")
LIBRARIES = ("cdgp", "torch", "torchvision", "timm", "numpy", "scipy", "scikit-learn", "pillow")
PAUSE = 0.05
"""Seconds between runs, in which the threads of the last runtime go to sleep; those of onnxruntime
take more than 20 ms, and until then slow down whatever runs next."""
_LAUNCHER = (
    "import resource, subprocess, sys\n"
    "subprocess.run(sys.argv[1:], check=True)\n"
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
)


# Time


def seconds_of(run: Callable[[], object], device: "torch.device | None" = None) -> float:
    """Seconds of one run, until the device has finished it."""
    wait_for(device)
    began = time.perf_counter()
    run()
    wait_for(device)
    return time.perf_counter() - began


def wait_for(device: "torch.device | None") -> None:
    """Wait until a GPU has finished its work."""
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def alternate(
    turns: Mapping[str, Callable[[], T]],
    runs: int,
    warm_ups: int,
    pause: float = 0.0,
    advance: Callable[[], object] | None = None,
) -> dict[str, list[T]]:
    """What ``runs`` turns of each give, one after the other, so that all meet the same machine.

    Warm-ups do not count. Before each turn it pauses for some seconds; after it, it advances.
    """
    kept: dict[str, list[T]] = {name: [] for name in turns}
    for index in range(warm_ups + runs):
        for name, turn in turns.items():
            time.sleep(pause)
            value = turn()
            if index >= warm_ups:
                kept[name].append(value)
            if advance is not None:
                advance()
    return kept


# Processes


def in_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """A module's function in a fresh process, so that nothing else is in its memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


class Worker:
    """A fresh process that makes an object once, and then answers calls of its methods.

    Raises:
        CdgpError: as ``make`` raises it.
        LatencyError: the process ended early.
    """

    def __init__(self, make: Callable[..., object], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._answer()
        except CdgpError:
            self.close()
            raise

    def call(self, method: str, *arguments: object) -> Any:
        """What a method of the object returns."""
        try:
            self._pipe.send((method, arguments))
        except OSError:
            raise _ended() from None
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise _ended() from None
        if isinstance(answer, CdgpError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _ended() -> LatencyError:
    return LatencyError("a measuring process ended early; is there enough memory?")


def _serve(pipe: "Connection", make: Callable[..., object], arguments: Sequence[object]) -> None:
    try:
        served = make(*arguments)
        pipe.send(None)
        while True:
            method, given = pipe.recv()
            pipe.send(getattr(served, method)(*given))
    except CdgpError as error:
        pipe.send(error)
    except EOFError:  # the other side has closed the pipe
        pass


class CommandCost(NamedTuple):
    """What one command took."""

    seconds: float
    peak_kib: int
    """Its largest resident memory."""


def command_cost(command: Sequence[str]) -> CommandCost:
    """Run a command and measure it.

    A small process starts it: what a child inherits from a large one would count as its own peak.
    """
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _LAUNCHER, *command], stdout=subprocess.PIPE, text=True, check=True
    )
    return CommandCost(time.perf_counter() - began, int(done.stdout.splitlines()[-1]))


# Memory


class PeakMemory(NamedTuple):
    """The most memory that was taken."""

    mib: float | None
    """None where it cannot be known."""
    memory_of: str


def reset_peak_memory(device: "torch.device | None" = None) -> None:
    """Forget earlier peaks, after freed memory has gone back to the system."""
    gc.collect()
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")  # resets the peak of the resident set


def peak_memory(device: "torch.device | None" = None) -> PeakMemory:
    """The peak of this process since it began, or since ``reset_peak_memory``."""
    if device is not None and device.type == "cuda":
        import torch

        return PeakMemory(torch.cuda.max_memory_allocated(device) / 2**20, "tensors on the GPU")
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return PeakMemory(int(found[1]) / 1024 if found else None,
                      "the whole process, with its libraries")  # fmt: skip


def peak_mib() -> float:
    """``peak_memory`` of this process, where a study cannot do without."""
    peak = peak_memory().mib
    assert peak is not None, "the peak of a process can be measured on Linux only"
    return peak


# The machine


@functools.cache
def machine() -> dict[str, Any]:
    """Versions of Python, libraries and drivers, and the devices."""
    import torch

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "libraries": {name: distribution(name).version for name in LIBRARIES},
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        facts |= {
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver(),
        }
    return facts


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor()


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() or None
