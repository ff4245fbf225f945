"""Tail, fusion and image probability against counts, NumPy and scikit-learn; degenerate inputs."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import optimize, special
from torch import Tensor, nn

from cdgp.errors import TrainingError
from cdgp.method.calibration import (
    EPSILON,
    PARETO_QUANTILE,
    BranchStatistics,
    branch_weights,
    final_map,
    fit_image_calibrator,
    fit_tail,
    fuse,
    log_tail_probability,
    standardise,
    surprisal,
)
from cdgp.method.resize import upsample
from cdgp.method.score import ImageCalibrator, image_logit

FLOOR = 16.0
Scores = NDArray[np.float64]


def sorted_scores(values: Scores) -> Tensor:
    return torch.from_numpy(np.sort(values)).float()


def counted(normal: list[float], query: float) -> float:
    """Eq. 26, by counting."""
    return (1 + sum(1 for u in normal if u > query)) / (len(normal) + 1)


NORMAL_SCORES: dict[str, Scores] = {
    "exponential": np.random.default_rng(0).exponential(size=50_000),
    "heavy": np.random.default_rng(1).standard_t(2, 50_000),
    "bounded": np.random.default_rng(2).random(50_000),
    "rounded": np.random.default_rng(3).standard_normal(50_000).round(1),
    "equal peaks": np.r_[np.random.default_rng(4).random(49_960), np.full(40, 2.0)],
    "few peaks": np.random.default_rng(5).standard_normal(700),
    "one": np.array([0.25]),
    "all equal": np.full(1_000, 0.25),
}


@pytest.mark.parametrize("seed", range(5))
def test_tail_probability_is_the_count(seed: int) -> None:
    """Scores on a lattice, so that queries tie with them, and queries beyond both ends."""
    rng = np.random.default_rng(seed)
    tail = fit_tail(sorted_scores(rng.integers(-8, 9, 60) / 8), "counting", FLOOR)
    queries = [*(np.arange(-20, 21) / 16).tolist(), -100.0, 100.0]
    expected = [math.log(counted(tail.scores.tolist(), q)) for q in queries]
    found = log_tail_probability(torch.tensor(queries), tail)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert surprisal(torch.tensor(queries), tail).tolist() == pytest.approx(
        [-value for value in expected], abs=1e-6
    )


def test_tail_probability_beyond_both_ends() -> None:
    tail = fit_tail(torch.arange(9.0), "counting", FLOOR)
    found = log_tail_probability(torch.tensor([-1.0, 8.0, 9.0]), tail)
    assert found.tolist() == pytest.approx([0.0, -math.log(10), -math.log(10)], abs=1e-6)


def test_counted_surprisal_is_floored() -> None:
    tail = fit_tail(torch.arange(99.0), "counting", 2.0)
    found = surprisal(torch.tensor([[0.0, 50.0], [90.0, 1e6]]), tail)
    expected = [-math.log(0.99), -math.log(0.49), 2.0, 2.0]
    assert found.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    assert found.shape == (2, 2)


@pytest.mark.parametrize("kind", ["counting", "pareto"])
@pytest.mark.parametrize("name", NORMAL_SCORES)
def test_surprisal_is_finite_at_least_zero_and_keeps_order(name: str, kind: str) -> None:
    tail = fit_tail(sorted_scores(NORMAL_SCORES[name]), kind, FLOOR)
    low, high = float(tail.scores[0]), float(tail.scores[-1])
    reach = max(1.0, high - low)
    outside = torch.linspace(0, 10, 1_000) * reach
    queries = torch.cat([tail.scores, low - outside, high + outside]).sort().values
    P = surprisal(queries, tail)
    assert bool(torch.isfinite(P).all())
    assert float(P.min()) >= 0
    assert float(P.diff().min()) >= 0


@pytest.mark.parametrize("name", NORMAL_SCORES)
def test_fitted_tail_counts_below_its_start_and_goes_on_from_there(name: str) -> None:
    scores = sorted_scores(NORMAL_SCORES[name])
    fitted, plain = (fit_tail(scores, kind, FLOOR) for kind in ("pareto", "counting"))
    quantile = np.quantile(scores.double().numpy(), PARETO_QUANTILE)
    assert fitted.start == float(np.float32(quantile)), "of the scores' own precision"
    below = torch.cat([scores[scores <= fitted.start], torch.tensor([-1e6, fitted.start])])
    assert torch.equal(surprisal(below, fitted), surprisal(below, plain))
    # Just above the start, before the slope counts: no step.
    start = float(surprisal(torch.tensor(fitted.start), fitted))
    step = min(1e-3 * fitted.scale, 1e-3)
    above = float(surprisal(torch.tensor(fitted.start + step, dtype=torch.float32), fitted))
    rounding = 4 * np.spacing(np.float32(abs(fitted.start))) / fitted.scale
    assert 0 <= above - start <= 2e-3 + rounding


@pytest.mark.parametrize("name", NORMAL_SCORES)
def test_fitted_tail_tells_scores_beyond_the_largest_normal_one_apart(name: str) -> None:
    scores = sorted_scores(NORMAL_SCORES[name])
    beyond = scores[-1] + torch.linspace(0, 2, 200) * max(1.0, float(scores[-1] - scores[0]))
    fitted = surprisal(beyond, fit_tail(scores, "pareto", FLOOR))
    assert float(fitted.diff().min()) > 0
    assert float(surprisal(beyond, fit_tail(scores, "counting", FLOOR)).diff().max()) == 0


def test_fitted_tail_is_not_floored() -> None:
    tail = fit_tail(sorted_scores(NORMAL_SCORES["exponential"]), "pareto", FLOOR)
    assert float(surprisal(torch.tensor(60.0), tail)) > 2 * FLOOR


@pytest.mark.parametrize("shape", [0.0, 0.25, 0.5])
def test_fitted_tail_reaches_the_true_probabilities(shape: float) -> None:
    """Of the quantiles of a known distribution, also beyond what counting can resolve (5e-6)."""
    u = (np.arange(200_000) + 0.5) / 200_000
    values = -np.log(u) if shape == 0 else (u**-shape - 1) / shape
    tail = fit_tail(sorted_scores(values), "pareto", FLOOR)
    for p in (3e-4, 1e-4, 1e-5, 1e-6):
        query = -math.log(p) if shape == 0 else (p**-shape - 1) / shape
        found = float(surprisal(torch.tensor(query), tail))
        assert found == pytest.approx(-math.log(p), abs=0.2)


def test_few_peaks_give_an_exponential_tail_of_their_mean_excess() -> None:
    values = np.r_[np.linspace(0, 1, 4_991), 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    scores = sorted_scores(values)
    tail = fit_tail(scores, "pareto", FLOOR)
    peaks = [v for v in scores.tolist() if v > tail.start]
    assert 0 < len(peaks) < 10
    assert tail.shape == 0
    scale = sum(v - tail.start for v in peaks) / len(peaks)
    assert tail.scale == pytest.approx(scale, rel=1e-6)
    query = torch.tensor([7.0, 9.5])
    expected = [
        -math.log((1 + len(peaks)) / (len(values) + 1)) + (q - tail.start) / scale
        for q in (7.0, 9.5)
    ]
    assert surprisal(query, tail).tolist() == pytest.approx(expected, rel=1e-5)


def test_equal_normal_scores_leave_a_usable_tail() -> None:
    for kind in ("counting", "pareto"):
        tail = fit_tail(torch.full((1_000,), 0.25), kind, FLOOR)
        found = surprisal(torch.tensor([0.0, 0.25, 0.3]), tail)
        assert float(found[0]) == 0
        assert float(found[1]) == pytest.approx(math.log(1001), rel=1e-6)
        assert bool(torch.isfinite(found).all())
        assert float(found[2]) >= float(found[1])


@pytest.mark.parametrize("kind", ["counting", "pareto"])
@pytest.mark.parametrize("scores", [[], [0.0, math.nan], [0.0, math.inf], [-math.inf, 0.0]])
def test_scores_that_are_missing_or_not_finite_are_refused(kind: str, scores: list[float]) -> None:
    with pytest.raises(TrainingError, match="not finite"):
        fit_tail(torch.tensor(scores), kind, FLOOR)


def test_standardise_and_fuse_are_the_equations() -> None:
    rng = np.random.default_rng(0)
    G, R = rng.standard_normal((2, 3, 5)), rng.random((2, 3, 5))
    g, r = BranchStatistics(0.3, 2.0), BranchStatistics(-0.1, 0.05)
    z = standardise(torch.from_numpy(G), g)
    np.testing.assert_allclose(z.numpy(), (G - 0.3) / (2.0 + EPSILON), rtol=1e-14)
    for w in (0.0, 0.025, 1.0):
        expected = w * (G - 0.3) / (2 + EPSILON) + (1 - w) * (R + 0.1) / (0.05 + EPSILON)
        maps = (torch.from_numpy(G), torch.from_numpy(R), None)
        found = fuse(maps, (g, r, g), branch_weights(w, 0.0))
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("with_distance", [False, True])
def test_without_a_share_of_the_distance_fusion_is_equation_25_bit_for_bit(
    with_distance: bool,
) -> None:
    generator = torch.Generator().manual_seed(0)
    G, R, D = torch.randn(3, 2, 5, 7, generator=generator)
    g, r, d = (BranchStatistics(0.3, 2.0), BranchStatistics(-0.1, 0.05), BranchStatistics(9, 3.0))
    for w in (0.0, 0.025, 1.0):
        found = fuse((G, R, D if with_distance else None), (g, r, d), branch_weights(w, 0.0))
        assert torch.equal(found, w * standardise(G, g) + (1 - w) * standardise(R, r))


@pytest.mark.parametrize("v", [0.0, 1 / 3, 0.5, 1.0])
def test_fusion_of_the_branches_that_there_are(v: float) -> None:
    """NumPy; the distance shares what good images alone give, and the weights sum to one."""
    rng = np.random.default_rng(1)
    maps = rng.standard_normal((3, 2, 4, 5))
    statistics = [BranchStatistics(*rng.random(2).tolist()) for _ in range(3)]
    Z = [(m - s.mean) / (s.std + EPSILON) for m, s in zip(maps, statistics, strict=True)]
    for w in (0.0, 0.025, 0.6):
        weights = branch_weights(w, v)
        assert sum(weights) == pytest.approx(1)
        expected = w * Z[0] + (1 - w) * ((1 - v) * Z[1] + v * Z[2])
        found = fuse([torch.from_numpy(m) for m in maps], statistics, weights)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)
    R, D = (torch.from_numpy(m) for m in maps[1:])
    alone = fuse((None, R, D), statistics, branch_weights(0.0, v))
    np.testing.assert_allclose(alone.numpy(), (1 - v) * Z[1] + v * Z[2], rtol=1e-12, atol=1e-12)


def test_standardise_without_spread_stays_finite() -> None:
    assert float(standardise(torch.tensor(1.0), BranchStatistics(1.0, 0.0))) == 0
    found = standardise(torch.tensor(2.0), BranchStatistics(1.0, 0.0))
    assert float(found) == pytest.approx(1 / EPSILON)


def test_upsample_of_a_hand_example() -> None:
    maps = torch.tensor([[[0.0, 1.0], [2.0, 5.0]], [[1.0, 1.0], [1.0, 1.0]]])
    across = [[0, 0.25, 0.75, 1], [2, 2.75, 4.25, 5]]
    expected = [
        [(1 - v) * a + v * b for a, b in zip(*across, strict=True)] for v in (0, 0.25, 0.75, 1)
    ]
    found = upsample(maps, (4, 4))
    assert found.shape == (2, 4, 4)
    np.testing.assert_allclose(found[0].numpy(), expected, rtol=0, atol=1e-6)
    assert bool((found[1] == 1).all())


def test_upsample_gives_the_asked_size_within_the_range() -> None:
    maps = torch.from_numpy(np.random.default_rng(0).random((2, 11, 5)))
    found = upsample(maps, (176, 80))
    assert found.shape == (2, 176, 80)
    assert float(found.min()) >= float(maps.min())
    assert float(found.max()) <= float(maps.max())
    assert torch.equal(upsample(maps, (11, 5)), maps)


def calibration_scores(seed: int) -> tuple[Scores, NDArray[np.bool_]]:
    """Data sets of many sizes and separations, at which the slope is positive."""
    rng = np.random.default_rng(seed)
    good, defective = int(rng.integers(20, 300)), int(rng.integers(1, 80))
    shift = rng.choice([0.7, 1.5, 4.0, 15.0, 60.0])
    scores = np.r_[rng.normal(0, 1, good), rng.normal(shift, rng.choice([0.5, 1, 4]), defective)]
    if seed % 3 == 0:
        scores = np.exp(scores.clip(max=6))  # skewed, as log-sum-exp pooled evidence is
    scale, offset = rng.choice([0.02, 1, 50]), rng.normal()
    return scores * scale + offset, np.r_[np.zeros(good, bool), np.ones(defective, bool)]


def bounded_logistic(
    x: NDArray[np.float64], defective: NDArray[np.bool_], C: float
) -> tuple[float, float]:
    """SciPy's bounded minimiser on the objective with slope >= 0, as the docstring states it."""
    y = np.where(defective, 1.0, -1.0)
    weights = len(y) / (2 * np.where(defective, defective.sum(), (~defective).sum()))

    def objective(theta: NDArray[np.float64]) -> float:
        slope, intercept = theta
        losses = np.logaddexp(0, -y * (slope * x + intercept))
        return float(slope**2 / 2 + C * weights @ losses)

    found = optimize.minimize(
        objective, np.zeros(2), method="Nelder-Mead", bounds=[(0, None), (None, None)],
        options={"xatol": 1e-10, "fatol": 1e-14, "maxiter": 100_000, "maxfev": 100_000},
    )  # fmt: skip
    return float(found.x[0]), float(found.x[1])


