"""The image score from no defect to many against other optimisers; its p-value against counts."""

import math
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import optimize, stats
from sklearn.linear_model import LogisticRegression

from cdgp.errors import TrainingError
from cdgp.method.calibration import PRIOR_INTERCEPT, fit_image_evidence, prior_slopes
from cdgp.method.score import ImageCalibrator, conformal_table, image_logit, image_score, p_value

Array = NDArray[np.float64]
KINDS = [(1, False), (2, False), (2, True), (3, True)]
"""(entries, whether the first is the dominance): residual, with distance, with dominance, all."""


class Case(NamedTuple):
    """Image evidence (n, F) and labels."""

    evidence: Array
    defective: NDArray[np.bool_]


def case(seed: int, F: int, good: int = 0, bad: int = -1) -> Case:
    """Skewed, correlated evidence in units of its own, of unlike usefulness."""
    rng = np.random.default_rng(seed)
    good = good or int(rng.integers(5, 150))
    bad = int(rng.integers(1, 40)) if bad < 0 else bad
    defective = np.arange(good + bad) >= good
    Z = rng.normal(size=(good + bad, F)) @ (np.eye(F) + 0.5 * rng.random((F, F)))
    Z += defective[:, None] * rng.choice([0.0, 0.5, 2.0, 10.0], F) * rng.random((good + bad, 1))
    if seed % 2:
        Z = np.exp(Z.clip(max=4))
    return Case(Z * rng.choice([0.02, 1, 50], F) + rng.normal(size=F), defective)


def standardised(given: Case) -> Array:
    normal = given.evidence[~given.defective]
    first, third = np.percentile(normal, [25, 75], axis=0)
    scaled: Array = (given.evidence - np.median(normal, axis=0)) / (third - first)
    return 2 * np.log(scaled / 2 + np.sqrt(1 + (scaled / 2) ** 2))


def objective(values: Array, Z: Array, defective: NDArray[np.bool_], prior: Array) -> float:
    """As the docstring states it, image by image."""
    *slope, intercept = values.tolist()
    bad = int(defective.sum())
    total = float(np.sum((np.array(slope) - prior) ** 2)) / 2
    for z, label in zip(Z, defective, strict=True):
        f = float(z @ np.array(slope)) + intercept
        weight = 1.0 if label else bad / (len(Z) - bad)
        total += weight * float(np.logaddexp(0, -f if label else f))
    return total


def by_slsqp(given: Case, prior: Array) -> tuple[Array, float]:
    Z = standardised(given)
    F = Z.shape[1]
    found = optimize.minimize(
        objective, np.r_[np.ones(F), 0.0], (Z, given.defective, prior), method="SLSQP",
        bounds=[(0, None)] * F + [(None, None)], options={"ftol": 1e-14, "maxiter": 2000},
    )  # fmt: skip
    return found.x[:F], float(found.x[F])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_fit_against_another_optimiser(seed: int, kind: tuple[int, bool]) -> None:
    F, has_dominance = kind
    given, prior = case(seed, F), prior_slopes(*kind)
    found = fit_image_evidence(given.evidence, given.defective, has_dominance)
    slope, intercept = by_slsqp(given, prior)
    assert not found.is_p_value
    np.testing.assert_allclose(found.slope, slope, rtol=2e-3, atol=1e-3)
    assert found.intercept == pytest.approx(intercept, rel=2e-3, abs=2e-3)
    Z = standardised(given)
    values = (objective(np.r_[s, i], Z, given.defective, prior)
              for s, i in ((found.slope, found.intercept), (slope, intercept)))  # fmt: skip
    own, other = values
    assert own <= other + 1e-6
    probability = image_score(given.evidence, found)
    np.testing.assert_allclose(probability, 1 / (1 + np.exp(-(Z @ slope + intercept))), atol=2e-3)


def test_fit_of_one_entry_against_a_grid() -> None:
    given = case(2, 1, good=30, bad=3)
    found = fit_image_evidence(given.evidence, given.defective, has_dominance=False)
    Z, prior = standardised(given), np.ones(1)
    best = objective(np.r_[found.slope, found.intercept], Z, given.defective, prior)
    for slope in np.linspace(0, 4, 41):
        for intercept in np.linspace(-8, 2, 51):
            assert objective(np.array([slope, intercept]), Z, given.defective, prior) > best - 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_no_defect_gives_the_prior_and_a_p_value(kind: tuple[int, bool]) -> None:
    F, has_dominance = kind
    given = case(1, F, good=40, bad=0)
    found = fit_image_evidence(given.evidence, given.defective, has_dominance)
    expected = {(1, False): (1.0,), (2, False): (1 / 3, 2 / 3), (2, True): (0.0, 1.0),
                (3, True): (0.0, 1 / 3, 2 / 3)}  # fmt: skip
    assert found.slope == pytest.approx(expected[kind], rel=1e-15)
    assert found.intercept == PRIOR_INTERCEPT
    assert found.is_p_value and not found.notes
    # Three quartile ranges above the median of good images even out the intercept.
    logits = standardised(given) @ np.array(expected[kind]) - 2 * np.arcsinh(1.5)
    np.testing.assert_allclose(found.good_logits, np.sort(logits), rtol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_a_prior_of_zero_is_scikit_learns_logistic(seed: int) -> None:
    """The penalty is then the usual one, and the dominance alone has no prior."""
    given = case(seed, 1, bad=20)
    given.evidence[given.defective] += 2 * given.evidence[~given.defective].std()
    found = fit_image_evidence(given.evidence, given.defective, has_dominance=True)
    bad = int(given.defective.sum())
    weight = np.where(given.defective, 1.0, bad / int((~given.defective).sum()))
    logistic = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000)
    logistic.fit(standardised(given), given.defective, weight)
    assert float(logistic.coef_[0, 0]) > 0
    assert found.slope == pytest.approx(logistic.coef_[0].tolist(), rel=1e-3)
    assert found.intercept == pytest.approx(float(logistic.intercept_[0]), rel=1e-3, abs=1e-3)


