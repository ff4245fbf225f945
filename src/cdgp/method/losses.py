"""The three losses of the Dual GP (Eq. 13-19)."""

import torch
from torch import Tensor
from torch.nn import functional

from cdgp.method.gp import Moments

TOP_SHARE = 0.05
"""Share of an image's tokens that the ``top`` pooling averages."""


def log_mean_exp(values: Tensor, sharpness: float) -> Tensor:
    """(1/r) log mean exp(r v) over the last dimension (Eq. 28)."""
    largest = values.amax(-1, keepdim=True)
    # A mean and no logarithm of a count, which an exported graph of free size would freeze.
    return largest[..., 0] + (sharpness * (values - largest)).exp().mean(-1).log() / sharpness


def top_mean(values: Tensor, count: int) -> Tensor:
    """Mean of the ``count`` largest values over the last dimension."""
    return values.topk(count, dim=-1).values.mean(-1)


def bag_margin(margins: Tensor, pooling: str, sharpness: float) -> Tensor:
    """Token margins (B, N) to one margin an image, (B,).

    ``max`` is Eq. 14; ``logsumexp`` pools as inference does (Eq. 28); ``top`` is the mean of the
    largest 5 %.
    """
    if pooling == "max":
        return margins.amax(-1)
    if pooling == "logsumexp":
        return log_mean_exp(margins, sharpness)
    return top_mean(margins, max(1, round(TOP_SHARE * margins.shape[-1])))


def mil_loss(bag_margins: Tensor, defective: Tensor, margin: float) -> Tensor:
    """Max-margin multiple-instance loss of bag margins (B,), mean over images (Eq. 15)."""
    loss = torch.where(defective, margin - bag_margins, bag_margins)
    return loss.clamp_min(0).mean()


def mean_loss(margins: Tensor, defective: Tensor, logit: Tensor | None) -> Tensor:
    """Cross entropy of log-odds scale * mean + bias of token margins (B, N), mean over images.

    ``logit`` is (scale, bias); None gives 0. The maximum of Eq. 14 has a gradient at one token of
    an image; the mean has one at all of them.
    """
    if logit is None:
        return margins.new_zeros(())
    log_odds = logit[0] * margins.mean(-1) + logit[1]
    return functional.binary_cross_entropy_with_logits(log_odds, defective.to(margins.dtype))


def normalised_evidence(
    moments: Moments, epsilon: float, floor: float, sigma_gradient: bool
) -> Tensor:
    """mu / (sigma + epsilon) (Eq. 16); the variance is floored so that its root has a gradient.

    Without ``sigma_gradient`` the standard deviation is a constant to the optimiser: otherwise it
    can satisfy both evidence losses, for every token of every image, by shrinking it.
    """
    sigma = moments.variance.clamp_min(floor).sqrt()
    return moments.mean / ((sigma if sigma_gradient else sigma.detach()) + epsilon)


def compactness_loss(normal_evidence: Tensor) -> Tensor:
    """Minus the mean normalised normal evidence (B_N, N) of the normal images (Eq. 17)."""
    return -normal_evidence.mean() if normal_evidence.numel() else normal_evidence.sum()


def attention(margins: Tensor, epsilon: float) -> Tensor:
    """Softmax of the standardised token margins (B, N), without a gradient (Eq. 18)."""
    margins = margins.detach()
    deviation, mean = torch.std_mean(margins, dim=-1, correction=0, keepdim=True)
    return torch.softmax((margins - mean) / (deviation + epsilon), dim=-1)


def attraction_loss(anomaly_evidence: Tensor, margins: Tensor, epsilon: float) -> Tensor:
    """Minus the attended anomaly evidence of the defective images (Eq. 19).

    Both are (B_A, N): normalised anomaly evidence, and mean margins of the same tokens.
    """
    if not anomaly_evidence.numel():
        return anomaly_evidence.sum()
    return -(attention(margins, epsilon) * anomaly_evidence).sum(-1).mean()
