"""EfficientAD-S (Batzner et al., 2024) through anomalib: a student, a teacher, an autoencoder.

The map is the mean of both disagreements, each scaled by its quantiles on good images that were
not trained on; the image score is its maximum. Sides below 256 are brought to 256, the published
input, since the autoencoder's bottleneck takes nothing smaller. Where the published teacher is not
at hand, ``studies/distil_teacher.py`` makes one.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from cdgp.data.manifest import WeakSplit
from cdgp.errors import SettingsError
from cdgp.files import digest
from cdgp.method.backbone import Encoder
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp_bench.errors import NotRunError
from cdgp_bench.methods import Fitted, MethodOptions, images_digest, require_images
from cdgp_bench.methods import through_anomalib as through

PUBLISHED_STEPS = 70_000
PUBLISHED_TEACHER_STEPS = 60_000
FEATURES = 384
"""Channels of the teacher."""
LEAST_SIDE = 256


class Options(MethodOptions):
    """How long EfficientAD trains, and the files that it needs."""

    teacher: str = ""
    """File ``pretrained_teacher_small.pth`` of anomalib's release, or one that
    ``cdgp_bench.studies.distil_teacher`` has made."""
    auxiliary: str = ""
    """Folder of images of many kinds, searched through; the published one is ImageNet, anomalib's
    is Imagenette."""
    steps: int = Field(ge=1)

    def decides(self) -> dict[str, Any]:
        return super().decides() | {
            "teacher": digest(Path(self.teacher)) if Path(self.teacher).is_file() else "",
            "auxiliary": images_digest(self.auxiliary),
        }


PAPER = Options(steps=PUBLISHED_STEPS)
LITE = Options(steps=1000)
"""Forty minutes on two cores at 256 x 256."""


class Teacher(NamedTuple):
    """A teacher from a file."""

    weights: dict[str, Tensor]
    distilled: dict[str, Any] | None
    """What ``distil_teacher`` says of its training: ``backbone``, ``steps`` and more; None where
    the file is not ours."""


def read_teacher(path: Path) -> Teacher:
    """The teacher's weights; torch reads tensors alone from the file, and runs nothing.

    Raises:
        SettingsError: the file does not hold the weights of anomalib's small teacher.
    """
    from anomalib.models.image.efficient_ad.torch_model import SmallPatchDescriptionNetwork

    with torch.device("meta"):
        network = SmallPatchDescriptionNetwork(FEATURES)
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
        network.load_state_dict(state, assign=True)
    except Exception as error:  # many kinds, by what the file holds; all mean the same to the user
        raise SettingsError(
            f"{path}: does not hold the weights of EfficientAD's small teacher; give "
            "pretrained_teacher_small.pth of anomalib's release, or a file of "
            "cdgp_bench.studies.distil_teacher"
        ) from error
    about: dict[str, Any] = getattr(state, "_metadata", {}).get("", {})
    return Teacher(dict(state), about.get("distilled"))


def build(encoder: Encoder | None, settings: Settings, options: Options) -> Any:
    """anomalib's module, untrained, with its teacher and its auxiliary images from what is given.

    Its learning rate falls at 95 % of the steps, as published; anomalib's own schedule counts
    passes, and would never reach that.
    """
    from anomalib.models import EfficientAd

    class Local(EfficientAd):  # type: ignore[misc]
        def prepare_pretrained_model(self) -> None:
            self.model.teacher.load_state_dict(read_teacher(Path(options.teacher)).weights)

        def prepare_imagenette_data(self, image_size: Any) -> None:
            # anomalib wants a folder a class but uses no class: as one class, linked, the images
            # may lie in any way.
            self.linked = TemporaryDirectory(prefix="cdgp-efficientad-")
            self.imagenet_dir = Path(self.linked.name)
            given = Path(options.auxiliary).resolve()
            (self.imagenet_dir / "images").symlink_to(given, target_is_directory=True)
            super().prepare_imagenette_data(image_size)

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
            "plan to the file pretrained_teacher_small.pth of anomalib's release, or to one made "
            f"by python -m cdgp_bench.studies.distil_teacher; {given}"
        )
    require_images("efficientad", options.auxiliary, "images of many kinds (published: ImageNet)")
    facts = {"budget_share": options.steps / PUBLISHED_STEPS,
             "network_input": list(settings.input_size)}  # fmt: skip
    distilled = read_teacher(Path(options.teacher)).distilled
    if distilled is not None:
        backbone, steps = distilled["backbone"], distilled["steps"]
        facts["teacher"] = f"distilled by us from {backbone}, {steps:,} steps"
        # A row is as short as the shorter of its two trainings.
        share = min(facts["budget_share"], steps / PUBLISHED_TEACHER_STEPS)
        facts["budget_share"] = share
    held = [s.image for s in data.calibration if not s.defective]
    return through.Recipe(
        "efficientad", build, data.fit, 1, {"max_steps": options.steps}, facts,
        pretrained=False, finish=lambda module: scale(module, held, settings),
    )  # fmt: skip


def fit(
    data: WeakSplit, settings: Settings, checkpoints: Path, progress: Progress, options: Options
) -> Fitted:
    """Train at sides of at least 256."""
    height, width = (max(LEAST_SIDE, side) for side in settings.input_size)
    settings = settings.model_copy(update={"input_size": (height, width)})
    return through.fit(recipe, data, settings, checkpoints, progress, options)
