"""PaDiM (Defard et al., 2021) through anomalib: a Gaussian a position over pretrained features.

The map is the Mahalanobis distance at every position, the image score its maximum.
"""

import os
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from cdgp.data.manifest import WeakSplit
from cdgp.errors import NotRunError
from cdgp.method.backbone import Encoder
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp.training.stages import dual_gp_samples
from cdgp_bench.methods import Fitted, MethodOptions
from cdgp_bench.methods.through_anomalib import (
    ALL_STAGES,
    PARTS_OFF,
    Recipe,
    Stages,
    fit_through_anomalib,
    input_steps,
    stage_names,
)


class Options(MethodOptions):
    """What PaDiM leaves open."""

    features: int = Field(ge=1)
    """Channels kept of those of the three stages, drawn at random."""


PAPER = Options(features=550)
LITE = Options(features=100)
"""The published number for a small backbone (ResNet-18)."""


def build(encoder: Encoder, settings: Settings, options: Options) -> Any:
    """anomalib's module, untrained."""
    from anomalib.models import Padim

    module = Padim(
        backbone=settings.backbone.name, layers=stage_names(encoder), pre_trained=False,
        n_features=min(options.features, sum(encoder.channels)),
        pre_processor=input_steps(settings, encoder), **PARTS_OFF,
    )  # fmt: skip
    module.model.feature_extractor.feature_extractor = Stages(encoder, ALL_STAGES)
    return module


def fit(
    data: WeakSplit, settings: Settings, checkpoints: Path, progress: Progress, options: Options
) -> Fitted:
    """Collect the good training images' features; nothing is learned by steps.

    Raises:
        NotRunError: they, and a covariance a position, would not fit into memory.
    """
    samples = dual_gp_samples(data, settings)
    good = sum(not s.defective for s in samples)
    positions = settings.input_size[0] // 4 * (settings.input_size[1] // 4)
    # Stacking holds the features twice; inverting takes three matrices a position.
    needed = 4 * positions * options.features * (2 * good + 3 * options.features)
    if needed > memory_bytes():
        raise NotRunError(
            f"padim would need {needed / 2**30:.0f} GiB of memory for {good} good images at "
            f"{settings.input_size[0]}x{settings.input_size[1]}: lower the data set's input_size, "
            "or options.padim.features"
        )
    recipe = Recipe("padim", build, samples, 32, {"max_epochs": 1}, {}, collects=True)
    return fit_through_anomalib(recipe, data, settings, checkpoints, progress, options)


def memory_bytes() -> int:
    """Of the GPU where there is one, else of the machine."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
