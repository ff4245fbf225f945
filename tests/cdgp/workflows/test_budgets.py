"""From no defect to many, wrong labels, many sizes, turned parts: what each gives."""

import csv
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from tests.helpers import cdgp, plain, raised

import cdgp as product
from cdgp.data.images import to_input
from cdgp.data.manifest import Manifest, Sample
from cdgp.errors import DataError, SettingsError
from cdgp.inference import Detector
from cdgp.presets import Settings, settings
from cdgp.report.overlay import SCORE_NAMES
from cdgp.workflows import Run, check_data, evaluate_run, train_run
from cdgp_bench.synthetic import make_surface, plant_defect, save

Image = NDArray[np.float32]
NEW = 40
SHORT = [
    "--input-size", "64x64", "--set", "student.steps=20", "--set", "student.batch_size=4",
    "--quiet",
]  # fmt: skip


def short(**changes: object) -> Settings:
    """The lite preset at the least input, with steps enough to tell defects of these parts."""
    return settings(
        "lite",
        input_size=(64, 64),
        dual_gp={"steps": 20, "batch_size": 8, "no_separation": "flag"},
        student={"steps": 20, "batch_size": 4},
        inducing={"normal": 8, "anomaly": 4},
        **changes,
    )


def part(
    seed: int, defective: bool, size: tuple[int, int] = (64, 64), quarter_turns: int = 0
) -> Image:
    """A brushed plate with a dark disc and a bar above it, HWC float32 RGB in [0, 1]."""
    rng = np.random.default_rng([7, seed, defective])
    image = make_surface(size, rng)
    y, x = np.mgrid[: size[0], : size[1]] / np.array(size)[:, None, None]
    image[np.hypot(y - 0.5, x - 0.5) < 0.3] *= np.float32(0.6)
    image[(y > 0.1) & (y < 0.2) & (x > 0.3) & (x < 0.7)] *= np.float32(0.5)
    if defective:
        image, _ = plant_defect(image, rng)
    return np.ascontiguousarray(np.rot90(image, quarter_turns))


def varied(seed: int, defective: bool, variety: str) -> Image:
    """A part of a random size, or turned by 90 degrees at random, as the variety says."""
    rng = np.random.default_rng([3, seed])
    if variety == "sizes":
        return part(seed, defective, size=(int(rng.integers(48, 144)), int(rng.integers(48, 144))))
    return part(seed, defective, quarter_turns=int(rng.integers(4)) if variety == "turned" else 0)


def written(
    folder: Path, good: int, defective: int, variety: str = "", mislabelled: int = 0
) -> Path:
    """Both bins; so many images of the defective one show no defect."""
    for i in range(good + defective):
        bad = i >= good
        image = varied(i, bad and i >= good + mislabelled, variety)
        save(folder / ("defective" if bad else "good") / f"{i:03d}.png", image)
    return folder


def new_parts(variety: str = "") -> tuple[list[Image], NDArray[np.bool_]]:
    """New parts with right labels, half of them defective."""
    labels = np.arange(NEW) % 2 == 1
    return [varied(1000 + i, bool(bad), variety) for i, bad in enumerate(labels)], labels


def auroc(detector: Detector, variety: str = "") -> float:
    images, labels = new_parts(variety)
    return float(roc_auc_score(labels, [detector.predict(image).pred_score for image in images]))


