"""What several test files share."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from torch import Tensor
from typer.testing import CliRunner, Result

from cdgp.artifact import Model
from cdgp.audit.findings import Audit, audit
from cdgp.cli.main import app
from cdgp.data import layouts, scan, splits
from cdgp.data.manifest import Manifest
from cdgp.decision import Decision
from cdgp.errors import CdgpError, DataError
from cdgp.method.build import (
    assemble,
    new_pair,
    new_projection,
    new_student,
    pretrained_encoder,
)
from cdgp.method.distance import fit_distance
from cdgp.method.gp import DualGP, SparseGP, linear_forms
from cdgp.method.kernels import Kernel, linear
from cdgp.presets import DataSettings, Settings, settings
from cdgp.progress import Advance, Quiet
from cdgp.training.calibrate import CalibrationEvidence, fit_calibration
from cdgp_bench.synthetic import make_surface

if TYPE_CHECKING:
    from cdgp.workflows import Run

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
JITTER = 1e-3
DATA = DataSettings()
WHITE = DATA.white_level
TINY_OPTIONS = [
    "--input-size", "64x64", "--set", "dual_gp.steps=2", "--set", "dual_gp.batch_size=4",
    "--set", "dual_gp.no_separation=flag", "--set", "student.steps=2",
    "--set", "student.batch_size=2", "--set", "inducing.normal=8", "--set", "inducing.anomaly=4",
    "--quiet",
]  # fmt: skip
"""Options of ``cdgp train`` for a few steps."""


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


def reference_settings(**changes: object) -> Settings:
    """The same as the benchmark's grid has it for references, which train on all images."""
    return tiny_settings(**{"calibration": {"pictures": "seen"}, **changes})


def cdgp(*arguments: object) -> Result:
    """Run a command of the command line."""
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "100"})


def plain(result: Result) -> str:
    """Output and errors as one line of words, so that wrapping does not matter."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.output).split())


def noise_image(path: Path, size: tuple[int, int] = (40, 40), seed: int = 0) -> Path:
    """Write an image of noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def snapshot(folder: Path) -> dict[Path, bytes]:
    """The content of every file below a folder."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Interrupting(Quiet):
    """Raises KeyboardInterrupt after so many steps of the named phase."""

    def __init__(self, phase: str, after: int) -> None:
        self.name, self.after = phase, after

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Advance]:
        left = self.after

        def advance(note: str = "") -> None:
            nonlocal left
            left -= 1
            if name == self.name and left == 0:
                raise KeyboardInterrupt

        yield advance


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        torch.testing.assert_close(value, b[key], atol=1e-6, rtol=0, msg=key)


def weights_of(run: "Run") -> dict[str, torch.Tensor]:
    return run.detector.model.network.state_dict()


def random_gp(
    Z: Tensor, kernel: Kernel, seed: int, scale: float = 1.0, jitter: float = JITTER
) -> SparseGP:
    """A GP with random m and random lower-triangular L of the given scale."""
    generator = torch.Generator().manual_seed(seed)
    gp = SparseGP(Z, kernel, jitter, 0.0, 1.0).requires_grad_(False)
    M = len(Z)
    gp.m.copy_(torch.randn(M, generator=generator, dtype=torch.float64))
    gp.L.copy_(scale * torch.randn(M, M, generator=generator, dtype=torch.float64).tril())
    return gp


def random_pair(
    seed: int, scale: float, dtype: torch.dtype, kernel: Kernel = linear, dim: int = 64
) -> DualGP:
    """Both GPs with the paper's budgets."""
    normal = random_gp(unit_tokens(32, dim, seed, dtype), kernel, seed + 1, scale)
    anomaly = random_gp(unit_tokens(16, dim, seed + 2, dtype), kernel, seed + 3, scale)
    return DualGP(normal, anomaly)


def sparse_gps(pair: DualGP) -> tuple[SparseGP, SparseGP]:
    """The normal and the anomaly GP of a pair, as what they are."""
    assert isinstance(pair.normal, SparseGP)
    assert isinstance(pair.anomaly, SparseGP)
    return pair.normal, pair.anomaly


KINDS = ("all", "no calibrating defect", "good alone", "no distance", "paper")
"""Of models, see ``random_model``."""


