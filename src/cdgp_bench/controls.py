"""The paper's controls: evidence functions without Gaussian processes (Section S1.2).

They take the place of ``SparseGP``, so that losses, calibration and inference are the same.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from cdgp.method.build import seeded
from cdgp.method.gp import DualGP, Moments
from cdgp.presets import Settings

LEAST_DIAGONAL = 1e-4
LEAST_VARIANCE = 1e-6
LOW_RANK_SCALE = 1e-2
"""Standard deviation of B before training; at zero it would have no gradient."""

Control = Literal["linear", "heteroscedastic"]


class LinearHead(nn.Module):
    """A free linear mean, and a variance of one.

    The head has no sigma for Eq. 16. With unit variance the losses stay defined, and the dominance
    is the mean margin over the square root of two.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.zeros(dim))

    def forward(self, tokens: Tensor) -> Moments:
        """Moments (N,) at tokens (N, D)."""
        mean = self.mean(tokens)
        return Moments(mean, torch.ones_like(mean))

    def mean(self, tokens: Tensor) -> Tensor:
        """t . beta, (N,)."""
        return tokens @ self.beta


class HeteroscedasticHead(LinearHead):
    """A free linear mean with a diagonal-plus-low-rank quadratic variance (Eq. S1).

    var(t) = t^T diag(softplus(a) + 1e-4) t + |B^T t|^2 + 1e-6. It starts as the GP's prior does:
    mean 0, variance 1. The rank, columns of B, is the inducing budget of the class.
    """

    def __init__(self, dim: int, rank: int) -> None:
        super().__init__(dim)
        self.a = nn.Parameter(torch.full((dim,), math.log(math.e - 1)))
        self.B = nn.Parameter(LOW_RANK_SCALE * torch.randn(dim, rank))

    def forward(self, tokens: Tensor) -> Moments:
        """Moments (N,) at tokens (N, D)."""
        diagonal = functional.softplus(self.a) + LEAST_DIAGONAL
        low_rank = (tokens @ self.B).square().sum(-1)
        return Moments(self.mean(tokens), tokens.square() @ diagonal + low_rank + LEAST_VARIANCE)


def new_control(control: Control, settings: Settings) -> DualGP:
    """An untrained pair of a control, with the ranks of the inducing budgets."""
    dim = settings.backbone.token_dim
    if control == "linear":
        return DualGP(LinearHead(dim), LinearHead(dim))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded(settings.seed, "control").initial_seed())
        return DualGP(
            HeteroscedasticHead(dim, settings.inducing.normal),
            HeteroscedasticHead(dim, settings.inducing.anomaly),
        )
