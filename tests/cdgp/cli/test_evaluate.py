"""``cdgp evaluate``: what it refuses, and what it warns of."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from tests.helpers import cdgp, noise_image, plain, snapshot

from cdgp.data.manifest import Manifest
from cdgp.workflows import Run


def test_mask_of_another_size(surfaces: Manifest, model: Path, tmp_path: Path) -> None:
    shutil.copytree(surfaces.root, tmp_path / "data")
    mask = sorted((tmp_path / "data" / "masks").rglob("*.png"))[0]
    Image.new("L", (10, 10), 255).save(mask)
    result = cdgp("evaluate", model, tmp_path / "data", "--quiet")
    assert result.exit_code == 3
    assert mask.name in plain(result) and "10" in plain(result)


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
