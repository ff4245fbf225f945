"""Feature pyramids to dense unit-norm tokens (Eq. 1)."""

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cdgp.method.resize import Size, linear_weights, upsample

LEAST_SQUARE = 1e-24
"""Of the length by which a vector is divided, as in ``l2_normalize``."""


class L2Normalize(torch.autograd.Function):
    """Vectors over their norms, as ``functional.normalize``, with a gradient of fewer passes.

    With y = x / |x| the gradient is (g - (g . y) y) / |x|, for which y and |x| suffice; autograd
    goes through every step of the quotient instead.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(1e-12)
        y = x / norm
        ctx.save_for_backward(y, norm)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (g,) = gradients
        y, norm = ctx.saved_tensors
        along = (g * y).sum(1, keepdim=True)
        gradient: Tensor = torch.addcmul(g, along, y, value=-1).div_(norm)
        return gradient


def l2_normalize(x: Tensor) -> Tensor:
    """Vectors along the channels of (B, C, H, W) over their norms."""
    y: Tensor = L2Normalize.apply(x)
    return y


class TokenProjection(nn.Module):
    """Project three stages to D channels, normalise, align to the first stage, average, normalise.

    The projections are orthogonal before training, so that cosine similarities between ImageNet
    features are kept as well as D dimensions allow.

    Args:
        channels: channels of the three stages.
        dim: D.
    """

    def __init__(self, channels: Sequence[int], dim: int) -> None:
        super().__init__()
        self.phi = nn.ModuleList(nn.Conv2d(c, dim, kernel_size=1, bias=False) for c in channels)
        for layer in self.phi:
            assert isinstance(layer, nn.Conv2d)
            nn.init.orthogonal_(layer.weight.view(dim, -1))

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """(B, C_l, H_l, W_l) of three stages to tokens (B, H', W', D), each of norm 1."""
        size = (features[0].shape[-2], features[0].shape[-1])
        stages = [l2_normalize(phi(f)) for phi, f in zip(self.phi, features, strict=True)]
        total = stages[0]
        for stage in stages[1:]:
            total = total + upsample(stage, size)
        # The mean's factor of one third vanishes in the norm.
        return l2_normalize(total).permute(0, 2, 3, 1)


class SquaredNorm(torch.autograd.Function):
    """``squared_norm``, with a gradient of one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        square: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True).square_()
        return square

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (g,) = gradients
        (x,) = ctx.saved_tensors
        gradient: Tensor = x * (2 * g)
        return gradient


class ImplicitTokens:
    """The tokens of ``TokenProjection`` without their D entries: products with vectors alone.

    A token is t = c / |c| with c = sum_l up(W_l f_l / |W_l f_l|), where W_l projects the features
    f_l of stage l. The share of a stage in c . v, v^T W_l f_l / |W_l f_l|, is made at the stage's
    own resolution. Lengths are those of coordinates: with (W_1 W_2 W_3) = Q R, finest stage first,
    the first C_1 entries of Q^T c have shares of all stages, the next C_2 of the two coarser ones,
    the last C_3 of the coarsest alone. Convolutional backbones have few channels at the finest
    resolution, where passes over memory take the time.

    Args:
        projection: of the three stages.
        features: (B, C_l, H_l, W_l) of the three stages; H', W' below are those of the first.
    """

    def __init__(self, projection: TokenProjection, features: Sequence[Tensor]) -> None:
        self.features = features
        self.size = (features[0].shape[-2], features[0].shape[-1])
        self.weights = [weight.flatten(1) for weight in projection.parameters()]
        self.scales: list[Tensor] = []
        """1 / |W_l f_l|, (B, 1, H_l, W_l) of each stage."""
        R = coordinates(self.weights)
        ends = [0, *accumulate(w.shape[1] for w in self.weights)]
        counts = [min(end, len(R)) - min(start, len(R)) for start, end in pairwise(ends)]
        """Entries of Q^T c that begin with each stage; beyond D there are none."""
        groups: list[list[Tensor]] = [[] for _ in counts]
        for stage, (feature, (start, end)) in enumerate(zip(features, pairwise(ends), strict=True)):
            own = matmul(R[:end, start:end], feature)
            self.scales.append(squared_norm(own).clamp_min(LEAST_SQUARE).rsqrt())
            parts = (own * self.scales[stage]).split(counts[: stage + 1], dim=1)
            for group, part in zip(groups, parts, strict=False):
                group.append(part)
        squares = [squared_norm_upsampled(g, self.size) for g in groups if g[0].shape[1]]
        self.scale = reduce(Tensor.add, squares).clamp_min(LEAST_SQUARE).rsqrt()
        """1 / |c|, (B, 1, H', W')."""

    def products(self, vectors: Tensor) -> Tensor:
        """c . v of vectors (M, D), (B H' W', M) in the order of the tokens."""
        parts = [
            upsample(matmul(vectors @ weight, feature) * scale, self.size)
            for weight, feature, scale in zip(self.weights, self.features, self.scales, strict=True)
        ]
        return reduce(Tensor.add, parts).permute(0, 2, 3, 1).flatten(0, 2)

    @torch.no_grad()
    def mean_token(self) -> Tensor:
        """The mean of all tokens, (D,); its squared length is the mean cosine over all pairs."""
        sums = []
        for weight, feature, scale in zip(self.weights, self.features, self.scales, strict=True):
            # How much each position of the stage counts in all tokens.
            rows, columns = (
                linear_weights(inputs, outputs, scale)
                for inputs, outputs in zip(feature.shape[-2:], self.size, strict=True)
            )
            share = rows.mT @ self.scale @ columns * scale
            sums.append(weight @ torch.einsum("bchw,bhw->c", feature, share[:, 0]))
        return reduce(Tensor.add, sums) / self.scale.numel()


def squared_norm_upsampled(parts: Sequence[Tensor], size: Size) -> Tensor:
    """|sum of up(parts)|^2 along the channels, (B, 1, H, W) of a size, of parts (B, C, h, w).

    A single part is upsampled along its columns alone. In a row of vectors x_i, upsampling makes
    sum_i a_i x_i, and the square is read off the inner products: sum_ij a_i a_j x_i . x_j.
    """
    if len(parts) > 1:
        return squared_norm(reduce(Tensor.add, (upsample(part, size) for part in parts)))
    width = parts[0].shape[-1]
    x = upsample(parts[0], (size[0], width)).permute(0, 2, 3, 1)
    a = linear_weights(width, size[1], x)
    pairs = (a[:, :, None] * a[:, None, :]).flatten(1)
    return ((x @ x.mT).flatten(2) @ pairs.mT)[:, None]


def coordinates(weights: Sequence[Tensor]) -> Tensor:
    """R of (W_1 W_2 W_3) = Q R, weights (D, C_l) each, in their precision.

    Where the first stage alone fills all D dimensions, the weights are coordinates already.
    """
    together = torch.cat(list(weights), dim=1)
    if weights[0].shape[1] >= len(together):
        return together
    # In float64: the gradient of R divides by its smallest diagonal entry.
    R: Tensor = torch.linalg.qr(together.double()).R
    return R.to(together.dtype)


def squared_norm(x: Tensor) -> Tensor:
    """Squared norms (B, 1, H, W) along the channels of (B, C, H, W)."""
    y: Tensor = SquaredNorm.apply(x)
    return y


def matmul(matrix: Tensor, maps: Tensor) -> Tensor:
    """A matrix (M, C) times every vector along the channels of (B, C, H, W), (B, M, H, W)."""
    return functional.conv2d(maps, matrix[:, :, None, None])
