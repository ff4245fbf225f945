"""The adapters and the grid: what every method returns, what is computed once, what is shared."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers import ROOT, tiny_options, tiny_settings

from cdgp.data.images import read_image, to_input
from cdgp.data.manifest import Manifest
from cdgp.data.splits import hashed
from cdgp.method.gp import DualGP
from cdgp.presets import DataSettings, Settings, merged
from cdgp.progress import Quiet
from cdgp.training.dual_gp import new_control
from cdgp.training.stages import pretrained
from cdgp_bench.controls import HeteroscedasticHead, LinearHead
from cdgp_bench.grid import EXPERIMENTS, METHODS, Variant, fit, variant_settings
from cdgp_bench.methods import cdgp, classifier
from cdgp_bench.methods.classifier import Classifier, class_activation, grad_cam
from cdgp_bench.plan import read_plan, ready_plans
from cdgp_bench.protocol import Prepared, prepare
from cdgp_bench.run import identity_of, plan_runs, read_rows
from cdgp_bench.scoring import score_test

RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def prepared(surfaces: Manifest) -> Prepared:
    return prepare("surfaces", "surfaces", hashed(surfaces), DataSettings(), 0)


def tiny(line: Variant = Variant("")) -> Settings:  # noqa: B008
    changes = merged(METHODS[line.method].changes, line.changes)
    steps = {
        "dual_gp": {"steps": 2, "batch_size": 4, "no_separation": "flag"},
        "student": {"steps": 2, "batch_size": 2},
    }
    return tiny_settings(**merged(steps, changes))


@pytest.mark.parametrize("method", METHODS)
def test_methods_score_every_image_and_train_once(
    method: str, prepared: Prepared, tmp_path: Path
) -> None:
    chosen = tiny(Variant("", method))
    own = tiny_options(method, tmp_path / "given")
    paths = [s.image for s in prepared.manifest.of("test")]
    fitted = fit(method, prepared.weak, chosen, own, tmp_path, Quiet())
    scored = list(fitted.score(paths))
    assert len(scored) == len(paths)
    for one in scored:
        assert one.size == (96, 80)
        assert one.anomaly_map.ndim == 2 and one.anomaly_map.dtype == np.float32
        assert np.isfinite(one.anomaly_map).all()
        assert np.isfinite(one.image_score)
        assert not fitted.probability or 0 <= one.image_score <= 1
    assert np.ptp(scored[0].anomaly_map) > 0
    checkpoints = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    again = list(fit(method, prepared.weak, chosen, own, tmp_path, Quiet()).score(paths))
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")} == checkpoints
    np.testing.assert_allclose(again[0].anomaly_map, scored[0].anomaly_map, atol=1e-6)
    network, run = fitted.pipeline()
    run(to_input(read_image(paths[0]), chosen.input_size)[None])
    assert sum(p.numel() for p in network.parameters()) > 10_000
    for size, expected in ((None, "native"), (chosen.input_size, "input")):
        row = score_test(fitted, prepared.manifest, size, details=True)
        assert row["metric_size"] == expected
        for key in ("image_auroc", "pixel_auroc", "pixel_aupro_30", "pixel_aupro_05"):
            assert row[key] is None or 0 <= row[key] <= 1


def test_inference_settings_neither_train_nor_run_the_network(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep over weights reads what the network said from its file."""
    paths = [s.image for s in prepared.manifest.of("test")]
    base = list(cdgp.fit(prepared.weak, tiny(), tmp_path, Quiet()).score(paths))
    monkeypatch.setattr(cdgp, "train", lambda *a, **k: pytest.fail("trained again"))
    lines = [
        *EXPERIMENTS["fusion_weight"],
        *EXPERIMENTS["image_weight"],
        EXPERIMENTS["components"][0],
    ]
    for line in lines:
        found = list(cdgp.fit(prepared.weak, tiny(line), tmp_path, Quiet()).score(paths))
        same = line.label.endswith("(paper)")
        equal = all(np.array_equal(a.anomaly_map, b.anomaly_map)
                    for a, b in zip(base, found, strict=True))  # fmt: skip
        assert equal == same, line
        if "image_weight" not in line.setting:
            assert [f.image_score for f in found] == [b.image_score for b in base], "w keeps p_A"


def test_without_spatial_weight_the_map_is_the_residuals_tail(
    prepared: Prepared, tmp_path: Path
) -> None:
    """GP-free: the map ranks as the residual does, and its tail is refitted to the residual."""
    paths = [s.image for s in prepared.manifest.of("test")]
    free = EXPERIMENTS["components"][0]
    for one in cdgp.fit(prepared.weak, tiny(free), tmp_path, Quiet()).score(paths[:2]):
        np.testing.assert_array_equal(one.anomaly_map, one.branches["surprisal"])
    fitted = cdgp.fit(prepared.weak, tiny(free), tmp_path, Quiet())
    good = [s.image for s in prepared.weak.calibration if not s.defective]
    values = np.concatenate([s.anomaly_map.ravel() for s in fitted.score(good)])
    # On its own calibration pixels a counted tail is uniform: P(p <= x) = x.
    for share in (0.5, 0.1, 0.01):
        assert (values >= -np.log(share)).mean() == pytest.approx(share, abs=0.01)


