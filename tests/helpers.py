"""What several test files share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from cdgp.method.gp import DualGP, SparseGP
from cdgp.method.kernels import Kernel, linear
from cdgp.presets import Settings, settings
from cdgp.progress import Advance, Quiet
from cdgp.training.fit import Run

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
JITTER = 1e-3


def tiny_settings(**changes: object) -> Settings:
    """The lite preset at the least input and a few steps: for the plumbing, not for quality."""
    dual_gp = {"steps": 4, "batch_size": 4, "no_separation": "flag"}
    values: dict[str, object] = {
        "input_size": (64, 64),
        "dual_gp": dual_gp,
        "student": {"steps": 4, "batch_size": 2},
        "inducing": {"normal": 8, "anomaly": 4},
    }
    return settings("lite", **{**values, **changes})


class Interrupting(Quiet):
    """Raises KeyboardInterrupt after so many steps of the named phase."""

    def __init__(self, phase: str, after: int) -> None:
        self.name, self.after = phase, after

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Advance]:
        left = self.after

        def advance(note: str = "") -> None:
            nonlocal left
            left -= 1
            if name == self.name and left == 0:
                raise KeyboardInterrupt

        yield advance


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        torch.testing.assert_close(value, b[key], atol=1e-6, rtol=0, msg=key)


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return run.detector.model.network.state_dict()


def random_gp(
    Z: Tensor, kernel: Kernel, seed: int, scale: float = 1.0, jitter: float = JITTER
) -> SparseGP:
    """A GP with random m and random lower-triangular L of the given scale."""
    generator = torch.Generator().manual_seed(seed)
    gp = SparseGP(Z, kernel, jitter).requires_grad_(False)
    M = len(Z)
    gp.m.copy_(torch.randn(M, generator=generator, dtype=torch.float64))
    gp.L.copy_(scale * torch.randn(M, M, generator=generator, dtype=torch.float64).tril())
    return gp


def random_pair(
    seed: int, scale: float, dtype: torch.dtype, kernel: Kernel = linear, dim: int = 64
) -> DualGP:
    """Both GPs with the paper's budgets."""
    normal = random_gp(unit_tokens(32, dim, seed, dtype), kernel, seed + 1, scale)
    anomaly = random_gp(unit_tokens(16, dim, seed + 2, dtype), kernel, seed + 3, scale)
    return DualGP(normal, anomaly)


def unit_tokens(count: int, dim: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(tokens, dim=1).to(dtype)
