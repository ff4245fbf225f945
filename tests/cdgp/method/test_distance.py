"""The normal distance against Gaussians fitted position by position, in float64."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import mahalanobis
from sklearn.covariance import EmpiricalCovariance
from sklearn.decomposition import PCA
from torch import Tensor
from torch.nn import functional

from cdgp.method.distance import FLOOR, RIDGE, NormalDistance, StageDistance, fit_distance

Array = NDArray[np.float64]
CHANNELS = (3, 6, 5)
GRIDS = [(2, 3), (5, 7), (1, 4)]
"""Of the coarsest stage."""


def features(count: int, grid: tuple[int, int], seed: int = 0) -> list[Tensor]:
    """Correlated features of three stages, with a mean and a scale of their own at each place."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.Generator().manual_seed(99)
    found = []
    for C, stride in zip(CHANNELS, (4, 2, 1), strict=True):
        size = (stride * grid[0], stride * grid[1])
        mixing = torch.randn(C, C, generator=places)
        mean = 2 * torch.randn(C, *size, generator=places)
        scale = 0.5 + torch.rand(size, generator=places)
        noise = torch.randn(count, C, *size, generator=generator)
        found.append(mean + scale * torch.einsum("cd,ndhw->nchw", mixing, noise))
    return found


def batched(stages: Sequence[Tensor], sizes: Iterable[int]) -> Iterator[list[Tensor]]:
    """All images in batches of these sizes."""
    for parts in zip(*(stage.split(list(sizes)) for stage in stages), strict=True):
        yield list(parts)


def fitted(stages: Sequence[Tensor], components: int = 32, batch: int = 3) -> NormalDistance:
    n = len(stages[0])
    sizes = [min(batch, n - first) for first in range(0, n, batch)]
    return fit_distance(lambda: batched(stages, sizes), components)