def test_grad_cam_is_the_gradient_weighted_map() -> None:
    """Against its definition: channels weighted by their mean gradient, summed, cut at zero."""
    torch.manual_seed(0)
    model = Classifier(pretrained(tiny_settings())).eval()
    with torch.no_grad():
        model.linear.weight.normal_()
    image = torch.rand(1, 3, 64, 96)
    found, probability = grad_cam(model, image)
    coarse = model.coarse(image).detach().requires_grad_()
    logit = model.linear(coarse.mean((2, 3)))[0, 0]
    logit.backward()
    weights = coarse.grad.mean((2, 3), keepdim=True)
    expected = (weights * coarse).sum(1)[0].clamp_min(0).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)
    assert probability == pytest.approx(torch.sigmoid(logit).item(), abs=1e-6)
    activation, same = class_activation(model, image)
    assert same == pytest.approx(probability, abs=1e-5)
    cut = np.maximum(activation - model.linear.bias.item(), 0) / coarse[0, 0].numel()
    np.testing.assert_allclose(found, cut, rtol=1e-3, atol=1e-6)


def test_cam_and_grad_cam_share_their_classifier(prepared: Prepared, tmp_path: Path) -> None:
    for of_one in (classifier.fit_cam, classifier.fit_grad_cam):
        of_one(prepared.weak, tiny(Variant("", "grad_cam")), tmp_path, Quiet())
    assert len(list(tmp_path.rglob("classifier.safetensors"))) == 1


def test_linear_head_has_unit_variance() -> None:
    torch.manual_seed(0)
    pair = DualGP(LinearHead(8), LinearHead(8)).double()
    for head in (pair.normal, pair.anomaly):
        head.beta.data.normal_()
    tokens = torch.randn(50, 8, dtype=torch.float64)
    margin = pair.mean_margin(tokens)
    expected = [sum(t[d] * (pair.anomaly.beta[d] - pair.normal.beta[d]) for d in range(8))
                for t in tokens]  # fmt: skip
    np.testing.assert_allclose(margin.detach(), torch.stack(expected).detach(), atol=1e-12)
    dominance = pair.dominance(tokens, 1e-6)
    np.testing.assert_allclose(dominance.detach(), margin.detach() / np.sqrt(2), atol=1e-12)


def test_heteroscedastic_variance_is_equation_s1() -> None:
    torch.manual_seed(0)
    head = HeteroscedasticHead(6, 3).double()
    head.a.data.normal_()
    head.B.data.normal_()
    tokens = torch.randn(20, 6, dtype=torch.float64)
    for t, found in zip(tokens, head(tokens).variance.detach(), strict=True):
        diagonal = torch.diag(torch.log1p(torch.exp(head.a)) + 1e-4)
        expected = t @ diagonal @ t + torch.linalg.vector_norm(head.B.mT @ t) ** 2 + 1e-6
        assert float(found) == pytest.approx(expected.item(), abs=1e-12)


def test_controls_start_as_the_prior_and_take_the_inducing_budgets() -> None:
    chosen = tiny_settings(inducing={"normal": 5, "anomaly": 3})
    unit = torch.nn.functional.normalize(torch.randn(40, chosen.backbone.token_dim), dim=1)
    for head in ("linear", "heteroscedastic"):
        pair = new_control(head, chosen)
        for function in (pair.normal, pair.anomaly):
            mean, variance = function(unit)
            assert torch.equal(mean, torch.zeros(40))
            np.testing.assert_allclose(variance.detach(), 1, atol=0.01)
    assert (pair.normal.B.shape[1], pair.anomaly.B.shape[1]) == (5, 3)


def test_settings_of_lines() -> None:
    """Each line changes what it says; the classifier's rate belongs to lite alone."""
    lite = {m: variant_settings(Variant("", m), "lite", 0, (64, 64), {}) for m in METHODS}
    assert lite["cdgp"].student == lite["cdgp_paper"].student
    assert lite["cdgp_paper"].dual_gp.sigma_gradient and not lite["cdgp"].dual_gp.sigma_gradient
    assert lite["grad_cam"].dual_gp.learning_rate == 3e-3
    paper = variant_settings(Variant("", "grad_cam"), "paper", 0, (64, 64), {})
    assert paper.dual_gp.learning_rate == 1e-4
    for lines in EXPERIMENTS.values():
        names = [(line.method, line.setting) for line in lines]
        assert len(set(names)) == len(names)


def test_ready_plans_are_whole() -> None:
    assert ready_plans() == [
        "house", "house-full", "paper-ksdd2", "paper-mvtec-ad2", "paper-visa", "smoke",
    ]  # fmt: skip
    for name in ready_plans():
        plan = read_plan(name)
        cells = plan_runs(plan, {(d, "x") for d in plan.datasets})
        assert len({c.identity for c in cells}) == len(cells) > 0


@pytest.mark.parametrize("plan", ["house", "house-full"])
def test_committed_rows_are_those_of_the_plans(plan: str) -> None:
    """Every row has the configuration digest of its cell, so none was made with other settings."""
    chosen = read_plan(plan)
    cells = {c.identity: c for c in plan_runs(chosen, {(d, d) for d in chosen.datasets})}
    rows = read_rows(RESULTS / plan / "results.jsonl")
    assert rows
    for row in rows:
        # Textures and a teacher's weights are what the machine of these rows does not have.
        missing = row["method"] in ("draem", "efficientad")
        assert row["status"] == ("not run" if missing else "ok")
        assert cells[identity_of(row)].config_sha256 == row["config_sha256"]
