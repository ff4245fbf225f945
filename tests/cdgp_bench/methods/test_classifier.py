"""Class activation and Grad-CAM of one classifier, against their definitions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.cdgp_bench.helpers import tiny_variant_settings
from tests.helpers import tiny_settings

from cdgp.progress import Quiet
from cdgp.training.stages import pretrained
from cdgp_bench.grid import Variant
from cdgp_bench.methods import classifier
from cdgp_bench.methods.classifier import Classifier, class_activation, grad_cam
from cdgp_bench.protocol import Prepared


def test_grad_cam_is_the_gradient_weighted_map() -> None:
    """Against its definition: channels weighted by their mean gradient, summed, cut at zero."""
    torch.manual_seed(0)
    model = Classifier(pretrained(tiny_settings())).eval()
    with torch.no_grad():
        model.linear.weight.normal_()
    image = torch.rand(1, 3, 64, 96)
    found, probability = grad_cam(model, image)
    coarse = model.coarse(image).detach().requires_grad_()
    logit = model.linear(coarse.mean((2, 3)))[0, 0]
    logit.backward()
    assert coarse.grad is not None
    weights = coarse.grad.mean((2, 3), keepdim=True)
    expected = (weights * coarse).sum(1)[0].clamp_min(0).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)
    assert probability == pytest.approx(torch.sigmoid(logit).item(), abs=1e-6)
    activation, same = class_activation(model, image)
    assert same == pytest.approx(probability, abs=1e-5)
    cut = np.maximum(activation - model.linear.bias.item(), 0) / coarse[0, 0].numel()
    np.testing.assert_allclose(found, cut, rtol=1e-3, atol=1e-6)


def test_cam_and_grad_cam_share_their_classifier(prepared: Prepared, tmp_path: Path) -> None:
    for of_one in (classifier.fit_cam, classifier.fit_grad_cam):
        of_one(prepared.weak, tiny_variant_settings(Variant("", "grad_cam")), tmp_path, Quiet())
    assert len(list(tmp_path.rglob("classifier.safetensors"))) == 1
