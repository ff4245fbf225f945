"""Exported files against torch: the same numbers, from any door, or no file at all."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
import pytest
import torch
from numpy.typing import NDArray
from openvino import opset13
from PIL import Image
from tests.helpers import ROOT
from torch.nn import functional
from typer.testing import CliRunner, Result

import cdgp
from cdgp import export, runtimes
from cdgp.cli.main import app
from cdgp.data.images import to_input
from cdgp.errors import ImageError, ModelFileError, SettingsError
from cdgp.method.network import Outputs
from cdgp.workflows import Run

EXAMPLE = ROOT / "examples/onnx_numpy.py"
SIZES = [(64, 64), (97, 63), (130, 50), (33, 33), (20, 300)]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "100"})


def folder(of: Run) -> Path:
    assert of.folder is not None
    return of.folder


@pytest.fixture(scope="module")
def exported(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("exported")
    made = {"onnx": place / "a.onnx", "openvino": place / "a.xml"}
    for target, out in made.items():
        result = run("export", folder(tiny_run), "--to", target, "--out", out, "--quiet")
        assert result.exit_code == 0, result.output
        assert "largest differences" in result.output
    assert sorted(p.name for p in place.iterdir()) == ["a.bin", "a.onnx", "a.xml"]
    return made


@pytest.fixture(scope="module")
def images() -> list[NDArray[np.uint8]]:
    """Of mixed sizes, with fine structure and unlike colours."""
    rng = np.random.default_rng(0)
    made = []
    for height, width in SIZES:
        image = rng.integers(0, 255, (height, width, 3)).astype(np.uint8)
        image[..., 0] //= 3
        image[: height // 2] = 255 * (np.indices((height // 2, width)).sum(0) % 2)[..., None]
        made.append(image)
    return made


@pytest.mark.parametrize("target", ["onnx", "openvino"])
def test_predictions_are_those_of_torch(
    tiny_run: Run, exported: dict[str, Path], images: list[NDArray[np.uint8]], target: str
) -> None:
    detector = cdgp.load(exported[target], threads=1)
    assert detector.runtime.name == export.RUNTIME[target]
    assert detector.threshold == tiny_run.detector.threshold
    assert detector.colour_scale == tiny_run.detector.colour_scale
    for image in images:
        a, b = tiny_run.detector.predict(image), detector.predict(image)
        assert a.anomaly_map.shape == b.anomaly_map.shape == image.shape[:2]
        assert abs(a.pred_score - b.pred_score) < 1e-4 and a.pred_label == b.pred_label
        assert float((np.abs(a.surprisal - b.surprisal) > 0.01).mean()) < 0.01


@pytest.mark.parametrize("target", ["onnx", "openvino"])
@pytest.mark.parametrize("batch", [1, 3, 5])
def test_any_batch(
    tiny_run: Run,
    exported: dict[str, Path],
    images: list[NDArray[np.uint8]],
    target: str,
    batch: int,
) -> None:
    size = tiny_run.detector.settings.input_size
    inputs = torch.stack([to_input(p / np.float32(255), size) for p in images[:batch]])
    plain = tiny_run.detector.runtime.run(inputs)
    detector = cdgp.load(exported[target])
    found = detector.runtime.run(inputs)
    for name in ("fused", "pooled", "pred_score"):
        torch.testing.assert_close(getattr(found, name), getattr(plain, name), atol=1e-4, rtol=0)
    # What users of other tools met: each of these moves the numbers far.
    swapped = detector.runtime.run(inputs.flip(1)).fused
    assert float((swapped - plain.fused).abs().max()) > 1e-2
    coarse = torch.stack([
        functional.interpolate(
            torch.from_numpy(p / np.float32(255)).permute(2, 0, 1)[None], size=size, mode="bilinear"
        )[0]
        for p in images[1:2]
    ])  # fmt: skip
    with_antialias = tiny_run.detector.runtime.run(
        to_input(images[1] / np.float32(255), size)[None]
    )
    assert float((detector.runtime.run(coarse).fused - with_antialias.fused).abs().max()) > 1e-2


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


@pytest.mark.parametrize(("target", "name"), [("onnx", "free.onnx"), ("openvino", "free.xml")])
def test_free_size(tiny_run: Run, tmp_path: Path, target: str, name: str) -> None:
    out = tmp_path / name
    result = run("export", folder(tiny_run), "--to", target, "--out", out, "--input-size", "free")
    assert result.exit_code == 0, result.output
    detector = cdgp.load(out)
    for shape in [(1, 3, 64, 64), (2, 3, 96, 176), (3, 3, 208, 64)]:
        images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        a, b = detector.runtime.run(images), tiny_run.detector.runtime.run(images)
        torch.testing.assert_close(a.fused, b.fused, atol=1e-4, rtol=0)
        torch.testing.assert_close(a.pooled, b.pooled, atol=1e-5, rtol=0)
    assert detector.card.export["input"]["shape"] == ["batch", 3, "height", "width"]


def test_another_size_and_operator_set(tiny_run: Run, tmp_path: Path) -> None:
    out = tmp_path / "wide.onnx"
    result = run("export", folder(tiny_run), "--to", "onnx", "--out", out, "--input-size", "64x96",
                 "--opset", 20, "--images", tiny_run.manifest.root / "good")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert {o.domain: o.version for o in onnx.load(out).opset_import}[""] == 20
    detector = cdgp.load(out)
    assert detector.settings.input_size == (64, 96)
    assert "calibrated at an input of 64x64" in detector.card.decision.source


def test_int8_is_measured(tiny_run: Run, images: list[NDArray[np.uint8]], tmp_path: Path) -> None:
    out = tmp_path / "small.xml"
    result = run("export", folder(tiny_run), "--to", "openvino", "--out", out, "--int8", "--quiet")
    assert result.exit_code == 0, result.output
    detector = cdgp.load(out)
    about = detector.card.export
    assert about["precision"] == "int8" and about["parity"]["tolerance"] is None
    assert about["parity"]["fused"] > export.TOLERANCE, "8 bits leave a trace"
    assert set(about["image_auroc"]) == {"torch", "openvino"}
    quantised = [o for o in openvino.Core().read_model(out).get_ops()
                 if o.get_type_name() == "FakeQuantize"]  # fmt: skip
    assert len(quantised) > 50
    assert detector.predict(images[0]).anomaly_map.shape == SIZES[0]


def test_what_a_file_says_of_itself(tiny_run: Run, exported: dict[str, Path]) -> None:
    for target, path in exported.items():
        about = cdgp.load(path).card.export
        assert about["runtime"] == export.RUNTIME[target]
        assert about["classes"] == ["good", "defective"]
        assert about["input"]["range"] == [0, 1] and about["input"]["channels"] == "RGB"
        assert "antialiasing" in about["input"]["resize"]
        assert about["parity"]["tolerance"] == 1e-4
        assert max(about["parity"][k] for k in ("fused", "pooled", "pred_score")) <= 1e-4
        assert about["parity"]["labels"] == 0
        assert set(about["versions"]) == {"cdgp", "torch", "onnx", export.RUNTIME[target]}
    assert about["model_sha256"] == export.digest(folder(tiny_run) / "model.safetensors")


def test_example_needs_onnxruntime_and_numpy_alone(
    tiny_run: Run, exported: dict[str, Path], tmp_path: Path
) -> None:
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 40
    image = np.random.default_rng(5).integers(0, 255, (150, 91, 3), np.uint8)
    np.save(tmp_path / "image.npy", image)
    code = (
        "import runpy, sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert name.split('.')[0] not in ('torch', 'cdgp', 'PIL', 'scipy'), name\n"
        "sys.meta_path.insert(0, Refuse())\n"
        f"sys.argv = ['x', {str(exported['onnx'])!r}, {str(tmp_path / 'image.npy')!r}]\n"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = tiny_run.detector.predict(image)
    label, score = done.stdout.splitlines()[0].split()
    assert label == ("defective" if expected.pred_label else "good")
    assert float(score) == pytest.approx(expected.pred_score, abs=2e-6)


def test_example_resizes_as_the_product() -> None:
    source = EXAMPLE.read_text("utf-8")
    names: dict[str, Any] = {"np": np}
    exec(source[source.index("def weights") : source.index("session =")], names)
    image = np.random.default_rng(0).random((150, 91, 3), dtype=np.float32)
    for size in [(64, 64), (160, 96), (150, 32)]:
        rows, columns = names["weights"](150, size[0]), names["weights"](91, size[1])
        found = np.einsum("hy,yxc,wx->chw", rows, image, columns)
        np.testing.assert_allclose(found, to_input(image, size).numpy(), atol=1e-5)


def test_predict_and_evaluate_take_an_exported_file(
    tiny_run: Run, exported: dict[str, Path], tmp_path: Path
) -> None:
    source = tiny_run.manifest.root / "good"
    tables = []
    for name, model in [("torch", folder(tiny_run)), *exported.items()]:
        result = run("predict", model, source, "--out", tmp_path / name, "--quiet")
        assert result.exit_code == 0, result.output
        assert (tmp_path / name / "report.html").is_file()
        rows = (tmp_path / name / "scores.csv").read_text("utf-8").splitlines()
        tables.append([row.split(",")[:3] for row in rows])
    assert [[r[0] for r in t] for t in tables] == [[r[0] for r in tables[0]]] * 3
    result = run("evaluate", exported["openvino"], tiny_run.manifest.root, "--out",
                 tmp_path / "again", "--quiet")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "again/metrics.json").read_text())["image_auroc"] is not None


def test_a_file_that_differs_is_not_written(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is a real one: a graph with another weight does not pass."""
    plain = export.to_onnx

    def spoilt(*arguments: Any) -> Any:
        proto = plain(*arguments)
        for tensor in proto.graph.initializer:
            if tensor.name.endswith("student.heads.0.weight"):
                values = onnx.numpy_helper.to_array(tensor)
                tensor.CopyFrom(onnx.numpy_helper.from_array(values * 1.001, tensor.name))
                return proto
        raise AssertionError("the weight has another name")

    monkeypatch.setattr(export, "to_onnx", spoilt)
    out = tmp_path / "a.onnx"
    result = run("export", folder(tiny_run), "--to", "onnx", "--out", out)
    assert result.exit_code == 1 and "not written" in result.output
    assert "0.0001 is allowed" in result.output and not out.exists()