def of_one_stage(good: Array, query: Array, grid: tuple[int, int], components: int) -> Array:
    """(B, h, w) distances of features (B, C, h, w), as the docstring of the fit states them."""
    n, C, h, w = good.shape
    down, across = h // grid[0], w // grid[1]
    vectors = good.transpose(0, 2, 3, 1)
    pca = PCA(min(components, C), svd_solver="full").fit(vectors.reshape(-1, C))
    x, q = (v @ pca.components_.T for v in (vectors, query.transpose(0, 2, 3, 1)))
    K = x.shape[-1]
    mean = x.mean(0)
    S = np.empty((*grid, K, K))
    for row, column in itertools.product(range(grid[0]), range(grid[1])):
        inside = [
            x[image, i, j] - mean[i, j]
            for image in range(n)
            for i in range(down * row, down * (row + 1))
            for j in range(across * column, across * (column + 1))
        ]
        S[row, column] = EmpiricalCovariance(assume_centered=True).fit(inside).covariance_
    W, count = S.mean((0, 1)), n * down * across
    found = np.empty((len(query), h, w))
    for image, i, j in np.ndindex(found.shape):
        shrunk = (count * S[i // down, j // across] + K * W) / (count + K)
        ridge = RIDGE * np.trace(W) / K + FLOOR * np.square(x).mean()
        inverse = np.linalg.inv(shrunk + ridge * np.eye(K))
        found[image, i, j] = mahalanobis(q[image, i, j], mean[i, j], inverse)
    return found


def resized(maps: Array, size: tuple[int, int]) -> Array:
    """(B, h, w) bilinearly to another size."""
    up = functional.interpolate(torch.from_numpy(maps)[:, None], size, mode="bilinear")
    values: Array = up[:, 0].numpy()
    return values


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("count", "components"), [(9, 32), (9, 3), (2, 4)])
def test_distance_is_that_of_a_gaussian_at_each_position(
    grid: tuple[int, int], count: int, components: int
) -> None:
    """Few images too: then the covariance of a cell alone has no inverse."""
    good, query = features(count, grid), features(3, grid, seed=1)
    found = fitted(good, components)
    stages = []
    for place, stage in zip((1, 2), found.stages, strict=True):
        expected = of_one_stage(
            good[place].double().numpy(), query[place].double().numpy(), grid, components
        )
        np.testing.assert_allclose(stage(query[place]).numpy(), expected, rtol=2e-4)
        stages.append(expected)
    fine, coarse = stages
    both = (fine + resized(coarse, (2 * grid[0], 2 * grid[1]))) / 2
    expected = resized(both, (4 * grid[0], 4 * grid[1]))
    np.testing.assert_allclose(found(query).numpy(), expected, rtol=2e-4)


@pytest.mark.parametrize("batch", [1, 2, 4, 7])
def test_batches_of_any_size_give_the_same_fit(batch: int) -> None:
    """Distances, since a principal component may turn round."""
    good, query = features(7, (3, 2)), features(2, (3, 2), seed=1)
    torch.testing.assert_close(fitted(good, batch=batch)(query), fitted(good, batch=3)(query),
                               rtol=1e-5, atol=0)  # fmt: skip


def test_both_passes_see_all_images_once() -> None:
    good, taken = features(5, (2, 2)), list[int]()

    def batches() -> Iterator[list[Tensor]]:
        taken.append(0)
        for batch in batched(good, [2, 2, 1]):
            taken[-1] += len(batch[0])
            yield batch

    fit_distance(batches, 4)
    assert taken == [5, 5]


@pytest.mark.parametrize("size", [(5, 4), (12, 20), (7, 3)])
def test_another_input_size_is_brought_to_the_grid_of_the_fit(size: tuple[int, int]) -> None:
    """Features are resized, then compared; the map has the resolution of the input's own stage."""
    grid = (2, 3)
    good = features(6, grid)
    found = fitted(good)
    query = [
        functional.interpolate(f, (s * size[0], s * size[1]), mode="bicubic")
        for f, s in zip(features(2, grid, seed=1), (4, 2, 1), strict=True)
    ]
    stages = [
        of_one_stage(
            good[place].double().numpy(),
            functional.interpolate(
                query[place].double(), good[place].shape[-2:], mode="bilinear"
            ).numpy(),
            grid,
            32,
        )
        for place in (1, 2)
    ]
    both = (stages[0] + resized(stages[1], (2 * grid[0], 2 * grid[1]))) / 2
    result = found(query)
    assert result.shape == (2, 4 * size[0], 4 * size[1])
    np.testing.assert_allclose(result.numpy(), resized(both, (4 * size[0], 4 * size[1])), rtol=2e-4)


def test_identities() -> None:
    """The mean image has no distance; a unit of the features, or turned channels, change none."""
    grid = (3, 4)
    good, query = features(8, grid), features(2, grid, seed=1)
    found = fitted(good)
    at_mean = found([stage.mean(0, keepdim=True) for stage in good])
    assert float(at_mean.max()) < 1e-4
    expected = found(query)
    assert float(expected.min()) > 0.1
    scaled = fitted([7 * stage for stage in good])([7 * stage for stage in query])
    torch.testing.assert_close(scaled, expected, rtol=1e-4, atol=0)
    generator = torch.Generator().manual_seed(3)
    turns = [torch.linalg.qr(torch.randn(C, C, generator=generator))[0] for C in CHANNELS]

    def turned(stages: Sequence[Tensor]) -> list[Tensor]:
        return [
            torch.einsum("cd,ndhw->nchw", Q, stage) for Q, stage in zip(turns, stages, strict=True)
        ]

    torch.testing.assert_close(fitted(turned(good))(turned(query)), expected, rtol=2e-4, atol=0)


@pytest.mark.parametrize("count", [1, 4])
def test_images_without_any_difference_leave_a_finite_distance(count: int) -> None:
    """One good image, or copies of one: no deviation is known at any position."""
    good = [stage[:1].expand(count, -1, -1, -1) for stage in features(1, (2, 3))]
    found = fitted(good)
    query = [stage + 1e3 for stage in good]
    near = [stage + 1e-3 for stage in good]
    for one in (found(good), found(near), found(query)):
        assert bool(torch.isfinite(one).all())
    assert float(found(good).max()) < float(found(near).min()) < float(found(query).min())


def test_a_stage_by_hand() -> None:
    """Two positions of one cell, two channels in a basis of one."""
    stage = StageDistance(
        torch.tensor([[1.0], [0.0]]),
        torch.tensor([[[1.0], [3.0]]]),
        torch.tensor([[[[0.5]]]]),
    )
    found = stage(torch.tensor([[[[2.0, 9.0]], [[100.0, -100.0]]]]))
    assert found.tolist() == [[[0.5, 3.0]]]
