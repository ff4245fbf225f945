"""The normal distance: Gaussians of the frozen teacher's features of good fit images."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cdgp.method.backbone import Encoder
from cdgp.method.distance import NormalDistance, fit_distance
from cdgp.presets import Settings
from cdgp.training.context import TrainingContext
from cdgp.training.dataset import WeakDataset

BATCH = 16


def train_distance(
    dataset: WeakDataset, teacher: Encoder, settings: Settings, context: TrainingContext
) -> NormalDistance | None:
    """Fit the branch on good images; None where the settings leave it out, and of windows.

    Raises:
        ValueError: a defective image among them.
    """
    if not settings.distance.weight or settings.tile:
        return None
    if bool(dataset.defective.any()):
        raise ValueError("the normal distance is fitted on good images only")
    device = context.fabric.device

    with context.progress.phase("Normal distance", 2 * len(dataset)) as advance:

        def batches() -> Iterator[list[Tensor]]:
            for first in range(0, len(dataset), BATCH):
                chosen = range(first, min(first + BATCH, len(dataset)))
                images = teacher.normalise(dataset.batch(chosen).to(device))
                yield list(teacher(images.contiguous(memory_format=torch.channels_last)))
                for _ in chosen:
                    advance()

        with torch.no_grad():
            return fit_distance(batches, settings.distance.components).to(device)
