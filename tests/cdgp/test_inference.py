"""Prediction at the image's own size, regions, arrays against files."""

import copy
import io
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from tests.cdgp.data.profiles import png_with
from tests.helpers import ROOT, noise_image
from tests.refused import rows

import cdgp
from cdgp import artifact
from cdgp.data.images import to_input
from cdgp.data.manifest import Manifest
from cdgp.errors import ImageError, ModelFileError, SettingsError
from cdgp.inference import Detector, as_image, find_regions
from cdgp.runtimes.base import Array, Outputs
from cdgp.workflows import Run
from cdgp_bench.studies.refused import Row


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
    # By the fused scores: the map of noise is at the end of its scale everywhere.
    rgb, bgr = (as_image(array, 65535) for array in (pixels, pixels[..., ::-1]))
    one, other = (tiny_run.detector.runtime.run(to_input(x, (64, 64))[None]) for x in (rgb, bgr))
    assert not np.allclose(one.fused, other.fused, atol=0.1), "channel order matters"


def test_read_pixels_give_the_same_prediction(tiny_run: Run, surfaces: Manifest) -> None:
    path = surfaces.samples[0].image
    whole = tiny_run.detector.predict(path)
    parts = tiny_run.detector.predict_pixels(tiny_run.detector.read(path))
    np.testing.assert_array_equal(whole.anomaly_map, parts.anomaly_map)
    assert (whole.pred_score, whole.regions) == (parts.pred_score, parts.regions)


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
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    prediction = detector.predict(noise)
    term = detector.settings.calibration.image_weight * np.log(prediction.pred_score)
    np.testing.assert_allclose(prediction.anomaly_map - prediction.surprisal, term, atol=1e-4)
    assert prediction.pred_label == (prediction.pred_score > detector.threshold)
    assert prediction.warnings == ()


def test_an_image_without_content_is_never_called_good(tiny_run: Run) -> None:
    detector = tiny_run.detector
    flat = np.full((64, 64, 3), 0.5, np.float32)
    certain = Detector(
        detector.card._replace(
            decision=detector.card.decision._replace(threshold=1.0, balanced_threshold=1.0)
        ),
        detector.runtime,
    )
    for found in (certain.predict(flat), certain.predict_pixels(flat, ("a doubt",))):
        assert found.pred_label and found.pred_score <= certain.threshold
        assert found.warnings[-1].startswith("holds nothing to see")
    assert certain.predict_pixels(flat, ("a doubt",)).warnings[0] == "a doubt"
    noise = np.random.default_rng(0).random((64, 64, 3), np.float32)
    assert not certain.predict(noise).pred_label


def test_warnings_of_a_file_come_with_its_prediction(tiny_run: Run, tmp_path: Path) -> None:
    noise_image(tmp_path / "a.png", (64, 64))
    png_with(tmp_path / "a.png", gAMA=(100_000).to_bytes(4, "big"))
    pixels, warnings = tiny_run.detector.read_with_warnings(tmp_path / "a.png")
    (text,) = warnings
    assert "gAMA" in text and tiny_run.detector.predict(tmp_path / "a.png").warnings == warnings
    np.testing.assert_array_equal(tiny_run.detector.read(tmp_path / "a.png"), pixels)


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


PIXELS = np.random.default_rng(7).integers(0, 255, (40, 50, 3), np.uint8)


@dataclass
class PathLike:
    """Another library's path."""

    path: str | bytes

    def __fspath__(self) -> str | bytes:
        return self.path


def saved(folder: Path) -> Path:
    Image.fromarray(PIXELS).save(folder / "a.png")
    return folder / "a.png"


def mapped(folder: Path) -> NDArray[np.uint8]:
    np.save(folder / "a.npy", PIXELS)
    found: NDArray[np.uint8] = np.load(folder / "a.npy", mmap_mode="r")
    assert isinstance(found, np.memmap)
    return found


def read_only() -> NDArray[np.uint8]:
    pixels = PIXELS.copy()
    pixels.flags.writeable = False
    return pixels


