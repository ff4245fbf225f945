"""The defect rate from the option to every file: scores move, decisions and maps do not."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from tests.helpers import TINY_OPTIONS, cdgp, plain, tiny_settings

import cdgp as product
from cdgp import artifact
from cdgp.data.manifest import Manifest
from cdgp.decision import Decision
from cdgp.errors import OutputError
from cdgp.export import TARGETS, ExportOptions, export
from cdgp.inference import Detector
from cdgp.metrics.reliability import at_rate
from cdgp.progress import Quiet
from cdgp.workflows import Run, evaluate_run, predict, predict_folder

RATE = 0.02


@pytest.fixture(scope="module")
def graded(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run with probabilities that differ, and its threshold at the score of an image."""
    assert tiny_run.folder is not None
    folder = tmp_path_factory.mktemp("graded") / "run"
    shutil.copytree(tiny_run.folder, folder)
    model = artifact.load(folder / "model.safetensors")
    image = model.calibration.image._replace(slope=(0.05, 0.02, 0.02), intercept=0.3, notes=())
    model = model._replace(calibration=model.calibration._replace(image=image))
    detector = Detector.of(model)
    scores = sorted(detector.predict(s.image).pred_score for s in tiny_run.manifest.of("test"))
    middle = float(at_rate(scores[3], model.decision.defect_rate, 0.5))
    decision = Decision(middle, "of the test", None).at(1 / 3)
    artifact.save(folder / "model.safetensors", model._replace(decision=decision))
    return folder


def test_the_rate_changes_scores_alone(graded: Path, tiny_run: Run) -> None:
    paths = [sample.image for sample in tiny_run.manifest.of("test")]
    first, second = product.load(graded), product.load(graded, defect_rate=RATE)
    assert second.card.decision.defect_rate == RATE
    labels = set()
    for path in paths:
        a, b = first.predict(path), second.predict(path)
        np.testing.assert_array_equal(a.anomaly_map, b.anomaly_map)
        assert (a.pred_label, a.regions) == (b.pred_label, b.regions)
        assert b.pred_score == pytest.approx(float(at_rate(a.pred_score, 1 / 3, RATE)), rel=1e-9)
        assert a.pred_label == (a.pred_score > first.threshold)
        assert b.pred_label == (b.pred_score > second.threshold)
        labels.add(a.pred_label)
    assert labels == {True, False}


@pytest.mark.parametrize("target", list(TARGETS))
def test_exported_files_hold_the_rate_and_can_be_loaded_at_another(
    graded: Path, tmp_path: Path, target: str, odd_images: list[NDArray[np.uint8]]
) -> None:
    out = tmp_path / f"a{TARGETS[target].suffix}"
    export(graded, ExportOptions(target, out, defect_rate=RATE), Quiet())
    stored, other = product.load(out), product.load(out, defect_rate=0.4)
    assert stored.card.decision == product.load(graded).card.decision.at(RATE)
    size = stored.settings.input_size
    inputs = np.random.default_rng(0).random((3, 3, *size), np.float32)
    outputs = stored.runtime.run(inputs)
    torch_at_rate = product.load(graded, defect_rate=RATE)
    expected = torch_at_rate.runtime.run(inputs)
    torch.testing.assert_close(outputs.pred_score, expected.pred_score, atol=1e-5, rtol=0)
    balanced = product.load(graded, defect_rate=0.5).runtime.run(inputs).pred_score
    assert not np.allclose(balanced, outputs.pred_score, atol=0.05), "the graph holds the rate"
    for image in odd_images:
        a, b, c = (d.predict(image) for d in (stored, other, torch_at_rate))
        assert a.pred_label == b.pred_label == c.pred_label
        assert a.pred_score == pytest.approx(c.pred_score, abs=1e-4)
        assert b.pred_score == pytest.approx(float(at_rate(a.pred_score, RATE, 0.4)), rel=1e-6)


