"""WeakREST's parts against plain loops."""

from pathlib import Path

import numpy as np
import torch
from tests.cdgp_bench.helpers import tiny_options
from tests.helpers import tiny_settings

from cdgp.training.dataset import WeakDataset
from cdgp.training.stages import pretrained
from cdgp_bench.methods import weakrest
from cdgp_bench.protocol import Prepared


def test_weakrest_sharpening_is_mixmatch() -> None:
    p = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    two = torch.stack([p, 1 - p], 1) ** 2
    np.testing.assert_allclose(weakrest.sharpened(p), (two / two.sum(1, keepdim=True))[:, 0])


def test_weakrest_residual_is_the_distance_to_the_nearest_that_it_remembers() -> None:
    """Against a loop over memory entries, positions included."""
    torch.manual_seed(0)
    options = tiny_options("weakrest", Path()).model_copy(update={"memory": 7})
    model = weakrest.Residuals(pretrained(tiny_settings()), options)
    model.scale.uniform_(1, 3)
    images = torch.rand(2, 3, 64, 64)
    model.memory = model.placed(model.features(images)).flatten(0, 1)[::19]
    found = model(images)
    features = model.features(images)
    channels = features.shape[1]
    for b, y, x in ((0, 0, 0), (0, 3, 7), (1, 5, 2), (1, 7, 7)):
        own = features[b, :, y, x] / model.scale
        place = options.position_weight * channels**0.5 * torch.tensor([y / 7, x / 7])
        distances = [
            float(((m[:channels] - own) ** 2).sum() + ((m[channels:] - place) ** 2).sum())
            for m in model.memory
        ]
        nearest = model.memory[int(np.argmin(distances)), :channels]
        np.testing.assert_allclose(found[b, y, x], (own - nearest).abs(), atol=1e-4)


def test_weakrest_remembers_positions_that_it_has_seen(prepared: Prepared) -> None:
    chosen, options = tiny_settings(), tiny_options("weakrest", Path())
    model = weakrest.Residuals(pretrained(chosen), options)
    images = WeakDataset(prepared.weak.train, chosen.input_size, 65535)
    good = images.batch(images.indices(defective=False))
    weakrest.fill_memory(model, list(torch.split(good, 1)), 0)
    everything = model.placed(model.features(good)).flatten(0, 1)
    away = torch.cdist(model.memory, everything).amin(1)
    np.testing.assert_allclose(away, 0, atol=0.05)
    assert model.memory.shape[0] == options.memory


def test_weakrest_guesses_are_those_of_the_flipped_image_turned_back() -> None:
    torch.manual_seed(0)
    model = weakrest.WeakREST(pretrained(tiny_settings()), tiny_options("weakrest", Path())).eval()
    away = torch.rand(1, 8, 6, len(model.residuals.scale))
    across = torch.sigmoid(model.logits(away.flip(2))).flip(2)
    down = torch.sigmoid(model.logits(away.flip(1))).flip(1)
    expected = weakrest.sharpened((across + down) / 2)
    np.testing.assert_allclose(model.guessed(away), expected.detach(), atol=1e-6)
