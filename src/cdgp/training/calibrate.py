"""Third stage: evidence of the calibration pictures, and what is fitted on it (Section 3.6)."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cdgp.method.calibration import (
    BranchStatistics,
    fit_image_calibrator,
    fit_tail,
    fuse,
    upsample,
)
from cdgp.method.detector import Calibration, Evidence
from cdgp.presets import CalibrationSettings
from cdgp.progress import Progress
from cdgp.training.pictures import Pictures


class CalibrationEvidence(NamedTuple):
    """Evidence of all calibration pictures, at token resolution, and their labels."""

    evidence: Evidence
    defective: Tensor
    """(n,) bool."""
    size: tuple[int, int]
    """(H, W) of the network's input."""


@torch.inference_mode()
def collect_evidence(
    network: Callable[[Tensor], Evidence],
    pictures: Pictures,
    device: torch.device,
    progress: Progress,
) -> CalibrationEvidence:
    """Run a network, or its graph for inference, over pictures, one at a time."""
    parts = []
    with progress.phase("Calibration", len(pictures)) as advance:
        for index in range(len(pictures)):
            result = network(pictures.input(index)[None].to(device))
            parts.append([part.float().cpu() for part in result])
            advance()
    evidence = Evidence(*(torch.cat(part) for part in zip(*parts, strict=True)))
    return CalibrationEvidence(evidence, pictures.defective, pictures.size)


def fit_calibration(collected: CalibrationEvidence, settings: CalibrationSettings) -> Calibration:
    """Branch statistics, normal tail and image probability from calibration evidence.

    The normal pixels of the tail are evenly spaced over all normal calibration pictures, at most
    ``tail_pixels`` of them; pictures are upsampled one at a time, so that memory stays bounded.

    Raises:
        TrainingError: no good or no defective picture, or scores that are not finite.
    """
    normal = ~collected.defective
    maps = [m[normal] for m in (collected.evidence.dominance, collected.evidence.residual)]
    pixels = collected.size[0] * collected.size[1]
    total = pixels * len(maps[0])
    count = min(settings.tail_pixels, total)
    dominance, residual = (_upsampled_statistics(m, collected.size) for m in maps)
    picked = torch.arange(count, dtype=torch.int64) * total // max(1, count)
    scores = []
    for index, (g, r) in enumerate(zip(*maps, strict=True)):
        first, last = torch.searchsorted(picked, torch.tensor([index, index + 1]) * pixels)
        U = fuse(
            upsample(g[None], collected.size),
            upsample(r[None], collected.size),
            dominance,
            residual,
            settings.fusion_weight,
        )
        scores.append(U.flatten()[picked[first:last] - index * pixels])
    merged = torch.cat(scores) if scores else torch.empty(0)
    return Calibration(
        dominance,
        residual,
        fit_tail(merged.sort().values, settings.tail, settings.tail_floor),
        fit_image_calibrator(
            collected.evidence.pooled.double().numpy(),
            collected.defective.numpy().astype(np.bool_),
            settings.logistic_c,
        ),
        settings.fusion_weight,
        settings.image_weight,
    )


def _upsampled_statistics(maps: Tensor, size: tuple[int, int]) -> BranchStatistics:
    """Mean and standard deviation over the pixels of maps (n, h, w) upsampled to ``size``."""
    if not len(maps):
        return BranchStatistics(0.0, 1.0)
    means, squares = [], []
    for m in maps:
        up = upsample(m[None], size).double()
        means.append(up.mean())
        squares.append(up.square().mean())
    mean = torch.stack(means).mean()
    variance = (torch.stack(squares).mean() - mean.square()).clamp_min(0)
    return BranchStatistics(float(mean), float(variance.sqrt()))