def random_model(kind: str) -> Model:
    """A model that nothing has trained, calibrated on generated images of 64 x 64.

    ``all`` has every branch; of ``no calibrating defect`` and ``good alone`` the score is a
    p-value, and the latter has no Dual GP; ``paper`` has the paper's evidence alone.
    """
    changes: dict[str, Any] = {"input_size": (64, 64), "dual_gp": {"initial_scale": 0.3}}
    if kind in ("no distance", "paper"):
        changes["distance"] = {"weight": 0.0}
    if kind == "paper":
        changes["calibration"] = {"pictures": "seen", "image_evidence": "dominance"}
    chosen = settings("lite", **changes)
    generator = torch.Generator().manual_seed(0)
    encoder, teacher = pretrained_encoder(chosen), pretrained_encoder(chosen)
    stem = {id(p) for module in encoder.stem() for p in module.parameters()}
    with torch.no_grad():
        for weight in encoder.parameters():
            if id(weight) not in stem and weight.ndim == 4:
                weight.mul_(1 + 0.1 * torch.randn(weight.shape, generator=generator))
    D = chosen.backbone.token_dim
    pair = new_pair(unit_tokens(8, D, 1, torch.float32), unit_tokens(4, D, 2, torch.float32),
                    chosen.dual_gp).requires_grad_(False)  # fmt: skip
    for gp in sparse_gps(pair):
        gp.m.copy_(torch.randn(len(gp.m), generator=generator))
    images = torch.rand(9, 3, 8, 8, generator=generator)
    images = torch.nn.functional.interpolate(images, size=(64, 64), mode="bicubic").clamp(0, 1)
    images[6:, :, 20:36, 24:44] = images[6:, :, 20:36, 24:44].flip(1) / 2
    distance = None
    if chosen.distance.weight:
        with torch.no_grad():
            features = teacher.eval()(teacher.normalise(images[:6]))
        distance = fit_distance(lambda: [features], chosen.distance.components)
    tuned = None if kind == "good alone" else (encoder, new_projection(encoder, chosen), pair)
    network = assemble(tuned, teacher, new_student(teacher, chosen), distance, chosen)
    count = 6 if kind in ("good alone", "no calibrating defect") else 9
    evidence = [network(image[None]).on_cpu() for image in images[:count]]
    labels = torch.arange(count) >= 6
    collected = CalibrationEvidence(evidence, labels, [chosen.input_size] * count)
    calibration = fit_calibration(collected, chosen)
    assert calibration.image.is_p_value == (count == 6)
    decision = Decision(0.5, "of the test", None, is_p_value=calibration.image.is_p_value)
    return Model(network, calibration, decision, chosen, {"made": kind})


def form_dominance(pair: DualGP, tokens: Tensor) -> Tensor:
    """The dominance written with the linear forms, in float64."""
    beta, C = linear_forms(pair)
    t = tokens.double()
    return (t @ beta) / (2 + ((t @ C) * t).sum(1)).sqrt()


def unit_tokens(count: int, dim: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(tokens, dim=1).to(dtype)


def save_image(path: Path, values: NDArray[Any], **options: Any) -> Path:
    """An image file, in a folder that is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path, **options)
    return path


def surface(seed: int, size: tuple[int, int] = (60, 64)) -> NDArray[np.uint8]:
    """A brushed surface, (H, W) grey."""
    grey = make_surface(size, np.random.default_rng(seed))[..., 0]
    return np.rint(255 * grey).astype(np.uint8)


def two_bins(folder: Path, good: int = 12, defective: int = 6) -> Path:
    """Different surfaces of one size in two bins, all changed at one moment."""
    for i in range(good + defective):
        name = f"good/{i:02d}.png" if i < good else f"defective/{i - good:02d}.png"
        path = save_image(folder / name, surface(i))
        os.utime(path, (1_700_000_000, 1_700_000_000))
    return folder


def load_folder(folder: Path) -> Manifest:
    """The manifest of a folder whose bins have the names of the presets."""
    return layouts.load(folder, DATA.good, DATA.defective)


def digested(manifest: Manifest) -> Manifest:
    """With digests, read with the white level of the presets."""
    return scan.digested(manifest, WHITE)


def divided(
    manifest: Manifest, seed: int, needed: Sequence[str] = ("fit", "calibration")
) -> Manifest:
    """Split by the fractions of the presets."""
    return splits.split(manifest, seed, DATA.test_fraction, DATA.calibration_fraction, needed)


def audited(manifest: Manifest, white_level: int = WHITE) -> Audit:
    """The audit of a manifest, from a scan of its own."""
    return audit(scan.scan(manifest, white_level), white_level)


def raised(call: Callable[[], object], *words: str, error: type[CdgpError] = DataError) -> str:
    """The message of the error that a call raises, which holds all the words."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words), message
    return message


def random_maps(
    seed: int, levels: int | None, dtype: type = np.float64
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Four maps of different sizes, quantised when `levels` is given; the last has no defect."""
    rng = np.random.default_rng(seed)
    maps: list[NDArray[Any]] = []
    masks: list[NDArray[Any]] = []
    for size in [(9, 14), (1, 20), (13, 6), (8, 8)]:
        mask = ndimage.binary_dilation(rng.random(size) < 0.06) & (len(maps) < 3)
        values = rng.normal(size=size) + mask
        maps.append((np.round(values * levels) / levels if levels else values).astype(dtype))
        masks.append(mask)
    return maps, masks
