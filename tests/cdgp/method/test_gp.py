"""Moments and dominance against GPyTorch, NumPy and sampling, and their limit identities."""

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.variational import CholeskyVariationalDistribution, UnwhitenedVariationalStrategy
from numpy.typing import NDArray
from tests.helpers import random_gp, random_pair, unit_tokens
from torch import Tensor

from cdgp.errors import TrainingError
from cdgp.method.gp import DualGP, FusedDominance, SparseGP, standardised
from cdgp.method.kernels import kernel_named, linear, spherical_rbf

SIGMA = 0.5
JITTER = 1e-3
FLOOR = 1e-6
SHAPES = [(32, 256), (16, 256), (8, 24), (24, 16)]
"""(M, D): both budgets of the paper, a small set, and one with more tokens than dimensions."""


class Reference(gpytorch.models.ApproximateGP):
    """GPyTorch with the same q(u): unwhitened, so that the jitter stands in K alone."""

    def __init__(self, gp: SparseGP, covariance: gpytorch.kernels.Kernel) -> None:
        distribution = CholeskyVariationalDistribution(len(gp.Z))
        super().__init__(
            UnwhitenedVariationalStrategy(
                self, gp.Z, distribution, learn_inducing_locations=False, jitter_val=JITTER
            )
        )
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = covariance
        self.double().eval().requires_grad_(False)
        distribution.variational_mean.copy_(gp.m)
        distribution.chol_variational_covar.copy_(gp.L)
        self.variational_strategy.variational_params_initialized.fill_(1)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def reference_kernel(name: str) -> gpytorch.kernels.Kernel:
    if name == "linear":
        kernel = gpytorch.kernels.LinearKernel().double()
        kernel.variance = 1.0
        return kernel
    kernel = gpytorch.kernels.RBFKernel().double()
    kernel.lengthscale = SIGMA
    return kernel


def closed_form(gp: SparseGP, tokens: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Eq. 6 and Eq. 7 as printed, for the linear kernel, with NumPy's inverse."""
    Z, t = gp.Z.double().numpy(), tokens.double().numpy()
    m, L = gp.m.double().numpy(), np.tril(gp.L.double().numpy())
    K_inv = np.linalg.inv(Z @ Z.T + JITTER * np.eye(len(Z)))
    inner = np.eye(Z.shape[1]) - Z.T @ K_inv @ Z + Z.T @ K_inv @ L @ L.T @ K_inv @ Z
    return t @ Z.T @ K_inv @ m, np.einsum("nd,de,ne->n", t, inner, t)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["linear", "rbf"])
def test_moments_are_those_of_gpytorch(name: str, shape: tuple[int, int]) -> None:
    M, D = shape
    for seed in range(3):
        gp = random_gp(unit_tokens(M, D, seed), kernel_named(name, SIGMA), seed + 50)
        tokens = torch.cat([unit_tokens(60, D, seed + 100), gp.Z[:4]])
        expected = Reference(gp, reference_kernel(name))(tokens)
        found = gp(tokens)
        assert (found.mean - expected.mean).abs().max() <= 1e-10
        assert (found.variance - expected.variance).abs().max() <= 1e-10
        assert torch.equal(gp.mean(tokens), found.mean)


@pytest.mark.parametrize("shape", SHAPES)
def test_linear_moments_are_the_printed_equations(shape: tuple[int, int]) -> None:
    M, D = shape
    gp = random_gp(unit_tokens(M, D, 1), linear, 2)
    tokens = unit_tokens(60, D, 3)
    mean, variance = closed_form(gp, tokens)
    found = gp(tokens)
    np.testing.assert_allclose(found.mean.numpy(), mean, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.variance.numpy(), variance, rtol=0, atol=1e-10)


def test_kernels_are_one_at_equal_tokens_and_gpytorch_elsewhere() -> None:
    x, z = unit_tokens(20, 12, 0), unit_tokens(30, 12, 1)
    for name in ("linear", "rbf"):
        kernel = kernel_named(name, SIGMA)
        assert (kernel(x, x).diagonal() - 1).abs().max() <= 1e-14
        expected = reference_kernel(name)(x, z).to_dense()
        assert (kernel(x, z) - expected).abs().max() <= 1e-13
    i, j = 3, 7
    by_hand = np.exp(-(1 - float(x[i] @ z[j])) / SIGMA**2)
    assert float(spherical_rbf(SIGMA)(x, z)[i, j]) == pytest.approx(by_hand, rel=1e-13)


