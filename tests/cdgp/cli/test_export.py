"""``cdgp export``: exit codes, what it prints, and what the other commands do with the file."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import cdgp
from cdgp.cli.main import app
from cdgp.export import OPSET
from cdgp.training.fit import Run


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "100"})


def folder(of: Run) -> Path:
    assert of.folder is not None
    return of.folder


def test_the_parity_is_printed(tiny_run: Run, tmp_path: Path) -> None:
    out = tmp_path / "a.onnx"
    result = run("export", folder(tiny_run), "--to", "onnx", "--out", out, "--quiet")
    assert result.exit_code == 0, result.output
    about = cdgp.load(out).card.export
    assert about["opset"] == OPSET
    lines = result.output.splitlines()
    assert lines[0].startswith(f"onnxruntime against torch, {about['parity']['pictures']} images")
    assert f"a(x) {about['parity']['pooled']:.2g}" in lines[1]
    assert "0 decisions differ" in lines[2]
    assert f"torch {about['image_auroc']['torch']:.4f}" in lines[3]
    assert lines[4] == f"written: {out}"


def test_predict_and_evaluate_take_an_exported_file(
    tiny_run: Run, exported: dict[str, Path], tmp_path: Path
) -> None:
    source = tiny_run.manifest.root / "good"
    names = []
    for name, model in [("torch", folder(tiny_run)), *exported.items()]:
        result = run("predict", model, source, "--out", tmp_path / name, "--quiet")
        assert result.exit_code == 0, result.output
        assert (tmp_path / name / "report.html").is_file()
        rows = (tmp_path / name / "scores.csv").read_text("utf-8").splitlines()
        names.append([row.split(",")[0] for row in rows])
    assert names == [names[0]] * 3
    result = run("evaluate", exported["openvino"], tiny_run.manifest.root, "--out",
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
    result = run("export", model, *options.split())
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
        result = run("export", model, "--to", "onnx", "--out", tmp_path / "a.onnx")
        assert result.exit_code == code, result.output
        assert culprit in result.output
    assert not (tmp_path / "a.onnx").exists()
