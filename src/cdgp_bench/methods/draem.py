"""DRAEM (Zavrtanik et al., 2021) through anomalib: a reconstruction and what it cannot explain.

Textures from a folder of images are blended into good ones under Perlin masks; one network removes
them again, another one learns where they were. The map is the second one's probability, the
image score its maximum.
"""

import functools
from typing import Any

from pydantic import Field

from cdgp.data.manifest import WeakSplit
from cdgp.method.backbone import Encoder
from cdgp.presets import Settings
from cdgp.training.dual_gp import dual_gp_samples
from cdgp_bench.methods import MethodOptions, images_digest, require_images
from cdgp_bench.methods import through_anomalib as through

PUBLISHED_EPOCHS = 700
BATCH = 8


class Options(MethodOptions):
    """How long DRAEM trains, and on what textures."""

    auxiliary: str = ""
    """Folder of texture images, searched through; the published one is the DTD data set."""
    epochs: int = Field(ge=1)
    most_steps: int = Field(ge=0)
    """An end before the last pass; 0 for none."""

    def decides(self) -> dict[str, Any]:
        return super().decides() | {"auxiliary": images_digest(self.auxiliary)}


PAPER = Options(epochs=PUBLISHED_EPOCHS, most_steps=0)
LITE = Options(epochs=PUBLISHED_EPOCHS, most_steps=60)
"""Its two networks have 97 million parameters and no pretrained part: two steps a minute on two
cores at 192 x 192, and 9 GB of memory."""


def build(encoder: Encoder | None, settings: Settings, options: Options) -> Any:
    """anomalib's module, untrained; it takes no pretrained encoder."""
    from anomalib.models import Draem

    module = Draem(
        dtd_dir=options.auxiliary,
        **through.parts(settings, None),
    )
    module.augmenter.anomaly_source_paths.sort()  # else in the order of the disk
    return module


def recipe(data: WeakSplit, settings: Settings, options: Options) -> through.Recipe:
    """Train on all good training images."""
    through.check_sides("draem", settings)
    require_images("draem", options.auxiliary, "texture images (published: DTD)")
    samples = dual_gp_samples(data, settings)
    a_pass = -(-sum(not s.defective for s in samples) // BATCH)
    published = PUBLISHED_EPOCHS * a_pass
    steps = min(options.most_steps or options.epochs * a_pass, options.epochs * a_pass)
    return through.Recipe(
        "draem", build, samples, BATCH, {"max_steps": steps}, {"budget_share": steps / published},
        pretrained=False,
    )  # fmt: skip


fit = functools.partial(through.fit, recipe)