@pytest.mark.parametrize("name", ["linear", "rbf"])
def test_inducing_covariance_equal_to_the_kernel_matrix_gives_the_prior(name: str) -> None:
    kernel = kernel_named(name, SIGMA)
    gp = SparseGP(unit_tokens(16, 64, 0), kernel, JITTER).requires_grad_(False)
    Kzz = kernel(gp.Z, gp.Z) + JITTER * torch.eye(16, dtype=torch.float64)
    gp.L.copy_(torch.linalg.cholesky(Kzz))
    tokens = torch.cat([unit_tokens(50, 64, 1), gp.Z])
    assert (gp(tokens).variance - 1).abs().max() <= 1e-12
    assert gp(tokens).mean.abs().max() == 0


@pytest.mark.parametrize("name", ["linear", "rbf"])
def test_at_the_inducing_tokens_the_inducing_values_come_back(name: str) -> None:
    gp = random_gp(unit_tokens(12, 64, 0), kernel_named(name, SIGMA), 1, jitter=1e-10)
    found = gp(gp.Z)
    S = gp.L @ gp.L.mT
    assert (found.mean - gp.m).abs().max() <= 1e-7
    assert (found.variance - S.diagonal()).abs().max() <= 1e-7


def test_variance_without_jitter_is_the_mass_outside_the_inducing_span() -> None:
    gp = random_gp(unit_tokens(8, 32, 0), linear, 1, scale=0.0, jitter=1e-10)
    basis = torch.linalg.qr(gp.Z.mT).Q
    tokens = unit_tokens(40, 32, 2)
    inside = torch.nn.functional.normalize(tokens @ basis @ basis.mT, dim=1)
    outside = torch.nn.functional.normalize(tokens - tokens @ basis @ basis.mT, dim=1)
    assert gp(inside).variance.abs().max() <= 1e-8
    assert (gp(outside).variance - 1).abs().max() <= 1e-12
    assert gp(outside).mean.abs().max() <= 1e-12
    mass = 1 - (tokens @ basis).square().sum(1)
    assert (gp(tokens).variance - mass).abs().max() <= 1e-8


def test_start_is_the_configured_mean_and_scale() -> None:
    gp = SparseGP(unit_tokens(5, 16, 0), linear, JITTER, initial_mean=0.25, initial_scale=0.5)
    assert gp.m.tolist() == [0.25] * 5
    assert torch.equal(gp.L.detach(), 0.5 * torch.eye(5, dtype=torch.float64))
    assert {name for name, _ in gp.named_parameters()} == {"m", "L"}, "the locations stay fixed"


def test_upper_triangle_of_the_covariance_factor_is_not_used() -> None:
    gp = random_gp(unit_tokens(6, 16, 0), linear, 1)
    tokens = unit_tokens(20, 16, 2)
    before = gp(tokens)
    gp.L += torch.ones(6, 6, dtype=torch.float64).triu(1)
    assert torch.equal(gp(tokens).variance, before.variance)
    gp.requires_grad_(True)
    gp(tokens).variance.sum().backward()
    assert gp.L.grad is not None
    assert gp.L.grad.triu(1).abs().max() == 0
    assert gp.L.grad.tril().abs().max() > 0


def test_inducing_tokens_are_a_copy() -> None:
    Z = unit_tokens(6, 16, 0)
    gp = random_gp(Z, linear, 1)
    tokens = unit_tokens(20, 16, 2)
    before = gp(tokens).mean
    Z.zero_()
    assert torch.equal(gp(tokens).mean, before)


@pytest.mark.parametrize("name", ["linear", "rbf"])
def test_dominance_is_the_probability_that_anomaly_evidence_is_larger(name: str) -> None:
    """Draws u, then f given u, of both functions; compares shares with Phi(g)  (Eq. 9 and 10)."""
    kernel = kernel_named(name, SIGMA)
    pair = DualGP(
        random_gp(unit_tokens(6, 12, 0), kernel, 1, 0.4),
        random_gp(unit_tokens(5, 12, 2), kernel, 3, 0.4),
    )
    tokens = torch.cat([pair.anomaly.Z[:2], pair.normal.Z[:2], unit_tokens(2, 12, 4)])
    rng = np.random.default_rng(0)
    draws = 200_000
    samples = []
    for gp in (pair.anomaly, pair.normal):
        Kzz = kernel(gp.Z, gp.Z).numpy() + JITTER * np.eye(len(gp.Z))
        ktz = kernel(tokens, gp.Z).numpy()
        u = gp.m.numpy() + rng.standard_normal((draws, len(gp.Z))) @ gp.L.numpy().T
        weights = np.linalg.solve(Kzz, ktz.T)
        left = 1 - np.einsum("nm,mn->n", ktz, weights)
        samples.append(u @ weights + np.sqrt(left) * rng.standard_normal((draws, len(tokens))))
    share = (samples[0] > samples[1]).mean(0)
    expected = torch.special.ndtr(pair.dominance(tokens, FLOOR)).numpy()
    assert np.abs(share - expected).max() <= 5 * 0.5 / np.sqrt(draws)
    assert expected.max() - expected.min() > 0.2, "the case tells values apart"


