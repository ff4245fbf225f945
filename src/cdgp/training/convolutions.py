"""Faster steps of depthwise networks on a processor, with the same results.

Two things take time there that arithmetic does not need. oneDNN's fast kernel for the gradient of
depthwise weights takes at most three columns; wider ones fall back to one that takes several times
as long. And TensorFlow's padding copies the largest activations of the network, where the
activation function before it can write its result into a padded tensor in the first place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from timm.layers.conv2d_same import Conv2dSame
from timm.layers.padding import pad_same_arg
from timm.models._efficientnet_blocks import InvertedResidual
from torch import Tensor, nn
from torch.nn import functional

COLUMNS = 3
"""Of depthwise weights, whose gradient is computed together."""


@contextmanager
def fast_convolutions(network: nn.Module) -> Iterator[None]:
    """Within it, convolutions of a network on the processor take less time in training."""
    modules: list[Any] = list(network.modules())
    changed: list[Any] = []
    if next(network.parameters()).device.type == "cpu":
        for module in modules:
            if is_wide_depthwise(module):
                module.forward = partial(wide_depthwise, module)
                changed.append(module)
            elif pads_after_relu6(module):
                act, conv = activation(module), module.conv_dw
                act.forward = partial(relu6_padded_for, conv)
                conv.forward = partial(convolve_padded, conv)
                changed += [act, conv]
    try:
        yield
    finally:
        for module in changed:
            del module.forward


class WideDepthwise(torch.autograd.Function):
    """``conv2d`` with a group for each channel, stride 1 and a padding that keeps the size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        height, width = weight.shape[-2:]
        padding = (height // 2, width // 2)
        return functional.conv2d(x, weight, padding=padding, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = gradients
        x, weight = ctx.saved_tensors
        height, width = weight.shape[-2:]
        of_x, _ = depthwise_gradients(g, x, weight, (height // 2, width // 2), (True, False))
        columns = []
        for first in range(0, width, COLUMNS):
            part = weight[..., first : first + COLUMNS]
            # As wide as these columns need it; a negative padding cuts.
            left, right = width // 2 - first, first + part.shape[-1] - 1 - width // 2
            shifted = functional.pad(x, (left, right))
            _, of_part = depthwise_gradients(g, shifted, part, (height // 2, 0), (False, True))
            columns.append(of_part)
        return of_x, torch.cat(columns, dim=-1)


def depthwise_gradients(
    g: Tensor, x: Tensor, weight: Tensor, padding: tuple[int, int], wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight of a depthwise convolution; undefined if not wanted."""
    # torch.nn.grad loses the channels' place in memory, which doubles the time.
    of_x, of_weight, _ = torch.ops.aten.convolution_backward(
        g, x, weight, None, [1, 1], padding, [1, 1], False, [0, 0], len(weight), [*wanted, False]
    )
    return of_x, of_weight


def is_wide_depthwise(module: nn.Module) -> bool:
    """Whether ``WideDepthwise`` computes what the module does, and in less time."""
    return (
        type(module) is nn.Conv2d
        and module.groups == module.in_channels == module.out_channels
        and module.bias is None
        and module.padding_mode == "zeros"
        and module.stride == module.dilation == (1, 1)
        and module.kernel_size[1] > COLUMNS
        and all(side % 2 for side in module.kernel_size)
        and module.padding == tuple(side // 2 for side in module.kernel_size)
    )


def wide_depthwise(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """What the convolution makes of x (B, C, H, W)."""
    weight: Tensor = conv.weight
    if torch.is_autocast_enabled(x.device.type):  # its gradient knows nothing of autocast
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    y: Tensor = WideDepthwise.apply(x, weight)
    return y


class PaddedReLU6(torch.autograd.Function):
    """``pad(relu6(x), padding)`` with padding = (left, right, top, bottom)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: tuple[int, int, int, int]) -> Tensor:
        left, right, top, bottom = padding
        B, C, H, W = x.shape
        y = torch.empty(
            (B, C, top + H + bottom, left + W + right), dtype=x.dtype, device=x.device,
            memory_format=torch.channels_last,
        )  # fmt: skip
        ctx.inside = (..., slice(top, top + H), slice(left, left + W))
        for edge in (y[..., :top, :], y[..., top + H :, :], y[..., :left], y[..., left + W :]):
            edge.zero_()
        torch.clamp(x, 0, 6, out=y[ctx.inside])
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (g,) = gradients
        (y,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(g[ctx.inside], y[ctx.inside], 0, 6), None


def pads_after_relu6(block: nn.Module) -> bool:
    """Whether a block pads what a ReLU6 has just made, for its depthwise convolution."""
    return (
        type(block) is InvertedResidual
        and type(block.conv_dw) is Conv2dSame
        and type(activation(block)) is nn.ReLU6
    )


def activation(block: InvertedResidual) -> nn.Module:
    """What a block applies before its depthwise convolution; ``fold`` leaves it alone there."""
    act: nn.Module = getattr(block.bn1, "act", block.bn1)
    return act


def relu6_padded_for(conv: Any, x: Tensor) -> Tensor:
    """ReLU6 of x (B, C, H, W), padded as the convolution needs it."""
    size = list(x.shape[-2:])
    padding = pad_same_arg(size, conv.kernel_size, conv.stride, conv.dilation)
    y: Tensor = PaddedReLU6.apply(x, tuple(padding))
    return y


def convolve_padded(conv: Conv2dSame, x: Tensor) -> Tensor:
    """The convolution of an x that is padded already."""
    return functional.conv2d(x, conv.weight, conv.bias, conv.stride, 0, conv.dilation, conv.groups)
