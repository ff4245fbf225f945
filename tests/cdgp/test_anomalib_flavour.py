"""``cdgp export --flavour anomalib``: anomalib's own inferencers give the product's numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from anomalib.deploy import OpenVINOInferencer, TorchInferencer
from numpy.typing import NDArray
from PIL import Image

from cdgp import artifact, load
from cdgp.data.images import read_image, to_input
from cdgp.data.resize import resize_image
from cdgp.errors import ModelFileError, SettingsError
from cdgp.export import ExportOptions, export
from cdgp.method.graph import EvidenceGraph, InferenceGraph
from cdgp.progress import Quiet
from cdgp.runtimes.anomalib import AnomalibGraph, resized
from cdgp.runtimes.torch import TorchRuntime
from cdgp.workflows import Run

Images = list[NDArray[np.uint8]]
NAMES = {"anomaly_map", "pred_score", "pred_label", "pred_mask"}


@pytest.fixture(scope="module")
def flavoured(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("flavoured") / "a.xml"
    assert tiny_run.folder is not None
    options = ExportOptions("openvino", out, flavour="anomalib")
    found = export(tiny_run.folder, options, Quiet()).flavoured
    assert found is not None and found.labels == 0
    return out


def check(found: Any, path: Path, model: artifact.Model) -> None:
    """anomalib's batch of one image against torch and against ``cdgp.load``."""
    data = model.settings.data
    pixels = read_image(path, data.white_level, data.first_page)
    expected = TorchRuntime(model, torch.device("cpu")).run(
        to_input(pixels, model.settings.input_size)[None]
    )
    told = load(path.parents[1] / "run").predict(path)
    assert {name for name in NAMES if getattr(found, name) is not None} == NAMES
    values = {name: np.asarray(getattr(found, name)) for name in NAMES}
    off = np.abs(values["anomaly_map"] - expected.anomaly_map)
    assert (off / (1 + np.abs(expected.anomaly_map))).max() < 1e-4
    np.testing.assert_allclose(values["pred_score"], told.pred_score, atol=1e-4)
    assert values["pred_label"].tolist() == [told.pred_label]
    marked = expected.surprisal > -np.log(model.settings.decision.region_level)
    assert (values["pred_mask"].astype(bool) != marked).mean() < 0.002


@pytest.fixture
def files(tiny_run: Run, odd_images: Images, tmp_path: Path) -> list[Path]:
    (tmp_path / "images").mkdir()
    assert tiny_run.folder is not None
    (tmp_path / "run").symlink_to(tiny_run.folder.absolute())
    paths = [tmp_path / "images" / f"{i}.png" for i in range(len(odd_images))]
    for path, image in zip(paths, odd_images, strict=True):
        Image.fromarray(image).save(path)
    return paths


def test_openvino_inferencer(
    flavoured: Path, files: list[Path], tiny_run: Run, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)  # the inferencer leaves a cache in the working directory
    precision = {"INFERENCE_PRECISION_HINT": "f32"}
    inferencer = OpenVINOInferencer(flavoured, device="CPU", config=precision)
    model = artifact.load(tiny_run.folder / "model.safetensors")  # type: ignore[operator]
    for path in files:
        check(inferencer.predict(path), path, model)


def test_torch_inferencer(
    files: list[Path], tiny_run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = artifact.load(tiny_run.folder / "model.safetensors")  # type: ignore[operator]
    graph = InferenceGraph(
        EvidenceGraph(model.network), model.calibration, model.decision.defect_rate
    )
    level = model.settings.decision.region_level
    module = AnomalibGraph(graph, model.settings.input_size, model.decision, level)
    torch.save({"model": module}, tmp_path / "a.pt")
    monkeypatch.setenv("TRUST_REMOTE_CODE", "1")
    inferencer = TorchInferencer(tmp_path / "a.pt", device="cpu")
    for path in files:
        with torch.inference_mode():
            check(inferencer.predict(path), path, model)


@pytest.mark.parametrize(
    "sizes", [((64, 64), (64, 64)), ((97, 63), (64, 32)), ((20, 300), (64, 96)), ((1, 1), (64, 64))]
)
def test_resize_is_the_product_s(sizes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    (height, width), size = sizes
    image = np.random.default_rng(0).random((height, width, 3), np.float32)
    found = resized(torch.from_numpy(image.transpose(2, 0, 1))[None], size)[0].numpy()
    np.testing.assert_allclose(found, resize_image(image, size), atol=1e-6)


def test_cdgp_does_not_run_it_and_says_who_does(flavoured: Path) -> None:
    with pytest.raises(ModelFileError, match=r"exported for anomalib.*without --flavour"):
        load(flavoured)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"flavour": "vanilla"}, "there is anomalib"), ({"input_size": "free"}, "leave --int8"),
     ({"int8": True, "target": "openvino", "out": Path("a.xml")}, "leave --int8")],
)  # fmt: skip
def test_impossible_options(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    options = replace(ExportOptions("onnx", Path("a.onnx"), flavour="anomalib"), **changes)
    options = replace(options, out=tmp_path / options.out)
    with pytest.raises(SettingsError, match=message):
        export(tmp_path / "none", options, Quiet())
