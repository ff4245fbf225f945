"""Feature pyramids to dense unit-norm tokens (Eq. 1)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cdgp.method.resize import upsample


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
