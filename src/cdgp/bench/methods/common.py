"""What adapters of networks share: training on weak batches, scoring files one by one."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from numpy.typing import NDArray
from torch import Tensor, nn

from cdgp.bench.methods import Fitted, Pipeline, Scored
from cdgp.data.images import read_picture, to_input
from cdgp.data.manifest import WeakSplit
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp.training.dual_gp import weak_batch
from cdgp.training.loop import run_stage
from cdgp.training.pictures import Pictures
from cdgp.training.stages import dual_gp_samples, fingerprint

Run = Callable[[Tensor], tuple[NDArray[np.float32], float]]
"""An input (1, 3, H, W) in [0, 1], on the network's device, to a map (h, w) and an image score."""


def train_on_labels(
    name: str,
    model: nn.Module,
    groups: list[dict[str, Any]],
    data: WeakSplit,
    settings: Settings,
    fabric: Fabric,
    states: Path,
    progress: Progress,
) -> float:
    """Train a model on the batches, for the steps and at the schedule of the Dual GP, resumably.

    Args:
        name: of the method, for its state and its progress.
        model: on the device; called with pictures and labels, returns the loss and signs. Left in
            evaluation mode.
        groups: parameter groups of AdamW.
        data: what to train on.
        settings: of the run.
        fabric: device and backward pass.
        states: folder of states.
        progress: where to tell the progress.

    Returns:
        The seconds that it took.
    """
    s = settings.dual_gp
    samples = dual_gp_samples(data, settings)
    pictures = Pictures(samples, settings.input_size, settings.data.white_level)
    mark = fingerprint(settings, data.sha256, "dual_gp")
    signs: dict[str, Any] = {}
    run_stage(
        name, fabric, model, torch.optim.AdamW(groups), s.steps, s.final_learning_rate,
        lambda step: weak_batch(pictures, settings, step), f"{name} {mark}",
        states / f"{name}-{mark[:16]}" / f"{name}.safetensors", signs.update, progress,
    )  # fmt: skip
    model.eval()
    return float(signs["seconds"])


def fitted_network(
    network: nn.Module,
    run: Run,
    settings: Settings,
    device: torch.device,
    seconds: float,
    probability: bool,
    facts: dict[str, Any],
) -> Fitted:
    """A trained network that scores one input at a time."""

    def score(paths: Sequence[Path]) -> Iterator[Scored]:
        for path in paths:
            picture = read_picture(path, settings.data.white_level)
            values, image_score = run(to_input(picture, settings.input_size)[None].to(device))
            yield Scored((picture.shape[0], picture.shape[1]), values, image_score)

    return Fitted(score, seconds, probability, facts, lambda: Pipeline(network, run))
