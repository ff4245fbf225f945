"""Fixtures that several files share."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from cdgp.data.manifest import Manifest
from cdgp.data.synthetic import make_dataset
from cdgp.presets import Settings, settings
from cdgp.training.fit import Run, fit

if TYPE_CHECKING:
    from cdgp.bench.methods import MethodOptions

SHARED = Path(__file__).parents[2] / "shared"

torch.set_num_threads(1)


def tiny_settings(**changes: object) -> Settings:
    """The lite preset at the least input and a few steps: for the plumbing, not for quality."""
    dual_gp = {"steps": 4, "batch_size": 4, "no_separation": "flag"}
    values: dict[str, object] = {
        "input_size": (64, 64),
        "dual_gp": dual_gp,
        "student": {"steps": 4, "batch_size": 2},
        "inducing": {"normal": 8, "anomaly": 4},
    }
    return settings("lite", **{**values, **changes})


def tiny_options(method: str, folder: Path) -> "MethodOptions | None":
    """A method's own hyperparameters for a few steps; what it must be given is made in ``folder``.

    ``None`` where it has none.
    """
    import numpy as np
    from PIL import Image

    from cdgp.bench.grid import METHODS

    known = METHODS[method].options
    if not known:
        return None
    changes: dict[str, object] = {
        "patchcore": {"coreset": 0.1}, "rd4ad": {"epochs": 2}, "draem": {"most_steps": 1},
        "efficientad": {"steps": 2}, "supersimplenet": {"most_steps": 4, "batch": 4},
        "weakrest": {"steps": 4, "batch": 4, "memory": 50},
    }.get(method, {})  # fmt: skip
    if method in ("draem", "efficientad"):
        pictures = folder / "auxiliary" / "things"
        pictures.mkdir(parents=True, exist_ok=True)
        for seed in range(2):
            noise = np.random.default_rng(seed).integers(0, 256, (70, 80, 3), np.uint8)
            Image.fromarray(noise).save(pictures / f"{seed}.png")
        changes["auxiliary"] = str(pictures.parent)
    if method == "efficientad":
        from anomalib.models.image.efficient_ad.torch_model import EfficientAdModel

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            torch.save(EfficientAdModel(384).teacher.state_dict(), folder / "teacher.pth")
        changes["teacher"] = str(folder / "teacher.pth")
    return known["lite"].model_copy(update=changes)


@pytest.fixture(scope="session")
def surfaces(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """24 good and 12 defective textured surfaces with masks, 96 × 80 pixels."""
    return make_dataset(tmp_path_factory.mktemp("surfaces"))


@pytest.fixture(scope="session")
def tiny_run(surfaces: Manifest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of a few steps, with all its files."""
    return fit(surfaces.root, tmp_path_factory.mktemp("runs") / "tiny", tiny_settings())