@pytest.mark.parametrize("seed", range(24))
def test_image_calibrator_is_scikit_learns_logistic_where_the_bound_is_inactive(seed: int) -> None:
    scores, defective = calibration_scores(seed)
    found = fit_image_calibrator(scores, defective, 1.0)
    normal = np.sort(scores[~defective])
    (centre,), (scale,), (found_slope,) = found.centre, found.scale, found.slope
    assert centre == pytest.approx(float(np.median(normal)))
    first, third = np.percentile(normal, [25, 75])
    assert scale == pytest.approx(third - first)
    x = (scores - centre) / scale
    slope, intercept = bounded_logistic(x, defective, C=1.0)
    assert slope > 0
    assert found_slope == pytest.approx(slope, rel=1e-5)
    assert found.intercept == pytest.approx(intercept, rel=1e-5, abs=1e-6)
    single = int(defective.sum()) == 1
    assert found.notes == (
        ("the probability rests on a single defective calibration image",) if single else ()
    )
    probability = torch.sigmoid(image_logit(torch.from_numpy(scores)[:, None], found)).numpy()
    expected = special.expit(slope * x + intercept)
    np.testing.assert_allclose(probability, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("C", [0.01, 1.0, 100.0])
def test_image_calibrator_is_at_the_minimum_of_its_objective(C: float) -> None:
    """The derivatives, written out, vanish; C is the inverse strength of the penalty."""
    scores, defective = calibration_scores(1)
    found = fit_image_calibrator(scores, defective, C)
    (centre,), (scale,), (slope,) = found.centre, found.scale, found.slope
    n, n_defective = len(scores), int(defective.sum())
    by_slope, by_intercept = slope, 0.0
    for score, label in zip(scores.tolist(), defective.tolist(), strict=True):
        x = (score - centre) / scale
        weight = n / (2 * (n_defective if label else n - n_defective))
        probability = 1 / (1 + math.exp(-slope * x - found.intercept))
        error = C * weight * (probability - label)
        by_slope += error * x
        by_intercept += error
    assert abs(by_slope) <= 1e-4 * C
    assert abs(by_intercept) <= 1e-4 * C


@pytest.mark.parametrize("seed", range(6))
def test_slope_of_reversed_scores_is_zero_and_noted(seed: int) -> None:
    scores, defective = calibration_scores(3 * seed + 1)
    found = fit_image_calibrator(-scores, defective, 1.0)
    assert found.slope == (0.0,)
    assert found.intercept == pytest.approx(0, abs=1e-6), "balanced classes: one half for all"
    assert any("bound of zero" in note for note in found.notes)
    logits = image_logit(torch.from_numpy(scores)[:, None], found)
    assert float(logits.max() - logits.min()) == 0


def test_no_spread_of_the_good_scores_falls_back_to_their_deviation() -> None:
    """More than half of the good scores are equal, so the interquartile range is zero."""
    good = np.r_[np.full(17, 2.0), 3.0, 4.0, 1.0]
    scores = np.r_[good, 6.0, 7.0]
    defective = np.r_[np.zeros(20, bool), np.ones(2, bool)]
    found = fit_image_calibrator(scores, defective, 1.0)
    assert found.centre == (2.0,)
    assert found.scale == pytest.approx((float(np.std(good)),))
    assert len(found.notes) == 1
    assert "no spread" in found.notes[0]
    assert f"{found.scale[0]:.3g}" in found.notes[0]


@pytest.mark.parametrize("good", [[2.0], [2.0] * 9])
def test_equal_good_scores_are_scaled_by_one(good: list[float]) -> None:
    scores = np.array([*good, 5.0, 6.0])
    defective = np.array([False] * len(good) + [True, True])
    found = fit_image_calibrator(scores, defective, 1.0)
    assert found.scale == (1.0,)
    assert found.slope[0] > 0
    assert any("no spread" in note for note in found.notes)


def test_a_single_defective_image_is_used_and_noted() -> None:
    scores = np.r_[np.random.default_rng(0).normal(size=30), 8.0]
    found = fit_image_calibrator(scores, np.arange(31) == 30, 1.0)
    assert found.slope[0] > 0
    assert any("single defective" in note for note in found.notes)


@pytest.mark.parametrize(("label", "missing"), [(True, "good"), (False, "defective")])
@pytest.mark.parametrize("count", [0, 5])
def test_a_missing_label_is_refused_by_name(label: bool, missing: str, count: int) -> None:
    if not count:
        missing = "good"  # nothing at all: the first to miss
    with pytest.raises(TrainingError, match=f"no {missing} calibration image"):
        fit_image_calibrator(np.arange(float(count)), np.full(count, label), 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, -1])
