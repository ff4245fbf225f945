"""Every loss of the Dual GP against a loop in plain floats written from its equation."""

import math

import pytest
import torch
from torch import Tensor

from cdgp.method.gp import Moments
from cdgp.method.losses import (
    attention,
    attraction_loss,
    bag_margin,
    compactness_loss,
    log_mean_exp,
    mean_loss,
    mil_loss,
    normalised_evidence,
    top_mean,
)

EPSILON = 1e-6
FLOOR = 1e-6


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def slow_attention(margins: list[float], epsilon: float) -> list[float]:
    """Eq. 18 of one image, with the standard deviation of the population."""
    mean = sum(margins) / len(margins)
    std = math.sqrt(sum((s - mean) ** 2 for s in margins) / len(margins))
    weights = [math.exp((s - mean) / (std + epsilon)) for s in margins]
    return [w / sum(weights) for w in weights]


def test_mil_loss_is_the_hinge_of_each_label() -> None:
    """Both labels, each with the hinge active and inactive  (Eq. 15)."""
    margins = [-0.4, 0.3, 0.7, 0.5, -0.2, 0.0, 0.4]
    labels = [True, True, True, True, False, False, False]
    gamma = 0.5
    losses = [
        max(0.0, gamma - m) if y else max(0.0, m) for m, y in zip(margins, labels, strict=True)
    ]
    assert losses == pytest.approx([0.9, 0.2, 0.0, 0.0, 0.0, 0.0, 0.4])
    found = mil_loss(torch.tensor(margins).double(), torch.tensor(labels), gamma)
    assert float(found) == pytest.approx(sum(losses) / len(losses), abs=1e-7)


def test_mil_gradient_pulls_apart_only_where_the_hinge_is_active() -> None:
    margins = torch.tensor([0.1, 0.9, 0.2, -0.3], requires_grad=True)
    mil_loss(margins, torch.tensor([True, True, False, False]), 0.5).backward()
    assert margins.grad is not None
    assert margins.grad.tolist() == [-0.25, 0.0, 0.25, 0.0]


def test_log_mean_exp_is_the_loop() -> None:
    values = random(3, 40)
    for sharpness in (0.5, 8.0):
        expected = [
            math.log(sum(math.exp(sharpness * v) for v in row) / len(row)) / sharpness
            for row in values.tolist()
        ]
        assert log_mean_exp(values, sharpness).tolist() == pytest.approx(expected, abs=1e-12)


def test_log_mean_exp_neither_overflows_nor_underflows() -> None:
    for offset in (1e4, -1e4):
        values = torch.tensor([0.0, 1.0, 2.0]) + offset
        expected = offset + math.log((1 + math.exp(8) + math.exp(16)) / 3) / 8
        assert float(log_mean_exp(values, 8.0)) == pytest.approx(expected, rel=1e-6)


def test_log_mean_exp_lies_between_mean_and_maximum() -> None:
    values = random(1, 500)[0]
    assert float(log_mean_exp(torch.full((7,), 0.3), 8.0)) == pytest.approx(0.3, rel=1e-6)
    assert float(log_mean_exp(values, 1e-4)) == pytest.approx(float(values.mean()), abs=1e-3)
    assert float(log_mean_exp(values, 1e4)) == pytest.approx(float(values.max()), abs=1e-3)


@pytest.mark.parametrize(("count", "largest"), [(5, 1), (29, 1), (40, 2), (250, 12), (4096, 205)])
def test_bag_margins_are_the_loops(count: int, largest: int) -> None:
    margins = random(3, count, seed=count)
    rows = margins.tolist()
    # count of the top 5 %: 12.5 goes to the even neighbour, and one is the least.
    expected = {
        "max": [max(row) for row in rows],
        "top": [sum(sorted(row)[-largest:]) / largest for row in rows],
        "logsumexp": [math.log(sum(math.exp(8 * v) for v in row) / count) / 8 for row in rows],
    }
    for pooling, values in expected.items():
        assert bag_margin(margins, pooling, 8.0).tolist() == pytest.approx(values, abs=1e-12)


@pytest.mark.parametrize(("pooling", "reached"), [("max", 1), ("top", 3), ("logsumexp", 60)])
def test_bag_margin_reaches_as_many_tokens_as_it_says(pooling: str, reached: int) -> None:
    margins = random(1, 60).requires_grad_(True)
    bag_margin(margins, pooling, 8.0).sum().backward()
    assert margins.grad is not None
    assert int((margins.grad != 0).sum()) == reached
    assert float(margins.grad.sum()) == pytest.approx(1.0)


def test_mean_loss_is_the_cross_entropy_of_the_mean() -> None:
    """Image by image; and its gradient reaches every token alike."""
    margins = random(4, 9).requires_grad_(True)
    defective = torch.tensor([True, False, False, True])
    scale, bias = 3.0, -0.4
    expected, slopes = 0.0, []
    for row, label in zip(margins.tolist(), defective.tolist(), strict=True):
        p = 1 / (1 + math.exp(-scale * sum(row) / len(row) - bias))
        expected -= math.log(p if label else 1 - p) / 4
        slopes.append((p - label) * scale / 9 / 4)
    loss = mean_loss(margins, defective, torch.tensor([scale, bias], dtype=margins.dtype))
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-13)
    (gradient,) = torch.autograd.grad(loss, margins)
    assert gradient.tolist() == [pytest.approx([slope] * 9, abs=1e-15) for slope in slopes]


def test_without_its_logit_the_mean_has_no_loss() -> None:
    found = mean_loss(random(2, 5).requires_grad_(True), torch.tensor([True, False]), None)
    assert found.shape == () and float(found) == 0 and not found.requires_grad


