"""What the adapters share: training on weak batches, checkpoints, scoring files one by one."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from cdgp.data.images import network_input
from cdgp.data.manifest import WeakSplit
from cdgp.locks import LOCK
from cdgp.method.backbone import Encoder
from cdgp.prefetch import read_ahead
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp.training.context import new_context, shared_parts, stage_key
from cdgp.training.dataset import WeakDataset, new_inputs
from cdgp.training.dual_gp import dual_gp_samples, weak_batch
from cdgp.training.loop import Stage, cosine, run_stage
from cdgp_bench.methods import Fitted, MethodOptions, Pipeline, Scored

Predict = Callable[[Tensor], tuple[NDArray[np.float32], float]]
"""An input (1, 3, H, W) in [0, 1], on the network's device, to a map (h, w) and an image score."""


def fit_on_labels(
    name: str,
    model: nn.Module,
    groups: list[dict[str, Any]],
    predict: Predict,
    data: WeakSplit,
    settings: Settings,
    checkpoints: Path,
    progress: Progress,
    facts: dict[str, Any],
) -> Fitted:
    """Train a model on the batches, for the steps and at the schedule of the Dual GP, resumably.

    The model, called with images and labels, returns the loss and diagnostics. ``groups`` are
    AdamW's; ``predict`` gives a probability as the image score.
    """
    context = new_context(None, None, progress)
    model.to(context.fabric.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    s = settings.dual_gp
    images = WeakDataset(dual_gp_samples(data, settings), new_inputs(settings))
    key = stage_key(settings, data.sha256, "dual_gp")
    stage = Stage(
        name, model, torch.optim.AdamW(groups), s.steps, cosine(s.steps, s.final_learning_rate),
        lambda step: weak_batch(images, settings, step), f"{name} {key}", f"{name}.safetensors",
    )  # fmt: skip
    folder = checkpoints / f"{name}-{key[:16]}"
    with held_stage(folder):
        seconds = run_stage(stage, replace(context, checkpoints=folder))
    model.eval()
    return fitted_network(model, predict, settings, seconds, True, facts)


def held_stage(folder: Path) -> FileLock:
    """A lock on the folder of a stage, which other processes wait for."""
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / LOCK)


def fitted_network(
    network: nn.Module,
    predict: Predict,
    settings: Settings,
    seconds: float,
    probability: bool,
    facts: dict[str, Any],
) -> Fitted:
    """A trained network that scores one input at a time."""
    device = next(network.parameters()).device

    def score(paths: Sequence[Path]) -> Iterator[Scored]:
        for image, native in read_ahead(lambda path: network_input(path, settings), paths):
            values, image_score = predict(torch.from_numpy(image)[None].to(device))
            yield Scored(native, values, image_score)

    return Fitted(score, seconds, probability, facts, lambda: Pipeline(network, predict))


def cache_key_of(
    name: str,
    options: MethodOptions,
    sha256: str,
    settings: Settings,
    without: tuple[str, ...] = (),
) -> str:
    """Digest of all that decides a method's weights.

    ``sha256`` is of the images that it may train on; ``without`` names shared settings that it does
    not use.
    """
    shared = {k: v for k, v in shared_parts(settings).items() if k not in without}
    decides = [name, options.decides(), sha256, settings.calibration.pictures, shared]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def checkpoint_of(name: str, cache_key: str, checkpoints: Path) -> Path:
    """The file of a method's weights; the name of its folder holds the key."""
    return checkpoints / f"{name}-{cache_key[:16]}" / f"{name}.safetensors"


def neighbourhoods(encoder: Encoder, images: Tensor, stages: Sequence[int], scale: int) -> Tensor:
    """Some frozen stages at one size, each position averaged over the nine around it.

    Args:
        encoder: put in evaluation mode.
        images: (B, 3, H, W) RGB in [0, 1].
        stages: of 0, 1, 2 (strides 4, 8, 16), the finest first.
        scale: the size is that of the first one, times this.

    Returns:
        (B, C, h, w), C the sum of the stages' channels.
    """
    with torch.no_grad():
        found = encoder.eval()(encoder.normalise(images))
        finest = found[stages[0]]
        size = (scale * finest.shape[2], scale * finest.shape[3])
        spread = [
            functional.interpolate(found[i], size, mode="bilinear", align_corners=True)
            for i in stages
        ]
        return functional.avg_pool2d(torch.cat(spread, 1), 3, 1, 1)


def fit_stage(
    stage: Stage,
    predict: Predict,
    options: MethodOptions,
    settings: Settings,
    checkpoints: Path,
    progress: Progress,
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> Fitted:
    """Train a reimplemented method, logging beside its checkpoint; it scores by a probability."""
    file = checkpoint_of(stage.name, stage.cache_key, checkpoints)
    file.parent.mkdir(parents=True, exist_ok=True)
    log = file.with_name("log.jsonl")
    seconds = run_stage(stage, new_context(file.parent, log, progress))
    stage.module.eval()
    facts = {
        "code": "reimplemented",
        "options": options.decides(),
        **facts,
        "learning_curve": learning_curve(log),
    }
    return fitted_network(stage.module, predict, settings, seconds, True, facts)


def learning_curve(log: Path) -> list[list[float]]:
    """(step, loss) pairs from a stage's log.

    A resumed stage may have logged a step twice; the last one counts. A line that a crash has cut
    is left out.
    """
    losses: dict[int, float] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "loss" in record:
            losses[record["step"]] = record["loss"]
    return [[step, losses[step]] for step in sorted(losses)]
