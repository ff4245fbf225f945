"""Prediction at the image's own size, regions, arrays against files."""

import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

import cdgp
from cdgp.data.manifest import Manifest
from cdgp.errors import ImageError
from cdgp.inference import as_image, find_regions, resize_map
from cdgp.workflows import Run


@pytest.mark.parametrize("size", [(96, 40), (40, 96), (64, 64), (63, 97), (8, 300)])
def test_map_has_the_images_size(tiny_run: Run, size: tuple[int, int]) -> None:
    image = np.random.default_rng(0).random((*size, 3), dtype=np.float32)
    prediction = tiny_run.detector.predict(image)
    assert prediction.anomaly_map.shape == prediction.pred_mask.shape == size
    assert prediction.anomaly_map.dtype == np.float32
    assert np.isfinite(prediction.anomaly_map).all()
    assert 0 <= prediction.pred_score <= 1
    assert prediction.surprisal.min() >= 0


def test_file_and_array_agree(tiny_run: Run, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (50, 70, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    a = tiny_run.detector.predict(tmp_path / "a.png")
    b = tiny_run.detector.predict(pixels)
    c = tiny_run.detector.predict(pixels.astype(np.float32) / 255)
    np.testing.assert_array_equal(a.anomaly_map, b.anomaly_map)
    np.testing.assert_allclose(a.anomaly_map, c.anomaly_map, atol=1e-4)
    assert a.pred_score == b.pred_score
    turned = tiny_run.detector.predict(pixels[..., ::-1])
    assert not np.allclose(a.anomaly_map, turned.anomaly_map), "channel order matters"


def test_read_pixels_give_the_same_prediction(tiny_run: Run, surfaces: Manifest) -> None:
    path = surfaces.samples[0].image
    whole = tiny_run.detector.predict(path)
    parts = tiny_run.detector.predict_pixels(tiny_run.detector.read(path))
    np.testing.assert_array_equal(whole.anomaly_map, parts.anomaly_map)
    assert (whole.pred_score, whole.regions) == (parts.pred_score, parts.regions)


def test_resized_map_is_torchs_own_bilinear_interpolation() -> None:
    values = np.random.default_rng(0).random((5, 7), np.float32)
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(values)[None, None], size=(11, 9), mode="bilinear"
    )
    np.testing.assert_array_equal(resize_map(values, (11, 9)), expected[0, 0].numpy())
    np.testing.assert_array_equal(resize_map(values, (5, 7)), values)


def test_from_predict_to_torch_are_at_most_four_frames_of_our_own(
    tiny_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tensor operation on the way to the network: the runtime's ``Tensor.to``."""
    depths: list[int] = []
    original = torch.Tensor.to

    def to(self: torch.Tensor, *arguments: object, **options: object) -> object:
        frames = traceback.extract_stack()
        ours = [f for f in frames if "/cdgp/" in f.filename and "/tests/" not in f.filename]
        depths.append(len(ours))
        return original(self, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch.Tensor, "to", to)
    tiny_run.detector.predict(np.full((64, 64), 128, np.uint8))
    assert depths and depths[0] <= 4


def test_final_map_is_surprisal_plus_image_term(tiny_run: Run) -> None:
    detector = cdgp.load(tiny_run.folder or "", defect_rate=0.5)
    prediction = detector.predict(np.full((64, 64), 128, np.uint8))
    term = detector.settings.calibration.image_weight * np.log(prediction.pred_score)
    np.testing.assert_allclose(prediction.anomaly_map - prediction.surprisal, term, atol=1e-4)
    assert prediction.pred_label == (prediction.pred_score > detector.threshold)


def test_load_takes_a_run_folder(tiny_run: Run) -> None:
    assert tiny_run.folder is not None
    image = np.full((64, 64, 3), 0.5, np.float32)
    a = cdgp.load(tiny_run.folder).predict(image)
    b = cdgp.load(tiny_run.folder / "model.safetensors").predict(image)
    assert a.pred_score == b.pred_score


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((9, 9, 4), np.uint8), "shape"),
        (np.zeros((4, 9), np.uint8), "smaller than the least"),
        (np.zeros((9, 9), np.int64), "expected uint8"),
        (np.full((9, 9), 1.5), r"outside \[0, 1\]"),
        (np.full((9, 9), np.nan), "not finite"),
        (np.full((9, 9), 5000, np.uint16), r"outside \[0, 4095\]"),
    ],
)
def test_arrays_of_another_kind_are_refused(array: NDArray[np.generic], message: str) -> None:
    with pytest.raises(ImageError, match=message):
        as_image(array, 4095)


def test_sixteen_bit_array_is_its_eight_bit_twin() -> None:
    eight = np.arange(256, dtype=np.uint8).reshape(16, 16)
    sixteen = eight.astype(np.uint16) * 257
    np.testing.assert_allclose(as_image(eight, 65535), as_image(sixteen, 65535), atol=1e-6)


def test_regions_against_a_plain_reading() -> None:
    rng = np.random.default_rng(0)
    values = ndimage.gaussian_filter(rng.normal(size=(60, 80)), 2).astype(np.float32) * 20
    level = 1.5
    regions = find_regions(values, level)
    assert sum(r.area for r in regions) == int((values > level).sum())
    assert [r.peak for r in regions] == sorted((r.peak for r in regions), reverse=True)
    for r in regions:
        box = values[r.y : r.y + r.height, r.x : r.x + r.width]
        assert box.max() == pytest.approx(r.peak, abs=1e-3) or box.max() > r.peak
    assert find_regions(np.zeros((5, 5), np.float32), 1.0) == ()
    diagonal = np.eye(4, dtype=np.float32) * 3
    assert len(find_regions(diagonal, 1.0)) == 1, "8-connected"
