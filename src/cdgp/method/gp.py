"""Sparse Gaussian-process moments, the contrastive pair, and posterior dominance (Eq. 3-12)."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cdgp.errors import TrainingError
from cdgp.method.kernels import Kernel, linear


class Moments(NamedTuple):
    """Predictive mean and variance of one evidence function, each (N,)."""

    mean: Tensor
    variance: Tensor


class EvidenceFunction(Protocol):
    """What the pair is made of: a sparse GP, or a control of the paper that takes its place."""

    def __call__(self, tokens: Tensor) -> Moments: ...

    def mean(self, tokens: Tensor) -> Tensor: ...


class SparseGP(nn.Module):
    """One evidence function f_c with q(u_c) = N(m_c, L_c L_c^T) at fixed inducing tokens.

    K_c = k(Z_c, Z_c) + jitter I is factorised once, in float64; what the moments need of it is
    kept in buffers, so that no factorisation is left in the graph.

    Args:
        Z: (M, D) inducing tokens, each of norm 1.
        kernel: of which k(t, t) = 1.
        jitter: added to the diagonal of the kernel matrix.
        initial_mean: every entry of m before training.
        initial_scale: L before training is this multiple of the identity.

    Raises:
        TrainingError: the kernel matrix cannot be factorised.
    """

    def __init__(
        self,
        Z: Tensor,
        kernel: Kernel,
        jitter: float,
        initial_mean: float,
        initial_scale: float,
    ) -> None:
        super().__init__()
        M = len(Z)
        self.kernel = kernel
        self.register_buffer("Z", Z.clone())
        self.m = nn.Parameter(torch.full((M,), initial_mean, dtype=Z.dtype))
        self.L = nn.Parameter(initial_scale * torch.eye(M, dtype=Z.dtype))
        Z64 = Z.double()
        Kzz = kernel(Z64, Z64) + jitter * torch.eye(M, dtype=torch.float64, device=Z.device)
        Lz, failed = torch.linalg.cholesky_ex(Kzz)
        if int(failed) or not bool(torch.isfinite(Lz).all()):
            raise TrainingError(
                "the kernel matrix of an inducing set cannot be factorised. Likely causes: (a) "
                "tokens that are not finite; (b) many equal images, so that inducing tokens "
                "repeat: remove the duplicates; (c) too small a jitter: raise dual_gp.jitter"
            )
        identity = torch.eye(M, dtype=torch.float64, device=Z.device)
        Lz_inv = torch.linalg.solve_triangular(Lz, identity, upper=False)
        self.register_buffer("Lz_inv", Lz_inv.to(Z.dtype), persistent=False)
        self.register_buffer("Kzz_inv", (Lz_inv.mT @ Lz_inv).to(Z.dtype), persistent=False)
        self.Z: Tensor
        self.Lz_inv: Tensor
        self.Kzz_inv: Tensor

    def forward(self, tokens: Tensor) -> Moments:
        """Moments (N,) of f_c at tokens (N, D).

        mean = k_tZ K^-1 m                                                (Eq. 6)
        variance = 1 - |Lz^-1 k_Zt|^2 + |L^T K^-1 k_Zt|^2                  (Eq. 7)
        """
        ktz = self.kernel(tokens, self.Z)
        mean = ktz @ (self.Kzz_inv @ self.m)
        explained = (ktz @ self.Lz_inv.mT).square().sum(-1)
        learned = (ktz @ (self.Kzz_inv @ self.L.tril())).square().sum(-1)
        return Moments(mean, 1 - explained + learned)

    def mean(self, tokens: Tensor) -> Tensor:
        """The predictive mean alone, (N,)."""
        return self.kernel(tokens, self.Z) @ (self.Kzz_inv @ self.m)

    def direction(self) -> Tensor:
        """beta (D,): with the linear kernel the mean is t . beta  (Eq. 11)."""
        return self.Z.mT @ (self.Kzz_inv @ self.m)


class DualGP(nn.Module):
    """The normal and the anomaly evidence function over one token space."""

    def __init__(self, normal: EvidenceFunction, anomaly: EvidenceFunction) -> None:
        super().__init__()
        self.normal = normal
        self.anomaly = anomaly

    def mean_margin(self, tokens: Tensor) -> Tensor:
        """s_mu = mu_A - mu_N at tokens (N, D), (N,)  (Eq. 8)."""
        return self.anomaly.mean(tokens) - self.normal.mean(tokens)

    def dominance(self, tokens: Tensor, floor: float) -> Tensor:
        """g = (mu_A - mu_N) / sqrt(var_A + var_N) at tokens (N, D), (N,)  (Eq. 10)."""
        mu_A, var_A = self.anomaly(tokens)
        mu_N, var_N = self.normal(tokens)
        return standardised(mu_A - mu_N, var_A + var_N, floor)


def standardised(margin: Tensor, variance: Tensor, floor: float) -> Tensor:
    """margin / sqrt(max(variance, floor))."""
    return margin / variance.clamp_min(floor).sqrt()


def has_linear_forms(gps: DualGP) -> bool:
    """Whether both functions are sparse GPs with the linear kernel, see ``linear_forms``."""
    return all(isinstance(f, SparseGP) and f.kernel is linear for f in (gps.normal, gps.anomaly))


def linear_forms(gps: DualGP) -> tuple[Tensor, Tensor]:
    """beta (D,) and C (D, D), in float64: margin and summed variance as forms of the token.

    With the linear kernel and |t| = 1 the margin is t . beta, beta = beta_A - beta_N (Eq. 11), and
    the summed variance is 2 + t^T C t, where
    C = sum_c Z_c^T (K_c^-1 S_c K_c^-1 - K_c^-1) Z_c has rank at most M_N + M_A and is indefinite.

    Raises:
        TypeError: a function is no sparse GP with the linear kernel.
    """
    if not has_linear_forms(gps):
        raise TypeError("only sparse GPs with the linear kernel have linear forms")
    assert isinstance(gps.normal, SparseGP) and isinstance(gps.anomaly, SparseGP)
    with torch.no_grad():
        beta_N, C_N = _linear_form(gps.normal)
        beta_A, C_A = _linear_form(gps.anomaly)
    return beta_A - beta_N, C_N + C_A


def linear_moments(
    gps: DualGP, products: Callable[[Tensor], Tensor], scale: Tensor
) -> tuple[Moments, Moments]:
    """Moments of the normal and of the anomaly function, without a gradient of the variances.

    For sparse GPs with the linear kernel. The means are those of Eq. 11; the variance is
    1 + sum_i e_i (t . v_i)^2 with the eigenvalues and eigenvectors of the form in
    ``linear_forms``. Roots of |e_i| go into the vectors, so that what is left of e_i is its sign.

    Args:
        gps: see ``has_linear_forms``.
        products: c . v, (N, M), of vectors (M, D) with vectors c along the N tokens.
        scale: 1 / |c|, (N,).
    """
    functions = [f for f in (gps.normal, gps.anomaly) if isinstance(f, SparseGP)]
    means = products(torch.stack([f.direction() for f in functions])) * scale[:, None]
    with torch.no_grad():
        vectors, signs = zip(*(_spectrum(f) for f in functions), strict=True)
        squares = products(torch.cat(vectors)).square_().split([len(v) for v in vectors], dim=1)
        shares = scale.square()
        variances = [1 + s @ sign * shares for s, sign in zip(squares, signs, strict=True)]
    normal, anomaly = (Moments(mean, v) for mean, v in zip(means.T, variances, strict=True))
    return normal, anomaly


def _spectrum(gp: SparseGP) -> tuple[Tensor, Tensor]:
    """sqrt|e_i| v_i (M, D) and the signs of e_i (M,): Z^T (K^-1 S K^-1 - K^-1) Z is their sum."""
    Kzz_inv = gp.Lz_inv.double().mT @ gp.Lz_inv.double()
    Kzz_inv_L = Kzz_inv @ gp.L.double().tril()
    e, V = torch.linalg.eigh(Kzz_inv_L @ Kzz_inv_L.mT - Kzz_inv)
    vectors = e.abs().sqrt()[:, None] * (V.mT @ gp.Z.double())
    return vectors.to(gp.Z.dtype), e.sign().to(gp.Z.dtype)


def _linear_form(gp: SparseGP) -> tuple[Tensor, Tensor]:
    """beta_c (D,) of Eq. 11 and Z^T (K^-1 S K^-1 - K^-1) Z (D, D), in float64."""
    Z = gp.Z.double()
    Kzz_inv = gp.Lz_inv.double().mT @ gp.Lz_inv.double()
    L = gp.L.double().tril()
    beta = Z.mT @ (Kzz_inv @ gp.m.double())
    C = Z.mT @ (Kzz_inv @ L @ L.mT @ Kzz_inv - Kzz_inv) @ Z
    return beta, (C + C.mT) / 2
