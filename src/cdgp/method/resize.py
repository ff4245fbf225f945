"""The one resizer of maps and features: bilinear, without aligned corners."""

import torch
from torch import Tensor
from torch.nn import functional

Size = tuple[int, int]


def upsample(maps: Tensor, size: Size) -> Tensor:
    """Maps (n, h, w) or features (n, C, h, w) at another size; unchanged where they have it."""
    if tuple(maps.shape[-2:]) == tuple(size):
        return maps
    stacked = maps if maps.ndim == 4 else maps[:, None]
    resized = functional.interpolate(stacked, size=size, mode="bilinear", align_corners=False)
    return resized if maps.ndim == 4 else resized[:, 0]


def upsample_matmul(maps: Tensor, size: Size) -> Tensor:
    """``upsample`` of maps (n, h, w) to (n, H, W) as one matrix product for each axis.

    Exported runtimes compute it in a third of the time that their own interpolation takes.
    """
    rows, columns = (
        linear_weights(maps.shape[axis], target, maps)
        for axis, target in zip((1, 2), size, strict=True)
    )
    return rows @ maps @ columns.mT


def linear_weights(inputs: int, outputs: int, like: Tensor) -> Tensor:
    """(outputs, inputs): the share of each input in each linearly upsampled position."""
    steps = torch.arange(outputs, dtype=like.dtype, device=like.device) + 0.5
    at = (steps * (inputs / outputs) - 0.5).clamp(0, inputs - 1)
    places = torch.arange(inputs, dtype=like.dtype, device=like.device)
    return (1 - (at[:, None] - places).abs()).clamp_min(0)
