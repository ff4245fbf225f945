"""Whether probabilities mean what they say, and thresholds that keep a promised false-reject rate.

One decision rule throughout: an image is rejected as defective when its score > threshold.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from cdgp.errors import DataError, SettingsError
from cdgp.metrics.ranking import Measure, checked_scores


@dataclass(frozen=True)
class ReliabilityCurve:
    """Predicted against observed rate of defects, in bins of equal width over [0, 1].

    An empty bin has None for both rates. A bin holds its lower edge; the last one also holds 1.
    """

    edges: tuple[float, ...]  # bins + 1, from 0 to 1
    mean_probability: tuple[float | None, ...]
    observed_rate: tuple[float | None, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class FalseRejectThreshold:
    """A threshold on the score, and the false-reject rate that it keeps for a new normal part."""

    threshold: float
    bound: float  # P(score of a new normal image > threshold) is at most this
    normals: int  # held-out normal images that it rests on


@dataclass(frozen=True)
class Decisions:
    """Outcome of one threshold: overkill = good parts rejected, escape = defective parts passed."""

    overkill: Measure
    escape: Measure
    good: int
    false_rejects: int
    defective: int
    misses: int


def reliability_curve(
    probabilities: ArrayLike, labels: ArrayLike, bins: int = 10
) -> ReliabilityCurve:
    """Mean probability and observed rate of defects in each bin.

    Args:
        probabilities: (n,) P(defective), in [0, 1].
        labels: (n,) bool or 0/1, 1 = defective.
        bins: how many, at least 1.

    Raises:
        SettingsError, DataError: no bin, or a probability outside [0, 1].
    """
    if bins < 1:
        raise SettingsError(f"a reliability curve needs at least 1 bin, got {bins}")
    values, defective = checked_scores(probabilities, labels)
    outside = np.flatnonzero((values < 0) | (values > 1))
    if outside.size:
        raise DataError(
            f"probability at index {outside[0]} is {values[outside[0]]}, outside [0, 1]"
        )
    edges = np.arange(bins + 1) / bins
    index = np.minimum(np.searchsorted(edges, values, "right") - 1, bins - 1)
    counts = np.bincount(index, minlength=bins).tolist()

    def means(summands: ArrayLike) -> tuple[float | None, ...]:
        sums = np.bincount(index, weights=summands, minlength=bins).tolist()
        return tuple(s / n if n else None for s, n in zip(sums, counts, strict=True))

    return ReliabilityCurve(tuple(edges.tolist()), means(values), means(defective), tuple(counts))


def expected_calibration_error(
    probabilities: ArrayLike, labels: ArrayLike, bins: int = 10
) -> Measure:
    r"""Mean distance between predicted and observed rate of defects over bins of equal width.

    .. math:: ECE = \sum_b \frac{n_b}{n} \, | \bar p_b - \bar y_b |

    (Naeini et al., "Obtaining Well Calibrated Probabilities Using Bayesian Binning", AAAI 2015;
    here on P(defective).) Arguments and errors as `reliability_curve`.

    >>> expected_calibration_error([0.0, 0.0, 1.0, 1.0], [0, 0, 0, 1])
    Measure(value=0.25, reason=None)
    """
    curve = reliability_curve(probabilities, labels, bins)
    if not any(curve.counts):
        return Measure(None, "no image")
    gaps = [
        count * abs(mean - rate)
        for count, mean, rate in zip(
            curve.counts, curve.mean_probability, curve.observed_rate, strict=True
        )
        if mean is not None and rate is not None
    ]
    return Measure(math.fsum(gaps) / sum(curve.counts))


def false_reject_threshold(normal_scores: ArrayLike, max_rate: float) -> FalseRejectThreshold:
    r"""Threshold that rejects a new normal image with a probability of at most `max_rate`.

    It is the k-th smallest of n held-out normal scores,
    :math:`k = \lceil (n + 1)(1 - R) \rceil`. If a new normal score is exchangeable with them, its
    rank among the n + 1 is uniform, so it exceeds the threshold with probability at most
    1 - k / (n + 1); ties only lower that. The probability is over the held-out images and the new
    one together. (Vovk et al., "Algorithmic Learning in
    a Random World", 2005; split conformal prediction.)

    Args:
        normal_scores: (n,) finite scores of normal images that took no part in training.
        max_rate: R in (0, 1), taken as the decimal number it prints as.

    Raises:
        SettingsError: R lies outside (0, 1), or n is below 1/R - 1.
        DataError: as `ranking.checked_scores`.

    >>> false_reject_threshold([3, 1, 4, 1, 5, 9, 2, 6, 5], max_rate=0.2)
    FalseRejectThreshold(threshold=6.0, bound=0.2, normals=9)
    """
    if not 0 < max_rate < 1:
        raise SettingsError(f"the false-reject rate must lie between 0 and 1, got {max_rate}")
    scores, _ = checked_scores(normal_scores, np.zeros(np.shape(normal_scores)))
    rate, n = Fraction(str(float(max_rate))), len(scores)  # 0.1 is 1/10, so the ceilings are exact
    k = math.ceil((n + 1) * (1 - rate))
    if k > n:
        raise SettingsError(
            f"too few good images to calibrate a false-reject rate of at most {max_rate}: "
            f"{n} are held out of training, at least {math.ceil(1 / rate) - 1} are needed"
        )
    return FalseRejectThreshold(float(np.sort(scores)[k - 1]), float(1 - Fraction(k, n + 1)), n)


def overkill_and_escape(scores: ArrayLike, labels: ArrayLike, threshold: float) -> Decisions:
    """Rate of good images rejected and of defective images passed, with their counts.

    Args:
        scores: (n,) finite, any range; rejected when score > threshold.
        labels: (n,) bool or 0/1, 1 = defective.
        threshold: a number; infinity rejects nothing or everything, NaN is a SettingsError.
    """
    if math.isnan(threshold):
        raise SettingsError("the decision threshold is NaN")
    values, defective = checked_scores(scores, labels)
    rejected = values > threshold
    bad = int(np.count_nonzero(defective))
    good = len(values) - bad
    false_rejects = int(np.count_nonzero(rejected & ~defective))
    misses = int(np.count_nonzero(~rejected & defective))
    return Decisions(
        overkill=Measure(false_rejects / good) if good else Measure(None, "no good image"),
        escape=Measure(misses / bad) if bad else Measure(None, "no defective image"),
        good=good,
        false_rejects=false_rejects,
        defective=bad,
        misses=misses,
    )
