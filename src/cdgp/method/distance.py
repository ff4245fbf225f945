"""Normal distance: how far a feature is from those of good images at the same place.

At the strides 8 and 16 the frozen teacher's features are Gaussian, with a mean a position and a
covariance a cell of the coarsest grid (16 x 16 pixels); the evidence is the Mahalanobis distance.
PaDiM (Defard et al., "PaDiM: a patch distribution modeling framework for anomaly detection and
localization", 2021) has a covariance a position over random channels of all stages together; here
each stage is on its own, in its first principal components, and its covariances are shrunk to their
mean over all cells, so that a tenth of the numbers and a few images suffice.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from cdgp.method.resize import upsample

STAGES = (1, 2)
"""Of the three stages those with a distance: at strides 8 and 16."""
RIDGE = 0.01
"""Share of the mean variance that is added to every variance."""
FLOOR = 1e-6
"""Share of the features' mean square that is added too: copies of one image vary nowhere."""


class StageDistance(nn.Module):
    """The distance of one stage.

    Args:
        basis: (C, K) principal components, orthonormal.
        mean: (h, w, K) of the features in the basis, by position.
        whitening: (rows, columns, K, K) by cell: |d W|^2 is the squared distance of a deviation d.
            A cell holds h / rows times w / columns positions.
    """

    def __init__(self, basis: Tensor, mean: Tensor, whitening: Tensor) -> None:
        super().__init__()
        self.register_buffer("basis", basis)
        self.register_buffer("mean", mean)
        self.register_buffer("whitening", whitening)
        self.basis: Tensor
        self.mean: Tensor
        self.whitening: Tensor

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, C, H, W) to distances (B, h, w), at least 0.

        An input of another size than that of the fit is brought to the grid of the fit.
        """
        h, w, _ = self.mean.shape
        rows, columns = self.whitening.shape[:2]
        reduced = functional.conv2d(features, self.basis.mT[:, :, None, None])
        x = upsample(reduced, (h, w)).permute(0, 2, 3, 1)
        # By cell before the subtraction: exported runtimes move the numbers once instead of twice.
        deviation = _cells(x, rows, columns) - _cells(self.mean[None], rows, columns)
        deviation = deviation.flatten(2, 3)
        distance = torch.linalg.vector_norm(deviation @ self.whitening, dim=-1)
        distance = distance.view(rows, columns, -1, h // rows, w // columns)
        found: Tensor = distance.permute(2, 0, 3, 1, 4).reshape(-1, h, w)
        return found


class NormalDistance(nn.Module):
    """The mean of both stages' distances at the resolution of the first stage."""

    def __init__(self, stages: Sequence[StageDistance]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Teacher features (B, C_l, H_l, W_l) of three stages to the distance (B, H_1, W_1)."""
        size = (features[0].shape[-2], features[0].shape[-1])
        fine, coarse = (stage(features[i]) for i, stage in zip(STAGES, self.stages, strict=True))
        both: Tensor = (fine + upsample(coarse, (fine.shape[-2], fine.shape[-1]))) / 2
        return upsample(both, size)


def fit_distance(
    batches: Callable[[], Iterable[Sequence[Tensor]]], components: int
) -> NormalDistance:
    """Gaussians of good images' features, in two passes over them; memory does not grow with these.

    The principal components come from the first pass, means and covariances from the second. Let S
    be the covariance of the n vectors of a cell, each about the mean of its position, and W the
    mean of S over all cells. The cell gets (n S + K W) / (n + K): W counts as much as K vectors.

    Args:
        batches: gives teacher features, three stages (B, C_l, h_l, w_l) each time, from the start
            whenever it is called.
        components: K, at most; a stage with fewer channels keeps all of them.
    """
    bases = _principal_components(batches(), components)
    return NormalDistance(_gaussians(batches(), bases))


def _principal_components(batches: Iterable[Sequence[Tensor]], components: int) -> list[Tensor]:
    """(C, K) of each stage, in float64."""
    sums: list[list[Tensor]] = []
    for features in batches:
        vectors = [features[i].permute(0, 2, 3, 1).flatten(0, 2).double() for i in STAGES]
        found = [[v.new_tensor(len(v)), v.sum(0), v.mT @ v] for v in vectors]
        sums = _added(sums, found)
    bases = []
    for count, first, second in sums:
        mean = first / count
        _, vectors = torch.linalg.eigh(second / count - torch.outer(mean, mean))
        bases.append(vectors[:, -components:])
    return bases


def _gaussians(batches: Iterable[Sequence[Tensor]], bases: Sequence[Tensor]) -> list[StageDistance]:
    sums: list[list[Tensor]] = []
    for features in batches:
        rows, columns = features[-1].shape[-2:]
        found = []
        for i, basis in zip(STAGES, bases, strict=True):
            x = features[i].permute(0, 2, 3, 1).double() @ basis
            cells = _cells(x, rows, columns).flatten(2, 3)
            found.append([x.new_tensor(len(x)), x.sum(0), cells.mT @ cells])
        sums = _added(sums, found)
    return [_stage_distance(basis, *stage) for stage, basis in zip(sums, bases, strict=True)]


def _stage_distance(basis: Tensor, count: Tensor, first: Tensor, second: Tensor) -> StageDistance:
    """From the number of images, sums (h, w, K) by position and of squares by cell."""
    rows, columns = second.shape[:2]
    mean = first / count
    of_means = _cells(mean[None], rows, columns).flatten(2, 3)
    K, vectors = mean.shape[-1], count * of_means.shape[2]
    S = (second - count * (of_means.mT @ of_means)) / vectors
    W = S.mean((0, 1))
    shrunk = (vectors * S + K * W) / (vectors + K)
    square = second.diagonal(dim1=-2, dim2=-1).mean() / vectors
    ridge = RIDGE * W.diagonal().mean() + FLOOR * square + torch.finfo(torch.float32).tiny
    shrunk = shrunk + ridge * torch.eye(K, dtype=torch.float64, device=W.device)
    whitening = torch.linalg.cholesky(torch.linalg.inv(shrunk))
    return StageDistance(basis.float(), mean.float(), whitening.float())


def _cells(x: Tensor, rows: int, columns: int) -> Tensor:
    """Positions (B, h, w, K) by cell, (rows, columns, B, n, K)."""
    B, h, w, K = x.shape
    tall, wide = h // rows, w // columns
    cells = x.reshape(B, rows, tall, columns, wide * K)
    return cells.permute(1, 3, 0, 2, 4).reshape(rows, columns, B, tall * wide, K)


def _added(sums: list[list[Tensor]], found: list[list[Tensor]]) -> list[list[Tensor]]:
    if not sums:
        return found
    return [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(sums, found, strict=True)]
