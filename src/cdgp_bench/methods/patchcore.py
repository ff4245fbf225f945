"""PatchCore (Roth et al., 2022) through anomalib: nearest neighbours in a coreset of features.

The map is each patch's distance to the nearest kept patch, the image score the largest one,
weighted by how crowded its neighbour's surroundings are.
"""

import functools
from typing import Any

from pydantic import Field

from cdgp.data.manifest import WeakSplit
from cdgp.method.backbone import Encoder
from cdgp.presets import Settings
from cdgp.training.dual_gp import dual_gp_samples
from cdgp_bench.methods import MethodOptions
from cdgp_bench.methods import through_anomalib as through

STAGES = (1, 2)
"""Its published choice: strides 8 and 16."""


class Options(MethodOptions):
    """What PatchCore leaves open."""

    coreset: float = Field(gt=0, le=1)
    """Share of the patches that is kept."""
    neighbours: int = Field(ge=1)


PAPER = Options(coreset=0.1, neighbours=9)
LITE = Options(coreset=0.01, neighbours=9)
"""The smallest published coreset; the time of the greedy choice grows with its square."""


def build(encoder: Encoder, settings: Settings, options: Options) -> Any:
    """anomalib's module, untrained."""
    from anomalib.models import Patchcore

    names = through.stage_names(encoder)
    module = Patchcore(
        backbone=settings.backbone.name, layers=[names[i] for i in STAGES], pre_trained=False,
        coreset_sampling_ratio=options.coreset, num_neighbors=options.neighbours,
        **through.parts(settings, encoder),
    )  # fmt: skip
    module.model.feature_extractor.feature_extractor = through.Stages(encoder, STAGES)
    return module


def recipe(data: WeakSplit, settings: Settings, options: Options) -> through.Recipe:
    """Collect the good training images' patches and keep a coreset."""
    samples = dual_gp_samples(data, settings)
    return through.Recipe("patchcore", build, samples, 32, {"max_epochs": 1}, {}, collects=True)


fit = functools.partial(through.fit, recipe)
