"""What a method costs: parameters, batch-one latency, peak memory, and on which machine."""

import ctypes
import functools
import gc
import multiprocessing
import platform
import re
import shutil
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cdgp.data.manifest import WeakSplit
from cdgp.presets import Settings
from cdgp.progress import Quiet
from cdgp_bench.methods import MethodOptions

WARM_UPS = 10
TIMED = 50
LIBRARIES = ("cdgp", "torch", "torchvision", "timm", "numpy", "scipy", "scikit-learn", "pillow")


def measured(
    method: str,
    data: WeakSplit,
    settings: Settings,
    options: MethodOptions | None,
    states: Path,
) -> dict[str, Any]:
    """Cost of a trained method's whole computation of one input, batch one.

    It is measured in a process of its own, so that what training left in memory is not counted.

    Args:
        method: its name in ``grid.METHODS``.
        data: what it was trained on.
        settings: of the row.
        options: of the method, where it has some.
        states: where its trained stages lie.

    Returns:
        ``parameters``; ``stored``, which counts memories and statistics too; ``latency_ms`` with
        mean, std, median and p95 over 50 runs after 10; ``peak_memory_mib`` and ``memory_of``,
        which says what was measured.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(
            _measure, method, data, settings, options, states, torch.get_num_threads()
        ).result()


def _measure(
    method: str,
    data: WeakSplit,
    settings: Settings,
    options: MethodOptions | None,
    states: Path,
    threads: int,
) -> dict[str, Any]:
    from cdgp_bench.grid import fit

    torch.set_num_threads(threads)
    pipeline = fit(method, data, settings, options, states, Quiet()).pipeline()
    device = next(pipeline.network.parameters()).device
    image = torch.rand(1, 3, *settings.input_size, generator=torch.Generator().manual_seed(0))
    image = image.to(device)
    start_peak_memory(device)
    seconds = []
    for index in range(WARM_UPS + TIMED):
        wait_for(device)
        began = time.perf_counter()
        pipeline.run(image)
        wait_for(device)
        if index >= WARM_UPS:
            seconds.append(time.perf_counter() - began)
    peak, of = peak_memory(device)
    told = 1000 * np.array(seconds)
    return {
        "parameters": sum(p.numel() for p in pipeline.network.parameters()),
        "stored": sum(values.numel() for values in pipeline.network.state_dict().values()),
        "latency_ms": {"mean": float(told.mean()), "std": float(told.std(ddof=1)),
                       "median": float(np.median(told)), "p95": float(np.percentile(told, 95))},
        "runs": TIMED,
        "device": device.type,
        "peak_memory_mib": peak,
        "memory_of": of,
    }  # fmt: skip


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_peak_memory(device: torch.device) -> None:
    """Forget earlier peaks, and give freed memory back first."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")  # resets the peak of the resident set


def peak_memory(device: torch.device) -> tuple[float | None, str]:
    """MiB at the peak since ``start_peak_memory``, and of what; None where it cannot be known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20, "tensors on the GPU"
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return (int(found[1]) / 1024 if found else None), "the whole process, with its libraries"


@functools.cache
def machine() -> dict[str, Any]:
    """Versions of Python, libraries and drivers, and the devices."""
    told: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "libraries": {name: distribution(name).version for name in LIBRARIES},
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        told |= {
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "driver": _driver(),
        }
    return told


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor()


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() or None
