"""One loop for both stages: deterministic steps, learning-rate schedule, log, resumable state."""

import ctypes
import json
import math
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cdgp.errors import OutputError, TrainingError
from cdgp.files import save_tensors
from cdgp.progress import Progress

SAVE_SECONDS = 20.0
LOG_EVERY = 10
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
"""Names of glibc's malloc.h."""


def keep_freed_memory() -> None:
    """Tell glibc to keep large freed buffers instead of handing them back to the kernel.

    Every training step frees and takes the same buffers; page faults otherwise double its time.
    Does nothing where the C library is another.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(M_TOP_PAD, 256 * 2**20)


def return_freed_memory() -> None:
    """Undo ``keep_freed_memory``, for work that is not the same step again and again.

    Where large and small buffers are taken by turns, kept ones may be cut up until none fits.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_MAX, 2**16)  # its default, like the next two
    libc.mallopt(M_TRIM_THRESHOLD, 2**17)
    libc.mallopt(M_TOP_PAD, 2**17)
    libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # the most that it adapts to by itself
    libc.malloc_trim(0)


def new_fabric() -> Fabric:
    """Lightning Fabric on the GPU where there is one, else on the processor, in float32."""
    keep_freed_memory()
    # Not "auto": it would take Apple's GPU, which lacks the float64 that the factorisation needs.
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = Fabric(accelerator=accelerator, devices=1, precision="32-true")
    fabric.launch()
    return fabric


def cosine(steps: int, final: float) -> Callable[[int], float]:
    """Factor on the learning rate by step: 1 at step 0, falling to ``final`` at ``steps``."""
    return lambda step: final + (1 - final) * 0.5 * (1 + math.cos(math.pi * step / steps))


def run_stage(
    name: str,
    fabric: Fabric,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    factor: Callable[[int], float],
    batch: Callable[[int], tuple[Any, ...]],
    fingerprint: str,
    state: Path | None,
    log: Callable[[Mapping[str, Any]], None],
    progress: Progress,
) -> None:
    """Train ``module`` in place for ``steps`` steps; go on from ``state`` where it fits.

    Args:
        name: of the stage, for the progress bar and the log.
        fabric: device and backward pass.
        module: called with a batch, returns the loss and a mapping of signs to log.
        optimizer: over the module's parameters, with the initial learning rates.
        steps: their number.
        factor: of a step, on the initial learning rates; see ``cosine``.
        batch: the arguments for a step, a function of the step's number alone.
        fingerprint: settings and data that the state must have been made with.
        state: file that holds the stage's progress, or None to keep none.
        log: takes one record every few steps.
        progress: where to tell the progress.

    Raises:
        TrainingError: the loss is not finite.
    """
    first, before = load_state(state, module, optimizer, fingerprint) if state else (0, 0.0)
    initial = [group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups]
    wrapped, wrapped_optimizer = fabric.setup(module, optimizer)
    began = saved = time.monotonic()
    with progress.phase(name, steps, first) as advance:
        for step in range(first, steps):
            for group, rate in zip(optimizer.param_groups, initial, strict=True):
                group["lr"] = rate * factor(step)
            loss, signs = wrapped(*fabric.to_device(batch(step)))
            if not bool(torch.isfinite(loss)):
                raise TrainingError(
                    f"{name}: the loss is not finite at step {step}. Likely causes: (a) a "
                    "learning rate that is too high for this backbone; (b) damaged weights"
                )
            fabric.backward(loss)
            wrapped_optimizer.step()
            wrapped_optimizer.zero_grad()
            if step % LOG_EVERY == 0 or step == steps - 1:
                record = {key: round(float(value), 6) for key, value in signs.items()}
                log({"stage": name, "step": step, "loss": round(float(loss.detach()), 6), **record})
            advance(f"loss {float(loss.detach()):.3f}")
            if state and step < steps - 1 and time.monotonic() - saved > SAVE_SECONDS:
                seconds = before + time.monotonic() - began
                save_state(state, module, optimizer, step + 1, fingerprint, seconds)
                saved = time.monotonic()
    seconds = before + time.monotonic() - began if first < steps else before
    if state and first < steps:
        save_state(state, module, None, steps, fingerprint, seconds)
    log({"stage": name, "seconds": round(seconds, 1)})


def save_state(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    fingerprint: str,
    seconds: float,
) -> None:
    """Weights, optimiser moments, step and seconds so far in one safetensors file, written whole.

    A finished stage needs no moments, and takes a third of the room without them. Random numbers
    are functions of seed and step, so the step is all the random state there is.
    """
    tensors = {f"module.{key}": value for key, value in module.state_dict().items()}
    unfinished = optimizer.state_dict()["state"] if optimizer else {}
    for index, moments in unfinished.items():
        for key, value in moments.items():
            tensors[f"optimizer.{index}.{key}"] = torch.as_tensor(value)
    metadata = {"step": str(step), "fingerprint": fingerprint, "seconds": str(seconds)}
    save_tensors(path, tensors, metadata)


class State(NamedTuple):
    """A saved state of a stage."""

    step: int
    seconds: float
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def read_state(path: Path, fingerprint: str) -> State | None:
    """A saved state, or None where there is none that fits."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("fingerprint") != fingerprint:
                return None
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return State(int(metadata["step"]), float(metadata["seconds"]), tensors, metadata)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise TrainingError(
            f"{path}: damaged training state ({error}); remove it to start this stage again"
        ) from error


def load_state(
    path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, fingerprint: str
) -> tuple[int, float]:
    """Restore module and optimiser; returns the next step and the seconds spent, or zeros."""
    found = read_state(path, fingerprint)
    if found is None:
        return 0, 0.0
    step, seconds, tensors, _ = found
    module.load_state_dict(
        {k.removeprefix("module."): v for k, v in tensors.items() if k.startswith("module.")}
    )
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".")
            moments.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
    return step, seconds


def json_log(path: Path | None) -> Callable[[Mapping[str, Any]], None]:
    """A function that appends one JSON line a record, or does nothing."""
    if path is None:
        return lambda record: None

    def append(record: Mapping[str, Any]) -> None:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise OutputError(f"{path}: cannot be written: {error.strerror}") from error

    return append
