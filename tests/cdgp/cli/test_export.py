"""``cdgp export``: exit codes, what it prints, and what the other commands do with the file."""

import json
from pathlib import Path

import onnx
import pytest
from tests.helpers import cdgp

from cdgp.cli.export import show_parity
from cdgp.export import OPSET, Exported
from cdgp.inference import load
from cdgp.runtimes.parity import Parity
from cdgp.workflows import Run


def folder(of: Run) -> Path:
    assert of.folder is not None
    return of.folder


def test_another_size_and_operator_set(tiny_run: Run, tmp_path: Path) -> None:
    out = tmp_path / "wide.onnx"
    result = cdgp("export", folder(tiny_run), "--to", "onnx", "--out", out, "--input-size", "64x96",
                 "--opset", 20, "--images", tiny_run.manifest.root / "good")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "onnxruntime against torch, 24 images" in result.output
    assert result.output.splitlines()[-1] == f"written: {out}"
    assert {o.domain: o.version for o in onnx.load(out).opset_import}[""] == 20
    detector = load(out)
    assert detector.settings.input_size == (64, 96)
    assert "calibrated at an input of 64x64" in detector.card.decision.source
    assert detector.card.export["image_auroc"] is None, "images without labels"


def test_the_parity_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity(50, 1.23e-5, 2e-7, 3e-8, 0.0123, 0.00042, (3, 8), (), ())
    show_parity(Exported("openvino", parity, {"torch": 0.98765, "openvino": 0.987}))
    assert capsys.readouterr().out.splitlines() == [
        "openvino against torch, 50 images, largest differences:",
        "  U 1.2e-05, image evidence 2e-07, score 3e-08, surprisal 0.012",
        "  0.042 % of map pixels more than one rank off, 2 decisions differ",
        "  image AUROC on these images: torch 0.9877, openvino 0.9870",
    ]


def test_predict_and_evaluate_take_an_exported_file(
    tiny_run: Run, exported: dict[str, Path], tmp_path: Path
) -> None:
    source = tiny_run.manifest.root / "good"
    names = []
    for name, model in [("torch", folder(tiny_run)), *exported.items()]:
        result = cdgp("predict", model, source, "--out", tmp_path / name, "--quiet")
        assert result.exit_code == 0, result.output
        assert (tmp_path / name / "report.html").is_file()
        rows = (tmp_path / name / "scores.csv").read_text("utf-8").splitlines()
        names.append([row.split(",")[0] for row in rows])
    assert names == [names[0]] * 3
    result = cdgp("evaluate", exported["openvino"], tiny_run.manifest.root, "--out",
                 tmp_path / "again", "--quiet")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "again/metrics.json").read_text())["image_auroc"] is not None


@pytest.mark.parametrize(
    ("options", "code", "culprit"),
    [
        ("--to coreml --out a.onnx", 2, "--to 'coreml'"),
        ("--to onnx --out a.pb", 2, "--out a.pb"),
        ("--to openvino --out a.onnx", 2, "--out a.onnx"),
        ("--to onnx --out a.onnx --int8", 2, "--int8"),
        ("--to onnx --out a.onnx --opset 0", 2, f"--opset 0: {OPSET} to"),
        ("--to onnx --out a.onnx --opset 999", 2, "--opset 999"),
        ("--to onnx --out a.onnx --input-size 70x64", 2, "--input-size 70x64"),
        ("--to onnx --out a.onnx --input-size big", 2, "--input-size 'big'"),
        ("--to onnx --out file/a.onnx", 1, "file/a.onnx"),
        ("--to onnx --out there.onnx", 1, "--overwrite"),
        ("--to openvino --out there.xml", 1, "there.bin: exists"),
        ("--to onnx --out a.onnx --images no", 3, "--images no"),
        ("--to onnx --out a.onnx --images empty", 3, "--images empty"),
    ],
)
def test_impossible_options(
    tiny_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    code: int,
    culprit: str,
) -> None:
    """The message names the option or the file, and nothing is written or replaced."""
    model = folder(tiny_run).absolute()
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    for name in ("file", "there.onnx", "there.bin"):
        Path(name).write_text("mine")
    result = cdgp("export", model, *options.split())
    assert result.exit_code == code, result.output
    assert culprit in result.output
    left = {path.name: path.is_dir() or path.read_text() for path in Path().iterdir()}
    assert left == {"empty": True, "file": "mine", "there.onnx": "mine", "there.bin": "mine"}


def test_models_that_cannot_be_exported(tiny_run: Run, tmp_path: Path) -> None:
    alone = tmp_path / "alone" / "model.safetensors"
    alone.parent.mkdir()
    alone.write_bytes((folder(tiny_run) / "model.safetensors").read_bytes())
    for model, code, culprit in [
        (alone, 3, "manifest.csv"),
        (tmp_path / "none", 1, str(tmp_path / "none")),
    ]:
        result = cdgp("export", model, "--to", "onnx", "--out", tmp_path / "a.onnx")
        assert result.exit_code == code, result.output
        assert culprit in result.output
    assert not (tmp_path / "a.onnx").exists()
