"""Synthetic surfaces: what is written, and defects that are visible and exactly marked."""

from pathlib import Path

import numpy as np
import pytest
from tests.helpers import digested, load_folder

from cdgp.data import images
from cdgp.errors import ImageError
from cdgp_bench import synthetic


def test_synthetic_set_is_what_it_says(tmp_path: Path) -> None:
    made = synthetic.make_dataset(tmp_path, 5, 4, (48, 40), seed=3)
    assert made.counts() == {"unsplit": (5, 4)}
    assert load_folder(tmp_path) == made
    (tmp_path / "manifest.csv").unlink()
    assert load_folder(tmp_path) == made
    pixels = {s.pixel_sha256 for s in digested(made).samples}
    assert len(pixels) == 9
    for sample in made.samples:
        assert images.image_size(sample.image) == (48, 40)
        if sample.masks:
            assert images.read_masks(sample.masks, (48, 40)).any()
    other = synthetic.make_dataset(tmp_path / "other", 5, 4, (48, 40), seed=4)
    assert not pixels & {s.pixel_sha256 for s in digested(other).samples}


@pytest.mark.parametrize("seed", range(40))
def test_planted_defects(seed: int) -> None:
    rng = np.random.default_rng(seed)
    image = synthetic.make_surface((80, 64), rng)
    before = image.copy()
    planted, mask = synthetic.plant_defect(image, rng)
    np.testing.assert_array_equal(image, before)
    assert planted.dtype == np.float32 and planted.shape == (80, 64, 3)
    assert planted.min() >= 0 and planted.max() <= 1
    assert 0.0005 * mask.size <= mask.sum() <= 0.03 * mask.size
    change = np.abs(planted - image).max(axis=2)
    assert change[mask].min() > synthetic.VISIBLE >= change[~mask].max()
    again = synthetic.plant_defect(image, np.random.default_rng(seed + 1000))
    same = synthetic.plant_defect(image, np.random.default_rng(seed + 1000))
    np.testing.assert_array_equal(again[0], same[0])


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_defects_show_on_flat_images_and_stay_grey(level: float) -> None:
    flat = np.full((64, 64, 3), level, np.float32)
    for seed in range(10):
        planted, mask = synthetic.plant_defect(flat, np.random.default_rng(seed))
        assert mask.any() and np.ptp(planted, axis=2).max() == 0


def test_no_defect_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "VISIBLE", 2.0)
    with pytest.raises(ImageError, match="no visible defect"):
        synthetic.plant_defect(np.zeros((16, 16, 3), np.float32), np.random.default_rng(0))