def test_many_defects_approach_a_logistic_without_penalty() -> None:
    """Slopes of the truth, whatever the prior."""
    rng = np.random.default_rng(0)
    Z = rng.normal(size=(20_000, 3))
    defective = rng.random(20_000) < 1 / (1 + np.exp(-(Z @ [1.5, 0.2, 0.6] - 1)))
    given = Case(2 * np.sinh(Z / 2), defective)
    found = fit_image_evidence(given.evidence, defective, has_dominance=True)
    bad = int(defective.sum())
    weight = np.where(defective, 1.0, bad / int((~defective).sum()))
    logistic = LogisticRegression(C=np.inf, tol=1e-10, max_iter=10_000)
    logistic.fit(standardised(given), defective, weight)
    np.testing.assert_allclose(found.slope, logistic.coef_[0], atol=0.01)
    assert found.slope[0] > found.slope[2] > found.slope[1] > 0


def test_what_tells_nothing_keeps_the_prior_and_what_falls_has_no_weight() -> None:
    given = case(0, 3, good=200, bad=60)
    constant, falling = given.evidence.copy(), given.evidence.copy()
    constant[:, 1] = 4.0
    found = fit_image_evidence(constant, given.defective, has_dominance=True)
    assert found.slope[1] == pytest.approx(1 / 3, abs=1e-6)
    assert any("no spread" in note for note in found.notes)
    falling[given.defective, 2] -= 5 * falling[~given.defective, 2].std()
    assert fit_image_evidence(falling, given.defective, has_dominance=True).slope[2] == 0.0


def test_few_defects_stay_near_the_prior_and_more_move_away() -> None:
    """The same defects, repeated: only their number changes."""
    rng = np.random.default_rng(1)
    good, bad = rng.normal(size=(200, 3)), np.array([[3.0, 1.0, 0.5]])
    prior, moved = prior_slopes(3, True), list[float]()
    for count in (1, 2, 4, 16, 64):
        evidence = np.r_[good, np.repeat(bad, count, axis=0)]
        found = fit_image_evidence(evidence, np.arange(len(evidence)) >= 200, has_dominance=True)
        assert len(found.notes) == (count == 1)
        moved.append(float(np.linalg.norm(np.array(found.slope) - prior)))
    assert moved[0] < 0.6
    assert (np.diff(moved) > 0).all()


@pytest.mark.parametrize("bad", [0, 1, 12])
@pytest.mark.parametrize("entry", range(3))
def test_the_score_never_falls_as_an_entry_rises(entry: int, bad: int) -> None:
    given = case(5, 3, good=30, bad=bad)
    found = fit_image_evidence(given.evidence, given.defective, has_dominance=True)
    assert found.is_p_value == (bad == 0)
    spread = given.evidence[:, entry].std()
    queries = np.tile(np.median(given.evidence, axis=0), (400, 1))
    queries[:, entry] += np.linspace(-3, 6, 400) * spread
    score = image_score(queries, found)
    assert float(np.diff(score).min()) >= 0
    if found.slope[entry]:
        assert float(score[-1]) > float(score[0])


