"""The control heads against their equations."""

import numpy as np
import pytest
import torch
from tests.helpers import tiny_settings

from cdgp.method.gp import DualGP
from cdgp.training.dual_gp import new_control
from cdgp_bench.controls import HeteroscedasticHead, LinearHead


def test_linear_head_has_unit_variance() -> None:
    torch.manual_seed(0)
    normal, anomaly = LinearHead(8), LinearHead(8)
    pair = DualGP(normal, anomaly).double()
    for head in (normal, anomaly):
        head.beta.data.normal_()
    tokens = torch.randn(50, 8, dtype=torch.float64)
    margin = pair.mean_margin(tokens)
    difference = (anomaly.beta - normal.beta).tolist()
    expected = [sum(t[d] * difference[d] for d in range(8)) for t in tokens.tolist()]
    np.testing.assert_allclose(margin.detach(), expected, atol=1e-12)
    dominance = pair.dominance(tokens, 1e-6)
    np.testing.assert_allclose(dominance.detach(), margin.detach() / np.sqrt(2), atol=1e-12)


def test_heteroscedastic_variance_is_equation_s1() -> None:
    torch.manual_seed(0)
    head = HeteroscedasticHead(6, 3).double()
    head.a.data.normal_()
    head.B.data.normal_()
    tokens = torch.randn(20, 6, dtype=torch.float64)
    for t, found in zip(tokens, head(tokens).variance.detach(), strict=True):
        diagonal = torch.diag(torch.log1p(torch.exp(head.a)) + 1e-4)
        expected = t @ diagonal @ t + torch.linalg.vector_norm(head.B.mT @ t) ** 2 + 1e-6
        assert float(found) == pytest.approx(expected.item(), abs=1e-12)


def test_controls_start_as_the_prior_and_take_the_inducing_budgets() -> None:
    chosen = tiny_settings(inducing={"normal": 5, "anomaly": 3})
    unit = torch.nn.functional.normalize(torch.randn(40, chosen.backbone.token_dim), dim=1)
    for head in ("linear", "heteroscedastic"):
        pair = new_control(head, chosen)
        for function in (pair.normal, pair.anomaly):
            mean, variance = function(unit)
            assert torch.equal(mean, torch.zeros(40))
            np.testing.assert_allclose(variance.detach(), 1, atol=0.01)
    for function, budget in ((pair.normal, 5), (pair.anomaly, 3)):
        assert isinstance(function, HeteroscedasticHead) and function.B.shape[1] == budget
