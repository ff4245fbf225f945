"""The order of the stages at inference, written plainly: the oracle that ``graph`` is tested with.

The product runs ``graph.InferenceGraph``, which gives the same numbers with less work.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cdgp.method.backbone import Encoder
from cdgp.method.calibration import Calibration, final_map, fuse, image_logit, surprisal
from cdgp.method.gp import DualGP
from cdgp.method.losses import log_mean_exp
from cdgp.method.resize import upsample
from cdgp.method.student import ReverseStudent, residual_map, residuals
from cdgp.method.tokens import TokenProjection


class Evidence(NamedTuple):
    """What both branches give before calibration."""

    dominance: Tensor
    """(B, h, w) standardised dominance g, or the mean margin for the control, at the resolution of
    the finest feature: H/4 x W/4, or the grid of a transformer's patches."""
    residual: Tensor
    """(B, h, w) mean cosine residual, in [0, 2]."""
    pooled: Tensor
    """(B,) a(x), the log-sum-exp of the dominance."""


class Outputs(NamedTuple):
    """The calibrated result for images (B, 3, H, W)."""

    anomaly_map: Tensor
    """(B, H, W) the final map S = P + lambda_I log p_A, in nats."""
    surprisal: Tensor
    """(B, H, W) P, minus the log of the normal-tail probability, in nats."""
    fused: Tensor
    """(B, H, W) U of Eq. 25, in standard deviations of the normal branches."""
    pooled: Tensor
    """(B,) a(x) of Eq. 28."""
    pred_score: Tensor
    """(B,) p_A, the probability of being defective, in [0, 1]."""


class Network(nn.Module):
    """Both trained branches, stage by stage.

    Args:
        encoder, projection, gps: the fine-tuned branch.
        teacher, student: the frozen pretrained encoder, and what reconstructs its features.
        sharpness: r of the pooling.
        floor: least summed variance.
        evidence: ``dominance`` or ``mean_margin``.
    """

    def __init__(
        self,
        encoder: Encoder,
        projection: TokenProjection,
        gps: DualGP,
        teacher: Encoder,
        student: ReverseStudent,
        sharpness: float,
        floor: float,
        evidence: str,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = projection
        self.gps = gps
        self.teacher = teacher
        self.student = student
        self.sharpness = sharpness
        self.floor = floor
        self.evidence = evidence
        self.requires_grad_(False).eval()

    def tokens(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) RGB in [0, 1] to unit-norm tokens (B, h, w, D)."""
        tokens: Tensor = self.projection(self.encoder(self.encoder.normalise(images)))
        return tokens

    def dominance(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) RGB in [0, 1] to the spatial evidence (B, h, w)."""
        tokens = self.tokens(images)
        flat = tokens.flatten(0, 2)
        return evidence_at(self.gps, flat, self.floor, self.evidence).view(tokens.shape[:3])

    def means(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, H, W) RGB in [0, 1] to mu_N and mu_A, (B, h, w) each."""
        tokens = self.tokens(images)
        flat = tokens.flatten(0, 2)
        normal, anomaly = self.gps.normal.mean(flat), self.gps.anomaly.mean(flat)
        return normal.view(tokens.shape[:3]), anomaly.view(tokens.shape[:3])

    def residual(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) RGB in [0, 1] to the residual map (B, h, w) of Eq. 23."""
        return reconstruction_residual(self.teacher, self.student, images)

    @torch.inference_mode()
    def forward(self, images: Tensor) -> Evidence:
        """(B, 3, H, W) float32 RGB in [0, 1] to the evidence of both branches."""
        images = images.contiguous(memory_format=torch.channels_last)
        dominance = self.dominance(images)
        pooled = log_mean_exp(dominance.flatten(1), self.sharpness)
        return Evidence(dominance, self.residual(images), pooled)


def evidence_at(gps: DualGP, tokens: Tensor, floor: float, evidence: str) -> Tensor:
    """``dominance`` (Eq. 10) or ``mean_margin`` (Eq. 8) at tokens (N, D), (N,)."""
    return gps.mean_margin(tokens) if evidence == "mean_margin" else gps.dominance(tokens, floor)


def reconstruction_residual(teacher: Encoder, student: ReverseStudent, images: Tensor) -> Tensor:
    """(B, 3, H, W) RGB in [0, 1] to the residual map (B, h, w) of Eq. 23."""
    features = teacher(teacher.normalise(images))
    sizes = [(f.shape[-2], f.shape[-1]) for f in features]
    return residual_map(residuals(features, student(features[2], sizes)))


def calibrated(evidence: Evidence, calibration: Calibration, size: tuple[int, int]) -> Outputs:
    """Evidence to maps at ``size`` (H, W) and image scores, step by step (Section 3.6)."""
    U = fuse(
        upsample(evidence.dominance, size),
        upsample(evidence.residual, size),
        calibration.dominance,
        calibration.residual,
        calibration.fusion_weight,
    )
    P = surprisal(U, calibration.tail)
    logit = image_logit(evidence.pooled, calibration.image)
    S = final_map(P, logit, calibration.image_weight)
    return Outputs(S, P, U, evidence.pooled, torch.sigmoid(logit))
