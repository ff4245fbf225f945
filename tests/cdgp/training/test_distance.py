"""What the normal distance is fitted on."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.helpers import tiny_settings

from cdgp.data.manifest import Manifest
from cdgp.method.build import pretrained_encoder
from cdgp.method.distance import fit_distance
from cdgp.presets import Settings
from cdgp.progress import Advance, Quiet
from cdgp.training import distance
from cdgp.training.context import new_context
from cdgp.training.dataset import WeakDataset, new_inputs
from cdgp.training.distance import train_distance


class Counting(Quiet):
    """Counts the steps of each phase, and what was announced."""

    def __init__(self) -> None:
        self.phases: dict[str, tuple[int, int]] = {}

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Advance]:
        self.phases[name] = (total, 0)

        def advance(note: str = "") -> None:
            self.phases[name] = (total, self.phases[name][1] + 1)

        yield advance


def good_images(manifest: Manifest, chosen: Settings, count: int) -> WeakDataset:
    good = [s for s in manifest.weak(None) if not s.defective]
    return WeakDataset(good[:count], new_inputs(chosen))


@pytest.mark.parametrize("size", [(64, 64), (80, 112)])
def test_training_is_the_fit_of_all_features_at_once(
    surfaces: Manifest, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of three; sides that the strides divide an odd number of times."""
    monkeypatch.setattr(distance, "BATCH", 3)
    chosen = tiny_settings(input_size=size, distance={"components": 6})
    dataset, progress = good_images(surfaces, chosen, 7), Counting()
    teacher = pretrained_encoder(chosen).eval()
    found = train_distance(dataset, teacher, chosen, new_context(None, None, progress))
    assert found is not None
    assert progress.phases == {"Normal distance": (14, 14)}
    with torch.no_grad():
        features = teacher(teacher.normalise(dataset.batch(range(7))))
        expected = fit_distance(lambda: [features], 6)
        result, plain = found(features), expected(features)
    assert result.shape == (7, size[0] // 4, size[1] // 4)
    assert float(plain.min()) > 0
    torch.testing.assert_close(result, plain, rtol=1e-3, atol=1e-3)
    shapes = [tuple(stage.get_buffer("mean").shape) for stage in found.stages]
    assert shapes == [(size[0] // s, size[1] // s, 6) for s in (8, 16)]


def test_windows_and_the_papers_settings_have_no_distance(surfaces: Manifest) -> None:
    context = new_context(None, None, Quiet())
    for chosen in (tiny_settings(tile=True), tiny_settings(distance={"weight": 0.0})):
        dataset = good_images(surfaces, chosen, 2)
        assert train_distance(dataset, pretrained_encoder(chosen), chosen, context) is None


def test_defective_images_are_refused(surfaces: Manifest) -> None:
    chosen = tiny_settings()
    dataset = WeakDataset(surfaces.weak(None), new_inputs(chosen))
    with pytest.raises(ValueError, match="good images only"):
        train_distance(
            dataset, pretrained_encoder(chosen), chosen, new_context(None, None, Quiet())
        )
