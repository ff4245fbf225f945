"""What several tests of the benchmark share."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tests.helpers import ROOT, tiny_settings
from typer.testing import CliRunner

from cdgp.cli.main import app
from cdgp.presets import Settings, merged
from cdgp.progress import Quiet
from cdgp_bench.grid import METHODS, Variant
from cdgp_bench.run import Place

RESULTS = ROOT / "docs" / "results"
CDGP = Variant("CDGP")
PLAN = """
title = "test"
preset = "lite"
seeds = [0]
metric_size = "native"
methods = ["static_max", "cdgp"]
settings.dual_gp = {{ steps = 2, batch_size = 4 }}
settings.student = {{ steps = 2, batch_size = 2 }}

[datasets.surfaces]
path = "{path}"
input_size = [64, 64]

[experiments]
main = ["surfaces"]
"""


def written(folder: Path, data: Path, *changes: tuple[str, str]) -> Path:
    """A small plan over one data set, with some of its text changed."""
    text = PLAN.format(path=data)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "plan.toml").write_text(text)
    return folder / "plan.toml"


def run_cli(*arguments: object, command: str = "benchmark") -> tuple[int, str]:
    """Exit code and output of a command of the benchmark."""
    found = CliRunner().invoke(app, [command, *map(str, arguments)])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


def here(folder: Path) -> Place:
    """A place that reports nothing."""
    return Place(folder, folder / "checkpoints", Quiet(), lambda line: None)


def row(method: str, category: str, seed: int, value: float, **more: Any) -> dict[str, Any]:
    """A row of the paper's MVTec AD 2 plan."""
    return {
        "dataset": "mvtec_ad2", "category": category, "method": method, "setting": "default",
        "seed": seed, "budget": None, "fold": None, "status": "ok", "preset": "paper",
        "input_size": [256, 256],
        "metric_size": "input", "image_auroc": value, "pixel_auroc": value,
        "pixel_aupro_30": value, "pixel_aupro_05": value, "facts": {}, "notes": {},
        "parts": {"fit": [1, 1], "calibration": [1, 1], "test": [1, 1]}, "effective_budget": 2,
        "audit": {p: {"path": 0, "pixel": 0} for p in ("calibration_test", "train_test")},
        **more,
    }  # fmt: skip


def tiny_variant_settings(variant: Variant = CDGP) -> Settings:
    """The settings of a variant for two steps."""
    changes = merged(METHODS[variant.method].changes, variant.changes)
    steps = {
        "dual_gp": {"steps": 2, "batch_size": 4, "no_separation": "flag"},
        "student": {"steps": 2, "batch_size": 2},
    }
    return tiny_settings(**merged(steps, changes))


def tiny_options(method: str, folder: Path) -> Any:
    """A method's own options for a few steps, None where it has none.

    The files that they name are made in ``folder``.
    """
    known = METHODS[method].options
    if not known:
        return None
    changes: dict[str, dict[str, object]] = {
        "patchcore": {"coreset": 0.1}, "rd4ad": {"epochs": 2}, "draem": {"most_steps": 1},
        "efficientad": {"steps": 2}, "supersimplenet": {"most_steps": 4, "batch": 4},
        "weakrest": {"steps": 4, "batch": 4, "memory": 50},
    }  # fmt: skip
    chosen = changes.get(method, {})
    if method in ("draem", "efficientad"):
        images = folder / "auxiliary" / "things"
        images.mkdir(parents=True, exist_ok=True)
        for seed in range(2):
            noise = np.random.default_rng(seed).integers(0, 256, (70, 80, 3), np.uint8)
            Image.fromarray(noise).save(images / f"{seed}.png")
        chosen["auxiliary"] = str(images.parent)
    if method == "efficientad":
        from anomalib.models.image.efficient_ad.torch_model import EfficientAdModel

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            torch.save(EfficientAdModel(384).teacher.state_dict(), folder / "teacher.pth")
        chosen["teacher"] = str(folder / "teacher.pth")
    return known["lite"].model_copy(update=chosen)