def test_not_a_number_is_no_parity(tiny_run: Run) -> None:
    """In one image of a batch of three alone, where nothing else would show it."""
    plain = tiny_run.detector.runtime

    class Broken:
        name = "broken"

        def run(self, images: torch.Tensor) -> Outputs:
            found = plain.run(images)
            if len(images) == 3:
                fused = found.fused.clone()
                fused[1, 0, 0] = torch.nan
                return found._replace(fused=fused)
            return found

    source = export.read_source(folder(tiny_run))
    inputs = export._Inputs(source.compared, 65535, tiny_run.detector.settings.input_size)
    parity, _ = export.compare(plain, Broken(), inputs, source.model, lambda note="": None)
    assert parity.fused == np.inf and not parity.worst <= export.TOLERANCE


def test_weights_of_another_file_are_not_replaced(tiny_run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_text("mine")
    result = run("export", folder(tiny_run), "--to", "openvino", "--out", tmp_path / "a.xml")
    assert result.exit_code == 1 and "a.bin: exists" in result.output
    assert (tmp_path / "a.bin").read_text() == "mine"


def test_impossible_exports(tiny_run: Run, tmp_path: Path) -> None:
    model = folder(tiny_run)
    (tmp_path / "file").write_text("")
    there = tmp_path / "there.onnx"
    there.write_text("mine")
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes((model / "model.safetensors").read_bytes())
    for arguments, code, message in [
        ((model, "--to", "coreml", "--out", "a.onnx"), 2, "there are onnx and openvino"),
        ((model, "--to", "onnx", "--out", "a.pb"), 2, "ends in .onnx"),
        ((model, "--to", "openvino", "--out", "a.onnx"), 2, "ends in .xml"),
        ((model, "--to", "onnx", "--out", "a.onnx", "--int8"), 2, "--to openvino"),
        ((model, "--to", "onnx", "--out", "a.onnx", "--opset", 9), 2, "--opset 9: 18 to"),
        ((model, "--to", "onnx", "--out", "a.onnx", "--opset", 999), 2, "--opset 999"),
        ((model, "--to", "onnx", "--out", "a.onnx", "--input-size", "70x64"), 2, "multiple of 16"),
        ((model, "--to", "onnx", "--out", "a.onnx", "--input-size", "big"), 2, "HEIGHTxWIDTH"),
        ((model, "--to", "onnx", "--out", tmp_path / "file/a.onnx"), 1, "cannot be written"),
        ((model, "--to", "onnx", "--out", there), 1, "--overwrite"),
        ((alone, "--to", "onnx", "--out", tmp_path / "b.onnx"), 3, "--images FOLDER"),
        ((alone, "--to", "onnx", "--out", tmp_path / "b.onnx", "--images", "no"), 3, "no such"),
        ((tmp_path / "none", "--to", "onnx", "--out", tmp_path / "b.onnx"), 1, "no such model"),
    ]:
        result = run("export", *arguments)
        assert result.exit_code == code, (arguments, result.output)
        assert message in result.output, (message, result.output)
    assert there.read_text() == "mine"
    assert not (tmp_path / "b.onnx").exists()


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime", "openvino", "nncf"])
def test_missing_extra(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(name: str) -> Any:
        if name == package:
            raise ImportError(name)
        return import_module(name)

    monkeypatch.setattr("importlib.import_module", refusing)
    target = "openvino" if package in ("openvino", "nncf") else "onnx"
    out = tmp_path / ("a.xml" if target == "openvino" else "a.onnx")
    with pytest.raises(SettingsError, match=rf"{package}.*pip install 'cdgp\[{target}\]'"):
        export.check_export(target, out, None, 18, package == "nncf")


def test_foreign_and_damaged_files(exported: dict[str, Path], tmp_path: Path) -> None:
    proto = onnx.load(exported["onnx"])
    newer = tmp_path / "newer.onnx"
    for entry in proto.metadata_props:
        if entry.key == "version":
            entry.value = str(runtimes.VERSION + 1)
    onnx.save(proto, newer)
    foreign = tmp_path / "foreign.onnx"
    del proto.metadata_props[:]
    onnx.save(proto, foreign)
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(exported["onnx"].read_bytes()[:100_000])
    alone = tmp_path / "alone.xml"
    alone.write_bytes(exported["openvino"].read_bytes())
    constant = tmp_path / "constant.xml"
    openvino.save_model(openvino.Model([opset13.constant(1.0)], [], "no input"), constant)
    for path, message in [
        (newer, "exported in format 2"),
        (foreign, "not exported by this tool"),
        (cut, "onnxruntime cannot run it"),
        (alone, "OpenVINO cannot run it"),
        (constant, "OpenVINO cannot run it"),
        (tmp_path / "none.onnx", "no such model file"),
    ]:
        with pytest.raises(ModelFileError, match=message) as caught:
            cdgp.load(path)
        assert str(path) in str(caught.value)
    with pytest.raises(SettingsError, match="threads = 0"):
        cdgp.load(exported["onnx"], threads=0)


@pytest.mark.parametrize("key", ["settings", "decision", "image", "provenance", "export"])
@pytest.mark.parametrize("value", [None, "", "{}", "[1]", "nan"])
def test_damaged_metadata(exported: dict[str, Path], key: str, value: str | None) -> None:
    metadata = runtimes.OnnxRuntime(exported["onnx"]).metadata
    damaged = {k: v for k, v in metadata.items() if k != key} | (
        {} if value is None else {key: value}
    )
    if key in ("provenance", "export") and value in ("{}", "[1]", "nan"):
        return  # told, not computed with
    with pytest.raises(ModelFileError, match="damaged"):
        runtimes.from_metadata(damaged, "a.onnx")


def test_networks_of_an_exported_file_are_refused(exported: dict[str, Path]) -> None:
    with pytest.raises(ModelFileError, match=r"load model\.safetensors"):
        _ = cdgp.load(exported["onnx"]).model


def test_images_of_another_kind_are_refused_alike(exported: dict[str, Path]) -> None:
    with pytest.raises(ImageError):
        cdgp.load(exported["onnx"]).predict(np.zeros((4, 4), np.uint8))