@pytest.mark.parametrize("labels", [[], [True, True]])
def test_evidence_without_a_good_image_is_refused(labels: list[bool]) -> None:
    with pytest.raises(TrainingError, match="no good calibration image"):
        fit_image_evidence(np.ones((len(labels), 3)), np.array(labels, bool), True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("bad", [0, 3])
def test_evidence_that_is_not_finite_is_refused(bad: int, value: float) -> None:
    given = case(0, 3, good=9, bad=bad)
    given.evidence[-1, 1] = value
    with pytest.raises(TrainingError, match="not finite"):
        fit_image_evidence(given.evidence, given.defective, True)


def counted(good: Array, query: float) -> float:
    """The conformal p-value, by counting."""
    return (1 + sum(1 for u in good.tolist() if u >= query)) / (len(good) + 1)


GOOD: dict[str, Array] = {
    "many": np.random.default_rng(0).normal(size=200),
    "few": np.array([-1.0, 0.5, 3.0]),
    "ties": np.array([0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0]),
    "one": np.array([0.7]),
    "all equal": np.full(12, -2.0),
    "copies": np.array([0.0, *(0.5 + 1e-9 * np.arange(10)), 2.0]),
}


def tied(good: Array) -> Array:
    """Each as the largest of those it ties with: from the top, all within a hundredth."""
    if not len(good):
        return good
    top = good.max()
    near = top - good < 0.01
    result = good.copy()
    result[near], result[~near] = top, tied(good[~near])
    return result


@pytest.mark.parametrize("name", GOOD)
def test_p_value_is_the_count_of_tied_images_and_never_below_that_of_images(name: str) -> None:
    good = GOOD[name]
    table = conformal_table(good.tolist())
    at_good = p_value(tied(good), table)
    assert at_good.tolist() == pytest.approx([counted(tied(good), u) for u in tied(good)])
    low, high = float(good.min()), float(good.max())
    queries = np.linspace(low - 3, high + 3, 5_001)
    found = p_value(queries, table)
    assert (found - [counted(good, q) for q in queries] > -1e-12).all()
    assert (np.diff(found) <= 1e-15).all()
    assert found.min() > 0 and found.max() == pytest.approx(1, rel=1e-12)
    below = p_value(np.array([low - 1e-9, low - 1e6]), table)
    assert below.tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("name", GOOD)
def test_p_value_has_no_cliff(name: str) -> None:
    """Two runtimes' log-odds of one image differ by a millionth; their p-values may not matter."""
    good = GOOD[name]
    table = conformal_table(good.tolist())
    for change in (-1e-6, 1e-6):
        moved = p_value(good + change, table)
        assert np.abs(moved - p_value(good, table)).max() < 1e-4


@pytest.mark.parametrize("name", ["many", "few", "ties", "copies"])
def test_p_value_is_linear_between_good_images_and_falls_beyond(name: str) -> None:
    good = GOOD[name]
    table, distinct = conformal_table(good.tolist()), np.unique(tied(good))
    counts = [counted(tied(good), u) for u in distinct]
    queries = np.linspace(distinct[0], distinct[-1], 999)
    found = p_value(queries, table)
    np.testing.assert_allclose(found, np.interp(queries, distinct, counts), rtol=1e-10)
    spread = distinct[-1] - distinct[0]
    beyond = distinct[-1] + np.linspace(0, 20, 500) * spread
    found = p_value(beyond, table)
    assert (np.diff(found) < 0).all(), "images beyond all good ones are ranked"
    least = 1 / (len(good) + 1)
    assert found[0] == pytest.approx(counted(tied(good), distinct[-1]))
    assert found[-1] == pytest.approx(least, rel=1e-6) and (found > least).all()


@pytest.mark.parametrize("n", [4, 19, 60])
def test_p_value_of_an_exchangeable_image_is_uniform_or_larger(n: int) -> None:
    """5,000 draws of n good images and one more; heavy tails, and ties by rounding."""
    draws = np.random.default_rng(n).standard_t(3, (5_000, n + 1)).round(2)
    found = np.array([
        float(p_value(row[-1:], conformal_table(row[:-1].tolist()))[0])
        for row in draws
    ])  # fmt: skip
    for alpha in (0.02, 0.05, 1 / (n + 1), 2 / (n + 1), 0.2, 0.5, 0.9):
        share = float((found <= alpha).mean())
        assert share <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / len(found))
    # No empty promise: an image beyond all good ones, one of n + 1, is at most 2 / (n + 1).
    assert float((found <= 2 / (n + 1)).mean()) > 0.8 / (n + 1)


def test_a_score_without_defects_is_one_minus_the_p_value_at_any_rate() -> None:
    given = case(3, 3, good=25, bad=0)
    found = fit_image_evidence(given.evidence, given.defective, has_dominance=True)
    queries = case(4, 3, good=50).evidence
    logits = image_logit(queries, found)
    expected = 1 - p_value(logits, conformal_table(found.good_logits))
    for rate in (0.001, 0.5, 0.9):
        assert np.array_equal(image_score(queries, found, rate), expected)
    own = image_score(given.evidence, found)
    ranks = stats.rankdata(standardised(given) @ np.array(found.slope))
    counted_scores = 1 - (1 + 26 - ranks) / 26
    assert (own <= counted_scores + 1e-12).all(), "the p-value is never below the count"
    z = np.sort(standardised(given) @ np.array(found.slope) + found.intercept)
    ends = np.unique(tied(z))
    expected = 1 - np.interp(z, ends, [counted(tied(z), end) for end in ends])
    np.testing.assert_allclose(np.sort(own), expected, atol=1e-9)


def test_a_probability_has_no_p_value() -> None:
    same = ImageCalibrator((0.0,), (1.0,), (1.0,), 0.0)
    assert not same.is_p_value
    found = image_score(np.array([[0.0], [2.0]], np.float32), same)
    assert found.tolist() == pytest.approx([0.5, 1 / (1 + math.exp(-2))])
    assert found.dtype == np.float64