@pytest.fixture(scope="module")
def good_alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of the command on a folder with good images alone, with all its files."""
    folder = written(tmp_path_factory.mktemp("alone"), 44, 0)
    result = cdgp("train", folder, "--out", folder / "run", *SHORT)
    assert result.exit_code == 0, result.output
    assert "scores are 1 - p" in plain(result)
    detector = product.load(folder / "run")
    return train_run(folder, folder / "run", detector.settings, resume=True)


def test_good_images_alone_find_defects(good_alone: Run) -> None:
    detector = good_alone.detector
    assert auroc(detector) > 0.9
    assert (detector.score_kind, detector.rests_on) == ("p-value", "good images alone")
    assert good_alone.separation is None
    made = detector.card.provenance
    assert (made["score_kind"], made["rests_on"]) == ("p-value", "good images alone")
    prediction = detector.predict(part(1, defective=False))
    assert (prediction.score_kind, prediction.rests_on) == ("p-value", "good images alone")


def test_good_parts_are_rejected_about_as_often_as_stated(good_alone: Run) -> None:
    """With 7 calibration images an eighth of new good parts is odder than all of them."""
    detector = good_alone.detector
    scores = [detector.predict(part(2000 + i, defective=False)) for i in range(60)]
    number = len(good_alone.manifest.of("calibration"))
    assert sum(p.pred_label for p in scores) / 60 < 3 / (number + 1)
    assert "odder than all" in detector.card.decision.source


def test_what_good_images_cannot_tell_is_null_with_a_reason(good_alone: Run) -> None:
    assert good_alone.folder is not None
    metrics = json.loads((good_alone.folder / "metrics.json").read_text())
    names = (
        "image_auroc", "escape", "pixel_auroc", "pixel_aupro_30", "pixel_aupro_05",
        "expected_calibration_error",
    )  # fmt: skip
    for name in names:
        assert metrics[name] is None and metrics[f"{name}_reason"], name
    assert 0 <= metrics["overkill"] <= 1
    assert metrics["defect_rate"] is None
    assert metrics["good"] == len(good_alone.manifest.of("test")) > 0


def test_every_file_says_what_the_score_is(good_alone: Run) -> None:
    folder = good_alone.folder
    assert folder is not None
    with (folder / "scores.csv").open(encoding="utf-8") as table:
        rows = list(csv.DictReader(table))
    overlays = [
        json.loads(place.read_text()) for place in sorted((folder / "overlays").rglob("*.json"))
    ]
    metrics = json.loads((folder / "metrics.json").read_text())
    for record in (*rows, *overlays, metrics):
        assert record["score_kind"] == "p-value"
        assert record["rests_on"] == "good images alone"
    assert all(record["defect_rate"] is None for record in overlays)
    page = (folder / "report.html").read_text()
    assert "P(defective)" not in page and "Is the probability right?" not in page
    assert SCORE_NAMES["p-value"] in page and "no probability" in page
    assert "<b>good images alone</b>" in page


def test_a_defect_rate_of_a_p_value_is_refused(good_alone: Run, tmp_path: Path) -> None:
    assert good_alone.folder is not None
    arguments = (good_alone.folder, good_alone.manifest.samples[0].image, "--out", tmp_path / "p")
    result = cdgp("predict", *arguments, "--defect-rate", 0.02)
    assert result.exit_code == SettingsError.exit_code
    assert "--defect-rate" in plain(result) and not (tmp_path / "p").exists()
    result = cdgp("predict", *arguments, "--quiet")
    assert result.exit_code == 0
    assert "scores are 1 - p" in plain(result) and "probabilities" not in plain(result)


def test_labelled_images_measure_a_model_of_good_images(good_alone: Run, tmp_path: Path) -> None:
    assert good_alone.folder is not None
    images, labels = new_parts()
    for i, (image, bad) in enumerate(zip(images, labels, strict=True)):
        save(tmp_path / "new" / ("defective" if bad else "good") / f"{i}.png", image)
    found = evaluate_run(good_alone.folder, tmp_path / "new")
    assert found.metrics["image_auroc"] > 0.9
    assert found.metrics["expected_calibration_error"] is None
    assert "p-value" in found.metrics["expected_calibration_error_reason"]


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"threshold": 0.7}, "decision.threshold"), ({"defect_rate": 0.02}, "decision.defect_rate")],
)
def test_what_only_a_probability_has_is_refused_before_training(
    tmp_path: Path, changes: dict[str, float], name: str
) -> None:
    folder = written(tmp_path, 8, 0)
    raised(
        lambda: train_run(folder, tmp_path / "run", short(decision=changes)), name,
        error=SettingsError,
    )  # fmt: skip
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_bound_on_false_rejects_holds_for_p_values(tmp_path: Path) -> None:
    """The threshold is the score of a held-out good part: by the conformal rule, the fourth of
    four, with the bound of 1/5."""
    run = train_run(
        written(tmp_path, 20, 0), None,
        short(decision={"max_false_rejects": 0.25}, data={"test_fraction": 0}),
    )  # fmt: skip
    held_out = run.manifest.of("calibration")
    assert len(held_out) == 4
    scores = sorted(run.detector.predict(s.image).pred_score for s in held_out)
    assert run.detector.threshold == scores[3]
    assert run.detector.card.decision.false_reject_bound == pytest.approx(1 / 5)


def test_one_defect_does_no_harm(good_alone: Run, tmp_path: Path) -> None:
    run = train_run(written(tmp_path, 44, 1), None, short())
    assert (run.detector.score_kind, run.detector.rests_on) == ("p-value", "1 defect")
    assert [s.split for s in run.manifest.samples if s.defective] == ["fit"]
    assert auroc(run.detector) >= auroc(good_alone.detector) - 0.05


def test_defects_of_one_part_do_no_harm(good_alone: Run, tmp_path: Path) -> None:
    folder = written(tmp_path, 44, 4)
    samples = tuple(
        Sample(path, defective=bad, group="one" if bad else None)
        for name, bad in (("good", False), ("defective", True))
        for path in sorted((folder / name).iterdir())
    )
    run = train_run(Manifest(folder, samples), None, short())
    assert (run.detector.score_kind, run.detector.rests_on) == ("p-value", "4 defects of 1 part")
    assert {s.split for s in run.manifest.samples if s.defective} == {"fit"}
    assert auroc(run.detector) >= auroc(good_alone.detector) - 0.05


def one_class_auroc(
    detector: Detector, images: Sequence[Image], labels: NDArray[np.bool_]
) -> float:
    """AUROC of what good images alone give: a third of the residual's peak, two of the distance's,
    each in interquartile ranges of good calibration images."""
    image = detector.card.image
    batches = [to_input(pixels, detector.settings.input_size)[None] for pixels in images]
    pooled = np.concatenate([detector.runtime.run(batch).pooled for batch in batches])
    ranges = (pooled.astype(np.float64) - np.array(image.centre)) / np.array(image.scale)
    assert pooled.shape[1] == 3
    return float(roc_auc_score(labels, ranges[:, 1] / 3 + 2 * ranges[:, 2] / 3))


def test_wrong_labels_do_no_harm(tmp_path: Path) -> None:
    """In a defective bin of 20, six images show no defect."""
    run = train_run(
        written(tmp_path, 40, 20, mislabelled=6), None, short(data={"test_fraction": 0})
    )
    detector = run.detector
    assert (detector.score_kind, detector.rests_on) == ("probability", "20 defects")
    assert auroc(detector) >= one_class_auroc(detector, *new_parts()) - 0.05
    assert auroc(detector) > 0.85


@pytest.mark.parametrize("variety", ["sizes", "turned"])
@pytest.mark.parametrize("defective", [0, 12])
def test_parts_of_many_sizes_and_turned_ones(tmp_path: Path, variety: str, defective: int) -> None:
    folder = written(tmp_path, 40, defective, variety)
    run = train_run(folder, None, short(data={"test_fraction": 0}))
    assert auroc(run.detector, variety) > 0.85
    assert run.detector.score_kind == ("probability" if defective else "p-value")


def test_the_message_comes_before_the_long_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cdgp.workflows.train.train", stop)
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        train_run(written(tmp_path, 8, 0), None, short())
    assert "no defective image: the model rests on good images alone" in caplog.text


def test_an_empty_folder_of_defects_means_none(tmp_path: Path) -> None:
    folder = written(tmp_path / "data", 8, 0)
    (folder / "defective").mkdir()
    found = check_data(folder).audit
    assert not found.of("error")
    assert [f.kind for f in found.findings if f.kind == "no_defective"] == ["no_defective"]
    assert found.counts == {"unsplit": (8, 0)}


def test_a_table_without_defects_is_enough(tmp_path: Path) -> None:
    folder = written(tmp_path, 8, 0)
    lines = [f"good/{i:03d}.png,good" for i in range(8)]
    (folder / "table.csv").write_text("\n".join(["image,label", *lines]))
    assert not check_data(folder / "table.csv").audit.of("error")


def test_defects_by_another_name_are_asked_for(tmp_path: Path) -> None:
    folder = written(tmp_path, 8, 2)
    (folder / "defective").rename(folder / "NG")
    raised(lambda: train_run(folder, None, short()), "--defective NG", "An empty folder")


def test_defects_that_are_no_images_are_no_good_images_alone(tmp_path: Path) -> None:
    folder = written(tmp_path, 8, 0)
    (folder / "defective").mkdir()
    (folder / "defective" / "crack.mp4").write_bytes(b"\0" * 64)
    raised(lambda: train_run(folder, None, short()), "defective: holds no images", "crack.mp4")


def test_no_good_image_is_an_error(tmp_path: Path) -> None:
    folder = written(tmp_path, 0, 4)
    raised(lambda: train_run(folder, None, short()), "'good'")
    (folder / "table.csv").write_text(
        "image,label\n" + "\n".join(f"defective/{i:03d}.png,defective" for i in range(4))
    )
    raised(lambda: train_run(folder / "table.csv", None, short()), "no good image")


def test_one_good_part_is_an_error_that_says_what_to_add(tmp_path: Path) -> None:
    folder = written(tmp_path, 4, 0)
    lines = [f"good/{i:03d}.png,good,one" for i in range(4)]
    (folder / "table.csv").write_text("\n".join(["image,label,group", *lines]))
    raised(
        lambda: train_run(folder / "table.csv", None, short()),
        "1 group of good images", "add images of other parts",
    )  # fmt: skip
    assert [f.kind for f in check_data(folder / "table.csv").audit.of("error")] == ["no_split"]


def test_the_paper_needs_both_labels(tmp_path: Path) -> None:
    """Preset paper's calibration is fitted on both, as before."""
    folder = written(tmp_path, 8, 0)
    changed = short(calibration={"image_evidence": "dominance"})
    message = raised(lambda: train_run(folder, None, changed), "no defective image")
    assert "preset lite" in message
    assert issubclass(DataError, product.CdgpError)
