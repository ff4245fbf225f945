"""Paired comparison of methods on one test part: a bootstrap over groups of images.

All methods are measured on the same draws of groups, see `cdgp.metrics.resampling`. Computing the
metrics anew for thousands of draws would take days; a `Profile` holds what each image adds to the
curves at some thousand thresholds, so that a draw is a weighted sum of its rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdgp.metrics.ranking import BoolArray, FloatArray, checked_maps, checked_scores
from cdgp.metrics.regions import labelled_regions
from cdgp.metrics.resampling import Difference, difference_of, drawn_auroc

Array = NDArray[np.float64]
LIMITS = {"pixel_aupro_30": 0.3, "pixel_aupro_05": 0.05}
RATES = np.concatenate(
    [np.linspace(0, 0.05, 1000), np.linspace(0.05, 0.3, 1000)[1:], np.linspace(0.3, 1, 300)[1:]]
)
"""False-positive rates at whose thresholds the curves are kept, dense where AUPRO is measured."""
DETECTION_RATES = np.linspace(0, 1, 700)
"""The same of the share of marked pixels that is found."""


class Profile(NamedTuple):
    """What n images with R regions add to a method's curves at T falling thresholds."""

    normal: Array
    """(n, T) unmarked pixels at or above each threshold; at the last one, all."""
    marked: Array
    """(n, T) marked pixels."""
    regions: Array
    """(R, T) share of each region."""
    image_of: NDArray[np.intp]
    """(R,) whose region it is."""
    area: NDArray[np.intp]
    """(R,) pixels."""
    scores: Array
    """(n,) image scores."""
    defective: BoolArray
    """(n,)."""


def profile(
    maps: Sequence[FloatArray],
    masks: Sequence[NDArray[Any] | None],
    scores: Sequence[float],
    labels: Sequence[bool],
) -> Profile:
    """The curves of each image.

    Where there are no more distinct scores than thresholds, the curves are exact; otherwise they
    are taken at quantiles of the scores and joined by straight lines.

    Args:
        maps: anomaly maps, (H, W) each and of any sizes, finite.
        masks: (H, W) each like its map, non-zero = defect; None keeps an image out of the pixel
            metrics.
        scores: (n,) image scores, finite.
        labels: (n,) whether an image is defective.
    """
    values, defective = checked_scores(scores, labels)
    inside = [index for index, mask in enumerate(masks) if mask is not None]
    chosen = [np.asarray(masks[index]) for index in inside]
    pairs = checked_maps([maps[index] for index in inside], chosen)
    cuts = _thresholds(pairs)
    normal, marked = np.zeros((2, len(values), len(cuts)))
    regions, image_of, area = [], [], []
    for index, (anomaly_map, mask) in zip(inside, pairs, strict=True):
        normal[index] = _reaching(anomaly_map[~mask], cuts)
        marked[index] = _reaching(anomaly_map[mask], cuts)
        labels_of, count = labelled_regions(mask)
        for region in range(1, count + 1):
            found = anomaly_map[labels_of == region]
            regions.append(_reaching(found, cuts) / found.size)
            image_of.append(index)
            area.append(found.size)
    curves = np.array(regions).reshape(-1, len(cuts))
    places, areas = np.array(image_of, dtype=np.intp), np.array(area, dtype=np.intp)
    return Profile(normal, marked, curves, places, areas, values, defective)


def _thresholds(pairs: Sequence[tuple[FloatArray, BoolArray]]) -> FloatArray:
    """Falling, from the highest score to the lowest; a single zero where there is no map."""
    if not pairs:
        return np.zeros(1)
    normal = np.sort(np.concatenate([values[~mask] for values, mask in pairs]))
    marked = np.sort(np.concatenate([values[mask] for values, mask in pairs]))
    every = np.unique(np.concatenate([np.unique(normal), np.unique(marked)]))
    if len(every) > len(RATES) + len(DETECTION_RATES):
        picked = [
            scores[np.rint((1 - rates) * (scores.size - 1)).astype(np.intp)]
            for scores, rates in ((normal, RATES), (marked, DETECTION_RATES))
            if scores.size
        ]
        every = np.unique(np.concatenate([*picked, every[[0, -1]]]))
    return every[::-1]


