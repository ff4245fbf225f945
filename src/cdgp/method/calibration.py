"""From evidence to numbers: fusion, normal tail, image probability, final map (Eq. 24-29).

Every fitted quantity is a small named tuple of tensors and floats, so that the model file can hold
it and the inference graph only reads it.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor
from torch.nn import functional

from cdgp.errors import TrainingError

EPSILON = 1e-6
"""The epsilon of the branch standardisation."""
PARETO_QUANTILE = 0.999
"""The peaks-over-threshold fit begins at this quantile of the normal pixels."""
BALANCED = 0.5
"""The defect rate that the logistic is fitted at: both classes count the same."""


class BranchStatistics(NamedTuple):
    """Location and scale of one spatial branch over normal calibration pixels."""

    mean: float
    std: float


class NormalTail(NamedTuple):
    """Upper tail of the fused normal scores.

    ``scores`` are sorted upwards. Where ``shape`` is NaN the tail is counted; otherwise it is a
    generalised Pareto distribution above ``start``, which keeps the order of scores beyond the
    largest normal one.
    """

    scores: Tensor
    start: float
    shape: float
    scale: float
    floor: float


class ImageCalibrator(NamedTuple):
    """Pooled dominance to probability: sigmoid(slope * (a - centre) / scale + intercept).

    The probability refers to good and defective parts in equal numbers.
    """

    centre: float
    scale: float
    slope: float
    intercept: float
    notes: tuple[str, ...] = ()
    good_groups: int = 0
    """Number of good parts (groups) that it was fitted on; 0 where that is not known."""
    defective_groups: int = 0

    @property
    def rests_on_one(self) -> bool:
        """Whether a class has a single part: then no digit of a probability is certain."""
        return 1 in (self.good_groups, self.defective_groups)


class Calibration(NamedTuple):
    """Everything that the calibration images decide."""

    dominance: BranchStatistics
    residual: BranchStatistics
    tail: NormalTail
    image: ImageCalibrator
    fusion_weight: float
    image_weight: float


def standardise(maps: Tensor, statistics: BranchStatistics) -> Tensor:
    """Z_b(B) = (B - m_b) / (s_b + epsilon)  (text above Eq. 25)."""
    return (maps - statistics.mean) / (statistics.std + EPSILON)


def fuse(
    dominance: Tensor,
    residual: Tensor,
    dominance_statistics: BranchStatistics,
    residual_statistics: BranchStatistics,
    weight: float,
) -> Tensor:
    """U = w Z(G) + (1 - w) Z(R), of maps of one size (Eq. 25)."""
    return weight * standardise(dominance, dominance_statistics) + (1 - weight) * standardise(
        residual, residual_statistics
    )


def fit_tail(scores: Tensor, tail: str, floor: float) -> NormalTail:
    """The normal tail from sorted scores; ``tail`` is ``counting`` or ``pareto``.

    Raises:
        TrainingError: no scores, or scores that are not finite.
    """
    if not len(scores) or not bool(torch.isfinite(scores).all()):
        raise TrainingError(
            "the fused scores of the normal calibration images are not finite. Likely causes: "
            "(a) a learning rate that is too high for the backbone; (b) a damaged weights file"
        )
    if tail == "counting":
        return NormalTail(scores, math.nan, math.nan, math.nan, floor)
    values = scores.double().numpy()
    start = float(np.quantile(values, PARETO_QUANTILE))
    excess = values[values > start] - start
    if len(excess) < 10:
        # Too few peaks to fit a shape: an exponential tail, whose scale is the mean excess.
        shape, scale = 0.0, float(excess.mean()) if len(excess) else float(values.std() + EPSILON)
    else:
        shape, _, scale = (float(v) for v in stats.genpareto.fit(excess, floc=0))
        if shape < 0:
            # A negative shape ends the tail at a finite score and would tie what lies beyond.
            shape, scale = 0.0, float(excess.mean())
    return NormalTail(scores, start, shape, scale, floor)


def log_tail_probability(fused: Tensor, tail: NormalTail) -> Tensor:
    """log of the finite-sample upper-tail probability of each fused score (Eq. 26)."""
    count = len(tail.scores)
    above = count - torch.searchsorted(tail.scores, fused.contiguous(), right=True)
    counted = torch.log((1 + above) / (count + 1))
    if math.isnan(tail.shape):
        return counted
    excess = (fused - tail.start).clamp_min(0)
    if tail.shape == 0:
        log_survival = -excess / tail.scale
    else:
        log_survival = -torch.log1p(tail.shape * excess / tail.scale) / tail.shape
    at_start = int((tail.scores > tail.start).sum())
    beyond = math.log((1 + at_start) / (count + 1)) + log_survival
    return torch.where(fused > tail.start, beyond, counted)


def surprisal(fused: Tensor, tail: NormalTail) -> Tensor:
    """P = -log max(p, e^-floor), at least 0 (Eq. 27); a fitted tail is not floored."""
    P = -log_tail_probability(fused, tail)
    return P.clamp_max(tail.floor) if math.isnan(tail.shape) else P


def fit_image_calibrator(
    scores: NDArray[np.float64], defective: NDArray[np.bool_], C: float
) -> ImageCalibrator:
    """Standardise by the normal median and interquartile range, then a logistic with slope >= 0.

    The logistic is scikit-learn's with balanced class weights: it minimises
    slope^2 / 2 + C * sum_i w_i log(1 + exp(-y_i f_i)), the intercept without penalty. A negative
    slope becomes 0; the objective is convex, so that is its minimum under slope >= 0, and balanced
    weights then give an intercept of 0.

    ``notes`` names the degenerate cases: no spread of the normal scores, a slope of 0 (every image
    gets the same probability), and a single defective image.

    Args:
        scores: (n,) pooled dominance of the calibration images.
        defective: (n,) their labels; both classes must occur.
        C: inverse strength of the penalty.

    Raises:
        TrainingError: a class is missing, or scores that are not finite.
    """
    from sklearn.linear_model import LogisticRegression  # training alone needs it

    normal = scores[~defective]
    if not len(normal) or len(normal) == len(scores):
        missing = "good" if not len(normal) else "defective"
        raise TrainingError(f"no {missing} calibration image: the probability cannot be fitted")
    if not np.isfinite(scores).all():
        raise TrainingError(
            "the pooled evidence of the calibration images is not finite. Likely causes: (a) a "
            "learning rate that is too high for the backbone; (b) a damaged weights file"
        )
    centre, scale, notes = _location_and_scale(normal)
    logistic = LogisticRegression(C=C, class_weight="balanced", tol=1e-10, max_iter=10_000)
    logistic.fit(((scores - centre) / scale)[:, None], defective)
    slope, intercept = float(logistic.coef_[0, 0]), float(logistic.intercept_[0])
    if slope <= 0:
        slope = intercept = 0.0
        notes.append(
            "the slope of the image calibration is at its bound of zero: on calibration images "
            "the evidence does not rise with the label, so every image gets the same probability"
        )
    if int(defective.sum()) == 1:
        notes.append("the probability rests on a single defective calibration image")
    return ImageCalibrator(centre, scale, slope, intercept, tuple(notes))


def _location_and_scale(normal: NDArray[np.float64]) -> tuple[float, float, list[str]]:
    """Median and interquartile range; where that is 0, the standard deviation, then 1, noted."""
    centre = float(np.median(normal))
    scale = float(np.subtract(*np.percentile(normal, [75, 25])))
    least = EPSILON * max(1.0, abs(centre))
    if scale > least:
        return centre, scale, []
    scale = float(normal.std())
    scale = scale if scale > least else 1.0
    return (
        centre,
        scale,
        [
            "the scores of the good calibration images have no spread (interquartile range 0): "
            f"they were scaled by {scale:.3g} instead"
        ],
    )


def image_logit(pooled: Tensor, calibrator: ImageCalibrator) -> Tensor:
    """Pooled dominance a(x) to the log-odds of being defective, at equal numbers of both."""
    return calibrator.slope * (pooled - calibrator.centre) / calibrator.scale + calibrator.intercept


def rate_shift(defect_rate: float) -> float:
    """What a defect rate adds to log-odds that refer to equal numbers: logit(rate) - logit(1/2).

    Bayes' rule with another prior (Saerens, Latinne and Decaestecker, "Adjusting the outputs of a
    classifier to new a priori probabilities", Neural Computation 14, 2002).
    """
    return math.log(defect_rate / (1 - defect_rate))


def image_probability(
    pooled: Tensor, calibrator: ImageCalibrator, defect_rate: float = BALANCED
) -> Tensor:
    """Pooled dominance a(x) to the probability of being defective, in float64.

    Thresholds are set and decisions made by this one path and at equal numbers of both classes, so
    that an image whose score is the threshold stays on its good side at any defect rate.
    """
    return torch.sigmoid(image_logit(pooled, calibrator).double() + rate_shift(defect_rate))


def final_map(P: Tensor, logit: Tensor, image_weight: float) -> Tensor:
    """S = P + lambda_I log p_A, of (n, H, W) and (n,)  (Eq. 29)."""
    return P + image_weight * functional.logsigmoid(logit)[:, None, None]
