"""What the stages do with their pieces, against loops and NumPy written from the equations."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import digested, divided, tiny_settings
from torch import Tensor, nn
from torch.nn import functional

from cdgp.data.manifest import Manifest
from cdgp.errors import TrainingError
from cdgp.method.gp import DualGP, SparseGP
from cdgp.method.kernels import linear
from cdgp.method.network import Evidence
from cdgp.presets import Settings, settings
from cdgp.progress import Quiet
from cdgp.training import calibrate, dual_gp, student
from cdgp.training.calibrate import CalibrationEvidence, fit_calibration
from cdgp.training.context import new_context, stage_key
from cdgp.training.dataset import WeakDataset, new_inputs
from cdgp.training.dual_gp import DualGPTraining, dual_gp_samples
from cdgp.training.jitter import jittered
from cdgp.training.loop import Stage, cosine, run_stage

JITTER = 1e-3
WEIGHTS = (2.0, 3.0, 5.0)


class Given(nn.Module):
    """Stands in for the encoder and the projections: its tokens are the images."""

    def normalise(self, images: Tensor) -> Tensor:
        return images

    def train_trunk(self, batch_norm: str) -> None:
        pass

    def forward(self, images: Tensor) -> Tensor:
        return images


class Tokens(nn.Module):
    def forward(self, grid: Tensor) -> Tensor:
        return functional.normalize(grid.permute(0, 2, 3, 1), dim=-1)


def random_gp(M: int, seed: int) -> SparseGP:
    generator = torch.Generator().manual_seed(seed)
    Z = torch.randn(M, 6, generator=generator, dtype=torch.float64)
    gp = SparseGP(functional.normalize(Z, dim=1), linear, JITTER, 0.0, 1.0).requires_grad_(False)
    gp.m.copy_(torch.randn(M, generator=generator, dtype=torch.float64))
    gp.L.copy_(torch.randn(M, M, generator=generator, dtype=torch.float64))
    return gp


def moments_of_one(gp: SparseGP, t: np.ndarray) -> tuple[float, float]:
    """Eq. 6 and Eq. 7 of one token."""
    Z, m, L = gp.Z.numpy(), gp.m.numpy(), np.tril(gp.L.numpy())
    K_inv = np.linalg.inv(Z @ Z.T + JITTER * np.eye(len(Z)))
    k = Z @ t
    return float(k @ K_inv @ m), float(1 - k @ K_inv @ k + k @ K_inv @ L @ L.T @ K_inv @ k)


@pytest.mark.parametrize("mean_weight", [0.0, 7.0])
@pytest.mark.parametrize("defective", [[True, False, False, True], [False] * 4, [True] * 4])
def test_training_loss_is_equation_13(defective: list[bool], mean_weight: float) -> None:
    """Loops over images and tokens; different weights, so that none can stand in for another.

    With a weight the cross entropy of the mean margin, at log-odds of ten times it, comes on top.
    """
    images = torch.randn(4, 6, 3, 2, generator=torch.Generator().manual_seed(4)).double()
    normal_gp, anomaly_gp = random_gp(5, 1), random_gp(3, 2)
    gps = DualGP(normal_gp, anomaly_gp)
    chosen = settings(
        "paper",
        dual_gp={
            "loss_weights": WEIGHTS,
            "margin": 0.7,
            "epsilon": 1e-2,
            "mean_weight": mean_weight,
        },
    ).dual_gp
    training = DualGPTraining(Given(), Tokens(), gps, chosen, 8.0)  # type: ignore[arg-type]
    found, _ = training(images, torch.tensor(defective))

    mil, compact, attract, means = [], [], [], []
    for image, label in zip(images.numpy(), defective, strict=True):
        margins, normal, anomaly = [], [], []
        for token in image.reshape(6, -1).T:
            t = token / np.linalg.norm(token)
            mu_N, var_N = moments_of_one(normal_gp, t)
            mu_A, var_A = moments_of_one(anomaly_gp, t)
            margins.append(mu_A - mu_N)
            normal.append(mu_N / (math.sqrt(var_N) + 1e-2))
            anomaly.append(mu_A / (math.sqrt(var_A) + 1e-2))
        top = max(margins)
        mil.append(max(0.0, 0.7 - top) if label else max(0.0, top))
        means.append(np.logaddexp(0, (-10 if label else 10) * np.mean(margins)))
        if label:
            s = (np.array(margins) - np.mean(margins)) / (np.std(margins) + 1e-2)
            a = np.exp(s) / np.exp(s).sum()
            attract.append(-sum(w * e for w, e in zip(a, anomaly, strict=True)))
        else:
            compact += [-e for e in normal]
    expected = WEIGHTS[0] * np.mean(mil)
    expected += WEIGHTS[1] * np.mean(compact) if compact else 0
    expected += WEIGHTS[2] * np.mean(attract) if attract else 0
    expected += mean_weight * np.mean(means)
    assert float(found.detach()) == pytest.approx(float(expected), rel=1e-9)


def captured(monkeypatch: pytest.MonkeyPatch, module: Any, run: Callable[[], object]) -> Stage:
    """What a stage hands to the loop, which does not run."""
    found: list[Stage] = []

    def take(stage: Stage, context: object) -> float:
        found.append(stage)
        return 0.0

    monkeypatch.setattr(module, "run_stage", take)
    run()
    (stage,) = found
    return stage


def images_of(manifest: Manifest, part: str | None, chosen: Settings) -> WeakDataset:
    return WeakDataset(manifest.weak(part), new_inputs(chosen))


def test_dual_gp_optimiser_spares_inducing_values_and_stem(
    surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tiny_settings(
        dual_gp={"learning_rate": 3e-5, "inducing_learning_rate": 7e-4, "weight_decay": 0.02,
                 "no_separation": "flag", "steps": 11}
    )  # fmt: skip
    dataset = images_of(surfaces, None, chosen)
    found = captured(monkeypatch, dual_gp, lambda: dual_gp.train_dual_gp(
        dataset, chosen, new_context(None, None, Quiet()), ""))  # fmt: skip
    training: Any = found.module
    encoder = training.encoder
    trunk, inducing, mean = found.optimizer.param_groups
    assert (trunk["lr"], trunk["weight_decay"]) == (3e-5, 0.02)
    assert (inducing["lr"], inducing["weight_decay"]) == (7e-4, 0.0)
    assert (mean["lr"], mean["weight_decay"]) == (1e-2, 0.0)
    assert [id(p) for p in mean["params"]] == [id(training.mean_logit)]
    gps = training.gps
    values = [p for gp in (gps.normal, gps.anomaly) for p in (gp.m, gp.L)]
    assert {id(p) for p in inducing["params"]} == {id(p) for p in values}
    stem = {id(p) for module in encoder.stem() for p in module.parameters()}
    projections = [id(p) for p in training.projection.parameters()]
    rest = {id(p) for p in encoder.parameters()} - stem
    assert stem
    assert projections
    assert {id(p) for p in trunk["params"]} == rest | set(projections)
    assert found.steps == 11
    assert found.lr_lambda(0) == 1
    assert found.lr_lambda(11) == pytest.approx(0.05)

    images, labels = found.batch(0)
    raw = torch.stack([dataset.input(i) for i in range(len(dataset))])
    for image, label in zip(images, labels, strict=True):
        # Jitter moves brightness and contrast, which leave the correlation with the original.
        rows = torch.cat([image[None], raw]).mean(1).flatten(1)
        nearest = int(torch.corrcoef(rows)[0, 1:].argmax())
        assert bool(dataset.defective[nearest]) == bool(label)
        assert not torch.equal(raw[nearest], image), "colour jitter is on"


def test_jitter_of_brightness_is_one_factor_an_image_within_its_strength() -> None:
    images = torch.rand(64, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 0.8
    factors = jittered(images, (0.12, 0, 0, 0), 0, 5) / images
    spread = factors.flatten(1).amax(1) - factors.flatten(1).amin(1)
    assert spread.max() < 1e-4
    one = factors.flatten(1).mean(1)
    assert 0.88 <= one.min() < 0.91
    assert 1.09 < one.max() <= 1.12
    assert torch.equal(jittered(images, (0, 0, 0, 0), 0, 5), images)


def test_student_trains_on_good_images_with_its_rate_and_decay(
    surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tiny_settings(student={"steps": 9, "learning_rate": 2e-4, "weight_decay": 0.03,
                                    "final_learning_rate": 1e-6, "batch_size": 3})  # fmt: skip
    good = [s for s in surfaces.weak(None) if not s.defective]
    dataset = WeakDataset(good, new_inputs(chosen))
    context = new_context(None, None, Quiet())
    found = captured(monkeypatch, student, lambda: student.train_student(
        dataset, chosen, context, ""))  # fmt: skip
    training: Any = found.module
    teacher = training.target._teacher
    (group,) = found.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (2e-4, 0.03)
    assert {id(p) for p in group["params"]} == {id(p) for p in training.student.parameters()}
    assert found.lr_lambda(0) == 1
    assert found.lr_lambda(9) == pytest.approx(1e-6 / 2e-4)
    assert not any(p.requires_grad for p in teacher.parameters())
    clean, corrupted, _ = found.batch(0)
    raw = teacher.normalise(torch.stack([dataset.input(i) for i in range(len(dataset))]))
    assert all(any(torch.equal(image, r) for r in raw) for image in clean)
    assert not torch.equal(clean, corrupted)
    with pytest.raises(ValueError, match="good images only"):
        student.train_student(images_of(surfaces, None, chosen), chosen, context, "")


def test_rates_fall_along_the_cosine_to_their_share() -> None:
    rates: list[list[float]] = []
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(
        [{"params": [module.weight], "lr": 1.0}, {"params": [module.bias], "lr": 0.1}]
    )

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            rates.append([group["lr"] for group in optimizer.param_groups])
            return self.inner(x).sum(), {}

    stage = Stage("x", Watched(), optimizer, 8, cosine(8, 0.05),
                  lambda step: (torch.ones(1, 1),), "", "x.safetensors")  # fmt: skip
    run_stage(stage, new_context(None, None, Quiet()))
    shares = [0.05 + 0.95 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert rates == [[pytest.approx(s), pytest.approx(0.1 * s)] for s in shares]
    assert cosine(8, 0.05)(8) == pytest.approx(0.05)


@pytest.mark.parametrize("tail_pixels", [37, 10_000])
def test_calibration_uses_good_images_alone(tail_pixels: int) -> None:
    """Defective maps are absurd; statistics and tail of the good ones are NumPy's."""
    generator = torch.Generator().manual_seed(1)
    defective = torch.tensor([False, True, False, False, True])
    dominance, residual = (torch.randn(5, 3, 4, generator=generator) for _ in range(2))
    dominance[defective] = 1e6
    residual[defective] = -1e6
    pooled = torch.tensor([0.0, 2.0, 0.1, -0.2, 3.0])[:, None]
    size = (6, 8)
    chosen = settings("paper", calibration={"tail_pixels": tail_pixels, "fusion_weight": 0.3})
    evidence = [
        Evidence(dominance[i : i + 1], residual[i : i + 1], None, pooled[i : i + 1])
        for i in range(5)
    ]
    collected = CalibrationEvidence(evidence, defective, [size] * 5)
    found = fit_calibration(collected, chosen)

    up = [
        functional.interpolate(
            m[~defective][:, None], size=size, mode="bilinear", align_corners=False
        )
        .double()
        .numpy()
        .reshape(3, -1)
        for m in (dominance, residual)
    ]
    for statistics, values in zip((found.dominance, found.residual), up, strict=True):
        assert statistics.mean == pytest.approx(values.mean(), abs=1e-6)
        assert statistics.std == pytest.approx(values.std(), rel=1e-5)
    G, R = ((v - v.mean()) / (v.std() + 1e-6) for v in up)
    U = (0.3 * G + 0.7 * R).ravel()
    count = min(tail_pixels, U.size)
    picked = np.sort([U[i * U.size // count] for i in range(count)])
    np.testing.assert_allclose(found.tail.scores.numpy(), picked, atol=1e-4)
    assert found.image.centre == pytest.approx((0.0,)), "the median of the good ones"
    assert found.fusion_weight == 0.3
    assert found.image_weight == pytest.approx(1 / 3)


@pytest.mark.parametrize("tuned", [True, False])
@pytest.mark.parametrize("defects", [2, 0])
def test_calibration_of_all_branches(tuned: bool, defects: int) -> None:
    """NumPy over three branches, or over the two of good images alone; lite's defaults."""
    generator = torch.Generator().manual_seed(2)
    n, size = 8 + defects, (6, 8)
    scales = torch.tensor([1, 5, 0.2]).view(3, 1, 1, 1)
    maps = scales * torch.randn(3, n, 3, 4, generator=generator)
    pooled = torch.randn(n, 3, generator=generator)
    pooled[8:] += 4
    maps[:, 8:] = 1e6
    chosen = tiny_settings(calibration={"fusion_weight": 0.3, "tail_pixels": 10_000})
    first = 0 if tuned else 1
    evidence = [
        Evidence(maps[0, i : i + 1] if tuned else None, maps[1, i : i + 1], maps[2, i : i + 1],
                 pooled[i : i + 1, first:])
        for i in range(n)
    ]  # fmt: skip
    found = fit_calibration(CalibrationEvidence(evidence, torch.arange(n) >= 8, [size] * n), chosen)
    Z = []
    for branch, statistics, there in zip(
        maps[:, :8], found.branches, (tuned, True, True), strict=True
    ):
        up = functional.interpolate(branch[:, None], size=size, mode="bilinear").double().numpy()
        Z.append((up - up.mean()) / (up.std() + 1e-6))
        assert statistics.mean == pytest.approx(up.mean() if there else 0, abs=1e-5)
        assert statistics.std == pytest.approx(up.std() if there else 1, rel=1e-5)
    v, w = chosen.distance.weight, 0.3 if tuned else 0.0
    assert v == 0.5
    U = w * Z[0] + (1 - w) * ((1 - v) * Z[1] + v * Z[2])
    np.testing.assert_allclose(found.tail.scores.numpy(), np.sort(U.ravel()), atol=1e-4)
    assert (found.fusion_weight, found.distance_weight) == (w, v)
    assert found.image.is_p_value == (not defects)
    medians = pooled[:8, first:].double().numpy()
    assert found.image.centre == pytest.approx(np.median(medians, axis=0).tolist())


def test_calibration_without_a_good_image_is_refused() -> None:
    one = Evidence(None, torch.zeros(1, 3, 4), None, torch.zeros(1, 1))
    collected = CalibrationEvidence([one], torch.tensor([True]), [(6, 8)])
    with pytest.raises(TrainingError, match="no good calibration image"):
        fit_calibration(collected, tiny_settings())


def test_dual_gp_takes_the_calibration_images_or_leaves_them(surfaces: Manifest) -> None:
    """Seen: fit and calibration; held out: fit alone."""
    manifest = divided(digested(surfaces), 0)
    parts = {p: {s.image for s in manifest.of(p)} for p in ("fit", "calibration", "test")}
    for images, expected in (
        ("seen", parts["fit"] | parts["calibration"]),
        ("held_out", parts["fit"]),
    ):
        chosen = tiny_settings(calibration={"pictures": images})
        assert {s.image for s in dual_gp_samples(manifest.weak_split(), chosen)} == expected


def test_a_checkpoint_of_other_weights_is_not_used(tmp_path: Path) -> None:
    """The stage's key holds what a weights file contains, not only its name."""
    path = tmp_path / "model.safetensors"
    chosen = settings(backbone={"weights": str(path)})
    path.write_bytes(b"one")
    first = stage_key(chosen, "", "dual_gp")
    path.write_bytes(b"two")
    assert stage_key(chosen, "", "dual_gp") != first


def test_evidence_is_collected_in_order(surfaces: Manifest) -> None:
    chosen = tiny_settings()
    dataset = images_of(surfaces, None, chosen)

    class Means(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(1))
            self.teacher = SimpleNamespace(strides=(4, 8, 16))

        def forward(self, images: Tensor) -> Evidence:
            mean = images.mean((1, 2, 3))
            return Evidence(mean[:, None, None], -mean[:, None, None], None, mean[:, None])

    found = calibrate.collect_evidence(Means(), dataset, Quiet())  # type: ignore[arg-type]
    means = [float(dataset.input(i).mean()) for i in range(len(dataset))]
    assert found.pooled[:, 0].tolist() == pytest.approx(means, abs=1e-6)
    assert torch.equal(found.defective, dataset.defective)
    assert found.sizes == [(64, 64)] * len(dataset)
