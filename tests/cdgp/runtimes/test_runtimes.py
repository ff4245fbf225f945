"""Every exported file against torch: the same numbers for any image and any batch."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

import cdgp
from cdgp.data.images import to_input
from cdgp.errors import ImageError, ModelFileError, SettingsError
from cdgp.export import TARGETS
from cdgp.inference import as_image
from cdgp.runtimes import EXPORTED, open_exported, require_package
from cdgp.workflows import Run

every_target = pytest.mark.parametrize("target", list(TARGETS))


@every_target
def test_an_exported_file_is_opened_by_its_suffix(
    tiny_run: Run, exported: dict[str, Path], target: str
) -> None:
    path = exported[target]
    card, runtime = open_exported(path, threads=1)
    assert isinstance(runtime, EXPORTED[path.suffix]) and runtime.name == TARGETS[target].runtime
    assert card._replace(export={}) == tiny_run.detector.card
    with pytest.raises(ModelFileError, match="none"):
        open_exported(path.with_stem("none"))


@every_target
def test_predictions_are_those_of_torch(
    tiny_run: Run, exported: dict[str, Path], odd_images: list[NDArray[np.uint8]], target: str
) -> None:
    detector = cdgp.load(exported[target], threads=1)
    assert detector.threshold == tiny_run.detector.threshold
    assert detector.colour_scale == tiny_run.detector.colour_scale
    for image in odd_images:
        a, b = tiny_run.detector.predict(image), detector.predict(image)
        assert a.anomaly_map.shape == b.anomaly_map.shape == image.shape[:2]
        assert abs(a.pred_score - b.pred_score) < 1e-4 and a.pred_label == b.pred_label
        assert float((np.abs(a.surprisal - b.surprisal) > 0.01).mean()) < 0.01


@every_target
@pytest.mark.parametrize("batch", [1, 3, 5])
def test_any_batch(
    tiny_run: Run,
    exported: dict[str, Path],
    odd_images: list[NDArray[np.uint8]],
    target: str,
    batch: int,
) -> None:
    size = tiny_run.detector.settings.input_size
    inputs = np.stack([to_input(as_image(i, 65535), size) for i in odd_images[:batch]])
    expected = tiny_run.detector.runtime.run(inputs)
    _, runtime = open_exported(exported[target])
    outputs = runtime.run(inputs)
    for name in ("fused", "pooled", "pred_score"):
        a, b = getattr(outputs, name), getattr(expected, name)
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@every_target
def test_another_preprocessing_shows(
    tiny_run: Run, exported: dict[str, Path], odd_images: list[NDArray[np.uint8]], target: str
) -> None:
    """Common mistakes around exported models move the numbers far: so the tests above see them."""
    size = tiny_run.detector.settings.input_size
    pixels = as_image(odd_images[1], 65535)
    image = to_input(pixels, size)[None]
    expected = tiny_run.detector.runtime.run(image).fused
    _, runtime = open_exported(exported[target])
    bgr = image[:, ::-1]
    whole = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    without_antialiasing = functional.interpolate(whole, size=size, mode="bilinear").numpy()
    for other in (bgr, without_antialiasing):
        assert float(np.abs(runtime.run(other).fused - expected).max()) > 1e-2


def test_case_export_parity(tiny_run: Run, exported: dict[str, Path], tmp_path: Path) -> None:
    """A path and an array, in all three runtimes."""
    Image.fromarray(np.random.default_rng(3).integers(0, 255, (90, 130, 3), np.uint8)).save(
        tmp_path / "a.png"
    )
    expected = tiny_run.detector.predict(tmp_path / "a.png")
    for path in exported.values():
        detector = cdgp.load(path)
        a = detector.predict(tmp_path / "a.png")
        b = detector.predict(np.asarray(Image.open(tmp_path / "a.png")))
        np.testing.assert_array_equal(a.anomaly_map, b.anomaly_map)
        assert a.pred_score == pytest.approx(expected.pred_score, abs=1e-4)


@every_target
def test_errors_are_those_of_torch(exported: dict[str, Path], target: str) -> None:
    with pytest.raises(ImageError):
        cdgp.load(exported[target]).predict(np.zeros((4, 4), np.uint8))
    with pytest.raises(SettingsError):
        cdgp.load(exported[target], threads=0)
    with pytest.raises(ModelFileError, match=r"load model\.safetensors"):
        _ = cdgp.load(exported[target]).model


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime", "openvino", "nncf"])
def test_a_missing_package(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is the feature: it holds the command that installs the package."""

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    extra = "openvino" if package in ("openvino", "nncf") else "onnx"
    with pytest.raises(SettingsError, match=rf"{package}.*pip install 'cdgp\[{extra}\]'"):
        require_package(package)


def test_optional_packages_are_imported_when_they_are_needed() -> None:
    code = (
        "import sys, cdgp.runtimes, cdgp.export\n"
        "assert not {'onnx', 'onnxscript', 'onnxruntime', 'openvino', 'nncf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
