"""One loop for both stages: deterministic steps, learning-rate schedule, log, checkpoints."""

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cdgp.errors import TrainingError
from cdgp.files import save_tensors
from cdgp.training.context import TrainingContext

log = logging.getLogger(__name__)

SAVE_SECONDS = 20.0
LOG_EVERY = 10

Schedule = Callable[[int], float]
"""Multiplier of the initial learning rates, by step."""


class Stage(NamedTuple):
    """What is trained, and how."""

    name: str
    module: nn.Module
    """Called with a batch, returns the loss and a mapping of diagnostics to log."""
    optimizer: torch.optim.Optimizer
    """Over the module's parameters, with the initial learning rates."""
    steps: int
    lr_lambda: Schedule
    batch: Callable[[int], tuple[Any, ...]]
    """The arguments for a step, a function of the step's number alone."""
    cache_key: str
    """Digest of settings and data; a checkpoint with another one is not used."""
    file: str


def cosine(steps: int, final: float) -> Schedule:
    """1 at step 0, falling along half a cosine to ``final`` at ``steps``."""
    return lambda step: final + (1 - final) * 0.5 * (1 + math.cos(math.pi * step / steps))


def run_stage(stage: Stage, context: TrainingContext) -> float:
    """Train a stage's module in place; go on from its checkpoint where there is one that fits.

    Returns the seconds that it took, those before an interruption among them.

    Raises:
        TrainingError: the loss is not finite, or the checkpoint is damaged.
    """
    path = context.checkpoint(stage.file)
    saves = path if context.share.rank == 0 else None
    first, before = load_checkpoint(path, stage) if path else (0, 0.0)
    groups = stage.optimizer.param_groups
    initial = [group.setdefault("initial_lr", group["lr"]) for group in groups]
    module, optimizer = context.fabric.setup(stage.module, stage.optimizer)
    began = saved = time.monotonic()
    with context.progress.phase(stage.name, stage.steps, first) as advance:
        for step in range(first, stage.steps):
            for group, rate in zip(groups, initial, strict=True):
                group["lr"] = rate * stage.lr_lambda(step)
            loss, diagnostics = module(*context.fabric.to_device(stage.batch(step)))
            value = float(loss.detach())
            if not math.isfinite(value):
                raise TrainingError(
                    f"{stage.name}: the loss is not finite at step {step}. Likely causes: (a) a "
                    "learning rate that is too high for this backbone; (b) damaged weights"
                )
            context.fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % LOG_EVERY == 0 or step == stage.steps - 1:
                record = {key: round(float(found), 6) for key, found in diagnostics.items()}
                context.log({"stage": stage.name, "step": step, "loss": round(value, 6), **record})
            advance(f"loss {value:.3f}")
            if saves and step < stage.steps - 1 and time.monotonic() - saved > SAVE_SECONDS:
                save_checkpoint(saves, stage, step + 1, before + time.monotonic() - began)
                saved = time.monotonic()
    seconds = before + time.monotonic() - began if first < stage.steps else before
    if saves and first < stage.steps:
        save_checkpoint(saves, stage, stage.steps, seconds)
    context.log({"stage": stage.name, "seconds": round(seconds, 1)})
    return round(seconds, 1)


class Checkpoint(NamedTuple):
    """A saved stage."""

    step: int
    """The next one."""
    seconds: float
    tensors: dict[str, Tensor]


def save_checkpoint(path: Path, stage: Stage, step: int, seconds: float) -> None:
    """Weights, optimiser moments, step and seconds so far in one safetensors file.

    A finished stage needs no moments, and takes a third of the room without them. Random numbers
    are functions of seed and step, so the step is all the random state there is.
    """
    tensors = {f"module.{key}": value for key, value in stage.module.state_dict().items()}
    unfinished = stage.optimizer.state_dict()["state"] if step < stage.steps else {}
    for index, moments in unfinished.items():
        for key, value in moments.items():
            tensors[f"optimizer.{index}.{key}"] = torch.as_tensor(value)
    metadata = {"step": str(step), "fingerprint": stage.cache_key, "seconds": str(seconds)}
    save_tensors(path, tensors, metadata)


def read_checkpoint(path: Path, cache_key: str) -> Checkpoint | None:
    """A saved stage, or None where there is none that fits; TrainingError where it is damaged."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("fingerprint") != cache_key:
                log.warning(
                    "%s: was made by other code, settings or images; starts again", path.name
                )
                return None
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return Checkpoint(int(metadata["step"]), float(metadata["seconds"]), tensors)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise TrainingError(
            f"{path}: damaged checkpoint ({error}); remove it to start this stage again"
        ) from error


def load_checkpoint(path: Path, stage: Stage) -> tuple[int, float]:
    """Restore module and optimiser; returns the next step and the seconds spent, or zeros."""
    found = read_checkpoint(path, stage.cache_key)
    if found is None:
        return 0, 0.0
    weights, moments = {}, dict[int, dict[str, Tensor]]()
    for key, value in found.tensors.items():
        kind, _, name = key.partition(".")
        if kind == "module":
            weights[name] = value
        else:
            index, _, moment = name.partition(".")
            moments.setdefault(int(index), {})[moment] = value
    stage.module.load_state_dict(weights)
    groups = stage.optimizer.state_dict()["param_groups"]
    stage.optimizer.load_state_dict({"state": moments, "param_groups": groups})
    return found.step, found.seconds
