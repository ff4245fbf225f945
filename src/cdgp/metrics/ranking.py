"""How well scores rank defects above normal surface: AUROC over images and over pixels.

Both are the Mann-Whitney statistic, P(score of a defect > score of a normal one) + P(equal)/2,
computed exactly: only the order of the scores counts, so they need no range and no scaling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cdgp.errors import DataError

FloatArray = NDArray[np.floating[Any]]
BoolArray = NDArray[np.bool_]

NO_MARKED = "no marked pixel"
NO_UNMARKED = "no unmarked pixel"


@dataclass(frozen=True)
class Measure:
    """The value of a metric, or the reason why it has none: exactly one of the two is None."""

    value: float | None
    reason: str | None = None

    def __post_init__(self) -> None:
        if (self.value is None) == (self.reason is None):
            raise ValueError("a Measure has either a value or a reason")


def image_auroc(
    scores: ArrayLike, labels: ArrayLike, *, names: Sequence[str] | None = None
) -> Measure:
    """Area under the ROC curve over images; ties count one half.

    Args:
        scores: (n,) finite, any range, higher means more defective.
        labels: (n,) bool or 0/1, 1 = defective.
        names: (n,) names of the images, for messages.

    Raises:
        DataError: a score is not finite, a label is neither 0 nor 1, or lengths differ.

    >>> image_auroc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
    Measure(value=0.75, reason=None)
    >>> image_auroc([0.1, 0.2], [1, 1])
    Measure(value=None, reason='no good image')
    """
    values, defective = checked_scores(scores, labels, names)
    if not defective.any():
        return Measure(None, "no defective image")
    if defective.all():
        return Measure(None, "no good image")
    positive, negative = np.sort(values[defective]), np.sort(values[~defective])
    wins = _twice_won(positive, negative)
    return Measure(wins / (2.0 * positive.size * negative.size))


def pixel_auroc(
    maps: Sequence[FloatArray], masks: Sequence[NDArray[Any]], names: Sequence[str] | None = None
) -> Measure:
    """Area under the ROC curve over all pixels of all images together; ties count one half.

    Args:
        maps: anomaly maps, (H, W) each and of any sizes, finite, any range.
        masks: (H, W) each like its map, non-zero = defect; all zero for a normal image.
        names: names of the images, for messages.
    """
    pairs = checked_maps(maps, masks, names)
    marked = [values[mask] for values, mask in pairs if mask.any()]
    if not marked:
        return Measure(None, NO_MARKED)
    if all(mask.all() for _, mask in pairs):
        return Measure(None, NO_UNMARKED)
    # Only the marked pixels are held together; each image's others are counted against them.
    positive = np.sort(np.concatenate(marked))
    wins = unmarked = 0
    for values, mask in pairs:
        negative = np.sort(values[~mask] if mask.any() else values.ravel())
        wins += _twice_won(positive, negative)
        unmarked += negative.size
    return Measure(wins / (2.0 * positive.size * unmarked))


def checked_scores(
    scores: ArrayLike, labels: ArrayLike, names: Sequence[str] | None = None
) -> tuple[NDArray[np.float64], BoolArray]:
    """Scores (n,) as float64 and labels (n,) as bool, or DataError saying which one is unfit."""
    values, classes = np.asarray(scores, dtype=np.float64), np.asarray(labels)
    if values.ndim != 1 or values.shape != classes.shape:
        raise DataError(
            f"scores and labels must be lists of one length; shapes {values.shape}, {classes.shape}"
        )
    if names is not None and len(names) != len(values):
        raise DataError(f"{len(values)} scores but {len(names)} names")
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise DataError(f"{_name(names, bad[0])}: score at index {bad[0]} is {values[bad[0]]}")
    odd = np.flatnonzero((classes != 0) & (classes != 1))
    if odd.size:
        raise DataError(
            f"{_name(names, odd[0])}: label at index {odd[0]} is {classes[odd[0]]!s}, not 0 or 1"
        )
    return values, classes.astype(bool)


def checked_maps(
    maps: Sequence[FloatArray], masks: Sequence[NDArray[Any]], names: Sequence[str] | None = None
) -> list[tuple[FloatArray, BoolArray]]:
    """Map and mask of each image, (H, W) float and (H, W) bool; nothing is copied that fits.

    Raises:
        DataError: the numbers of maps, masks and names differ, a map is not (H, W) or is empty,
            its mask has another shape, or it holds NaN or infinity. The message begins with
            the image's name.
    """
    if len(maps) != len(masks) or (names is not None and len(names) != len(maps)):
        counts = f"{len(maps)} maps, {len(masks)} masks"
        raise DataError(counts if names is None else f"{counts}, {len(names)} names")
    pairs = []
    for index, (values, mask) in enumerate(zip(maps, masks, strict=True)):
        values, mask = np.asarray(values), np.asarray(mask, dtype=bool)
        if values.ndim != 2 or values.shape != mask.shape or not values.size:
            raise DataError(
                f"{_name(names, index)}: map {values.shape} and mask {mask.shape} must be (H, W), "
                "alike and not empty"
            )
        finite = np.count_nonzero(np.isfinite(values))
        if finite < values.size:
            raise DataError(
                f"{_name(names, index)}: the map has {values.size - finite} non-finite pixels"
            )
        pairs.append((values, mask))
    return pairs


def _name(names: Sequence[str] | None, index: int) -> str:
    return f"image {index}" if names is None else names[index]


def _twice_won(positive: FloatArray, negative: FloatArray) -> int:
    """Pairs in which the positive is higher, twice, and equal pairs, once; both sorted."""
    # Neighbours in order make these look-ups run through memory.
    wins = np.searchsorted(negative, positive, "left").sum(dtype=np.int64)
    wins += np.searchsorted(negative, positive, "right").sum(dtype=np.int64)
    return int(wins)