FIELDS = [("r", "u1"), ("g", "u1"), ("b", "u1")]
MAKERS: dict[str, Callable[[Path], object]] = {
    "pil": lambda _: Image.fromarray(PIXELS),
    "tensor": lambda _: torch.from_numpy(PIXELS).permute(2, 0, 1),
    "list": lambda _: PIXELS.tolist(),
    "paths": lambda folder: [saved(folder)],
    "bytes": lambda folder: saved(folder).read_bytes(),
    "bytearray": lambda folder: bytearray(saved(folder).read_bytes()),
    "memoryview": lambda _: PIXELS.data,
    "none": lambda _: None,
    "memory-file": lambda folder: io.BytesIO(saved(folder).read_bytes()),
    "open-file": lambda folder: saved(folder).open("rb"),
    "bytes-path": lambda folder: os.fsencode(saved(folder)),
    "empty-path": lambda _: "",
    "nul-path": lambda _: "a\0.png",
    "masked": lambda _: np.ma.masked_greater(PIXELS, 200),
    "structured": lambda _: PIXELS.view(FIELDS)[..., 0],
    "object": lambda _: PIXELS.astype(object),
    "complex": lambda _: PIXELS.astype(complex),
    "int64": lambda _: PIXELS.astype(np.int64),
    "bool": lambda _: PIXELS > 100,
    "float-255": lambda _: PIXELS.astype(np.float32),
    "nan": lambda _: np.where(PIXELS > 250, np.nan, PIXELS / 255),
    "channels-first": lambda _: PIXELS.transpose(2, 0, 1),
    "batch": lambda _: PIXELS[None],
    "rgba": lambda _: np.dstack([PIXELS, PIXELS[..., :1]]),
    "empty": lambda _: PIXELS[:0],
    "scalar": lambda _: np.array(3),
    "one-channel": lambda _: PIXELS[..., :1],
    "big-endian": lambda _: (PIXELS.astype(np.uint16) * 257).astype(">u2"),
    "half": lambda _: (PIXELS / 255).astype(np.float16),
    "double": lambda _: PIXELS / 255,
    "mirrored": lambda _: PIXELS[::-1, ::-1],
    "fortran": lambda _: np.asfortranarray(PIXELS),
    "read-only": lambda _: read_only(),
    "mapped": mapped,
    "path-like": lambda folder: PathLike(str(saved(folder))),
    "load-none": lambda _: None,
    "load-bytes": lambda folder: saved(folder).read_bytes(),
    "load-threads": lambda _: "2",
    "fit-none": lambda _: None,
    "fit-out": lambda _: 3,
    "fit-settings": lambda _: {"seed": 1},
}
CALLS: dict[str, Callable[[Any], object]] = {
    "load-none": cdgp.load,
    "load-bytes": cdgp.load,
    "load-threads": lambda given: cdgp.load("a.onnx", threads=given),
    "fit-none": cdgp.fit,
    "fit-out": lambda given: cdgp.fit("parts", given),
    "fit-settings": lambda given: cdgp.fit("parts", settings=given),
}
"""Of the rows that are given to something else than ``Detector.predict``."""
EXPECTED = {"one-channel": PIXELS[..., [0, 0, 0]], "mirrored": PIXELS[::-1, ::-1]}
"""The 8-bit image that an array means, where it is not ``PIXELS``."""


@rows("python", MAKERS)
def test_every_row(tiny_run: Run, tmp_path: Path, row: Row) -> None:
    given: Any = MAKERS[row.id](tmp_path)
    if row.result == "read":
        before = given.copy() if isinstance(given, np.ndarray) else given
        found = tiny_run.detector.read(given)
        expected = EXPECTED.get(row.id, PIXELS) / 255
        np.testing.assert_allclose(found, expected, atol=5e-4 if row.id == "half" else 1e-6)
        assert found.dtype == np.float32 and found.flags.c_contiguous
        assert 0 <= tiny_run.detector.predict(given).pred_score <= 1
        np.testing.assert_array_equal(given, before)
        return
    call: Callable[[Any], object] = CALLS.get(row.id, tiny_run.detector.predict)
    with pytest.raises(SettingsError if row.id in CALLS else ImageError) as raised:
        call(given)
    assert row.says in str(raised.value)