@pytest.mark.parametrize("scale", [0.03, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("seed", [0, 10, 20])
def test_fused_dominance_is_the_unfused_one(seed: int, scale: float) -> None:
    """In float32, of values up to some tens; 1e-5 is about a hundred roundings of 6e-8."""
    pair = random_pair(seed, scale, torch.float32, dim=256)
    tokens = torch.cat([unit_tokens(500, 256, seed + 5, torch.float32), pair.normal.Z])
    fused = FusedDominance(pair, FLOOR)
    found, expected = fused(tokens), pair.dominance(tokens, FLOOR)
    assert found.dtype == torch.float32
    assert ((found - expected).abs() / expected.abs().clamp_min(1)).max() <= 1e-5
    mean_N, variance_N = closed_form(pair.normal, tokens)
    mean_A, variance_A = closed_form(pair.anomaly, tokens)
    exact = (mean_A - mean_N) / np.sqrt(variance_A + variance_N)
    error = np.abs(found.numpy() - exact) / np.maximum(1, np.abs(exact))
    assert error.max() <= 1e-5


@pytest.mark.parametrize("cosine", [0.5, 0.8, 0.9])
def test_fused_dominance_of_tokens_that_resemble_each_other_is_exact(cosine: float) -> None:
    """As trained networks leave them; the unfused float32 form is the less exact one here."""
    common = unit_tokens(1, 256, 1)

    def alike(count: int, seed: int) -> torch.Tensor:
        own = unit_tokens(count, 256, seed)
        mixed = cosine**0.5 * common + (1 - cosine) ** 0.5 * own
        return torch.nn.functional.normalize(mixed, dim=1).float()

    pair = DualGP(*(random_gp(alike(M, M), linear, M, scale=1.0) for M in (32, 16)))
    tokens = alike(500, 7)
    mean_N, variance_N = closed_form(pair.normal, tokens)
    mean_A, variance_A = closed_form(pair.anomaly, tokens)
    exact = (mean_A - mean_N) / np.sqrt(variance_A + variance_N)
    error = np.abs(FusedDominance(pair, FLOOR)(tokens).numpy() - exact)
    assert (error / np.maximum(1, np.abs(exact))).max() <= 1e-5


@pytest.mark.parametrize("seed", [0, 10])
def test_fused_mean_margin_is_the_unfused_one_and_linear(seed: int) -> None:
    pair = random_pair(seed, 1.0, torch.float64)
    tokens = unit_tokens(200, 64, seed + 5)
    expected = closed_form(pair.anomaly, tokens)[0] - closed_form(pair.normal, tokens)[0]
    np.testing.assert_allclose(pair.mean_margin(tokens).numpy(), expected, rtol=0, atol=1e-11)
    fused = FusedDominance(pair, FLOOR, "mean_margin")
    np.testing.assert_allclose(fused(tokens).numpy(), expected, rtol=0, atol=1e-11)
    mixed = fused(tokens[:100] + 2 * tokens[100:])
    np.testing.assert_allclose(mixed, expected[:100] + 2 * expected[100:], rtol=0, atol=1e-11)
    pair32 = random_pair(seed, 1.0, torch.float32)
    found = FusedDominance(pair32, FLOOR, "mean_margin")(tokens.float())
    assert (found - pair32.mean_margin(tokens.float())).abs().max() <= 1e-5


def test_variance_correction_is_indefinite_and_the_fused_form_keeps_its_signs() -> None:
    """K^-1 S K^-1 - K^-1 is negative for small S, positive for large S, and both in between."""
    tokens = unit_tokens(100, 64, 99)
    small, middle, large = (random_pair(0, scale, torch.float64) for scale in (1e-3, 0.3, 30.0))
    assert set(FusedDominance(small, FLOOR).signs.tolist()) == {-1.0}
    assert set(FusedDominance(middle, FLOOR).signs.tolist()) == {-1.0, 1.0}
    assert 1.0 in FusedDominance(large, FLOOR).signs
    for pair in (small, middle, large):
        fused = FusedDominance(pair, FLOOR)
        expected = pair.dominance(tokens, FLOOR)
        assert (fused(tokens) - expected).abs().max() <= 1e-9
        if pair is not large:
            fused.signs = torch.ones_like(fused.signs)
            assert (fused(tokens) - expected).abs().max() > 1e-2, "the signs matter"


def test_fused_form_needs_no_more_directions_than_inducing_tokens() -> None:
    fused = FusedDominance(random_pair(0, 1.0, torch.float64), FLOOR)
    assert fused.weight.shape == (64, 1 + 32 + 16)


def test_fused_form_of_covariances_at_the_prior_is_the_margin_over_root_two() -> None:
    pair = random_pair(0, 1.0, torch.float64)
    for gp in (pair.normal, pair.anomaly):
        gp.L.copy_(torch.linalg.cholesky(gp.Z @ gp.Z.mT + JITTER * torch.eye(len(gp.Z)).double()))
    tokens = unit_tokens(50, 64, 5)
    expected = pair.mean_margin(tokens) / 2**0.5
    assert (FusedDominance(pair, FLOOR)(tokens) - expected).abs().max() <= 1e-10


def test_fused_form_refuses_the_rbf_kernel() -> None:
    rbf = random_pair(0, 1.0, torch.float64, spherical_rbf(SIGMA))
    with pytest.raises(TypeError, match="only the linear kernel"):
        FusedDominance(rbf, FLOOR)
    mixed = DualGP(random_pair(0, 1.0, torch.float64).normal, rbf.anomaly)
    with pytest.raises(TypeError, match="only the linear kernel"):
        FusedDominance(mixed, FLOOR)


def test_summed_variance_is_floored() -> None:
    margin = torch.tensor([1.0, -2.0, 3.0, 0.5, 1.0])
    variance = torch.tensor([-1.0, 0.0, 1e-9, 1e-6, 4.0])
    expected = [1e3, -2e3, 3e3, 0.5e3, 0.5]
    assert standardised(margin, variance, FLOOR).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_variance_that_vanishes_or_rounds_below_zero_leaves_finite_dominance(
    dtype: torch.dtype,
) -> None:
    """Equal inducing sets, no covariance, almost no jitter: the sum is 0 up to rounding."""
    Z = unit_tokens(16, 64, 0, dtype)
    pair = DualGP(*(random_gp(Z, linear, seed, scale=0.0, jitter=1e-9) for seed in (1, 2)))
    summed = pair.normal(Z).variance + pair.anomaly(Z).variance
    assert summed.abs().max() < FLOOR * 5
    if dtype == torch.float32:
        assert summed.min() < 0, "the case that the floor is for"
    below = summed < FLOOR
    found = pair.dominance(Z, FLOOR)
    assert bool(below.any())
    assert bool(torch.isfinite(found).all())
    assert torch.allclose(found[below], pair.mean_margin(Z)[below] * 1e3, rtol=1e-5)
    fused = FusedDominance(pair, FLOOR)(Z)
    assert bool(torch.isfinite(fused).all())
    assert fused.abs().max() <= pair.mean_margin(Z).abs().max() * 1.001e3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["linear", "rbf"])
def test_tokens_that_are_not_finite_are_told_with_causes(name: str, value: float) -> None:
    Z = unit_tokens(8, 16, 0)
    Z[3, 2] = value
    with pytest.raises(TrainingError, match="cannot be factorised") as caught:
        SparseGP(Z, kernel_named(name, SIGMA), JITTER)
    for cause in ("not finite", "repeat", "dual_gp.jitter"):
        assert cause in str(caught.value)


def test_repeated_tokens_need_the_jitter() -> None:
    Z = unit_tokens(1, 16, 0).repeat(8, 1)
    with pytest.raises(TrainingError, match="remove the copies"):
        SparseGP(Z, linear, 1e-30)
    gp = random_gp(Z, linear, 1)
    assert bool(torch.isfinite(gp(unit_tokens(20, 16, 2)).variance).all())
