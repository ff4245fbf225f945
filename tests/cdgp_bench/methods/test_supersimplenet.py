"""SuperSimpleNet against its definition."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from tests.cdgp_bench.helpers import tiny_options
from tests.helpers import WHITE, reference_settings
from torch.nn.functional import interpolate

from cdgp.data.images import read_image, to_input
from cdgp.method.build import pretrained_encoder
from cdgp.progress import Quiet
from cdgp_bench.methods import supersimplenet as ssn
from cdgp_bench.protocol import Prepared


def test_supersimplenet_loss_is_its_definition() -> None:
    torch.manual_seed(0)
    position = torch.randn(4, 1, 3, 5, dtype=torch.float64)
    image = torch.randn(4, dtype=torch.float64)
    defective = torch.tensor([False, True, False, False])
    synthetic = torch.zeros(4, 1, 3, 5, dtype=torch.bool)
    synthetic[2, 0, 1, 1:4] = True

    def focal(logit: float, target: bool) -> float:
        p = 1 / (1 + math.exp(-logit))
        right = p if target else 1 - p
        return -((1 - right) ** 4) * math.log(right)

    normal, abnormal, focals = [], [], []
    for b in range(4):
        if defective[b]:
            continue
        for y in range(3):
            for x in range(5):
                value, target = float(position[b, 0, y, x]), bool(synthetic[b, 0, y, x])
                focals.append(focal(value, target))
                if target:
                    abnormal.append(max(0.5 - value, 0))
                else:
                    normal.append(max(value + 0.5, 0))
    targets = [False, True, True, False]
    images = [focal(float(v), t) for v, t in zip(image, targets, strict=True)]
    expected = (np.mean(normal) + np.mean(abnormal), np.mean(focals), np.mean(images))
    total, terms = ssn.loss(ssn.HeadLogits(position, image), defective, synthetic)
    found = terms["truncated"], terms["positions"], terms["images"]
    np.testing.assert_allclose([float(t) for t in found], expected, rtol=1e-9)
    assert float(total) == pytest.approx(sum(expected), rel=1e-9)


def test_supersimplenet_without_anything_known_learns_from_images_alone() -> None:
    logits = ssn.HeadLogits(torch.randn(2, 1, 2, 2), torch.randn(2))
    bad = torch.tensor([True, True])
    total, terms = ssn.loss(logits, bad, torch.zeros(2, 1, 2, 2, dtype=torch.bool))
    assert float(total) == float(terms["images"]) > 0


def test_noise_stays_inside_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """On good images, inside the mask, and nowhere else."""
    torch.manual_seed(0)
    options = tiny_options("supersimplenet", Path()).model_copy(update={"noise": 5.0})
    model = ssn.SuperSimpleNet(pretrained_encoder(reference_settings()), options)
    seen: list[torch.Tensor] = []
    score = model.logits

    def recorded(adapted: torch.Tensor) -> ssn.HeadLogits:
        seen.append(adapted)
        return score(adapted)

    monkeypatch.setattr(model, "logits", recorded)
    images = torch.rand(2, 3, 64, 64)
    perlin = torch.zeros(4, 1, 16, 16, dtype=torch.bool)
    perlin[:, :, 4:9, 2:7] = True
    perlin[0] = False
    model(images, torch.tensor([False, True]), perlin, 7)
    clean = model.adaptor(model.features(images)).repeat(2, 1, 1, 1)
    changed = ((seen[0] - clean).abs() > 1e-6).any(1)
    assert not changed[0].any(), "an empty mask"
    assert not changed[1].any() and not changed[3].any(), "a defective image"
    assert torch.equal(changed[2], perlin[2, 0])


def test_perlin_masks_are_reproduced_and_half_are_empty() -> None:
    masks = ssn.perlin_masks(60, (16, 24), 0.2, torch.Generator().manual_seed(1))
    again = ssn.perlin_masks(60, (16, 24), 0.2, torch.Generator().manual_seed(1))
    assert masks.shape == (60, 1, 16, 24) and masks.dtype == torch.bool
    assert torch.equal(masks, again)
    assert 15 <= sum(bool(m.any()) for m in masks) <= 45


def test_supersimplenet_rates_fall_twice() -> None:
    factor = ssn.falling(100)
    assert [factor(s) for s in (0, 79, 80, 89, 90, 99)] == pytest.approx(
        [1, 1, 0.4, 0.4, 0.16, 0.16]
    )


@pytest.mark.slow
def test_supersimplenet_keeps_a_defect_free_map_quiet(prepared: Prepared, tmp_path: Path) -> None:
    """After a short training it is lower everywhere than the peak of any defective image."""
    changes = {"most_steps": 100, "batch": 8, "noise": 1.5}
    options = tiny_options("supersimplenet", Path()).model_copy(update=changes)
    fitted = ssn.fit(prepared.weak, reference_settings(), tmp_path, Quiet(), options)
    part = prepared.manifest.of("test")
    peaks = {
        bad: [
            s.anomaly_map.max() for s in fitted.score([x.image for x in part if x.defective == bad])
        ]
        for bad in (False, True)
    }
    assert max(peaks[False]) < min(peaks[True])
    assert fitted.facts["budget_share"] < 0.05


def test_supersimplenet_map_is_blurred_at_the_input_size(
    prepared: Prepared, tmp_path: Path
) -> None:
    """Against scipy: upsampled logits under a Gaussian of four pixels."""
    chosen = reference_settings()
    options = tiny_options("supersimplenet", Path())
    fitted = ssn.fit(prepared.weak, chosen, tmp_path, Quiet(), options)
    path = prepared.manifest.of("test")[0].image
    (scored,) = fitted.score([path])
    network: Any = fitted.pipeline().network
    with torch.inference_mode():
        image = torch.from_numpy(to_input(read_image(path, WHITE), chosen.input_size))
        logits = network.logits(network.adaptor(network.features(image[None]))).position
        spread = interpolate(logits, (64, 64), mode="bilinear")[0, 0].numpy()
    expected = gaussian_filter(spread, 4.0, mode="mirror", truncate=3.0)
    np.testing.assert_allclose(scored.anomaly_map, expected, atol=1e-4)
