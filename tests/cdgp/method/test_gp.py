"""Moments and dominance against GPyTorch, NumPy and sampling, and their limit identities."""

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.variational import CholeskyVariationalDistribution, UnwhitenedVariationalStrategy
from numpy.typing import NDArray
from tests.helpers import form_dominance, random_gp, random_pair, sparse_gps, unit_tokens
from torch import Tensor

from cdgp.errors import TrainingError
from cdgp.method.gp import (
    DualGP,
    SparseGP,
    has_linear_forms,
    linear_forms,
    linear_moments,
    standardised,
)
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


@pytest.mark.parametrize("shape", SHAPES)
def test_moments_from_products_are_the_printed_equations(shape: tuple[int, int]) -> None:
    """Also after training, where the variance exceeds the prior's and eigenvalues change sign."""
    M, D = shape
    pair = DualGP(
        random_gp(unit_tokens(M, D, 1), linear, 2), random_gp(unit_tokens(5, D, 3), linear, 4, 0.1)
    )
    tokens = unit_tokens(60, D, 5)
    lengths = torch.linspace(0.5, 3, 60, dtype=torch.float64)
    c = lengths[:, None] * tokens
    found = linear_moments(pair, lambda vectors: c @ vectors.mT, 1 / lengths)
    for gp, moments in zip(sparse_gps(pair), found, strict=True):
        mean, variance = closed_form(gp, tokens)
        np.testing.assert_allclose(moments.mean.numpy(), mean, rtol=0, atol=1e-9)
        np.testing.assert_allclose(moments.variance.numpy(), variance, rtol=1e-9, atol=1e-9)


def test_moments_from_products_have_the_gradient_of_the_means_alone() -> None:
    pair = random_pair(0, 1.0, torch.float64).requires_grad_()
    tokens = unit_tokens(30, 64, 9)
    weight = torch.linspace(-1, 2, 30, dtype=torch.float64)
    found = linear_moments(pair, lambda vectors: tokens @ vectors.mT, torch.ones_like(weight))
    for gp, moments in zip(sparse_gps(pair), found, strict=True):
        (mine,) = torch.autograd.grad(moments.mean @ weight, gp.m, retain_graph=True)
        (plain,) = torch.autograd.grad(gp(tokens).mean @ weight, gp.m)
        assert (mine - plain).abs().max() <= 1e-10 * plain.abs().max()
        assert not moments.variance.requires_grad


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
    gp = SparseGP(unit_tokens(16, 64, 0), kernel, JITTER, 0.0, 1.0).requires_grad_(False)
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
    gp.L.add_(torch.ones(6, 6, dtype=torch.float64).triu(1))
    assert torch.equal(gp(tokens).variance, before.variance)
    gp.requires_grad_(True)
    torch.autograd.backward(gp(tokens).variance.sum())
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
    normal = random_gp(unit_tokens(6, 12, 0), kernel, 1, 0.4)
    anomaly = random_gp(unit_tokens(5, 12, 2), kernel, 3, 0.4)
    pair = DualGP(normal, anomaly)
    tokens = torch.cat([anomaly.Z[:2], normal.Z[:2], unit_tokens(2, 12, 4)])
    rng = np.random.default_rng(0)
    draws = 200_000
    samples = []
    for gp in (anomaly, normal):
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
def test_linear_forms_give_the_dominance(seed: int, scale: float) -> None:
    """Whether C is negative, positive or indefinite, which the scale of S decides."""
    pair = random_pair(seed, scale, torch.float64, dim=256)
    normal, anomaly = sparse_gps(pair)
    tokens = torch.cat([unit_tokens(500, 256, seed + 5), normal.Z])
    mean_N, variance_N = closed_form(normal, tokens)
    mean_A, variance_A = closed_form(anomaly, tokens)
    exact = (mean_A - mean_N) / np.sqrt(variance_A + variance_N)
    found = form_dominance(pair, tokens)
    np.testing.assert_allclose(found.numpy(), exact, rtol=0, atol=1e-9)
    np.testing.assert_allclose(pair.dominance(tokens, FLOOR).numpy(), exact, rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", [0, 10])
def test_mean_margin_is_linear_in_the_token(seed: int) -> None:
    pair = random_pair(seed, 1.0, torch.float64)
    tokens = unit_tokens(200, 64, seed + 5)
    normal, anomaly = sparse_gps(pair)
    expected = closed_form(anomaly, tokens)[0] - closed_form(normal, tokens)[0]
    np.testing.assert_allclose(pair.mean_margin(tokens).numpy(), expected, rtol=0, atol=1e-11)
    beta, _ = linear_forms(pair)
    np.testing.assert_allclose((tokens @ beta).numpy(), expected, rtol=0, atol=1e-11)
    mixed = pair.mean_margin(tokens[:100] + 2 * tokens[100:])
    np.testing.assert_allclose(mixed, expected[:100] + 2 * expected[100:], rtol=0, atol=1e-11)


def test_variance_correction_is_indefinite() -> None:
    """K^-1 S K^-1 - K^-1 is negative for small S, positive for large S, and both in between."""

    def signs(scale: float) -> set[float]:
        _, C = linear_forms(random_pair(0, scale, torch.float64))
        eigenvalues = torch.linalg.eigvalsh(C)
        kept = eigenvalues.abs() > 1e-12 * eigenvalues.abs().max()
        assert int(kept.sum()) <= 32 + 16, "no more directions than inducing tokens"
        return set(eigenvalues[kept].sign().tolist())

    assert signs(1e-3) == {-1.0}
    assert signs(0.3) == {-1.0, 1.0}
    assert 1.0 in signs(30.0)


def test_covariances_at_the_prior_make_the_dominance_the_margin_over_root_two() -> None:
    pair = random_pair(0, 1.0, torch.float64)
    for gp in sparse_gps(pair):
        gp.L.copy_(torch.linalg.cholesky(gp.Z @ gp.Z.mT + JITTER * torch.eye(len(gp.Z)).double()))
    tokens = unit_tokens(50, 64, 5)
    expected = pair.mean_margin(tokens) / 2**0.5
    assert (form_dominance(pair, tokens) - expected).abs().max() <= 1e-10
    assert (pair.dominance(tokens, FLOOR) - expected).abs().max() <= 1e-10


def test_only_the_linear_kernel_has_linear_forms() -> None:
    rbf = random_pair(0, 1.0, torch.float64, spherical_rbf(SIGMA))
    mixed = DualGP(random_pair(0, 1.0, torch.float64).normal, rbf.anomaly)
    for pair in (rbf, mixed):
        assert not has_linear_forms(pair)
        with pytest.raises(TypeError, match="linear kernel"):
            linear_forms(pair)


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["linear", "rbf"])
def test_tokens_that_are_not_finite_are_refused_with_causes(name: str, value: float) -> None:
    Z = unit_tokens(8, 16, 0)
    Z[3, 2] = value
    with pytest.raises(TrainingError, match="cannot be factorised") as caught:
        SparseGP(Z, kernel_named(name, SIGMA), JITTER, 0.0, 1.0)
    for cause in ("not finite", "repeat", "dual_gp.jitter"):
        assert cause in str(caught.value)


def test_repeated_tokens_need_the_jitter() -> None:
    Z = unit_tokens(1, 16, 0).repeat(8, 1)
    with pytest.raises(TrainingError, match="remove the duplicates"):
        SparseGP(Z, linear, 1e-30, 0.0, 1.0)
    gp = random_gp(Z, linear, 1)
    assert bool(torch.isfinite(gp(unit_tokens(20, 16, 2)).variance).all())
