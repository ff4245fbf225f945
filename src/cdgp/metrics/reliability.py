"""Whether probabilities mean what they say, and thresholds that keep a promised false-reject rate.

One decision rule throughout: an image is rejected as defective when its score > threshold.

Images of one part (a *group*) look alike, so what a figure rests on is the number of groups.
Intervals are of 95 %, and wide enough where all images of a group agree.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, expit, logit

from cdgp.errors import DataError, SettingsError
from cdgp.metrics.ranking import Measure, checked_scores

CONFIDENCE = 0.95
RESAMPLES = 2000
"""Draws of groups behind the interval of a calibration error."""
BLOCK = 50
"""So many draws at a time, to bound the memory."""

Interval = tuple[float, float]


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
    bound: float  # P(any score of a new normal group > threshold) is at most this
    normals: int  # held-out normal images
    groups: int  # groups of them, which it rests on


@dataclass(frozen=True)
class Decisions:
    """Outcome of one threshold: overkill = good parts rejected, escape = defective parts passed."""

    overkill: Measure
    escape: Measure
    good: int
    false_rejects: int
    defective: int
    misses: int
    good_groups: int
    defective_groups: int
    overkill_interval: Interval | None
    escape_interval: Interval | None


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
    index = _bins_of(values, bins)
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


def calibration_error_interval(
    probabilities: ArrayLike,
    labels: ArrayLike,
    groups: ArrayLike | None = None,
    bins: int = 10,
    seed: int = 0,
) -> Interval:
    """An interval for the calibration error, from a bootstrap of groups.

    Groups with a defective image and the others are drawn apart, so that their numbers stay. The
    error is a sum of distances, which chance alone makes larger: its bootstrap distribution lies
    above it, and a percentile interval would exclude a perfect calibration. The upper end is that
    percentile. The lower end uses that, by the triangle inequality, the error cannot exceed the
    true one by more than the bins' summed deviations from the truth do, whose percentile the same
    draws give. In simulations of correlated images it covers 90 to 100 %, with as few as four
    groups of a class.

    Arguments and errors as `expected_calibration_error`; ``groups`` are (n,) numbers, each image a
    group of its own where None. Both classes need two groups.
    """
    values, defective = checked_scores(probabilities, labels)
    members = group_members(groups, len(values))
    count = int(members.max()) + 1
    gaps = np.zeros((count, bins))
    np.add.at(gaps, (members, _bins_of(values, bins)), values - defective)
    images = np.bincount(members).astype(np.float64)
    rng, errors, deviations = np.random.default_rng(seed), [], []
    with_defect = np.bincount(members, weights=defective) > 0
    parts = [part for mask in (with_defect, ~with_defect) if len(part := np.flatnonzero(mask))]
    for _ in range(0, RESAMPLES, BLOCK):
        drawn, around = np.empty((BLOCK, count)), np.empty((BLOCK, count))
        for part in parts:
            size = len(part)
            chosen = rng.integers(size, size=(BLOCK, size)) + size * np.arange(BLOCK)[:, None]
            counts = np.bincount(chosen.ravel(), minlength=BLOCK * size)
            drawn[:, part] = counts.reshape(BLOCK, size)
            # The variance of few groups is underestimated by one group.
            around[:, part] = (drawn[:, part] - 1) * math.sqrt(size / max(1, size - 1))
        errors.append(np.abs(drawn @ gaps).sum(1) / (drawn @ images))
        deviations.append(np.abs(around @ gaps).sum(1) / images.sum())
    error = np.abs(gaps.sum(0)).sum() / images.sum()
    end = (1 + CONFIDENCE) / 2
    deviation, high = (np.quantile(np.concatenate(v), end) for v in (deviations, errors))
    return float(max(0, error - deviation)), float(min(1, max(error, high)))


def at_rate(probabilities: ArrayLike, of: float, to: float) -> NDArray[np.float64]:
    """Probabilities that refer to one defect rate, at another one.

    Their log-odds are shifted by the difference of the rates' log-odds; 0 and 1 stay.

    >>> at_rate([0.5, 0.9], of=0.5, to=0.1).round(4).tolist()
    [0.1, 0.5]
    """
    values = np.asarray(probabilities, dtype=np.float64)
    if of == to:
        return values
    return np.asarray(expit(logit(values) + (logit(to) - logit(of))), dtype=np.float64)


def false_reject_threshold(
    normal_scores: ArrayLike, max_rate: float, groups: ArrayLike | None = None
) -> FalseRejectThreshold:
    r"""Threshold above which a new normal part has an image with a probability of at most R.

    A part is a group of images, and its score the largest of theirs. The threshold is the k-th
    smallest of the G held-out groups' scores, :math:`k = \lceil (G + 1)(1 - R) \rceil`. If the
    score of a new group is exchangeable with them, its rank among the G + 1 is uniform, so it
    exceeds the threshold with probability at most 1 - k / (G + 1); ties only lower that.
    Exchangeable means: a part of the same process, with about as many images as the held-out ones
    have. The probability is over the held-out groups and the new one together. (Vovk et al.,
    "Algorithmic Learning in a Random World", 2005; split conformal prediction.)

    Args:
        normal_scores: (n,) finite scores of normal images that took no part in training.
        max_rate: R in (0, 1), taken as the decimal number it prints as.
        groups: (n,) number of the group of each; each image is a group of its own where None.

    Raises:
        SettingsError: R lies outside (0, 1), or G is below 1/R - 1.
        DataError: as `ranking.checked_scores`.

    >>> false_reject_threshold([3, 1, 4, 1, 5, 9, 2, 6, 5], max_rate=0.2)
    FalseRejectThreshold(threshold=6.0, bound=0.2, normals=9, groups=9)
    """
    if not 0 < max_rate < 1:
        raise SettingsError(f"the false-reject rate must lie between 0 and 1, got {max_rate}")
    scores, _ = checked_scores(normal_scores, np.zeros(np.shape(normal_scores)))
    members = group_members(groups, len(scores))
    n = len(np.unique(members))
    rate = Fraction(str(float(max_rate)))  # 0.1 is 1/10, so the ceilings are exact
    k = math.ceil((n + 1) * (1 - rate))
    if k > n:
        raise SettingsError(
            f"too few groups of good images to calibrate a false-reject rate of at most {max_rate}"
            f": {n} are held out of training, at least {math.ceil(1 / rate) - 1} are needed. "
            "Images of one part, equal images and near duplicates are one group, and a group with "
            "training images does not count; add good parts, or allow a higher rate"
        )
    largest = np.full(n, -np.inf)
    np.maximum.at(largest, members, scores)
    bound = float(1 - Fraction(k, n + 1))
    return FalseRejectThreshold(float(np.sort(largest)[k - 1]), bound, len(scores), n)


def rate_interval(events: ArrayLike, groups: ArrayLike | None = None) -> Interval:
    """An interval for the rate of an event over images that come in groups.

    Clopper and Pearson's exact interval, with the number of independent images that the groups are
    worth: (sum of sizes)^2 / sum of squared sizes (Kish, "Survey Sampling", 1965), as if all images
    of a group agreed. That is the number of groups where they have equal sizes, and of images where
    each is a group. The correlation within groups is not estimated (Korn and Graubard, "Confidence
    intervals for proportions with small expected number of positive counts", Survey Methodology 24,
    1998, from whom the use of a fractional number comes): where no or all images show the event,
    there is nothing to estimate it from. So the interval is wide enough, and wider than need be
    where images of a group differ.

    Args:
        events: (n,) bool, at least one.
        groups: (n,) number of the group of each; each image is a group of its own where None.

    >>> low, high = rate_interval([False] * 10)
    >>> low, round(high, 4)
    (0.0, 0.3085)
    """
    values = np.asarray(events, dtype=np.bool_)
    sizes = np.bincount(group_members(groups, len(values))).astype(np.float64)
    worth = float(sizes.sum() ** 2 / np.square(sizes).sum())
    x, tail = float(values.mean()) * worth, (1 - CONFIDENCE) / 2
    low = float(betaincinv(x, worth - x + 1, tail)) if x > 0 else 0.0
    high = float(betaincinv(x + 1, worth - x, 1 - tail)) if x < worth else 1.0
    return low, high


def overkill_and_escape(
    scores: ArrayLike, labels: ArrayLike, threshold: float, groups: ArrayLike | None = None
) -> Decisions:
    """Rate of good images rejected and of defective images passed, with counts and intervals.

    Args:
        scores: (n,) finite, any range; rejected when score > threshold.
        labels: (n,) bool or 0/1, 1 = defective.
        threshold: a number; infinity rejects nothing or everything, NaN is a SettingsError.
        groups: (n,) number of the group of each; each image is a group of its own where None.
    """
    if math.isnan(threshold):
        raise SettingsError("the decision threshold is NaN")
    values, defective = checked_scores(scores, labels)
    members = group_members(groups, len(values))
    rejected = values > threshold
    bad = int(np.count_nonzero(defective))
    good = len(values) - bad
    false_rejects = int(np.count_nonzero(rejected & ~defective))
    misses = int(np.count_nonzero(~rejected & defective))
    return Decisions(
        good_groups=len(np.unique(members[~defective])),
        defective_groups=len(np.unique(members[defective])),
        overkill_interval=rate_interval(rejected[~defective], members[~defective])
        if good
        else None,
        escape_interval=rate_interval(~rejected[defective], members[defective]) if bad else None,
        overkill=Measure(false_rejects / good) if good else Measure(None, "no good image"),
        escape=Measure(misses / bad) if bad else Measure(None, "no defective image"),
        good=good,
        false_rejects=false_rejects,
        defective=bad,
        misses=misses,
    )


def _bins_of(probabilities: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    """(n,) the bin of each; a bin holds its lower edge, the last one also holds 1."""
    edges = np.arange(bins + 1) / bins
    return np.minimum(np.searchsorted(edges, probabilities, "right") - 1, bins - 1)


def group_members(groups: ArrayLike | None, count: int) -> NDArray[np.int64]:
    """(n,) the numbers of groups, from 0 on without gaps; DataError where they are not n."""
    if groups is None:
        return np.arange(count)
    members = np.asarray(groups)
    if members.shape != (count,):
        raise DataError(f"{count} scores but groups of shape {members.shape}")
    found: NDArray[np.int64] = np.unique(members, return_inverse=True)[1].reshape(-1)
    return found
