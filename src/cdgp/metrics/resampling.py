"""Paired comparison on one set of images: a bootstrap over groups, the same draws for both sides.

Images of one part (a group) resemble each other, so whole groups are drawn with replacement.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdgp.metrics.ranking import BoolArray
from cdgp.metrics.reliability import CONFIDENCE

Array = NDArray[np.float64]
DRAWS = 2000
BLOCK = 4_000_000
"""So many weights are worked on at a time, to bound the memory."""


class Difference(NamedTuple):
    """A metric of one side minus that of the other, on the same images."""

    value: float
    low: float
    high: float
    """Ends of the 95 % percentile interval: of which test images were drawn, not of training."""
    draws: int
    """In which the metric is defined."""


def group_draws(groups: Sequence[str] | Sequence[int], draws: int = DRAWS, seed: int = 0) -> Array:
    """(B, n) how often each image is drawn, where whole groups are drawn with replacement."""
    names, place = np.unique(np.asarray(groups), return_inverse=True)
    count = len(names)
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=draws)
    weights: Array = drawn[:, place.reshape(-1)].astype(np.float64)
    return weights


def drawn_auroc(scores: Array, defective: BoolArray, weights: Array) -> Array:
    """(B,) image AUROC of each draw, ties counted one half; NaN where a draw lacks a class.

    Args:
        scores: (n,) finite.
        defective: (n,).
        weights: (B, n) whole numbers, how often each image is drawn.
    """
    level = np.unique(scores, return_inverse=True)[1].reshape(-1)
    order = np.argsort(level, kind="stable")
    starts = np.flatnonzero(np.diff(level[order], prepend=-1))
    bad = defective[order]
    found = np.empty(len(weights))
    step = max(1, BLOCK // max(1, len(scores)))
    for first in range(0, len(weights), step):
        block = weights[first : first + step, order]
        of_bad = np.add.reduceat(block * bad, starts, axis=1)
        of_good = np.add.reduceat(block * ~bad, starts, axis=1)
        won = (of_bad * (np.cumsum(of_good, axis=1) - of_good / 2)).sum(1)
        with np.errstate(invalid="ignore"):
            found[first : first + step] = won / (of_bad.sum(1) * of_good.sum(1))
    return found


def drawn_rate(events: BoolArray, among: BoolArray, weights: Array) -> Array:
    """(B,) share of the images ``among`` that show an event, of each draw; NaN where it has none.

    ``events`` and ``among`` are (n,), ``weights`` (B, n).
    """
    with np.errstate(invalid="ignore"):
        rates: Array = (weights @ (events & among)) / (weights @ among)
    return rates


def difference_of(value: float, spread: Array) -> Difference | None:
    """A difference on all images with its interval from the draws, where they are defined.

    ``value`` may be NaN, and so may some of ``spread`` (B,); None where there is nothing to tell.
    """
    defined = spread[~np.isnan(spread)]
    if np.isnan(value) or not defined.size:
        return None
    low, high = np.percentile(defined, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Difference(float(value), float(low), float(high), defined.size)
