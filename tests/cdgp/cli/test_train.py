"""``cdgp train``: what it refuses, and what it leaves."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.helpers import TINY_OPTIONS as TINY
from tests.helpers import cdgp, noise_image, plain, snapshot, surface

from cdgp.data.manifest import Manifest
from cdgp.workflows import Run


@pytest.mark.slow
def test_train_evaluate_predict_end_to_end(surfaces: Manifest, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = cdgp("train", surfaces.root, "--out", out, "--save-maps", *TINY)
    assert result.exit_code == 0, result.output
    assert {p.name for p in out.iterdir()} >= {
        "model.safetensors", "config.json", "manifest.csv", "metrics.json", "scores.csv",
        "overlays", "maps", "report.html", "log.jsonl",
    }  # fmt: skip
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["good"] + metrics["defective"] == len(
        list(csv.DictReader((out / "scores.csv").open()))
    )
    assert "no stage was trained on" in metrics["computed_on"]
    for key in ("image_auroc", "pixel_auroc", "pixel_aupro_30", "pixel_aupro_05"):
        assert 0 <= metrics[key] <= 1
    maps = sorted((out / "maps").rglob("*.npy"))
    assert np.load(maps[0]).shape == (96, 80) and np.load(maps[0]).dtype == np.float16
    record = json.loads(next((out / "overlays").rglob("*.json")).read_text())
    assert record["size"] == [96, 80] and 0 <= record["pred_score"] <= 1

    result = cdgp("evaluate", out, out / "manifest.csv", "--quiet", "--out", tmp_path / "check")
    assert result.exit_code == 0, result.output
    again = json.loads((tmp_path / "check" / "metrics.json").read_text())
    assert again["image_auroc"] == metrics["image_auroc"]
    assert again["pixel_auroc"] == pytest.approx(metrics["pixel_auroc"], abs=1e-6)

    broken = tmp_path / "new" / "broken.png"
    noise_image(tmp_path / "new" / "a.png", (50, 70))
    broken.write_bytes(b"<html>")
    result = cdgp("predict", out, tmp_path / "new", "--out", tmp_path / "scores", "--quiet")
    assert result.exit_code == 3
    assert "1 images could not be read" in plain(result) and "broken.png" in plain(result)
    rows = list(csv.DictReader((tmp_path / "scores" / "scores.csv").open()))
    assert [row["image"] for row in rows] == ["a.png"]


@pytest.mark.slow
def test_the_first_page_of_every_file_from_training_to_prediction(tmp_path: Path) -> None:
    """Files of two pages give the numbers of files that hold the first page alone."""
    for number in range(12):
        part = "good" if number < 8 else "defective"
        page = surface(number)
        page[10:20, 10:40] = page[10:20, 10:40] if number < 8 else 255
        for root, others in (("one", []), ("two", [Image.fromarray(surface(99))])):
            path = tmp_path / root / part / f"{number}.tif"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(page).save(path, save_all=True, append_images=others)
    two, first = tmp_path / "two", ("--set", "data.pages=first")
    assert "holds 2 pages" in plain(cdgp("check", two))
    assert "holds 2 pages" not in plain(cdgp("check", two, "--pages", "first"))
    refused = cdgp("train", two, "--out", tmp_path / "refused", *TINY)
    assert refused.exit_code == 3 and "data.pages=first" in plain(refused)
    scores = {}
    for root in ("one", "two"):
        run, out = tmp_path / f"run {root}", tmp_path / f"scores {root}"
        trained = cdgp("train", tmp_path / root, "--out", run, *TINY, *first)
        assert trained.exit_code == 0, trained.output
        assert cdgp("predict", run, tmp_path / root, "--out", out, "--quiet").exit_code == 0
        with (out / "scores.csv").open() as file:
            scores[root] = [(row["image"], row["pred_score"]) for row in csv.DictReader(file)]
    assert scores["one"] == scores["two"] and len(scores["one"]) == 12


def test_output_folder_that_exists_is_refused(surfaces: Manifest, tmp_path: Path) -> None:
    (tmp_path / "KEEP_me.txt").write_text("mine")
    result = cdgp("train", surfaces.root, "--out", tmp_path, *TINY)
    assert result.exit_code == 1
    assert "exists and is not empty" in plain(result) and "--resume" in plain(result)
    assert (tmp_path / "KEEP_me.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    result = cdgp("train", tmp_path / "data", "--out", tmp_path / "run", *TINY)
    assert result.exit_code == 3
    assert "Traceback" not in result.output and "good" in plain(result)


def test_good_images_are_missing(tmp_path: Path) -> None:
    noise_image(tmp_path / "data" / "defective" / "a.png")
    result = cdgp("train", tmp_path / "data", "--out", tmp_path / "run", *TINY)
    assert result.exit_code == 3
    assert "'good'" in plain(result)


def test_a_single_good_image_leaves_none_to_calibrate_with(tmp_path: Path) -> None:
    noise_image(tmp_path / "data" / "good" / "a.png")
    result = cdgp("train", tmp_path / "data", "--out", tmp_path / "run", *TINY)
    assert result.exit_code == 3
    assert "calibration has no good image" in plain(result)
    assert "2 are the least" in plain(result)


def test_unreadable_image_is_listed_before_training(surfaces: Manifest, tmp_path: Path) -> None:
    shutil.copytree(surfaces.root, tmp_path / "data")
    (tmp_path / "data" / "manifest.csv").unlink()
    victim = sorted((tmp_path / "data" / "good").iterdir())[0]
    victim.write_bytes(victim.read_bytes()[:100])
    result = cdgp("train", tmp_path / "data", "--out", tmp_path / "run", *TINY)
    assert result.exit_code == 3
    assert victim.name in plain(result) and "1 of 36" in plain(result)


def test_findings_are_reported_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(15):
        light = 1.0 if i < 10 else 0.5
        name = f"good/{i}.png" if i < 10 else f"defective/{i}.png"
        noise_image(tmp_path / "parts" / name, (96, 80), i)
        dark = Image.open(tmp_path / "parts" / name).point(lambda v, light=light: int(v * light))
        dark.save(tmp_path / "parts" / name)
    warned: list[str] = []

    def stop(*arguments: object) -> None:
        warned.extend(caplog.messages)
        raise KeyboardInterrupt

    monkeypatch.setattr("cdgp.workflows.train.train", stop)
    result = cdgp("train", tmp_path / "parts", "--out", tmp_path / "run", "--quiet")
    assert result.exit_code == 130
    shortcut = "brightness alone distinguishes good from defective"
    assert any(shortcut in line for line in warned), warned
    kinds = {f["kind"] for f in json.loads((tmp_path / "run/check.json").read_text())["findings"]}
    assert "shortcut" in kinds


def test_output_that_is_a_file(surfaces: Manifest, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("mine")
    result = cdgp("train", surfaces.root, "--out", tmp_path / "file.txt", *TINY)
    assert result.exit_code == 1 and "cannot be written" in plain(result)
    assert (tmp_path / "file.txt").read_text() == "mine"


def test_weights_that_cannot_be_had(surfaces: Manifest, tmp_path: Path) -> None:
    result = cdgp("train", surfaces.root, "--out", tmp_path / "run", "--weights",
                  tmp_path / "none.safetensors", *TINY)  # fmt: skip
    assert result.exit_code == 1
    assert "no such file" in plain(result)


def test_a_start_that_fails_leaves_the_earlier_run(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path
) -> None:
    assert tiny_run.folder is not None
    shutil.copytree(tiny_run.folder, tmp_path / "run")
    before = snapshot(tmp_path / "run")
    for wrong in (("--weights", "typo.safetensors"), ("--set", "backbone.name=nonsense")):
        result = cdgp(
            "train", surfaces.root, "--out", tmp_path / "run", "--overwrite", *TINY, *wrong
        )
        assert result.exit_code != 0
        assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize("place", ["maps", "overlays", "checkpoints"])
def test_overwrite_never_takes_images(surfaces: Manifest, tmp_path: Path, place: str) -> None:
    shutil.copytree(surfaces.root, tmp_path / "project" / place)
    (tmp_path / "project/notes.txt").write_text("mine")
    before = snapshot(tmp_path / "project")
    result = cdgp("train", tmp_path / "project" / place, "--out", tmp_path / "project",
                  "--overwrite", *TINY)  # fmt: skip
    assert result.exit_code == 1
    assert "where a run keeps its own files" in plain(result)
    assert snapshot(tmp_path / "project") == before