def _reaching(values: FloatArray, cuts: FloatArray) -> Array:
    """(T,) how many values lie at or above each threshold."""
    below = np.searchsorted(np.sort(values), cuts, "left")
    reaching: Array = (values.size - below).astype(np.float64)
    return reaching


def weighted_metrics(found: Profile, weights: Array) -> dict[str, Array]:
    """Image AUROC, pixel AUROC and AUPRO for each of B draws, (B,) by metric.

    ``weights`` (B, n) say how often each image was drawn; a draw that lacks what a metric needs
    gives NaN.
    """
    start = np.zeros((len(weights), 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        normal = weights @ found.normal
        marked = weights @ found.marked
        of_region = weights[:, found.image_of]
        overlap = of_region @ found.regions / of_region.sum(1, keepdims=True)
        rates = np.hstack([start, normal / normal[:, -1:]])
        metrics = {
            "image_auroc": drawn_auroc(found.scores, found.defective, weights),
            "pixel_auroc": _area(rates, np.hstack([start, marked / marked[:, -1:]]), 1.0),
        }
        metrics |= {
            name: _area(rates, np.hstack([start, overlap]), limit) / limit
            for name, limit in LIMITS.items()
        }
    return metrics


def _area(rates: Array, heights: Array, limit: float) -> Array:
    """(B,) area under straight lines through (B, T) points, from 0 to ``limit``."""
    left, right = np.minimum(rates[:, :-1], limit), np.minimum(rates[:, 1:], limit)
    width = np.diff(rates)
    share = np.divide(right - rates[:, :-1], width, out=np.zeros_like(width), where=width > 0)
    end = heights[:, :-1] + share * np.diff(heights)
    area: Array = ((right - left) * (heights[:, :-1] + end) / 2).sum(1)
    return area


def region_areas(found: Profile, limit: float) -> Array:
    """(R,) what each region alone adds to AUPRO: the normalised area under its overlap's curve."""
    normal = found.normal.sum(0)
    rates = np.hstack([0.0, normal / normal[-1]])
    heights = np.hstack([np.zeros((len(found.regions), 1)), found.regions])
    return _area(np.broadcast_to(rates, heights.shape), heights, limit) / limit


class Resampled(NamedTuple):
    """A method's metrics on the whole test part, and on each of B draws."""

    whole: dict[str, float]
    drawn: dict[str, Array]
    """(B,) by metric; NaN where a draw lacks what the metric needs."""


def resampled(found: Profile, weights: Array) -> Resampled:
    """All metrics of one method, with ``weights`` (B, n) from `group_draws`."""
    whole = weighted_metrics(found, np.ones((1, weights.shape[1])))
    return Resampled({k: float(v[0]) for k, v in whole.items()}, weighted_metrics(found, weights))


def averaged(folds: Sequence[Resampled]) -> Resampled:
    """A method's metrics averaged over folds, each on draws of its own groups.

    A draw in which one fold lacks what a metric needs gives NaN.
    """
    names = folds[0].whole.keys()
    return Resampled(
        {name: float(np.mean([fold.whole[name] for fold in folds])) for name in names},
        {name: np.mean([fold.drawn[name] for fold in folds], axis=0) for name in names},
    )


def difference(first: Resampled, second: Resampled, metric: str) -> Difference | None:
    """The first method minus the second on the same draws; undefined ones are left out.

    None where the metric is undefined on a whole test part, or in all draws.
    """
    value = first.whole[metric] - second.whole[metric]
    spread = first.drawn[metric] - second.drawn[metric]
    return difference_of(value, spread)