def test_image_scores_that_are_not_finite_are_refused(value: float, position: int) -> None:
    scores = np.r_[np.random.default_rng(0).normal(size=30), 8.0, 9.0]
    scores[position] = value
    with pytest.raises(TrainingError, match="not finite"):
        fit_image_calibrator(scores, np.arange(32) >= 30, 1.0)


def test_image_logit_is_the_logistic_of_the_standardised_score() -> None:
    calibrator = ImageCalibrator((0.5, -1.0), (2.0, 0.25), (3.0, 0.5), -1.0)
    pooled = [(-1.0, 0.0), (0.5, -1.5), (4.0, 2.0)]
    expected = [3 * (a - 0.5) / 2 + 0.5 * (b + 1) / 0.25 - 1 for a, b in pooled]
    assert image_logit(torch.tensor(pooled), calibrator).tolist() == pytest.approx(expected)
    assert image_logit(np.array(pooled), calibrator).tolist() == pytest.approx(expected)


def test_compressed_image_logit_by_hand() -> None:
    calibrator = ImageCalibrator((1.0,), (2.0,), (3.0,), -1.0, compressed=True)
    pooled = [1.0, 1.0 + 4 * math.sinh(1), 1.0 - 4 * math.sinh(0.5), 1.0 + 1e-6]
    expected = [-1.0, -1 + 3 * 2, -1 - 3, -1 + 3 * 0.5e-6]
    for values in (torch.tensor(pooled, dtype=torch.float64), np.array(pooled)):
        found = image_logit(values[:, None], calibrator)
        assert found.tolist() == pytest.approx(expected, abs=1e-12)


