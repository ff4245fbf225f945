"""PaDiM (Defard et al., 2021) through anomalib: a Gaussian a position over pretrained features.

The map is the Mahalanobis distance at every position, the image score its maximum.
"""

import functools
import os
from typing import Any

import torch
from pydantic import Field

from cdgp.data.manifest import WeakSplit
from cdgp.method.backbone import Encoder
from cdgp.presets import Settings
from cdgp.training.dual_gp import dual_gp_samples
from cdgp_bench.errors import NotRunError
from cdgp_bench.methods import MethodOptions
from cdgp_bench.methods import through_anomalib as through


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
        backbone=settings.backbone.name, layers=through.stage_names(encoder), pre_trained=False,
        n_features=min(options.features, sum(encoder.channels)),
        **through.parts(settings, encoder),
    )  # fmt: skip
    module.model.feature_extractor.feature_extractor = through.Stages(encoder, through.ALL_STAGES)
    return module


def recipe(data: WeakSplit, settings: Settings, options: Options) -> through.Recipe:
    """Collect the good training images' features; nothing is learned by steps."""
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
    return through.Recipe("padim", build, samples, 32, {"max_epochs": 1}, {}, collects=True)


fit = functools.partial(through.fit, recipe)


def memory_bytes() -> int:
    """Of the GPU where there is one, else of the machine."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
