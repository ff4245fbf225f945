"""Whether image scores that are probabilities mean what they say, over all folds of a plan."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from cdgp.metrics.ranking import BoolArray
from cdgp.metrics.reliability import at_rate, rate_interval
from cdgp_bench.grid import Variant
from cdgp_bench.results import Results
from cdgp_bench.scoring import SCORED_RATE

BINS = 10


class ImageScores(NamedTuple):
    """P(defective) of all n images of a data set, each by the model that has not seen it."""

    probability: NDArray[np.float64]
    """(n,), at the set's own share of defective images."""
    defective: BoolArray
    """(n,)."""
    group: NDArray[np.int64]
    """(n,) number of the group of each."""


class Bin(NamedTuple):
    """Images of similar probability."""

    mean: float
    """Of the probability."""
    rate: float
    """Share that is defective."""
    low: float
    high: float
    """Ends of its 95 % interval, which knows groups."""
    images: int


def pooled_scores(results: Results, dataset: str, variant: Variant) -> ImageScores | None:
    """Image scores of all folds; None where they are no probabilities, or some are missing."""
    rows = results.rows_of(dataset, variant)
    planned = results.plan.planned.number * len(results.categories[dataset])
    if len(rows) < planned or not all({"image_ece", "images"} <= row.keys() for row in rows):
        return None
    _, number, defective, score = zip(*(i for row in rows for i in row["images"]), strict=True)
    part = [place for place, row in enumerate(rows) for _ in row["images"]]
    # A group lies in one fold, and its number counts within that fold.
    pairs = np.column_stack([part, number])
    group = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    labels = np.array(defective, dtype=np.bool_)
    told = at_rate(np.array(score), SCORED_RATE, float(labels.mean()))
    return ImageScores(told, labels, group)


def reliability(found: ImageScores) -> list[Bin]:
    """Predicted against observed rate of defects, in ten bins with equal numbers of images."""
    place = equal_count_bins(found.probability, BINS)
    bins = []
    for index in np.unique(place):
        inside = place == index
        events = found.defective[inside]
        low, high = rate_interval(events, found.group[inside])
        mean = float(found.probability[inside].mean())
        bins.append(Bin(mean, float(events.mean()), low, high, int(inside.sum())))
    return bins


def equal_count_bins(values: ArrayLike, bins: int) -> NDArray[np.int64]:
    """(n,) the bin of each value, rising from 0; equal values share one, so that some may be empty.

    >>> equal_count_bins([0.9, 0.1, 0.5, 0.7], 2).tolist()
    [1, 0, 0, 1]
    >>> equal_count_bins([0.0, 0.0, 0.0, 1.0], 2).tolist()
    [0, 0, 0, 1]
    """
    ranks = rankdata(values)  # equal values have their mean rank
    return np.asarray((ranks - 0.5) * bins / len(ranks), dtype=np.int64)
