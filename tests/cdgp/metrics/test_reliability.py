"""Calibration error, false-reject thresholds and decisions, against loops and by hand."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest

from cdgp.errors import DataError, SettingsError
from cdgp.metrics.ranking import Measure
from cdgp.metrics.reliability import (
    expected_calibration_error,
    false_reject_threshold,
    overkill_and_escape,
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
