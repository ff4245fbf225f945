"""The two kernels over unit-norm tokens; of both, k(t, t) = 1."""

from collections.abc import Callable

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor], Tensor]


def linear(x: Tensor, z: Tensor) -> Tensor:
    """k(x, z) = x . z, of (N, D) and (M, D) to (N, M)  (Eq. 5)."""
    return x @ z.mT


def spherical_rbf(sigma: float) -> Kernel:
    """k(x, z) = exp(-(1 - x . z) / sigma^2), of (N, D) and (M, D) to (N, M)  (Table S5)."""

    def kernel(x: Tensor, z: Tensor) -> Tensor:
        return torch.exp((x @ z.mT - 1) / sigma**2)

    return kernel


def kernel_named(name: str, rbf_sigma: float) -> Kernel:
    """The kernel that the settings name: ``linear`` or ``rbf``."""
    return {"linear": linear, "rbf": spherical_rbf(rbf_sigma)}[name]