def test_commands_take_the_rate_and_say_what_probabilities_refer_to(
    graded: Path, surfaces: Manifest, tmp_path: Path
) -> None:
    image = surfaces.samples[0].image
    done = cdgp("predict", graded, image, "--out", tmp_path / "a", "--defect-rate", RATE)
    assert done.exit_code == 0, done.output
    assert "refer to a line with 2 % of parts defective (as stated)" in plain(done)
    assert "2 % of parts defective" in (tmp_path / "a/report.html").read_text()
    (row,) = csv.DictReader((tmp_path / "a/scores.csv").open())
    expected = product.load(graded, defect_rate=RATE).predict(image).pred_score
    assert float(row["pred_score"]) == expected
    record = json.loads(next((tmp_path / "a/overlays").rglob("*.json")).read_text())
    assert record["defect_rate"] == RATE
    assert (record["pred_score"] > record["threshold"]) == (record["pred_label"] == "defective")
    done = cdgp("evaluate", graded, surfaces.root, "--out", tmp_path / "b", "--defect-rate", RATE)
    assert done.exit_code == 0, done.output
    stated = json.loads((tmp_path / "b/metrics.json").read_text())
    own = json.loads(json.dumps(evaluate_run(graded, surfaces.root).metrics))
    assert (stated["defect_rate"], stated["defect_rate_source"]) == (RATE, "as stated")
    assert stated["notes"] == own["notes"]
    for key in stated.keys() - {
        "defect_rate",
        "defect_rate_source",
        "threshold",
        "notes",
        "run_id",
    }:
        assert stated[key] == pytest.approx(own[key]), key


def test_a_prediction_is_resumed_at_its_own_rate(
    graded: Path, surfaces: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [s.image for s in surfaces.samples[:3]]
    with monkeypatch.context() as broken:
        broken.setattr(predict, "_finished", lambda *a: pytest.fail("stopped"))
        with pytest.raises(pytest.fail.Exception):
            predict_folder(graded, images, tmp_path / "out", defect_rate=RATE)
    with pytest.raises(OutputError, match="another --defect-rate"):
        predict_folder(graded, images, tmp_path / "out", resume=True)
    done = predict_folder(graded, images, tmp_path / "out", resume=True, defect_rate=RATE)
    assert done.scored == 3 and "2 %" in done.refers_to


def test_training_tells_the_rate_of_its_bins_or_takes_the_stated_one(
    tiny_run: Run, surfaces: Manifest, tmp_path: Path
) -> None:
    good, bad = tiny_run.manifest.weak_split().parts
    decision = tiny_run.detector.card.decision
    assert decision.defect_rate == bad / (good + bad) and decision.balanced == 0.5
    assert f"{bad} of {good + bad} parts in the training bins" in decision.rate_source
    assert tiny_run.metrics is not None
    assert tiny_run.metrics["defect_rate"] == decision.defect_rate
    done = cdgp("train", surfaces.root, "--out", tmp_path / "a", *TINY_OPTIONS)
    assert f"{bad} of {good + bad} parts in the training bins" in plain(done)
    assert "give --defect-rate where the line's own rate is known" in plain(done)
    done = cdgp(
        "train", surfaces.root, "--out", tmp_path / "b", "--defect-rate", RATE, *TINY_OPTIONS
    )
    assert "2 % of parts defective (as stated)" in plain(done)
    assert "give --defect-rate" not in plain(done)
    decision = product.load(tmp_path / "b").card.decision
    assert decision.defect_rate == RATE and decision.balanced == 0.5


def test_files_from_before_refer_to_equal_numbers(tiny_run: Run, tmp_path: Path) -> None:
    """A model file whose decision and calibrator have no rate and no groups."""
    assert tiny_run.folder is not None
    with safe_open(tiny_run.folder / "model.safetensors", framework="pt") as file:
        metadata = dict(file.metadata()) | {"version": "1"}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    metadata["decision"] = json.dumps(
        {"threshold": 0.5, "source": "decision.threshold = 0.5", "false_reject_bound": None}
    )
    settings = tiny_settings().model_dump(mode="json")
    del settings["decision"]["defect_rate"]
    metadata["settings"] = json.dumps(settings)
    calibration = json.loads(metadata["calibration"])
    for key in ("good_groups", "defective_groups"):
        del calibration["image"][key]
    metadata["calibration"] = json.dumps(calibration)
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    detector = product.load(tmp_path / "model.safetensors")
    assert (detector.card.decision.defect_rate, detector.threshold) == (0.5, 0.5)
    assert not detector.coarse
