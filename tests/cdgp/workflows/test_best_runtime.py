"""``--best-runtime``: exported once, used while the model is the same."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import cdgp, noise_image

from cdgp import export
from cdgp.errors import SettingsError
from cdgp.run_folder import BEST
from cdgp.runtimes import open_exported
from cdgp.workflows import Run, predict_folder


@pytest.fixture
def run(tiny_run: Run, tmp_path: Path) -> Path:
    """A run's model and manifest."""
    assert tiny_run.folder is not None
    (tmp_path / "run").mkdir()
    for name in ("model.safetensors", "manifest.csv"):
        shutil.copy(tiny_run.folder / name, tmp_path / "run")
    return tmp_path / "run"


def test_it_is_made_once_and_scores_alike(run: Path, tmp_path: Path) -> None:
    image = noise_image(tmp_path / "images/a.png")
    plain_scores = predict_folder(run, image, tmp_path / "torch")
    done = cdgp("predict", run, image, "--out", tmp_path / "fast", "--best-runtime")
    assert done.exit_code == 0, done.output
    made = run / f"{BEST}.xml"
    assert open_exported(made)[0].export["runtime"] == "openvino"
    before = made.stat().st_mtime_ns
    again = predict_folder(run, image, tmp_path / "again", best_runtime=True)
    assert made.stat().st_mtime_ns == before
    scores = [
        float((tmp_path / name / "scores.csv").read_text().splitlines()[1].split(",")[3])
        for name in ("torch", "fast", "again")
    ]
    assert scores[1] == scores[2] == pytest.approx(scores[0], abs=1e-4)
    assert again.scored == plain_scores.scored == 1


def test_it_is_made_anew_where_model_or_file_have_changed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, made = noise_image(tmp_path / "images/a.png"), run / f"{BEST}.onnx"
    missing = {"openvino"}
    monkeypatch.setattr(
        "cdgp.export.find_spec", lambda name: None if name in missing else find_spec(name)
    )
    calls: list[Any] = []

    def exported(*arguments: Any) -> None:
        calls.append(arguments)
        made.write_bytes(b"damaged")

    monkeypatch.setattr(export, "export", exported)
    for expected in (1, 2):
        assert export.best_runtime(run, [image], progress=None) == made  # type: ignore[arg-type]
        assert len(calls) == expected and calls[-1][3] == ()
    (run / "manifest.csv").unlink()
    export.best_runtime(run, [image], progress=None)  # type: ignore[arg-type]
    assert calls[-1][3] == [image], "no images of a run to compare on"
    missing.add("onnxruntime")
    with pytest.raises(SettingsError, match="--best-runtime: neither OpenVINO nor onnxruntime"):
        export.best_runtime(run, [image], progress=None)  # type: ignore[arg-type]
    assert export.best_runtime(made, [], progress=None) == made  # type: ignore[arg-type]
