"""Means over seeds and the paired analysis, against brute force and identities."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cdgp_bench.statistics import (
    category_bootstrap,
    holm,
    paired_contrast,
    sign_flip,
    summarise,
)


def brute_sign_flip(values: list[float]) -> float:
    observed = abs(sum(values))
    flips = list(itertools.product((-1, 1), repeat=len(values)))
    sums = [abs(sum(s * v for s, v in zip(f, values, strict=True))) for f in flips]
    return sum(s >= observed - 1e-12 for s in sums) / len(flips)


@given(st.lists(st.integers(-30, 30), min_size=1, max_size=8))
@example([0, 0, 0, 0, 0, 3, -1, -2])  # a mean of zero, which binary fractions miss
def test_sign_flip_is_the_enumeration(values: list[int]) -> None:
    floats = [v / 10 for v in values]
    assert sign_flip(floats) == pytest.approx(brute_sign_flip(floats), abs=1e-12)


def test_sign_flip_identities() -> None:
    assert sign_flip([0.0] * 8) == 1
    assert sign_flip([0.3, 0.1, 0.2, 0.5, 0.9, 0.4, 0.8, 0.7]) == 2 / 256
    assert sign_flip([-0.3, -0.1, -0.2]) == 2 / 8
    assert sign_flip([0.3]) == 1
    assert sign_flip([0.1] * 12) == 2 / 4096


def test_bootstrap_against_all_resamples() -> None:
    """Three categories have 27 resamples: the interval is the quantiles of their means."""
    values = [0.1, 0.4, 1.0]
    means = np.sort([np.mean(r) for r in itertools.product(values, repeat=3)])
    low, high = category_bootstrap(values, seed=1)
    # P(mean = least) = 1/27 = 3.7 %, above 2.5 %: both ends are the extremes themselves.
    assert (low, high) == pytest.approx((means[0], means[-1]))
    wide = list(np.random.default_rng(0).normal(size=30))
    low, high = category_bootstrap(wide)
    error = np.std(wide) / np.sqrt(30)
    assert low == pytest.approx(np.mean(wide) - 1.96 * error, abs=0.03)
    assert high == pytest.approx(np.mean(wide) + 1.96 * error, abs=0.03)


def test_bootstrap_of_equal_differences_is_that_point() -> None:
    assert category_bootstrap([0.2, 0.2, 0.2]) == (0.2, 0.2)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([2 / 256] * 3) == pytest.approx([6 / 256] * 3)  # the paper's .023
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])


def test_paired_contrast_of_one_category_has_no_interval() -> None:
    found = paired_contrast([0.25])
    assert (found.difference, found.low, found.high, found.p) == (0.25, None, None, 1.0)


def test_category_mean_comes_before_the_spread_over_seeds() -> None:
    """Not the spread over all values: categories differ by 0.4, seeds by 0.1."""
    values = {0: {"a": 0.2, "b": 0.6}, 1: {"a": 0.3, "b": 0.7}, 2: {"a": 0.4, "b": 0.8}}
    found = summarise(values)
    assert found is not None
    assert found.mean == pytest.approx(0.5)
    assert found.std == pytest.approx(0.1)
    assert found.repeats == 3


def test_incomplete_seeds_do_not_count() -> None:
    found = summarise({0: {"a": 0.2, "b": 0.6}, 1: {"a": 0.9}, 2: {"a": 0.9, "b": None}})
    assert found is not None
    assert found.mean == pytest.approx(0.4)
    assert (found.std, found.repeats) == (None, 1)
    assert summarise({0: {"a": None}}) is None
    assert summarise({}) is None
