"""The order of the stages at inference, written plainly: the oracle that ``graph`` is tested with.

The product runs ``graph.InferenceGraph``, which gives the same numbers with less work.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cdgp.method.backbone import Encoder
from cdgp.method.calibration import (
    Calibration,
    final_map,
    fuse,
    surprisal,
)
from cdgp.method.distance import NormalDistance
from cdgp.method.gp import DualGP
from cdgp.method.losses import log_mean_exp, top_mean
from cdgp.method.resize import upsample
from cdgp.method.score import PEAK, image_logit, image_score
from cdgp.method.student import ReverseStudent, residual_map, residuals
from cdgp.method.tokens import TokenProjection


class Evidence(NamedTuple):
    """What the branches give before calibration."""

    dominance: Tensor | None
    """(B, h, w) standardised dominance g, or the mean margin for the control, at the resolution of
    the finest feature: H/4 x W/4, or the grid of a transformer's patches. None without a Dual GP,
    which good images alone do not give."""
    residual: Tensor
    """(B, h, w) mean cosine residual, in [0, 2]."""
    distance: Tensor | None
    """(B, h, w) normal distance, at least 0; None without that branch."""
    pooled: Tensor
    """(B, F) what the image score is made of, see ``pool``."""

    def maps_below(self, cap: float | None) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """The three maps, the dominance with a largest value, so that no weight lets it drown the
        others."""
        if self.dominance is None or cap is None:
            return self.maps
        return self.dominance.clamp_max(cap), self.residual, self.distance

    def on_cpu(self) -> "Evidence":
        """In float32 on the CPU."""
        dominance, residual, distance = (None if m is None else m.float().cpu() for m in self.maps)
        assert residual is not None
        return Evidence(dominance, residual, distance, self.pooled.float().cpu())

    @property
    def maps(self) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """The three maps."""
        return self.dominance, self.residual, self.distance


class Outputs(NamedTuple):
    """The calibrated result for images (B, 3, H, W)."""

    anomaly_map: Tensor
    """(B, H, W) the final map S = P + lambda_I log p_A, in nats."""
    surprisal: Tensor
    """(B, H, W) P, minus the log of the normal-tail probability, in nats."""
    fused: Tensor
    """(B, H, W) U of Eq. 25, in standard deviations of the normal branches."""
    pooled: Tensor
    """(B, F) image evidence: a(x) of Eq. 28 first."""
    pred_score: Tensor
    """(B,) p_A, the probability of being defective, in [0, 1]; without any defective calibration
    image, one minus a conformal p-value."""


class Network(nn.Module):
    """All trained branches, stage by stage.

    Args:
        encoder, projection, gps: the fine-tuned branch; all None where training had no defective
            image.
        teacher, student: the frozen pretrained encoder, and what reconstructs its features.
        distance: of the teacher's features from those of good images; None without that branch.
        sharpness: r of the pooling.
        floor: least summed variance.
        evidence: ``dominance`` or ``mean_margin``.
        image_evidence: ``dominance`` or ``all``, see ``pool``.
    """

    def __init__(
        self,
        encoder: Encoder | None,
        projection: TokenProjection | None,
        gps: DualGP | None,
        teacher: Encoder,
        student: ReverseStudent,
        distance: NormalDistance | None,
        sharpness: float,
        floor: float,
        evidence: str,
        image_evidence: str,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = projection
        self.gps = gps
        self.teacher = teacher
        self.student = student
        self.distance = distance
        self.sharpness = sharpness
        self.floor = floor
        self.evidence = evidence
        self.image_evidence = image_evidence
        self.requires_grad_(False).eval()

    @property
    def entries(self) -> int:
        """F, how many entries ``pool`` makes of the branches that there are."""
        tuned = self.gps is not None
        alone = self.image_evidence == "all" or not tuned
        return tuned + alone * (1 + (self.distance is not None))

    def tokens(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) RGB in [0, 1] to unit-norm tokens (B, h, w, D)."""
        assert self.encoder is not None and self.projection is not None
        tokens: Tensor = self.projection(self.encoder(self.encoder.normalise(images)))
        return tokens

    def dominance(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) RGB in [0, 1] to the spatial evidence (B, h, w)."""
        assert self.gps is not None
        tokens = self.tokens(images)
        flat = tokens.flatten(0, 2)
        return evidence_at(self.gps, flat, self.floor, self.evidence).view(tokens.shape[:3])

    def means(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, H, W) RGB in [0, 1] to mu_N and mu_A, (B, h, w) each."""
        assert self.gps is not None
        tokens = self.tokens(images)
        flat = tokens.flatten(0, 2)
        normal, anomaly = self.gps.normal.mean(flat), self.gps.anomaly.mean(flat)
        return normal.view(tokens.shape[:3]), anomaly.view(tokens.shape[:3])

    def residual(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) RGB in [0, 1] to the residual map (B, h, w) of Eq. 23."""
        return reconstruction_residual(self.teacher, self.student, images)

    @torch.inference_mode()
    def forward(self, images: Tensor) -> Evidence:
        """(B, 3, H, W) float32 RGB in [0, 1] to the evidence of all branches."""
        images = images.contiguous(memory_format=torch.channels_last)
        dominance = None if self.gps is None else self.dominance(images)
        residual, distance = self.residual(images), None
        if self.distance is not None:
            distance = self.distance(self.teacher(self.teacher.normalise(images)))
        pooled = pool(dominance, residual, distance, self.sharpness, self.image_evidence)
        return Evidence(dominance, residual, distance, pooled)


def peak(maps: Tensor) -> Tensor:
    """Mean of the largest hundredth of maps (B, h, w), (B,)."""
    share = (maps.shape[-2] * maps.shape[-1] + PEAK - 1) // PEAK
    return top_mean(maps.flatten(1), share)


def pool(
    dominance: Tensor | None,
    residual: Tensor,
    distance: Tensor | None,
    sharpness: float,
    image_evidence: str,
) -> Tensor:
    """Maps (B, h, w) to what the image score is made of, (B, F).

    a(x) of Eq. 28 where there is a dominance; then, of the maps that good images alone give, the
    mean of the largest hundredth, unless ``image_evidence`` is ``dominance``, as in the paper.
    """
    found = [] if dominance is None else [log_mean_exp(dominance.flatten(1), sharpness)]
    if image_evidence == "all" or dominance is None:
        found += [peak(m) for m in (residual, distance) if m is not None]
    return torch.stack(found, dim=1)


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
    low = evidence.maps_below(calibration.dominance_cap)
    maps = [None if m is None else upsample(m, size) for m in low]
    U = fuse(maps, calibration.branches, calibration.weights)
    P = surprisal(U, calibration.tail)
    logit = image_logit(evidence.pooled, calibration.image)
    S = final_map(P, logit, calibration.image_weight)
    score = torch.from_numpy(image_score(evidence.pooled.cpu(), calibration.image)).to(P)
    return Outputs(S, P, U, evidence.pooled, score)
