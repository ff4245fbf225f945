"""EfficientAD-S (Batzner et al., 2024) through anomalib: a student, a teacher, an autoencoder.

The map is the mean of both disagreements, each scaled by its quantiles on good images that were
not trained on; the image score is its maximum. Sides below 256 are brought to 256, the published
input, since the autoencoder's bottleneck takes nothing smaller.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from cdgp.data.manifest import WeakSplit
from cdgp.files import digest
from cdgp.method.backbone import Encoder
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp_bench.errors import NotRunError
from cdgp_bench.methods import Fitted, MethodOptions, images_digest, require_images
from cdgp_bench.methods import through_anomalib as through

PUBLISHED_STEPS = 70_000
LEAST_SIDE = 256


class Options(MethodOptions):
    """How long EfficientAD trains, and the files that it needs."""

    teacher: str = ""
    """File ``pretrained_teacher_small.pth`` of anomalib's release."""
    auxiliary: str = ""
    """Folder with a folder of images a class; the published one is ImageNet, anomalib's is
    Imagenette."""
    steps: int = Field(ge=1)

    def decides(self) -> dict[str, Any]:
        return super().decides() | {
            "teacher": digest(Path(self.teacher)) if Path(self.teacher).is_file() else "",
            "auxiliary": images_digest(self.auxiliary),
        }


PAPER = Options(steps=PUBLISHED_STEPS)
LITE = Options(steps=1000)
"""Half an hour on two cores."""


def build(encoder: Encoder | None, settings: Settings, options: Options) -> Any:
    """anomalib's module, untrained, with its teacher from the given file.

    Its learning rate falls at 95 % of the steps, as published; anomalib's own schedule counts
    passes, and would never reach that.
    """
    from anomalib.models import EfficientAd

    class Local(EfficientAd):  # type: ignore[misc]
        def prepare_pretrained_model(self) -> None:
            state = torch.load(options.teacher, map_location=self.device, weights_only=True)
            self.model.teacher.load_state_dict(state)

        def configure_optimizers(self) -> Any:
            found = super().configure_optimizers()
            scheduler = {"scheduler": found["lr_scheduler"], "interval": "step"}
            return found | {"lr_scheduler": scheduler}

    return Local(
        imagenet_dir=options.auxiliary,
        **through.parts(settings, None),
    )


@torch.no_grad()
def scale(module: Any, good: Sequence[Path], settings: Settings) -> None:
    """Set the quantiles of both maps from good images that were held out."""
    module.eval()
    maps = [
        module.model.get_maps(through.eight_bit(path, settings).div(255)[None].to(module.device))
        for path in good
    ]
    for name, index in (("st", 0), ("ae", 1)):
        low, high = module._get_quantiles_of_maps([pair[index] for pair in maps])
        module.model.quantiles.update({f"qa_{name}": low, f"qb_{name}": high})


def recipe(data: WeakSplit, settings: Settings, options: Options) -> through.Recipe:
    """Train on good fit images; good calibration images scale the maps."""
    if not Path(options.teacher).is_file():
        given = f"{options.teacher} is no file" if options.teacher else "nothing was given"
        raise NotRunError(
            "efficientad needs its teacher's weights: set options.efficientad.teacher in the "
            f"plan to the file pretrained_teacher_small.pth of anomalib's release; {given}"
        )
    require_images("efficientad", options.auxiliary, "images of many classes (Imagenette)")
    held = [s.image for s in data.calibration if not s.defective]
    return through.Recipe(
        "efficientad", build, data.fit, 1, {"max_steps": options.steps},
        {"budget_share": options.steps / PUBLISHED_STEPS,
         "network_input": list(settings.input_size)},
        pretrained=False, finish=lambda module: scale(module, held, settings),
    )  # fmt: skip


def fit(
    data: WeakSplit, settings: Settings, checkpoints: Path, progress: Progress, options: Options
) -> Fitted:
    """Train at sides of at least 256."""
    height, width = (max(LEAST_SIDE, side) for side in settings.input_size)
    settings = settings.model_copy(update={"input_size": (height, width)})
    return through.fit(recipe, data, settings, checkpoints, progress, options)
