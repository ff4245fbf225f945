"""Convolutions that do the work of what follows or precedes them, for inference alone."""

from timm.layers.conv2d_same import Conv2dSame
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights


class _Tracer(fx.Tracer):
    """Convolutions and batch norms stay whole, whoever's they are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = isinstance(m, nn.Conv2d | nn.modules.batchnorm._BatchNorm)
        return whole or super().is_leaf_module(m, module_qualified_name)


def fold_batch_norms(module: nn.Module) -> None:
    """Fold each batch norm that follows a convolution into it, in place, for evaluation mode.

    A module whose order cannot be traced stays as it is.
    """
    try:
        nodes = _Tracer().trace(module).nodes
    except Exception:  # tracing runs foreign code and may raise anything; unfolded is right too
        return
    parts = dict(module.named_modules())
    for node in nodes:
        norm, source = parts.get(str(node.target)), node.args[0] if node.args else None
        if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or not isinstance(source, fx.Node):
            continue
        conv = parts.get(str(source.target))
        if not isinstance(conv, nn.Conv2d) or len(source.users) > 1:
            continue
        if norm.running_mean is None or norm.running_var is None:
            continue
        conv.weight, conv.bias = fuse_conv_bn_weights(
            conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps,
            norm.weight, norm.bias,
        )  # fmt: skip
        parent, _, name = str(node.target).rpartition(".")
        # timm's batch norms carry the activation that follows them
        setattr(module.get_submodule(parent), name, getattr(norm, "act", nn.Identity()))


def fix_padding(module: nn.Module) -> None:
    """Give TensorFlow-style convolutions the padding that they work out anew for every input.

    It depends on the size unless this is a multiple of the stride, which inputs here are at every
    layer.
    """
    for name, layer in list(module.named_modules()):
        if isinstance(layer, Conv2dSame):
            sides = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
            total = [max(d * (k - 1) + 1 - s, 0) for k, s, d in sides]
            top, left = (side // 2 for side in total)
            padding = nn.ZeroPad2d((left, total[1] - left, top, total[0] - top))
            conv = nn.Conv2d(
                layer.in_channels, layer.out_channels, (layer.kernel_size[0], layer.kernel_size[1]),
                (layer.stride[0], layer.stride[1]), 0, (layer.dilation[0], layer.dilation[1]),
                layer.groups, layer.bias is not None,
            )  # fmt: skip
            conv.weight, conv.bias = layer.weight, layer.bias
            parent, _, own = name.rpartition(".")
            setattr(module.get_submodule(parent), own, nn.Sequential(padding, conv))
