"""From evidence to numbers: fusion, normal tail, image probability, final map (Eq. 24-29).

Every fitted quantity is a small named tuple of tensors and floats, so that the model file can hold
it and the inference graph only reads it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize, stats
from scipy.special import expit
from torch import Tensor

from cdgp.errors import TrainingError
from cdgp.method.score import ImageCalibrator, compress

EPSILON = 1e-6
"""The epsilon of the branch standardisation."""
PARETO_QUANTILE = 0.999
"""The peaks-over-threshold fit begins at this quantile of the normal pixels."""
NOT_FINITE = (
    "the pooled evidence of the calibration images is not finite. Likely causes: (a) a learning "
    "rate that is too high for the backbone; (b) a damaged weights file"
)
PRIOR_INTERCEPT = -float(compress(3.0))
"""Log-odds of an image at the median of good ones before any label: three interquartile ranges
above it are as likely defective as not."""
PRIOR_STEPS = 4
"""Standard deviation of the doublings of the fusion weight before any label."""


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


class Calibration(NamedTuple):
    """Everything that the calibration images decide."""

    dominance: BranchStatistics
    residual: BranchStatistics
    tail: NormalTail
    image: ImageCalibrator
    fusion_weight: float
    image_weight: float
    distance: BranchStatistics = BranchStatistics(0.0, 1.0)
    distance_weight: float = 0.0
    dominance_cap: float | None = None
    """In the units of the dominance."""

    @property
    def branches(self) -> tuple[BranchStatistics, ...]:
        """Of dominance, residual and distance."""
        return self.dominance, self.residual, self.distance

    @property
    def weights(self) -> tuple[float, ...]:
        """Of dominance, residual and distance."""
        return branch_weights(self.fusion_weight, self.distance_weight)


def standardise(maps: Tensor, statistics: BranchStatistics) -> Tensor:
    """Z_b(B) = (B - m_b) / (s_b + epsilon)  (text above Eq. 25)."""
    return (maps - statistics.mean) / (statistics.std + EPSILON)


def branch_weights(fusion_weight: float, distance_weight: float) -> tuple[float, ...]:
    """Weights of dominance, residual and distance, from w of Eq. 25 and v, the distance's share."""
    w, v = fusion_weight, distance_weight
    return w, (1 - w) * (1 - v), (1 - w) * v


def fuse(
    maps: Sequence[Tensor | None],
    branches: Sequence[BranchStatistics],
    weights: Sequence[float],
) -> Tensor:
    """U = w Z(G) + (1 - w) [(1 - v) Z(R) + v Z(D)], of maps of one size, those that there are.

    With v = 0 it is Eq. 25.
    """
    terms = [
        weight * standardise(m, statistics)
        for m, statistics, weight in zip(maps, branches, weights, strict=True)
        if m is not None
    ]
    return sum(terms[1:], terms[0])


def chosen_weight(
    peaks: NDArray[np.float64], defective: NDArray[np.bool_], candidates: Sequence[float]
) -> float:
    """The fusion weight under which the map's peak tells labels best, and no larger than needed.

    For each candidate a logistic of the peak is fitted like ``fit_image_evidence``, from a slope of
    one; the least sum of its objective and half the square of (steps from the first candidate) /
    PRIOR_STEPS is chosen. The likelihood counts 2 n_d images, so the first one stays where
    defective images are few or where its peaks already tell them apart.

    Args:
        peaks: (n, candidates) peak of the fused map of images that no stage was trained on.
        defective: (n,) their labels.
        candidates: weights, upwards.
    """
    if not defective.any() or defective.all():
        return candidates[0]
    costs = []
    for step, of_candidate in enumerate(peaks.T):
        centre, scale, _ = _location_and_scale(of_candidate[~defective])
        Z = ((of_candidate - centre) / scale)[:, None]
        costs.append(
            penalised_logistic(Z, defective, np.ones(1))[1] + (step / PRIOR_STEPS) ** 2 / 2
        )
    return candidates[int(np.argmin(costs))]


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
    # A number of the scores' own precision: rounding must not move it past one of them.
    start = float(scores.new_tensor(np.quantile(values, PARETO_QUANTILE)))
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
        raise TrainingError(NOT_FINITE)
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
    return ImageCalibrator((centre,), (scale,), (slope,), intercept, tuple(notes))


