"""Dense tokens against Eq. 1 in loops."""

import math

import pytest
import torch
from torch import Tensor

from cdgp.method.tokens import ImplicitTokens, TokenProjection, squared_norm


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def normalised(vector: list[float]) -> list[float]:
    length = math.sqrt(sum(v * v for v in vector))
    return [v / length for v in vector]


def slow_resize(grid: list[list[list[float]]], rows: int, columns: int) -> list[list[list[float]]]:
    """Bilinear, pixel centres at half: grid[y][x] is a vector."""
    height, width = len(grid), len(grid[0])

    def source(index: int, old: int, new: int) -> tuple[int, int, float]:
        position = max(0.0, (index + 0.5) * old / new - 0.5)
        low = min(int(position), old - 1)
        return low, min(low + 1, old - 1), position - low

    out = []
    for y in range(rows):
        y0, y1, v = source(y, height, rows)
        line = []
        for x in range(columns):
            x0, x1, u = source(x, width, columns)
            corners = zip(grid[y0][x0], grid[y0][x1], grid[y1][x0], grid[y1][x1], strict=True)
            line.append(
                [
                    (1 - v) * ((1 - u) * a + u * b) + v * ((1 - u) * c + u * d)
                    for a, b, c, d in corners
                ]
            )
        out.append(line)
    return out


def slow_tokens(projection: TokenProjection, features: list[Tensor]) -> list[list[list[float]]]:
    """Eq. 1 of one image."""
    rows, columns = features[0].shape[-2:]
    stages = []
    for phi, feature in zip(projection.phi, features, strict=True):
        assert isinstance(phi, torch.nn.Conv2d)
        weight = phi.weight[:, :, 0, 0].tolist()
        F = feature[0].permute(1, 2, 0).tolist()
        grid = [
            [
                normalised([sum(w * f for w, f in zip(line, p, strict=True)) for line in weight])
                for p in row
            ]
            for row in F
        ]
        stages.append(slow_resize(grid, rows, columns))
    return [
        [
            normalised([sum(parts) / 3 for parts in zip(*(s[y][x] for s in stages), strict=True)])
            for x in range(columns)
        ]
        for y in range(rows)
    ]


@pytest.mark.parametrize("sizes", [[(4, 8), (2, 4), (1, 2)], [(11, 5), (6, 3), (3, 2)]])
def test_tokens_are_equation_one(sizes: list[tuple[int, int]]) -> None:
    """Sizes that halve, and odd ones that do not."""
    projection = TokenProjection((3, 5, 6), 4).double()
    features = [random(1, c, *size, seed=c) for c, size in zip((3, 5, 6), sizes, strict=True)]
    found = projection(features)
    assert found.shape == (1, *sizes[0], 4)
    expected = torch.tensor([slow_tokens(projection, features)], dtype=torch.float64)
    assert (found - expected).abs().max() <= 1e-12


def test_tokens_have_norm_one_and_do_not_change_with_the_scale_of_a_stage() -> None:
    projection = TokenProjection((24, 40, 112), 256)
    features = [
        random(2, c, s, s, seed=c).float() for c, s in zip((24, 40, 112), (16, 8, 4), strict=True)
    ]
    tokens = projection(features)
    assert tokens.shape == (2, 16, 16, 256)
    assert (tokens.norm(dim=-1) - 1).abs().max() <= 1e-6
    scaled = projection([100 * features[0], 0.01 * features[1], features[2]])
    assert (scaled - tokens).abs().max() <= 1e-6


@pytest.mark.parametrize("channels", [(24, 40, 112), (256, 512, 1024)])
def test_projections_are_orthogonal_before_training(channels: tuple[int, int, int]) -> None:
    """Fewer channels than D keep all dot products; with more, the rows are orthonormal."""
    for phi, count in zip(TokenProjection(channels, 256).phi, channels, strict=True):
        assert isinstance(phi, torch.nn.Conv2d)
        W = phi.weight[:, :, 0, 0].detach()
        assert W.shape == (256, count)
        gram = W.mT @ W if count <= 256 else W @ W.mT
        assert (gram - torch.eye(len(gram))).abs().max() <= 1e-5