def test_final_map_is_equation_29_and_keeps_the_order_within_an_image() -> None:
    rng = np.random.default_rng(0)
    P, logit = rng.random((3, 4, 5)) * 10, np.array([-3.0, 0.0, 6.0])
    found = final_map(torch.from_numpy(P), torch.from_numpy(logit), 1 / 3)
    for n in range(3):
        expected = P[n] + math.log(1 / (1 + math.exp(-logit[n]))) / 3
        np.testing.assert_allclose(found[n].numpy(), expected, rtol=0, atol=1e-12)
        assert (np.argsort(found[n].numpy().ravel()) == np.argsort(P[n].ravel())).all()
    assert torch.equal(final_map(torch.from_numpy(P), torch.from_numpy(logit), 0), torch.tensor(P))


def test_final_map_of_an_exported_graph_stays_finite(tmp_path: Path) -> None:
    """onnxruntime's own sigmoid is 0 where a good image is very good, and its log not finite."""
    onnxruntime = pytest.importorskip("onnxruntime")

    class Final(nn.Module):
        def forward(self, P: Tensor, logit: Tensor) -> Tensor:
            return final_map(P, logit, 1.0)

    logit = torch.tensor([-1000.0, -90.0, -25.0, -18.0, -1.0, 0.0, 3.0, 25.0, 1000.0])
    inputs = (torch.zeros(9, 1, 1), logit)
    torch.onnx.export(Final().eval(), inputs, tmp_path / "a.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    names = [one.name for one in session.get_inputs()]
    (found,) = session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})
    expected = -np.logaddexp(0, -logit.double().numpy())
    np.testing.assert_allclose(found[:, 0, 0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("logit", [-1000.0, 1000.0])
def test_final_map_does_not_overflow(logit: float) -> None:
    found = final_map(torch.zeros(1, 2, 2), torch.tensor([logit]), 1 / 3)
    assert found.flatten().tolist() == pytest.approx([min(logit, 0.0) / 3] * 4, rel=1e-6)