def fit_image_evidence(
    evidence: NDArray[np.float64], defective: NDArray[np.bool_], has_dominance: bool
) -> ImageCalibrator:
    """One image score from no defect to many: a penalised logistic that starts as one-class.

    Entries are standardised by median and interquartile range of good images and compressed. With
    weights that give the n_d defective images and all good ones n_d each, it minimises

        sum_i w_i log(1 + exp(-y_i f_i)) + |slope - prior|^2 / 2,    slope >= 0,

    so that with few defects the slopes stay at the prior, which weighs what good images alone give
    and no dominance, and with many they follow the labels. Without any, they are the prior.

    Args:
        evidence: (n, F) image evidence of images that no stage was trained on.
        defective: (n,) their labels.
        has_dominance: whether the first entry is the pooled dominance.

    Raises:
        TrainingError: no good image, or evidence that is not finite.
    """
    if not (~defective).any():
        raise TrainingError("no good calibration image: the image score cannot be fitted")
    if not np.isfinite(evidence).all():
        raise TrainingError(NOT_FINITE)
    F = evidence.shape[1]
    fitted = [_location_and_scale(evidence[~defective, entry]) for entry in range(F)]
    centre, scale = np.array([f[0] for f in fitted]), np.array([f[1] for f in fitted])
    notes = list(dict.fromkeys(note for f in fitted for note in f[2]))
    Z = compress((evidence - centre) / scale)
    prior = prior_slopes(F, has_dominance)
    slope, intercept, good = prior, PRIOR_INTERCEPT, np.sort(Z @ prior + PRIOR_INTERCEPT)
    if defective.any():
        found, _ = penalised_logistic(Z, defective, prior)
        slope, intercept, good = found[:F], float(found[F]), good[:0]
    if int(defective.sum()) == 1:
        notes.append("the probability rests on a single defective calibration image")
    numbers = (tuple(float(v) for v in values) for values in (centre, scale, slope, good))
    centres, scales, slopes, logits = numbers
    return ImageCalibrator(
        centres, scales, slopes, intercept, tuple(notes), good_logits=logits, compressed=True
    )


def penalised_logistic(
    Z: NDArray[np.float64], defective: NDArray[np.bool_], prior: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """The minimum of ``fit_image_evidence``'s objective: slopes (F,) and the intercept, its value.

    Z is (n, F), standardised and, of image evidence, compressed; both labels must occur.
    """
    F = Z.shape[1]
    n_d = int(defective.sum())
    weight = np.where(defective, 1.0, n_d / int((~defective).sum()))
    sign = np.where(defective, 1.0, -1.0)

    def objective(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        slope, intercept = values[:F], values[F]
        margin = sign * (Z @ slope + intercept)
        pull = -weight * sign * expit(-margin)
        loss = float(weight @ np.logaddexp(0, -margin) + np.square(slope - prior).sum() / 2)
        return loss, np.append(Z.T @ pull + slope - prior, pull.sum())

    bounds = [(0, None)] * F + [(None, None)]
    start = np.append(prior, PRIOR_INTERCEPT)
    found = optimize.minimize(objective, start, jac=True, bounds=bounds, options={"ftol": 1e-12})
    return found.x, float(found.fun)


def prior_slopes(count: int, has_dominance: bool) -> NDArray[np.float64]:
    """Slopes before any label: none for the dominance, a third for the residual, the rest for the
    distance; all for the residual where there is no distance.
    """
    alone = count - has_dominance
    one_class = {0: [], 1: [1.0], 2: [1 / 3, 2 / 3]}[alone]
    return np.array([0.0] * has_dominance + one_class)


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


def final_map(P: Tensor, logit: Tensor, image_weight: float) -> Tensor:
    """S = P + lambda_I log p_A, of (n, H, W) and (n,)  (Eq. 29)."""
    # Not functional.logsigmoid: exported, it is the log of a sigmoid, in onnxruntime 0 below -18.
    log_p = logit.clamp_max(0) - torch.log1p(torch.exp(-logit.abs()))
    return P + image_weight * log_p[:, None, None]
