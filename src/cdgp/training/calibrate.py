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
    branch_weights,
    chosen_weight,
    fit_image_calibrator,
    fit_image_evidence,
    fit_tail,
    fuse,
)
from cdgp.method.graph import EvidenceGraph
from cdgp.method.network import Evidence, peak
from cdgp.method.resize import upsample
from cdgp.method.tiles import tiled_evidence
from cdgp.prefetch import read_ahead
from cdgp.presets import Settings
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
        """(n, F) image evidence."""
        return torch.cat([one.pooled for one in self.evidence])


@torch.inference_mode()
def collect_evidence(
    graph: EvidenceGraph, dataset: WeakDataset, progress: Progress
) -> CalibrationEvidence:
    """Run the inference graph over images, one at a time."""
    device, cell = next(graph.parameters()).device, graph.teacher.strides[0]
    evidence, sizes = [], []
    with progress.phase("Calibration", len(dataset)) as advance:
        for image in read_ahead(dataset.input, range(len(dataset))):
            size = dataset.size
            if dataset.tile:
                found = tiled_evidence(graph, image, size)
                size = (cell * found.residual.shape[1], cell * found.residual.shape[2])
            else:
                images = image[None].to(device)
                found = graph(images.contiguous(memory_format=torch.channels_last))
            evidence.append(found.on_cpu())
            sizes.append(size)
            advance()
    return CalibrationEvidence(evidence, dataset.defective, sizes)


def fit_calibration(collected: CalibrationEvidence, settings: Settings) -> Calibration:
    """Branch statistics, normal tail and image score from calibration evidence.

    The normal pixels of the tail are evenly spaced over all normal calibration images, at most
    ``tail_pixels`` of them; images are upsampled one at a time, so that memory stays bounded.
    A branch that the network lacks has no weight. TrainingError without a good image (with the
    image evidence of the paper, without a defective one, too), or where scores are not finite.
    """
    s = settings.calibration
    good = torch.nonzero(~collected.defective).flatten().tolist()
    maps = [collected.evidence[i] for i in good]
    sizes = [collected.sizes[i] for i in good]
    branches = [
        _upsampled_statistics([m for m in of_branch if m is not None], sizes)
        for of_branch in zip(*(one.maps for one in maps), strict=True)
    ] or [BranchStatistics(0.0, 1.0)] * 3
    tuned, distant = (
        any(one.maps[branch] is not None for one in collected.evidence) for branch in (0, 2)
    )
    distance_weight = settings.distance.weight if distant else 0.0
    cap = None
    if s.dominance_cap is not None and tuned:
        cap = branches[0].mean + s.dominance_cap * branches[0].std
    capped_maps = [one.maps_below(cap) for one in collected.evidence]
    pooled = collected.pooled.double().numpy()
    defective = collected.defective.numpy().astype(np.bool_)
    fusion_weight = 0.0
    if tuned:
        candidates = doublings(s.fusion_weight, s.most_fusion_weight)
        every = [branch_weights(candidate, distance_weight) for candidate in candidates]
        peaks = [[float(peak(fuse(m, branches, w))) for w in every] for m in capped_maps]
        fusion_weight = chosen_weight(np.array(peaks), defective, candidates)
    weights = branch_weights(fusion_weight, distance_weight)
    ends = np.cumsum([0, *(height * width for height, width in sizes)])
    total = int(ends[-1])
    count = min(s.tail_pixels, total)
    picked = torch.arange(count, dtype=torch.int64) * total // max(1, count)
    scores = []
    of_good = [capped_maps[i] for i in good]
    for one, size, bounds in zip(of_good, sizes, itertools.pairwise(ends.tolist()), strict=True):
        first, last = torch.searchsorted(picked, torch.tensor(bounds))
        # Fused before it is upsampled, as ``graph.OutputGraph`` does for new images.
        U = upsample(fuse(one, branches, weights), size)
        scores.append(U.flatten()[picked[first:last] - bounds[0]])
    merged = torch.cat(scores) if scores else torch.empty(0)
    if s.image_evidence == "dominance" and tuned:
        image = fit_image_calibrator(pooled[:, 0], defective, s.logistic_c)
    else:
        image = fit_image_evidence(pooled, defective, tuned)
    return Calibration(
        branches[0],
        branches[1],
        fit_tail(merged.sort().values, s.tail, s.tail_floor),
        image,
        fusion_weight,
        s.image_weight,
        branches[2],
        distance_weight,
        cap,
    )


def doublings(least: float, most: float) -> list[float]:
    """The least, and as often doubled as it stays within the most."""
    found = [least]
    while 0 < 2 * found[-1] <= most:
        found.append(2 * found[-1])
    return found


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
