"""From image evidence to the image score (Eq. 28 and what it grew into), without torch.

Thresholds are set and decisions made by this one path, in float64 and whatever the runtime.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logsumexp

BALANCED = 0.5
"""The defect rate that the logistic is fitted at: both classes count the same."""
PEAK = 100
"""The largest hundredth of a map's positions stands for an image."""
KNEE = 2.0
"""Beyond about so many interquartile ranges of good images an entry counts by its logarithm."""
TIED = 0.01
"""Good images whose log-odds are nearer than this tie in a p-value. Without it the p-value would be
a cliff between two copies of an image, and runtimes would come down on either side."""


class ImageCalibrator(NamedTuple):
    """Image evidence (F entries, see ``network.pool``) to the image score.

    With z = (a - centre) / scale, sigmoid(sum of slope * z over the entries, + intercept) is the
    probability of being defective, for good and defective parts in equal numbers; where
    ``compressed``, ``compress(z)`` takes the place of z. Where no defective image tells what
    evidence a defect has, the score is one minus a p-value, see ``p_value``.
    """

    centre: tuple[float, ...]
    scale: tuple[float, ...]
    slope: tuple[float, ...]
    intercept: float
    notes: tuple[str, ...] = ()
    good_groups: int = 0
    """Number of good parts (groups) that it was fitted on; 0 where that is not known."""
    defective_groups: int = 0
    good_logits: tuple[float, ...] = ()
    """Sorted log-odds of the good calibration images, where no defective image is among these."""
    compressed: bool = False
    """As the entries of one branch alone (the paper) are not."""

    @property
    def is_p_value(self) -> bool:
        """Whether the score is one minus a p-value, and no probability."""
        return bool(self.good_logits)

    @property
    def score_kind(self) -> str:
        """What the score is: "probability" or "p-value"."""
        return "p-value" if self.is_p_value else "probability"

    @property
    def rests_on_one(self) -> bool:
        """Whether a class has a single part: then no digit of a probability is certain."""
        return 1 in (self.good_groups, self.defective_groups)


def pool_maps(
    maps: NDArray[np.float32], sharpness: float, image_evidence: str
) -> NDArray[np.float32]:
    """``network.pool`` of one image: maps (M, h, w), dominance, if any, and residual, to (1, F)."""
    *tuned, residual = maps.reshape(len(maps), -1).astype(np.float64)
    found = [(logsumexp(sharpness * m) - math.log(m.size)) / sharpness for m in tuned]
    if image_evidence == "all" or not tuned:
        share = (residual.size + PEAK - 1) // PEAK
        found.append(np.partition(residual, -share)[-share:].mean())
    return np.array([found], np.float32)


def image_logit(pooled: Any, calibrator: ImageCalibrator) -> Any:
    """Image evidence (B, F) to the log-odds (B,) of being defective, at equal numbers of both.

    An array of NumPy gives one of NumPy, a tensor a tensor.
    """
    c = calibrator
    shape = compress if c.compressed else lambda z: z
    entries = zip(c.centre, c.scale, c.slope, strict=True)
    first, *more = (k * shape((pooled[:, i] - m) / s) for i, (m, s, k) in enumerate(entries))
    return sum(more, start=first) + c.intercept


def compress(z: Any) -> Any:
    """KNEE asinh(z / KNEE) of numbers of NumPy or a tensor: z near 0, its logarithm far out.

    Evidence of defects has a heavy tail. In a linear logistic the few images far out pay for a
    small slope, and the many near the good ones are told apart no more.
    """
    scaled = z / KNEE
    return KNEE * (scaled.arcsinh() if hasattr(scaled, "arcsinh") else np.arcsinh(scaled))


def rate_shift(defect_rate: float) -> float:
    """What a defect rate adds to log-odds that refer to equal numbers: logit(rate) - logit(1/2).

    Bayes' rule with another prior (Saerens, Latinne and Decaestecker, "Adjusting the outputs of a
    classifier to new a priori probabilities", Neural Computation 14, 2002).
    """
    return math.log(defect_rate / (1 - defect_rate))


def image_score(
    pooled: ArrayLike, calibrator: ImageCalibrator, defect_rate: float = BALANCED
) -> NDArray[np.float64]:
    """Image evidence (B, F) to the probability of being defective, or 1 - p, in float64, (B,).

    Decisions are made at equal numbers of both classes, so that an image whose score is the
    threshold stays on its good side at any defect rate. A p-value does not depend on the rate.
    """
    logit = image_logit(np.asarray(pooled, np.float64), calibrator)
    if calibrator.is_p_value:
        return 1 - p_value(logit, conformal_table(calibrator.good_logits))
    score: NDArray[np.float64] = expit(logit + rate_shift(defect_rate))
    return score


class ConformalTable(NamedTuple):
    """What a p-value is read off; of n good images."""

    logits: NDArray[np.float64]
    """(k,) their log-odds, sorted, each once."""
    values: NDArray[np.float64]
    """(k,) (1 + number of good images at least as odd) / (n + 1), falling."""
    least: float
    """1 / (n + 1)."""
    spread: float
    """Of the log-odds, at least 1."""


def conformal_table(good_logits: Sequence[float]) -> ConformalTable:
    """The table of n good images' log-odds; those that tie take the largest of them."""
    every = np.sort(np.asarray(good_logits, np.float64))
    ends = [every[-1]]
    for u in every[::-1]:
        if ends[-1] - u >= TIED:
            ends.append(u)
    logits = np.array(ends[::-1])
    above = len(every) - np.searchsorted(every, logits, side="right")
    least = 1 / (len(every) + 1)
    values = least * (1 + np.array([len(every), *above[:-1]]))
    return ConformalTable(logits, values, least, max(float(logits[-1] - logits[0]), 1.0))


def p_value(logit: NDArray[np.float64], table: ConformalTable) -> NDArray[np.float64]:
    """Conformal p-value of images' log-odds (B,), (B,) in (0, 1].

    Never below (1 + number of good images at least as odd) / (n + 1), so for an image that is
    exchangeable with the n good ones P(p <= alpha) <= alpha (Vovk, Gammerman and Shafer,
    "Algorithmic learning in a random world", 2005). At the table's log-odds it is equal to that; in
    between it is linear, and beyond the largest it falls towards 1 / (n + 1), so that it ranks
    images that would tie.
    """
    inside = np.interp(logit, table.logits, table.values)
    beyond = (logit - table.logits[-1]).clip(0) / table.spread
    found: NDArray[np.float64] = table.least + (inside - table.least) * np.exp(-beyond)
    return found
