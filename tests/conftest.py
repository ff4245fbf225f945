"""Fixtures that several files share."""

from pathlib import Path

import pytest
import torch

from cdgp.data.manifest import Manifest
from cdgp.data.synthetic import make_dataset
from cdgp.presets import Settings, settings
from cdgp.training.fit import Run, fit

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


@pytest.fixture(scope="session")
def surfaces(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """24 good and 12 defective textured surfaces with masks, 96 × 80 pixels."""
    return make_dataset(tmp_path_factory.mktemp("surfaces"))


@pytest.fixture(scope="session")
def tiny_run(surfaces: Manifest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of a few steps, with all its files."""
    return fit(surfaces.root, tmp_path_factory.mktemp("runs") / "tiny", tiny_settings())
