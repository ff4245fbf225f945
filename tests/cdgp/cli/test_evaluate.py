"""``cdgp evaluate``: what it refuses, and what it warns of."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.helpers import cdgp, noise_image, plain, save_image, snapshot

from cdgp.data.manifest import Manifest
from cdgp.workflows import Run


def test_mask_of_another_size(surfaces: Manifest, model: Path, tmp_path: Path) -> None:
    shutil.copytree(surfaces.root, tmp_path / "data")
    mask = sorted((tmp_path / "data" / "masks").rglob("*.png"))[0]
    Image.new("L", (10, 10), 255).save(mask)
    result = cdgp("evaluate", model, tmp_path / "data", "--out", tmp_path / "out", "--quiet")
    assert result.exit_code == 3 and not (tmp_path / "out").exists()
    image = tmp_path / "data/defective" / mask.name
    named = (str(image), str(mask), "10 × 10", "save the mask at the size of the image")
    assert image.is_file() and all(words in plain(result) for words in named)


def test_an_image_without_content_counts_as_rejected(
    surfaces: Manifest, model: Path, tmp_path: Path
) -> None:
    """Overkill and escape follow the decision, not the score."""
    shutil.copytree(surfaces.root, tmp_path / "data")
    for name in ("good/zz.png", "defective/zz.png"):
        save_image(tmp_path / "data" / name, np.full((96, 80), 255, np.uint8))
    (tmp_path / "data/manifest.csv").unlink(missing_ok=True)
    result = cdgp("evaluate", model, tmp_path / "data", "--out", tmp_path / "out", "--quiet")
    assert result.exit_code == 0, result.output
    with (tmp_path / "out/scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    for rate, label, called in (("overkill", "good", "defective"), ("escape", "defective", "good")):
        part = [row for row in rows if row["label"] == label]
        wrong = sum(row["pred_label"] == called for row in part)
        assert metrics[rate] == wrong / len(part)
    empty = [row for row in rows if "nothing to see" in row["warnings"]]
    assert {row["image"] for row in empty} == {"good/zz.png", "defective/zz.png"}
    assert {row["pred_label"] for row in empty} == {"defective"}
    assert len(metrics["notes"]["images_with_warnings"]) == 2
    assert "images with warnings: " in plain(result)


def test_results_are_not_written_among_images_or_over_a_run(
    surfaces: Manifest, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(surfaces.root, tmp_path / "parts")
    before = snapshot(tmp_path)
    result = cdgp("evaluate", model, tmp_path / "parts", "--out", tmp_path / "parts/good/res")
    assert result.exit_code == 1 and "lies in the data" in plain(result)
    assert snapshot(tmp_path) == before
    run = snapshot(model.parent)
    a = noise_image(tmp_path / "a.png", (96, 80))
    result = cdgp("predict", model, a, "--out", model.parent, "--overwrite")
    assert result.exit_code == 1 and "is the folder of a training run" in plain(result)
    assert snapshot(model.parent) == run


def test_evaluation_warns_of_images_that_were_trained_on(
    surfaces: Manifest,
    tiny_run: Run,
    model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By their pixels, wherever they lie and whatever they are called."""
    trained = tiny_run.manifest.of("train")
    for label in (False, True):
        for i, sample in enumerate([s for s in trained if s.defective == label][:3]):
            place = tmp_path / ("defective" if label else "good") / f"{i}.png"
            place.parent.mkdir(exist_ok=True)
            shutil.copy(sample.image, place)
    result = cdgp("evaluate", model, tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "trained on 6 of these images" in caplog.text
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    assert metrics["computed_on"].endswith("6 of which the model was trained on")
    test = tmp_path / "test.csv"
    rows = [f"{s.image},{'defective' if s.defective else 'good'}"
            for s in tiny_run.manifest.of("test")]  # fmt: skip
    test.write_text("image,label\n" + "\n".join(rows))
    caplog.clear()
    assert cdgp("evaluate", model, test).exit_code == 0
    assert "trained on" not in caplog.text


def test_evaluation_lists_all_that_is_wrong_before_it_starts(
    surfaces: Manifest, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(surfaces.root, tmp_path / "parts")
    for name in ("000.png", "003.png"):
        path = tmp_path / "parts/good" / name
        path.write_bytes(path.read_bytes()[:200])
    result = cdgp("evaluate", model, tmp_path / "parts", "--out", tmp_path / "out")
    assert result.exit_code == 3
    assert "000.png" in plain(result) and "003.png" in plain(result)
    assert not (tmp_path / "out").exists()
