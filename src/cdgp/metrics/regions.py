"""AUPRO: how much of each defect region is found before too much normal surface is marked."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from cdgp.errors import SettingsError
from cdgp.metrics.ranking import (
    NO_MARKED,
    NO_UNMARKED,
    BoolArray,
    FloatArray,
    Measure,
    checked_maps,
)

_SAMPLE = 1 << 18  # pixels drawn to guess where to cut
_EVERYTHING = np.float16(-np.inf)  # the narrowest type, so that comparing widens no map


def aupro(
    maps: Sequence[FloatArray],
    masks: Sequence[NDArray[Any]],
    limits: Sequence[float] = (0.3, 0.05),
    names: Sequence[str] | None = None,
) -> dict[float, Measure]:
    r"""Exact area under the per-region overlap curve up to each false-positive limit.

    Lowering the threshold over all distinct scores draws a curve from (0, 0) to (1, 1): across, the
    share of all normal pixels that are marked; up, the marked share of a region, averaged over
    the 8-connected regions of all images. Points are joined by straight lines, and the area up
    to the limit L is divided by L. (Bergmann et al., "The MVTec Anomaly Detection Dataset: A
    Comprehensive Real-World Dataset for Unsupervised Anomaly Detection", IJCV 2021.)

    The area is summed pixel by pixel instead of threshold by threshold. Of N normal pixels, let a
    lie above a defect pixel's score and t be equal to it. The pixel lifts the curve by its weight
    w = 1 / (pixels of its region * regions) on a straight line between a/N and (a + t)/N, so with
    l = max(LN - a, 0) and i = min(l, t)

    .. math:: AUPRO_L = \frac{1}{LN} \sum_{pixels} w \, (l - i + i^2 / 2t).

    A pixel with a >= LN adds nothing, so only the highest LN normal pixels are ever sorted.

    Args:
        maps: anomaly maps, (H, W) each and of any sizes, finite, any range.
        masks: (H, W) each like its map, non-zero = defect; all zero for a normal image.
        limits: false-positive rates in (0, 1].
        names: names of the images, for messages.

    Returns:
        For each limit the value, or the reason 'no marked pixel' or 'no unmarked pixel'.

    Raises:
        SettingsError: there is no limit, or one outside (0, 1].
        DataError: as `ranking.checked_maps`.

    >>> score, mask = np.array([[0.9, 0.1, 0.4]]), np.array([[True, False, False]])
    >>> aupro([score], [mask], limits=[0.3])
    {0.3: Measure(value=1.0, reason=None)}
    """
    if not limits or not all(0 < limit <= 1 for limit in limits):
        raise SettingsError(f"AUPRO limits must lie in (0, 1], got {list(limits)}")
    pairs = checked_maps(maps, masks, names)
    marked = sum(int(np.count_nonzero(mask)) for _, mask in pairs)
    normal = sum(mask.size for _, mask in pairs) - marked
    if not marked or not normal:
        undefined = Measure(None, NO_UNMARKED if marked else NO_MARKED)
        return dict.fromkeys(limits, undefined)

    scores, weights = _defect_pixels(pairs)
    highest = _highest_normal(pairs, normal, max(limits))
    above = highest.size - np.searchsorted(highest, scores, "right")
    tied = highest.size - np.searchsorted(highest, scores, "left") - above
    return {
        limit: Measure(_area(above, tied, weights, limit * normal) / (limit * normal))
        for limit in limits
    }


def _area(
    above: NDArray[np.intp], tied: NDArray[np.intp], weights: NDArray[np.float64], end: float
) -> float:
    """Area under the curve from 0 to `end` normal pixels, the sum of the docstring above."""
    left = np.maximum(end - above, 0.0)
    inside = np.minimum(left, tied)
    return float(weights @ (left - inside + inside**2 / (2 * np.maximum(tied, 1))))


def labelled_regions(mask: BoolArray) -> tuple[NDArray[np.int32], int]:
    """The 8-connected regions of a mask, numbered from 1 in an array of its shape, and how many."""
    labels, count = ndimage.label(mask, structure=np.ones((3, 3)))
    return labels, count


def _defect_pixels(
    pairs: list[tuple[FloatArray, BoolArray]],
) -> tuple[FloatArray, NDArray[np.float64]]:
    """Scores of all marked pixels, ascending, and their weights, which add up to 1."""
    scores, shares, regions = [], [], 0
    for values, mask in pairs:
        if mask.any():
            labels, count = labelled_regions(mask)
            region = labels[mask]
            scores.append(values[mask])
            shares.append(1.0 / np.bincount(region)[region])
            regions += count
    pooled, weights = np.concatenate(scores), np.concatenate(shares) / regions
    order = np.argsort(pooled)  # neighbours in order make later look-ups run through memory
    return pooled[order], weights[order]


def _highest_normal(
    pairs: list[tuple[FloatArray, BoolArray]], normal: int, limit: float
) -> FloatArray:
    """At least the highest `limit * normal` unmarked pixels and all that equal them, ascending.

    A random sample of pixels says where to cut, a little low to be safe; the count afterwards says
    whether that was low enough. So the sample decides how much is sorted, never the result.
    """
    highest = _normal_from(pairs, _probable_cut(pairs, limit))
    if highest.size < limit * normal:
        highest = _normal_from(pairs, _EVERYTHING)
    highest.sort()
    return highest


def _normal_from(pairs: list[tuple[FloatArray, BoolArray]], cut: np.floating[Any]) -> FloatArray:
    """All unmarked pixels with a score of at least `cut`, in no order."""

    def kept(values: FloatArray, mask: BoolArray) -> BoolArray:
        high: BoolArray = values >= cut
        return high & ~mask if mask.any() else high

    # Counted first and then filled in, so that the pixels are never held twice.
    counts = [int(np.count_nonzero(kept(values, mask))) for values, mask in pairs]
    found = np.empty(sum(counts), dtype=np.result_type(*{values.dtype for values, _ in pairs}))
    ends = np.cumsum(counts)
    for (values, mask), count, end in zip(pairs, counts, ends, strict=True):
        found[end - count : end] = values[kept(values, mask)]
    return found


def _probable_cut(pairs: list[tuple[FloatArray, BoolArray]], limit: float) -> np.floating[Any]:
    """A score that, almost surely, at least a share `limit` of the unmarked pixels reach."""
    rng = np.random.default_rng(0)
    share = min(1.0, _SAMPLE / sum(mask.size for _, mask in pairs))
    drawn = []
    for values, mask in pairs:
        picks = rng.integers(0, mask.size, math.ceil(share * mask.size))
        drawn.append(values.ravel()[picks][~mask.ravel()[picks]])
    sample = np.concatenate(drawn)
    # Five standard deviations of a sampled rate, and one pixel, on the safe side.
    rank = limit * sample.size + 5.0 * math.sqrt(limit * (1.0 - limit) * sample.size) + 1.0
    if rank >= sample.size:
        return _EVERYTHING
    place = sample.size - math.ceil(rank)
    cut: np.floating[Any] = np.partition(sample, place)[place]
    return cut