def test_top_mean_is_that_of_the_sorted_values() -> None:
    values = random(3, 50)
    for count in (1, 7, 50):
        expected = [sum(sorted(row)[-count:]) / count for row in values.tolist()]
        assert top_mean(values, count).tolist() == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("sigma_gradient", [True, False])
def test_normalised_evidence_is_the_loop(sigma_gradient: bool) -> None:
    """Eq. 16; a variance below the floor counts as the floor."""
    means = [0.5, -1.5, 2.0, 0.25, 1.0]
    variances = [1.0, 4.0, 0.01, 0.0, -3.0]
    expected = [
        mu / (math.sqrt(max(variance, FLOOR)) + EPSILON)
        for mu, variance in zip(means, variances, strict=True)
    ]
    moments = Moments(*(torch.tensor(v, dtype=torch.float64) for v in (means, variances)))
    found = normalised_evidence(moments, EPSILON, FLOOR, sigma_gradient)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_normalised_evidence_has_the_gradients_of_the_quotient() -> None:
    mean = random(6).requires_grad_(True)
    variance = (random(6, seed=1).square() + 0.1).requires_grad_(True)
    normalised_evidence(Moments(mean, variance), EPSILON, FLOOR, True).sum().backward()
    assert mean.grad is not None
    assert variance.grad is not None
    for i, (mu, v) in enumerate(zip(mean.tolist(), variance.tolist(), strict=True)):
        sigma = math.sqrt(v)
        assert float(mean.grad[i]) == pytest.approx(1 / (sigma + EPSILON), rel=1e-12)
        slope = -mu / (sigma + EPSILON) ** 2 / (2 * sigma)
        assert float(variance.grad[i]) == pytest.approx(slope, rel=1e-12)


def test_without_sigma_gradient_the_variance_gets_none_and_the_mean_its_own() -> None:
    mean = random(6).requires_grad_(True)
    variance = (random(6, seed=1).square() + 0.1).requires_grad_(True)
    found = normalised_evidence(Moments(mean, variance), EPSILON, FLOOR, False)
    (gradient, none) = torch.autograd.grad(found.sum(), (mean, variance), allow_unused=True)
    assert none is None or not none.any()
    expected = 1 / (variance.detach().sqrt() + EPSILON)
    assert (gradient - expected).abs().max() <= 1e-12


def test_variance_below_the_floor_has_a_finite_gradient() -> None:
    variance = torch.tensor([0.0, -1.0, 1e-9], requires_grad=True)
    mean = torch.ones(3)
    normalised_evidence(Moments(mean, variance), EPSILON, FLOOR, True).sum().backward()
    assert variance.grad is not None
    assert variance.grad.tolist() == [0.0, 0.0, 0.0]


def test_compactness_is_minus_the_mean_evidence() -> None:
    evidence = random(3, 20)
    total = sum(value for row in evidence.tolist() for value in row)
    assert float(compactness_loss(evidence)) == pytest.approx(-total / 60, abs=1e-14)


def test_attention_is_the_loop_and_sums_to_one() -> None:
    margins = random(4, 30)
    found = attention(margins, EPSILON)
    for row, expected in zip(found.tolist(), margins.tolist(), strict=True):
        assert row == pytest.approx(slow_attention(expected, EPSILON), abs=1e-14)
    assert (found.sum(-1) - 1).abs().max() <= 1e-14


def test_attention_has_no_gradient_and_of_equal_margins_is_uniform() -> None:
    margins = random(2, 30).requires_grad_(True)
    assert not attention(margins, EPSILON).requires_grad
    equal = attention(torch.full((2, 8), 0.7), EPSILON)
    assert (equal - 1 / 8).abs().max() <= 1e-7


def test_attention_does_not_change_with_offset_and_positive_scale() -> None:
    margins = random(2, 30)
    assert (attention(5 * margins + 3, 0.0) - attention(margins, 0.0)).abs().max() <= 1e-14


def test_attraction_is_the_loop() -> None:
    """Eq. 19: attended evidence summed over tokens, mean over images."""
    evidence, margins = random(3, 25), random(3, 25, seed=1)
    expected = 0.0
    for values, row in zip(evidence.tolist(), margins.tolist(), strict=True):
        weights = slow_attention(row, EPSILON)
        expected -= sum(a * mu for a, mu in zip(weights, values, strict=True)) / 3
    assert float(attraction_loss(evidence, margins, EPSILON)) == pytest.approx(expected, abs=1e-13)


def test_attraction_moves_the_evidence_by_the_attention_and_the_margin_not_at_all() -> None:
    evidence, margins = random(2, 25).requires_grad_(True), random(2, 25, seed=1).requires_grad_()
    loss = attraction_loss(evidence, margins, EPSILON)
    gradient, none = torch.autograd.grad(loss, (evidence, margins), allow_unused=True)
    assert (gradient + attention(margins, EPSILON) / 2).abs().max() <= 1e-15
    assert none is None


@pytest.mark.parametrize("defective", [[False, False], [True, True]])
def test_a_batch_of_one_label_gives_a_zero_that_can_be_differentiated(
    defective: list[bool],
) -> None:
    evidence, margins = random(2, 9).requires_grad_(True), random(2, 9, seed=1)
    labels = torch.tensor(defective)
    losses = {
        False: compactness_loss(evidence[~labels]),
        True: attraction_loss(evidence[labels], margins[labels], EPSILON),
    }
    absent = losses[not defective[0]]
    assert absent.item() == 0
    absent.backward(retain_graph=True)
    assert evidence.grad is not None
    assert not evidence.grad.any()
    present = losses[defective[0]]
    present.backward()
    assert bool(torch.isfinite(evidence.grad).all())
    assert bool(evidence.grad.any())
