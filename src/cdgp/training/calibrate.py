"""Third stage: evidence of the calibration images, and what is fitted on it (Section 3.6)."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cdgp.method.calibration import (
    BranchStatistics,
    Calibration,
    fit_image_calibrator,
    fit_tail,
    fuse,
)
from cdgp.method.graph import EvidenceGraph
from cdgp.method.network import Evidence
from cdgp.method.resize import upsample
from cdgp.method.tiles import tiled_evidence
from cdgp.presets import CalibrationSettings
from cdgp.progress import Progress
from cdgp.training.dataset import WeakDataset


class CalibrationEvidence(NamedTuple):
    """Evidence of the calibration images, at token resolution, and their labels."""

    evidence: Sequence[Evidence]
    """Of each image, (1, h, w)."""
    defective: Tensor
    """(n,) bool."""
    sizes: Sequence[tuple[int, int]]
    """(H, W) of each image's map."""

    @property
    def pooled(self) -> Tensor:
        """(n,) a(x)."""
        return torch.cat([one.pooled for one in self.evidence])


@torch.inference_mode()
def collect_evidence(
    graph: EvidenceGraph, dataset: WeakDataset, progress: Progress
) -> CalibrationEvidence:
    """Run the inference graph over images, one at a time."""
    device, cell = next(graph.parameters()).device, graph.encoder.strides[0]
    evidence, sizes = [], []
    with progress.phase("Calibration", len(dataset)) as advance:
        for index in range(len(dataset)):
            image, size = dataset.input(index), dataset.size
            if dataset.tile:
                found = tiled_evidence(graph, image, size)
                size = (cell * found.dominance.shape[1], cell * found.dominance.shape[2])
            else:
                images = image[None].to(device)
                found = graph(images.contiguous(memory_format=torch.channels_last))
            evidence.append(Evidence(*(part.float().cpu() for part in found)))
            sizes.append(size)
            advance()
    return CalibrationEvidence(evidence, dataset.defective, sizes)


def fit_calibration(collected: CalibrationEvidence, settings: CalibrationSettings) -> Calibration:
    """Branch statistics, normal tail and image probability from calibration evidence.

    The normal pixels of the tail are evenly spaced over all normal calibration images, at most
    ``tail_pixels`` of them; images are upsampled one at a time, so that memory stays bounded.
    TrainingError without a good or a defective image, or where scores are not finite.
    """
    good = torch.nonzero(~collected.defective).flatten().tolist()
    maps = [collected.evidence[i] for i in good]
    sizes = [collected.sizes[i] for i in good]
    dominance, residual = (
        _upsampled_statistics([getattr(one, branch) for one in maps], sizes)
        for branch in ("dominance", "residual")
    )
    ends = np.cumsum([0, *(height * width for height, width in sizes)])
    total = int(ends[-1])
    count = min(settings.tail_pixels, total)
    picked = torch.arange(count, dtype=torch.int64) * total // max(1, count)
    scores = []
    for one, size, bounds in zip(maps, sizes, itertools.pairwise(ends.tolist()), strict=True):
        first, last = torch.searchsorted(picked, torch.tensor(bounds))
        # Fused before it is upsampled, as ``graph.OutputGraph`` does for new images.
        low = fuse(one.dominance, one.residual, dominance, residual, settings.fusion_weight)
        U = upsample(low, size)
        scores.append(U.flatten()[picked[first:last] - bounds[0]])
    merged = torch.cat(scores) if scores else torch.empty(0)
    return Calibration(
        dominance,
        residual,
        fit_tail(merged.sort().values, settings.tail, settings.tail_floor),
        fit_image_calibrator(
            collected.pooled.double().numpy(),
            collected.defective.numpy().astype(np.bool_),
            settings.logistic_c,
        ),
        settings.fusion_weight,
        settings.image_weight,
    )


def _upsampled_statistics(
    maps: Sequence[Tensor], sizes: Sequence[tuple[int, int]]
) -> BranchStatistics:
    """Mean and standard deviation over the pixels of maps (1, h, w) upsampled to their sizes."""
    if not len(maps):
        return BranchStatistics(0.0, 1.0)
    means, squares = [], []
    for m, size in zip(maps, sizes, strict=True):
        up = upsample(m, size).double()
        means.append(up.mean())
        squares.append(up.square().mean())
    pixels = torch.tensor([h * w for h, w in sizes], dtype=torch.float64)
    share = pixels / pixels.max()  # exactly one where all are of one size
    mean = (torch.stack(means) * share).sum() / share.sum()
    second = (torch.stack(squares) * share).sum() / share.sum()
    variance = (second - mean.square()).clamp_min(0)
    return BranchStatistics(float(mean), float(variance.sqrt()))