def test_projections_are_trained() -> None:
    projection = TokenProjection((3, 5, 6), 4).double()
    features = [random(1, c, s, s, seed=c) for c, s in zip((3, 5, 6), (4, 2, 1), strict=True)]
    projection(features)[..., 0].sum().backward()
    for weight in projection.parameters():
        assert weight.grad is not None and bool(weight.grad.any())
    assert sum(p.numel() for p in projection.parameters()) == 4 * (3 + 5 + 6)


@pytest.mark.parametrize("sizes", [[(8, 12), (4, 6), (2, 3)], [(11, 5), (6, 3), (3, 2)]])
@pytest.mark.parametrize("dim", [20, 11, 7, 3])
def test_implicit_tokens_give_the_products_of_tokens(
    dim: int, sizes: list[tuple[int, int]]
) -> None:
    """Values and gradients; more dimensions than channels, as many as those of two stages and a
    few more, less than those of two stages, and no more than the first stage has channels."""
    torch.manual_seed(0)
    channels = (3, 5, 6)
    projection = TokenProjection(channels, dim).double()
    for weight in projection.parameters():  # away from orthogonal ones
        weight.data += 0.3 * random(*weight.shape, seed=dim)
    features = [
        random(2, c, *size, seed=c).requires_grad_()
        for c, size in zip(channels, sizes, strict=True)
    ]
    vectors = random(4, dim, seed=9).requires_grad_()
    tokens = projection(features).flatten(0, 2)
    implicit = ImplicitTokens(projection, features)
    found = implicit.products(vectors) * implicit.scale.flatten()[:, None]
    expected = tokens @ vectors.mT
    assert (found - expected).abs().max() <= 1e-12
    g = random(*expected.shape, seed=5)
    inputs = [*features, *projection.parameters(), vectors]
    gradients = [torch.autograd.grad((p * g).sum(), inputs) for p in (found, expected)]
    for mine, plain in zip(*gradients, strict=True):
        assert (mine - plain).abs().max() <= 1e-9 * (1 + plain.abs().max())
    pairs = (tokens @ tokens.mT).detach().mean()
    assert float(implicit.mean_token().square().sum()) == pytest.approx(float(pairs), abs=1e-12)


def test_implicit_tokens_in_float32_are_the_tokens_of_the_lite_backbone() -> None:
    """1e-5: products of unit vectors of 256 entries, with lengths from 176 of them."""
    channels = (24, 40, 112)
    torch.manual_seed(0)
    projection = TokenProjection(channels, 256)
    features = [
        random(2, c, s, s, seed=c).float() for c, s in zip(channels, (32, 16, 8), strict=True)
    ]
    vectors = torch.nn.functional.normalize(random(48, 256).float(), dim=1)
    implicit = ImplicitTokens(projection, features)
    found = implicit.products(vectors) * implicit.scale.flatten()[:, None]
    expected = projection.double()([f.double() for f in features]).flatten(0, 2)
    assert (found - expected @ vectors.double().mT).abs().max() <= 1e-5


def test_implicit_tokens_of_a_zero_feature_are_finite() -> None:
    features = [torch.zeros(1, 2, 4, 4, requires_grad=True) for _ in range(3)]
    implicit = ImplicitTokens(TokenProjection((2, 2, 2), 8), features)
    products = implicit.products(torch.ones(3, 8)) * implicit.scale.flatten()[:, None]
    products.sum().backward()
    assert not products.any()
    assert all(bool(f.grad.isfinite().all()) for f in features if f.grad is not None)


def test_squared_norm_has_the_gradient_that_differences_show() -> None:
    x = random(2, 3, 2, 2).requires_grad_()
    assert (squared_norm(x) - x.square().sum(1, keepdim=True)).abs().max() <= 1e-14
    assert torch.autograd.gradcheck(squared_norm, x)