@pytest.mark.parametrize("name", Outputs._fields)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_never_good(
    tiny_run: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: float, tmp_path: Path
) -> None:
    detector = tiny_run.detector
    plain = detector.runtime.run

    def spoilt(images: Array) -> Outputs:
        found = plain(images)
        part = getattr(found, name).copy()
        part.flat[-1] = value
        return found._replace(**{name: part})

    monkeypatch.setattr(detector.runtime, "run", spoilt)
    with pytest.raises(ImageError, match=rf"^an image of 50 × 40 pixels: .*\({name}\)"):
        detector.predict(PIXELS)
    with pytest.raises(ImageError, match=r"a\.png \(50 × 40 pixels\): the model gives no finite"):
        detector.predict(saved(tmp_path))
    monkeypatch.undo()
    assert detector.predict(PIXELS).pred_label in (True, False)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("not enough memory: you tried to allocate 9 bytes."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        Exception("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : std::bad_alloc"),
        RuntimeError("Exception from src/inference: Failed to allocate 9 bytes of memory"),
    ],
)
def test_short_memory_is_an_error_of_the_image(
    tiny_run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def short(images: Array) -> Outputs:
        raise error

    monkeypatch.setattr(tiny_run.detector.runtime, "run", short)
    with pytest.raises(ImageError, match="50 × 40 pixels: needs more memory than there is"):
        tiny_run.detector.predict(PIXELS)


LIMITED = """
import re, resource, sys
from pathlib import Path
import cdgp

for path in sys.argv[3:]:
    detector = cdgp.load(path, threads=1)
    before = detector.predict(sys.argv[2]).pred_score
    used = re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())
    limit = int(used[1]) * 1024 + 500 * 2**20  # pixels alone take 561 MiB
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        detector.predict(sys.argv[1])
    except cdgp.ImageError as error:
        print(error)
    assert detector.predict(sys.argv[2]).pred_score == before
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits and counts memory as Linux does")
def test_an_image_of_49_megapixels_does_not_stop_the_next(tiny_run: Run, tmp_path: Path) -> None:
    """Whole and by windows, with too little memory for it."""
    rows = np.tile(np.arange(200, dtype=np.uint8)[:, None, None], (35, 7000, 3))
    Image.fromarray(rows).save(tmp_path / "large.png", compress_level=1)
    model = tiny_run.detector.model
    network, image = copy.deepcopy(model.network), model.calibration.image
    network.distance = None  # which windows lack
    image = image._replace(centre=image.centre[:2], scale=image.scale[:2], slope=image.slope[:2])
    tiled = model._replace(
        network=network,
        calibration=model.calibration._replace(image=image, distance_weight=0.0),
        settings=model.settings.model_copy(update={"tile": True}),
    )
    artifact.save(tmp_path / "whole.safetensors", model)
    artifact.save(tmp_path / "tiled.safetensors", tiled)
    files = ["large.png", saved(tmp_path).name, "whole.safetensors", "tiled.safetensors"]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *(tmp_path / name for name in files)],
        capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("needs more memory than there is") == 2, done.stdout


def test_other_errors_stay_what_they_are(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(images: Array) -> Outputs:
        raise RuntimeError("a shape that does not fit")

    monkeypatch.setattr(tiny_run.detector.runtime, "run", broken)
    with pytest.raises(RuntimeError, match="does not fit"):
        tiny_run.detector.predict(PIXELS)


def test_a_detector_of_a_file_is_loaded_again_elsewhere(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelFileError, match="not loaded from a file"):
        pickle.dumps(tiny_run.detector)
    assert tiny_run.folder is not None
    (tmp_path / "m.safetensors").write_bytes((tiny_run.folder / "model.safetensors").read_bytes())
    monkeypatch.chdir(tmp_path)
    sent = pickle.dumps(cdgp.load("m.safetensors"))
    assert len(sent) < 10_000, "no weights travel"
    monkeypatch.chdir("/")
    again = pickle.loads(sent)
    assert isinstance(again, Detector)
    assert again.predict(PIXELS).pred_score == tiny_run.detector.predict(PIXELS).pred_score
    other = tiny_run.detector.model
    image = other.calibration.image._replace(intercept=other.calibration.image.intercept + 1)
    changed = other._replace(calibration=other.calibration._replace(image=image))
    artifact.save(tmp_path / "m.safetensors", changed)
    with pytest.raises(ModelFileError, match="holds another model"):
        pickle.loads(sent)
