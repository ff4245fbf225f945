"""Draws of groups against copied images and SciPy's bootstrap."""

import numpy as np
import pytest
from scipy import stats

from cdgp.metrics.ranking import image_auroc
from cdgp.metrics.resampling import difference_of, drawn_auroc, drawn_rate, group_draws


def test_draws_are_metrics_of_copied_images(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=30).round(1), np.arange(30) % 10 == 4
    weights = group_draws((np.arange(30) // 3).tolist(), draws=50)
    found = drawn_auroc(scores, labels, weights)
    rates = drawn_rate(scores > 0.3, labels, weights)
    assert np.isnan(found).any(), "some draws lack a class"
    for value, rate, times in zip(found, rates, weights.astype(int), strict=True):
        drawn = np.repeat(np.arange(30), times)
        exact = image_auroc(scores[drawn], labels[drawn]).value
        assert value == exact or (exact is None and np.isnan(value))
        bad = drawn[labels[drawn]]
        assert np.isnan(rate) if not bad.size else rate == np.mean(scores[bad] > 0.3)
    monkeypatch.setattr("cdgp.metrics.resampling.BLOCK", 70)
    np.testing.assert_array_equal(drawn_auroc(scores, labels, weights), found)


def test_interval_of_a_difference_is_scipys() -> None:
    """Every image a group of its own, paired, of a statistic that both can compute."""
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(2, 40))
    weights = group_draws(list(range(40)), draws=20_000)
    spread = weights @ (first - second) / 40
    found = difference_of(float(np.mean(first - second)), spread)
    oracle = stats.bootstrap(
        (first, second), lambda a, b, axis: a.mean(axis) - b.mean(axis), paired=True,
        method="percentile", n_resamples=20_000, vectorized=True, rng=rng,
    ).confidence_interval  # fmt: skip
    assert found is not None
    width = oracle.high - oracle.low
    assert (found.low, found.high) == pytest.approx((oracle.low, oracle.high), abs=0.04 * width)
    assert difference_of(np.nan, spread) is None
    assert difference_of(0.1, np.full(3, np.nan)) is None
