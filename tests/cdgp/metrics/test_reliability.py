"""Calibration error, false-reject thresholds and decisions, against loops and by hand."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from cdgp.errors import DataError, SettingsError
from cdgp.metrics.ranking import Measure
from cdgp.metrics.reliability import (
    at_rate,
    calibration_error_interval,
    expected_calibration_error,
    false_reject_threshold,
    overkill_and_escape,
    rate_interval,
    reliability_curve,
)


@pytest.mark.parametrize("bins", [1, 5, 10, 15])
def test_calibration_error_equals_a_loop(bins: int) -> None:
    rng = np.random.default_rng(bins)
    # Tenths lie on edges, where rounding could move them; 0 and 1 are the ends.
    probabilities = np.concatenate([rng.random(60), np.arange(11) / 10])
    labels = rng.random(71) < probabilities**2
    expected, counts = 0.0, []
    for b in range(bins):
        low, high = b / bins, (b + 1) / bins
        inside = (probabilities >= low) & ((probabilities < high) | (b == bins - 1))
        counts.append(inside.sum())
        if inside.any():
            gap = abs(probabilities[inside].mean() - labels[inside].mean())
            expected += inside.mean() * gap
    measure = expected_calibration_error(probabilities, labels, bins)
    assert measure.value == pytest.approx(expected, rel=0, abs=1e-12)
    assert reliability_curve(probabilities, labels, bins).counts == tuple(counts)


def test_reliability_curve_by_hand() -> None:
    curve = reliability_curve([0.0, 0.125, 1.0], [0, 1, 1], bins=4)
    assert curve.edges == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert curve.counts == (2, 0, 0, 1)
    assert curve.mean_probability == (0.0625, None, None, 1.0)
    assert curve.observed_rate == (0.5, None, None, 1.0)


def test_reliability_refuses_what_is_no_probability() -> None:
    assert expected_calibration_error([], []) == Measure(None, "no image")
    for bad in (-0.1, 1.5, np.nan):
        with pytest.raises(DataError, match="index 1"):
            expected_calibration_error([0.5, bad], [0, 1])
    with pytest.raises(SettingsError, match="bin"):
        expected_calibration_error([0.5], [1], bins=0)


@pytest.mark.parametrize("max_rate", [0.5, 0.35, 0.3, 0.25])
@pytest.mark.parametrize("pool", [range(6), [0, 0, 1, 2, 2, 2], [4] * 6])
def test_false_rejects_stay_below_the_bound(pool: Sequence[int], max_rate: float) -> None:
    # Exchangeable scores: every order of the pool is equally likely, the last one is new.
    orders = list(itertools.permutations(pool))
    found = [false_reject_threshold(order[:-1], max_rate) for order in orders]
    rejected = sum(order[-1] > f.threshold for order, f in zip(orders, found, strict=True))
    rate, bound = Fraction(rejected, len(orders)), Fraction(found[0].bound).limit_denominator(100)
    assert rate <= bound <= Fraction(str(max_rate))
    if len(set(pool)) == len(
        pool
    ):  # without ties the bound is met, so it is no looser than it says
        assert rate == bound


@pytest.mark.parametrize(("max_rate", "needed"), [(0.01, 99), (0.05, 19), (0.1, 9), (0.3, 3)])
def test_normal_images_needed_for_a_rate(max_rate: float, needed: int) -> None:
    scores = np.arange(needed, dtype=float)[::-1]
    enough = false_reject_threshold(scores, max_rate)
    assert (enough.threshold, enough.normals) == (needed - 1, needed)
    assert enough.bound == pytest.approx(1 / (needed + 1))
    assert enough.bound <= max_rate
    with pytest.raises(
        SettingsError,
        match=f": {needed - 1} are held out of training, at least {needed} are needed",
    ):
        false_reject_threshold(scores[1:], max_rate)


def test_false_reject_rank_is_free_of_rounding() -> None:
    for percent, n in itertools.product(range(1, 100), range(99, 400, 50)):
        k = -(-(n + 1) * (100 - percent) // 100)  # in whole numbers
        found = false_reject_threshold(np.arange(1, n + 1), percent / 100)
        assert found.threshold == k
        assert found.bound <= percent / 100


@pytest.mark.parametrize("max_rate", [0, 1, -0.1, math.nan])
def test_impossible_false_reject_rates_are_refused(max_rate: float) -> None:
    with pytest.raises(SettingsError, match="between 0 and 1"):
        false_reject_threshold(np.arange(200.0), max_rate)


def test_false_reject_threshold_refuses_nan_scores() -> None:
    with pytest.raises(DataError, match="index 1 is nan"):
        false_reject_threshold([0.0, np.nan], 0.4)


def test_overkill_and_escape_by_hand() -> None:
    result = overkill_and_escape([0.1, 0.5, 0.6, 0.9, 0.5, 0.2], [0, 0, 0, 1, 1, 1], 0.5)
    assert result.overkill == Measure(1 / 3)  # 0.5 is not above the threshold
    assert result.escape == Measure(2 / 3)
    assert (result.good, result.false_rejects, result.defective, result.misses) == (3, 1, 3, 2)
    assert overkill_and_escape([1.0], [1], 0).overkill == Measure(None, "no good image")
    assert overkill_and_escape([1.0], [0], 0).escape == Measure(None, "no defective image")
    with pytest.raises(SettingsError, match="NaN"):
        overkill_and_escape([1.0], [1], math.nan)


def shots_of_parts(
    parts: int, shots: int, share: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """(parts, shots) scores with a variance of one, this share of it between parts."""
    of_part = math.sqrt(share) * rng.normal(size=(parts, 1))
    scores: NDArray[np.float64] = of_part + math.sqrt(1 - share) * rng.normal(size=(parts, shots))
    return scores


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_false_rejects_of_parts_stay_below_the_bound(share: float) -> None:
    """15 parts of 20 shots each: any shot of a new part, realised over 2,000 draws."""
    rng, draws = np.random.default_rng(0), 2000
    groups = np.repeat(np.arange(15), 20)
    rejected, bounds = 0, set()
    for _ in range(draws):
        scores = shots_of_parts(16, 20, share, rng)
        found = false_reject_threshold(scores[:15].ravel(), 0.1, groups)
        bounds.add(found.bound)
        rejected += scores[15].max() > found.threshold
    (bound,) = bounds
    assert bound == 1 / 16 and (found.groups, found.normals) == (15, 300)
    assert rejected / draws <= bound + 3 * math.sqrt(bound * (1 - bound) / draws)
    assert rejected / draws >= bound - 3 * math.sqrt(bound * (1 - bound) / draws), "no ties: met"


def test_the_number_of_parts_limits_the_rate_whatever_the_number_of_images() -> None:
    scores, groups = np.arange(300.0), np.repeat(np.arange(15), 20)
    with pytest.raises(SettingsError, match=": 15 are held out of training, at least 19 are"):
        false_reject_threshold(scores, 0.05, groups)
    assert false_reject_threshold(scores, 0.05).groups == 300
    with pytest.raises(DataError, match="groups"):
        false_reject_threshold(scores, 0.05, groups[1:])


@pytest.mark.parametrize(("events", "n"), [(0, 1), (0, 12), (1, 1), (3, 24), (24, 24), (7, 200)])
def test_rate_interval_of_single_images_is_clopper_and_pearsons(events: int, n: int) -> None:
    values = np.arange(n) < events
    found = rate_interval(values)
    assert found == pytest.approx(proportion_confint(events, n, 0.05, "beta"), abs=1e-12)
    exact = stats.binomtest(events, n).proportion_ci(0.95, "exact")
    assert found == pytest.approx((exact.low, exact.high), abs=1e-9)
    in_pairs = rate_interval(np.repeat(values, 2), np.repeat(np.arange(n), 2))
    assert in_pairs == pytest.approx(found, abs=1e-12), "a second shot of each part tells nothing"


@pytest.mark.parametrize("sizes", [[20] * 15, [1, 2, 5, 10, 20] * 4])
@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_rate_intervals_cover_the_rate_of_clustered_images(
    sizes: list[int], rate: float, share: float
) -> None:
    """In at least 95 % of 1,000 draws, less three standard errors of that share."""
    rng, draws = np.random.default_rng(1), 1000
    groups, limit = np.repeat(np.arange(len(sizes)), sizes), stats.norm.isf(rate)
    covered = 0
    for _ in range(draws):
        scores = shots_of_parts(len(sizes), max(sizes), share, rng)
        kept = np.concatenate([row[:size] for row, size in zip(scores, sizes, strict=True)])
        low, high = rate_interval(kept > limit, groups)
        covered += low <= rate <= high
    assert covered / draws >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / draws)


@pytest.mark.parametrize(("parts", "shots", "share"), [(45, 1, 0.0), (24, 10, 0.7)])
@pytest.mark.parametrize("sharpness", [1.0, 0.3, 3.0])
def test_calibration_error_intervals_cover_the_true_error(
    parts: int, shots: int, share: float, sharpness: float
) -> None:
    """Right, too flat and too steep log-odds; a third of the parts is defective.

    A percentile interval of the same draws never covers the error of a right calibration.
    """
    rng, draws = np.random.default_rng(2), 100

    def scored(bad: int) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]:
        labels = np.arange(3 * bad) < bad
        x = shots_of_parts(3 * bad, shots, share, rng) + np.where(labels, 1, -1)[:, None]
        log_odds = sharpness * 2 * x - math.log(2)  # of two normal densities, and a prior of 1/3
        groups = np.repeat(np.arange(3 * bad), shots)
        return 1 / (1 + np.exp(-log_odds)).ravel(), np.repeat(labels, shots), groups

    probabilities, labels, _ = scored(40_000 // shots)
    truth = expected_calibration_error(probabilities, labels).value
    assert truth is not None
    covered = 0
    for _ in range(draws):
        probabilities, labels, groups = scored(parts // 3)
        low, high = calibration_error_interval(probabilities, labels, groups)
        found = expected_calibration_error(probabilities, labels).value
        assert found is not None and low <= found <= high
        covered += low <= truth <= high
    assert covered / draws >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / draws)


def test_calibration_error_intervals_are_the_same_each_time() -> None:
    rng = np.random.default_rng(0)
    probabilities = rng.random(60)
    labels = rng.random(60) < probabilities
    once, again = (calibration_error_interval(probabilities, labels) for _ in range(2))
    assert once == again
    assert calibration_error_interval(probabilities, labels, seed=1) != once


def test_overkill_and_escape_name_the_groups_they_rest_on() -> None:
    scores, labels = [0.9, 0.1, 0.2, 0.9, 0.9], [0, 0, 0, 1, 1]
    found = overkill_and_escape(scores, labels, 0.5, groups=[7, 7, 3, 9, 9])
    assert (found.good_groups, found.defective_groups) == (2, 1)
    assert found.overkill_interval == rate_interval([True, False, False], [0, 0, 1])
    assert found.escape_interval == pytest.approx((0, 0.975)), "one part, as 0 of 1"
    alone = overkill_and_escape(scores[:3], labels[:3], 0.5)
    assert alone.escape_interval is None and alone.defective_groups == 0


def test_a_rate_that_is_stated_puts_the_probabilities_right() -> None:
    """5 % of 40,000 images are defective; log-odds are those of a balanced logistic."""
    rng = np.random.default_rng(0)
    labels = rng.random(40_000) < 0.05
    log_odds = 2 * (rng.normal(size=40_000) + np.where(labels, 1, -1))
    balanced = 1 / (1 + np.exp(-log_odds))
    before = expected_calibration_error(balanced, labels).value
    after = expected_calibration_error(at_rate(balanced, 0.5, 0.05), labels).value
    assert before is not None and after is not None
    assert 0.1 < before < 0.3 and after < 0.02
    half = (balanced > 0.45) & (balanced < 0.55)
    assert labels[half].mean() < 0.1, "of images told 0.5"
    np.testing.assert_array_equal(at_rate([0, 1], 0.5, 0.05), [0, 1])
