"""What the adapters share: training on weak batches, checkpoints, scoring files one by one."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from cdgp.data.images import read_image, to_input
from cdgp.data.manifest import WeakSplit
from cdgp.method.backbone import Encoder
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp.training.dataset import WeakDataset
from cdgp.training.dual_gp import weak_batch
from cdgp.training.loop import cosine, json_log, run_stage
from cdgp.training.stages import dual_gp_samples, fingerprint, shared_parts
from cdgp_bench.methods import Fitted, MethodOptions, Pipeline, Scored

Predict = Callable[[Tensor], tuple[NDArray[np.float32], float]]
"""An input (1, 3, H, W) in [0, 1], on the network's device, to a map (h, w) and an image score."""


def train_on_labels(
    name: str,
    model: nn.Module,
    groups: list[dict[str, Any]],
    data: WeakSplit,
    settings: Settings,
    fabric: Fabric,
    checkpoints: Path,
    progress: Progress,
) -> float:
    """Train a model on the batches, for the steps and at the schedule of the Dual GP, resumably.

    Args:
        name: of the method, for its checkpoint and its progress.
        model: on the device; called with images and labels, returns the loss and diagnostics.
            Left in evaluation mode.
        groups: parameter groups of AdamW.
        data: what to train on.
        settings: of the run.
        fabric: device and backward pass.
        checkpoints: folder of checkpoints.
        progress: where to show the progress.

    Returns:
        The seconds that it took.
    """
    s = settings.dual_gp
    samples = dual_gp_samples(data, settings)
    images = WeakDataset(samples, settings.input_size, settings.data.white_level)
    cache_key = fingerprint(settings, data.sha256, "dual_gp")
    last: dict[str, Any] = {}
    run_stage(
        name, fabric, model, torch.optim.AdamW(groups), s.steps,
        cosine(s.steps, s.final_learning_rate),
        lambda step: weak_batch(images, settings, step), f"{name} {cache_key}",
        checkpoints / f"{name}-{cache_key[:16]}" / f"{name}.safetensors", last.update, progress,
    )  # fmt: skip
    model.eval()
    return float(last["seconds"])


def fitted_network(
    network: nn.Module,
    predict: Predict,
    settings: Settings,
    device: torch.device,
    seconds: float,
    probability: bool,
    facts: dict[str, Any],
) -> Fitted:
    """A trained network that scores one input at a time."""

    def score(paths: Sequence[Path]) -> Iterator[Scored]:
        for path in paths:
            image = read_image(path, settings.data.white_level)
            values, image_score = predict(to_input(image, settings.input_size)[None].to(device))
            yield Scored((image.shape[0], image.shape[1]), values, image_score)

    return Fitted(score, seconds, probability, facts, lambda: Pipeline(network, predict))


def checkpoint_of(
    name: str,
    options: MethodOptions,
    sha256: str,
    settings: Settings,
    checkpoints: Path,
    without: tuple[str, ...] = (),
) -> tuple[str, Path]:
    """Digest of all that decides a method's weights, and the file that holds them.

    Args:
        name: of the method.
        options: its own.
        sha256: of the images that it may train on.
        settings: of the row.
        checkpoints: folder of checkpoints.
        without: shared settings that it does not use.
    """
    shared = {k: v for k, v in shared_parts(settings).items() if k not in without}
    decides = [name, options.decides(), sha256, settings.calibration.pictures, shared]
    cache_key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    return cache_key, checkpoints / f"{name}-{cache_key[:16]}" / f"{name}.safetensors"


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


def train_with_curve(
    name: str,
    fabric: Fabric,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    lr_lambda: Callable[[int], float],
    batch: Callable[[int], tuple[Any, ...]],
    checkpoint: tuple[str, Path],
    progress: Progress,
) -> tuple[list[list[float]], float]:
    """``run_stage`` with its log beside its checkpoint.

    Args:
        name: of the method.
        fabric: device and backward pass.
        model: called with a batch; left in evaluation mode.
        optimizer: over its parameters.
        steps: their number.
        lr_lambda: factor on the learning rates by step.
        batch: arguments of the model by step.
        checkpoint: as ``checkpoint_of`` names it.
        progress: where to show the progress.

    Returns:
        The learning curve, and the seconds that it took.
    """
    cache_key, file = checkpoint
    log = file.with_name("log.jsonl")
    log.parent.mkdir(parents=True, exist_ok=True)
    run_stage(
        name,
        fabric,
        model,
        optimizer,
        steps,
        lr_lambda,
        batch,
        cache_key,
        file,
        json_log(log),
        progress,
    )
    model.eval()
    return learning_curve(log)


def learning_curve(log: Path) -> tuple[list[list[float]], float]:
    """(step, loss) pairs from a stage's log, and the seconds that it took.

    A resumed stage may have logged a step twice; the last one counts. A line that a crash has cut
    is left out.
    """
    losses: dict[int, float] = {}
    seconds = 0.0
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        seconds = record.get("seconds", seconds)
        if "loss" in record:
            losses[record["step"]] = record["loss"]
    return [[step, losses[step]] for step in sorted(losses)], float(seconds)
