"""One training step on several devices: each process works on its share of a batch.

All processes choose the same batch and take their rows of it. What the loss mixes over images is
gathered first, so that each process has the loss of the whole batch; batch norms use the statistics
of the whole batch. DistributedDataParallel divides the sum of the gradients by the number of
processes, so gradients that pass back to a share are multiplied by it. In a single process every
function here gives back what it was given.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, distributed, nn
from torch.nn import functional

from cdgp.errors import SettingsError


@dataclass(frozen=True)
class Share:
    """Which part of every batch a process works on."""

    rank: int
    """Of the process, from 0."""
    count: int
    """How many processes there are."""

    def rows(self, batch: int) -> range:
        """Those of a batch of so many images; where they cannot be equal, they differ by one."""
        return range(batch * self.rank // self.count, batch * (self.rank + 1) // self.count)

    def sizes(self, batch: int) -> list[int]:
        """The number of rows of each process."""
        return [len(Share(rank, self.count).rows(batch)) for rank in range(self.count)]

    def gathered(self, own: Tensor, batch: int) -> Tensor:
        """(rows, ...) of all processes as (batch, ...), with a gradient."""
        if self.count == 1:
            return own
        whole: Tensor = _Gathered.apply(own, self.rows(batch), batch, self.count)
        return whole

    def mean(self, own: Tensor, batch: int) -> Tensor:
        """Mean over a batch of what is a mean over each process's rows, with a gradient."""
        if self.count == 1:
            return own
        part = own * (len(self.rows(batch)) / batch)
        parts: Tensor = _Gathered.apply(
            part[None], range(self.rank, self.rank + 1), self.count, self.count
        )
        return parts.sum(0)

    def from_first(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The first process's tensor, on the CPU as it was; the others' have its shape."""
        if self.count == 1:
            return tensor
        sent = tensor.to(device)
        distributed.broadcast(sent, 0)
        return sent.to(tensor.device)


ALONE = Share(0, 1)


class _Gathered(torch.autograd.Function):
    """Rows of all processes in one tensor; a sum of tensors that are zero elsewhere is exact."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: range, total: int, count: int) -> Tensor:
        ctx.rows, ctx.count = rows, count
        whole = own.new_zeros((total, *own.shape[1:]))
        whole[rows.start : rows.stop] = own
        distributed.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (g,) = gradients
        return g[ctx.rows.start : ctx.rows.stop] * ctx.count, None, None, None


@contextmanager
def synchronised(network: nn.Module, share: Share) -> Iterator[None]:
    """Within it, batch norms that train normalise by the statistics of the whole batch.

    torch's own ``SyncBatchNorm`` runs on GPUs alone.
    """
    norms: list[Any] = []
    if share.count > 1:
        norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.forward = partial(synchronised_norm, norm, share)
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


def synchronised_norm(norm: Any, share: Share, x: Tensor) -> Tensor:
    """What a batch norm makes of its process's rows x (B, C, H, W) of a batch.

    Raises:
        SettingsError: a batch norm that trains and is of a kind that is not known here.
    """
    y: Tensor
    if not norm.training:
        y = type(norm).forward(norm, x)
        return y
    known = type(norm) in (nn.BatchNorm2d, BatchNormAct2d)
    if not (known and norm.affine and norm.track_running_stats and norm.momentum is not None):
        raise SettingsError(
            f"backbone.name: its batch norms ({type(norm).__name__}) cannot train on several "
            "devices; leave --devices out, or give --set dual_gp.batch_norm=frozen"
        )
    y, mean, variance, count = _SynchronisedNorm.apply(x, norm.weight, norm.bias, norm.eps, share)
    with torch.no_grad():
        norm.num_batches_tracked += 1
        unbiased = variance * (count / (count - 1))
        for kept, new in ((norm.running_mean, mean), (norm.running_var, unbiased)):
            kept.lerp_(new, norm.momentum)
    if isinstance(norm, BatchNormAct2d):
        y = norm.act(norm.drop(y))
    return y


class _SynchronisedNorm(torch.autograd.Function):
    """Batch norm by the mean and variance of all processes' rows, which it gives back too.

    With y = w x^ + b, x^ = (x - mean) / deviation, the gradient of x is that of fixed statistics,
    g w / deviation, less (w / deviation) (mean of g + x^ mean of g x^), means over the batch.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, share: Share
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        C = x.shape[1]
        # Of the running statistics that it updates too, none is kept; var_mean takes 20 times as
        # long on a processor.
        mean, variance = torch.batch_norm_update_stats(
            x.to(weight.dtype), weight.new_zeros(C), weight.new_ones(C), 0.0
        )
        parts = mean.new_zeros(share.count, 2 * C + 1)
        parts[share.rank] = torch.cat([mean, variance, mean.new_tensor([x.numel() / C])])
        distributed.all_reduce(parts)
        means, variances, counts = parts.split([C, C, 1], dim=1)
        count = counts.sum()
        weights = counts / count
        mean = (weights * means).sum(0)
        variance = (weights * (variances + (means - mean).square())).sum(0)
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, variance, count)
        y = functional.batch_norm(x, mean, variance, weight, bias, eps=eps)
        return y, mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        g = gradients[0]
        x, weight, mean, variance, count = ctx.saved_tensors
        of_x, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            g, x, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        sums = torch.stack([of_weight, of_bias])
        distributed.all_reduce(sums)
        slope, constant = sums * (weight * (variance + ctx.eps).rsqrt() / count)
        shift = functional.batch_norm(x, mean, variance, slope, constant, eps=ctx.eps)
        return of_x.sub_(shift), of_weight, of_bias, None, None
