"""The command line as its user meets it: results, messages, exit codes."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from tests.helpers import tiny_settings
from typer.testing import CliRunner, Result

from cdgp.cli.main import app
from cdgp.data.manifest import Manifest
from cdgp.progress import Bars
from cdgp.workflows import Run

TINY = [
    "--input-size", "64x64", "--set", "dual_gp.steps=2", "--set", "dual_gp.batch_size=4",
    "--set", "dual_gp.no_separation=flag", "--set", "student.steps=2",
    "--set", "student.batch_size=2", "--set", "inducing.normal=8", "--set", "inducing.anomaly=4",
    "--quiet",
]  # fmt: skip


def cdgp(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "100"})


def plain(result: Result) -> str:
    """Output and errors as one line of words, so that wrapping does not matter."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.output).split())


@pytest.fixture
def model(tiny_run: Run) -> Path:
    assert tiny_run.folder is not None
    return tiny_run.folder / "model.safetensors"


def image(path: Path, size: tuple[int, int] = (40, 40), seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_help_names_every_command_and_shows_examples() -> None:
    assert all(word in plain(cdgp("--help")) for word in ("train", "predict", "evaluate", "demo"))
    for command in ("train", "predict", "evaluate", "demo"):
        result = cdgp(command, "--help")
        assert result.exit_code == 0
        assert f"cdgp {command}" in plain(result).split("Examples:")[1]


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
    assert "no stage has seen" in metrics["computed_on"]
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
    image(tmp_path / "new" / "a.png", (50, 70))
    broken.write_bytes(b"<html>")
    result = cdgp("predict", out, tmp_path / "new", "--out", tmp_path / "scores", "--quiet")
    assert result.exit_code == 3
    assert "1 images could not be read" in plain(result) and "broken.png" in plain(result)
    rows = list(csv.DictReader((tmp_path / "scores" / "scores.csv").open()))
    assert [row["image"] for row in rows] == ["a.png"]


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


def test_one_class_missing(tmp_path: Path) -> None:
    image(tmp_path / "data" / "good" / "a.png")
    result = cdgp("train", tmp_path / "data", "--out", tmp_path / "run", *TINY)
    assert result.exit_code == 3
    assert "'defective'" in plain(result)


def test_unreadable_image_is_listed_before_training(surfaces: Manifest, tmp_path: Path) -> None:
    shutil.copytree(surfaces.root, tmp_path / "data")
    (tmp_path / "data" / "manifest.csv").unlink()
    victim = sorted((tmp_path / "data" / "good").iterdir())[0]
    victim.write_bytes(victim.read_bytes()[:100])
    result = cdgp("train", tmp_path / "data", "--out", tmp_path / "run", *TINY)
    assert result.exit_code == 3
    assert victim.name in plain(result) and "1 of 36" in plain(result)


def test_what_is_odd_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(15):
        light = 1.0 if i < 10 else 0.5
        name = f"good/{i}.png" if i < 10 else f"defective/{i}.png"
        image(tmp_path / "parts" / name, (96, 80), i)
        dark = Image.open(tmp_path / "parts" / name).point(lambda v, light=light: int(v * light))
        dark.save(tmp_path / "parts" / name)
    told: list[str] = []

    def stop(*arguments: object) -> None:
        told.extend(caplog.messages)
        raise KeyboardInterrupt

    monkeypatch.setattr("cdgp.training.fit.train", stop)
    result = cdgp("train", tmp_path / "parts", "--out", tmp_path / "run", "--quiet")
    assert result.exit_code == 130
    assert any("brightness alone tells good from defective" in line for line in told), told
    kinds = {f["kind"] for f in json.loads((tmp_path / "run/check.json").read_text())["findings"]}
    assert "shortcut" in kinds


def test_mask_of_another_size(surfaces: Manifest, model: Path, tmp_path: Path) -> None:
    shutil.copytree(surfaces.root, tmp_path / "data")
    mask = sorted((tmp_path / "data" / "masks").rglob("*.png"))[0]
    Image.new("L", (10, 10), 255).save(mask)
    result = cdgp("evaluate", model, tmp_path / "data", "--quiet")
    assert result.exit_code == 3
    assert mask.name in plain(result) and "10" in plain(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "imagesize=3"], "did you mean 'input_size'"),
        (["--set", "dual_gp.lerning_rate=1"], "did you mean 'learning_rate'"),
        (["--set", "learning_rate=1"], "did you mean 'dual_gp.learning_rate'"),
        (["--set", "dual_gp.steps=ten"], "dual_gp.steps = 'ten'"),
        (["--set", "dual_gp.batch_size=-4"], "dual_gp.batch_size = -4"),
        (["--set", "dual_gp.learning_rate=NaN"], "dual_gp.learning_rate"),
        (["--set", "nothing"], "expected KEY=VALUE"),
        (["--input-size", "wide"], "expected HEIGHTxWIDTH"),
        (["--input-size", "100x64"], "multiple of 16"),
        (["--input-size", "160²"], "expected HEIGHTxWIDTH"),
        (["--set", "seed=1", "--set", "seed.x=2"], "was given a value before"),
        (["--set", "preset=[1]"], "does not exist"),
        (["--set", "path=3"], "unknown key 'path'"),
        (["--set", "dual_gp.loss_weights=[-1, 1, 1]"], "dual_gp.loss_weights"),
        (["--set", "dual_gp.initial_mean=Infinity"], "dual_gp.initial_mean"),
        (["--set", "data.test_fraction=0.7"], "data.test_fraction"),
        (["--preset", "huge"], "preset 'huge' does not exist"),
        (["--max-false-rejects", "2"], "max_false_rejects"),
    ],
)
def test_bad_options_exit_2_before_anything_is_read(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = cdgp("train", tmp_path / "not there", "--out", tmp_path / "run", *arguments)
    assert result.exit_code == 2, result.output
    assert message in plain(result)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("imagesize = [64, 64]", "did you mean 'input_size'"),
        ("[data]\nimage_size = 3", "image_size"),
        ("seed = 1\nseed = 2", "not a valid TOML file"),
        ("[dual_gp]\nlearning_rate = nan", "dual_gp.learning_rate"),
        ("[dual_gp]\n\tsteps = 'ten'", "dual_gp.steps"),
    ],
)
def test_bad_config_file(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "bad.toml"
    config.write_text(text)
    result = cdgp("train", tmp_path / "x", "--out", tmp_path / "run", "--config", config)
    assert result.exit_code == 2, result.output
    assert "bad.toml" in plain(result) and message in plain(result)


def test_config_file_and_json_of_a_run(tiny_run: Run, tmp_path: Path) -> None:
    from cdgp.presets import read_settings

    assert tiny_run.folder is not None
    assert read_settings(tiny_run.folder / "config.json") == tiny_settings()
    config = tmp_path / "good.toml"
    config.write_text("[dual_gp]\nlearning_rate = 1e-3\nsteps = 7\n")
    assert read_settings(config).dual_gp.steps == 7
    assert read_settings(config, seed=3).seed == 3
    (tmp_path / "empty.toml").write_text("")
    assert read_settings(tmp_path / "empty.toml").preset == "lite"


@pytest.mark.parametrize("keep", [0, 7, 1000, -10])
def test_truncated_model_file(model: Path, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "model.safetensors"
    cut.write_bytes(model.read_bytes()[:keep])
    result = cdgp("predict", cut, image(tmp_path / "a.png"), "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "incomplete or damaged" in plain(result) and str(cut) in plain(result).replace(" ", "")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "999"}, "model format 999, this cdgp reads format"),
        ({"format": "other"}, "not a model file of this tool"),
        ({"settings": "{"}, "incomplete or damaged model file"),
        ({"calibration": "{}"}, "incomplete or damaged model file"),
    ],
)
def test_model_file_of_another_kind(
    model: Path, tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    with safe_open(model, framework="pt") as file:
        metadata = {**file.metadata(), **changes}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    other = tmp_path / "model.safetensors"
    save_file(tensors, other, metadata=metadata)
    result = cdgp("predict", other, image(tmp_path / "a.png"), "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert message in plain(result)


def test_image_smaller_than_the_least(model: Path, tmp_path: Path) -> None:
    tiny = image(tmp_path / "in" / "thin.png", (96, 1))
    fine = image(tmp_path / "in" / "fine.png", (33, 33))
    result = cdgp("predict", model, tiny, fine, "--out", tmp_path / "out", "--quiet")
    assert result.exit_code == 3
    assert "thin.png" in plain(result) and "8" in plain(result)
    assert [r["image"] for r in csv.DictReader((tmp_path / "out" / "scores.csv").open())] == [
        "fine.png"
    ]


def test_results_inside_the_scored_folder_are_refused(model: Path, tmp_path: Path) -> None:
    image(tmp_path / "a.png")
    result = cdgp("predict", model, tmp_path, "--out", tmp_path / "scores")
    assert result.exit_code == 1 and "lies in a folder that is scored" in plain(result)
    assert not (tmp_path / "scores").exists()


def test_output_that_is_a_file(surfaces: Manifest, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("mine")
    result = cdgp("train", surfaces.root, "--out", tmp_path / "file.txt", *TINY)
    assert result.exit_code == 1 and "cannot be written" in plain(result)
    assert (tmp_path / "file.txt").read_text() == "mine"


def test_missing_model_and_missing_images(model: Path, tmp_path: Path) -> None:
    result = cdgp("predict", tmp_path / "none", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 1 and "no such model file" in plain(result)
    result = cdgp("predict", model, tmp_path / "none.png", "--out", tmp_path / "out")
    assert result.exit_code == 3 and "no such file" in plain(result)
    (tmp_path / "empty").mkdir()
    result = cdgp("predict", model, tmp_path / "empty", "--out", tmp_path / "out")
    assert result.exit_code == 3 and "no images" in plain(result)


def test_weights_that_cannot_be_had(surfaces: Manifest, tmp_path: Path) -> None:
    result = cdgp("train", surfaces.root, "--out", tmp_path / "run", "--weights",
                  tmp_path / "none.safetensors", *TINY)  # fmt: skip
    assert result.exit_code == 1
    assert "no such file" in plain(result)


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


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


@pytest.mark.parametrize("place", ["maps", "overlays", "state"])
def test_overwrite_never_takes_images(surfaces: Manifest, tmp_path: Path, place: str) -> None:
    shutil.copytree(surfaces.root, tmp_path / "project" / place)
    (tmp_path / "project/notes.txt").write_text("mine")
    before = snapshot(tmp_path / "project")
    result = cdgp("train", tmp_path / "project" / place, "--out", tmp_path / "project",
                  "--overwrite", *TINY)  # fmt: skip
    assert result.exit_code == 1
    assert "where a run keeps its own files" in plain(result)
    assert snapshot(tmp_path / "project") == before


def test_results_are_not_written_among_images_or_over_a_run(
    surfaces: Manifest, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(surfaces.root, tmp_path / "parts")
    before = snapshot(tmp_path)
    result = cdgp("evaluate", model, tmp_path / "parts", "--out", tmp_path / "parts/good/res")
    assert result.exit_code == 1 and "lies in the data" in plain(result)
    assert snapshot(tmp_path) == before
    run = snapshot(model.parent)
    a = image(tmp_path / "a.png", (96, 80))
    result = cdgp("predict", model, a, "--out", model.parent, "--overwrite")
    assert result.exit_code == 1 and "is the folder of a training run" in plain(result)
    assert snapshot(model.parent) == run


def test_overwritten_results_hold_the_new_ones_alone(model: Path, tmp_path: Path) -> None:
    for i in range(3):
        image(tmp_path / f"images/{i}.png", (96, 80), i)
    out = tmp_path / "out"
    assert cdgp("predict", model, tmp_path / "images", "--out", out).exit_code == 0
    assert len(list(out.rglob("*.png"))) == 3
    one = tmp_path / "images/1.png"
    assert cdgp("predict", model, one, "--out", out, "--overwrite").exit_code == 0
    assert len(list(out.rglob("*.png"))) == 1
    before = snapshot(out)
    result = cdgp("predict", model, out / "overlays", "--out", out, "--overwrite")
    assert result.exit_code == 1 and "where a run keeps its own files" in plain(result)
    assert snapshot(out) == before
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    result = cdgp("predict", model, one, "--out", foreign, "--overwrite")
    assert result.exit_code == 1 and "no earlier result" in plain(result)


def test_evaluation_tells_of_images_that_were_trained_on(
    surfaces: Manifest, tiny_run: Run, model: Path, tmp_path: Path
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
    assert "trained on 6 of these images" in plain(result)
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    assert metrics["computed_on"].endswith("6 of which the model was trained on")
    test = tmp_path / "test.csv"
    rows = [f"{s.image},{'defective' if s.defective else 'good'}"
            for s in tiny_run.manifest.of("test")]  # fmt: skip
    test.write_text("image,label\n" + "\n".join(rows))
    assert "trained on" not in plain(cdgp("evaluate", model, test))


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


def test_interrupted_prediction_keeps_its_scores(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cdgp.inference import Detector

    for i in range(4):
        image(tmp_path / f"images/{i}.png", (96, 80), i)
    original, calls = Detector.predict, []

    def predict(self: Detector, path: Path) -> object:
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, path)

    monkeypatch.setattr(Detector, "predict", predict)
    result = cdgp("predict", model, tmp_path / "images", "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert "interrupted after 2 of 4 images; --resume" in plain(result)
    assert not (tmp_path / "out/scores.csv").exists()

    again = ("predict", model, tmp_path / "images", "--out", tmp_path / "out")
    assert "--resume" in plain(cdgp(*again))  # refused, and told how to go on
    other = cdgp(*again, "--resume", "--save-maps")
    assert other.exit_code == 1 and "another --save-maps" in plain(other)
    assert cdgp(*again, "--resume", "--overwrite").exit_code == 2
    monkeypatch.undo()
    seen: list[Path] = []
    # What a kill in the middle of a write leaves behind goes; what is the user's stays.
    for name in ("overlays/.1.png.png.abcd1234.png", ".report.html.abcd1234.html", "notes.txt"):
        (tmp_path / "out" / name).write_text("half")

    def count(self: Detector, path: Path) -> object:
        seen.append(path)
        return original(self, path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cdgp.ledger.Detector.predict", count)
        assert cdgp(*again, "--resume").exit_code == 0
    assert {path.name for path in seen[:2]} == {"2.png", "3.png"}  # then the report's own
    whole = cdgp("predict", model, tmp_path / "images", "--out", tmp_path / "whole")
    assert whole.exit_code == 0
    for name in ("scores.csv", "overlays/0.png.json", "overlays/3.png.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "out/unfinished.sqlite").exists()
    left = {p.name for p in (tmp_path / "out").rglob("*") if p.suffix != ".json"}
    assert left == {"overlays", *(f"{i}.png.png" for i in range(4)), "scores.csv", "report.html",
                    "notes.txt"}  # fmt: skip
    assert "holds no unfinished prediction" in plain(cdgp(*again, "--resume"))


def test_a_file_that_goes_away_is_listed_and_the_others_are_scored(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cdgp.inference import Detector

    for i in range(4):
        image(tmp_path / f"images/{i}.png", (96, 80), i)
    original = Detector.predict

    def predict(self: Detector, path: Path) -> object:
        (tmp_path / "images/2.png").unlink(missing_ok=True)
        return original(self, path)

    monkeypatch.setattr(Detector, "predict", predict)
    command = ("predict", model, tmp_path / "images", "--quiet", "--out", tmp_path / "out")
    result = cdgp(*command)
    assert result.exit_code == 3 and "there is no such file" in plain(result)
    with (tmp_path / "out/scores.csv").open() as file:
        assert [row["image"] for row in csv.DictReader(file)] == ["0.png", "1.png", "3.png"]
    with (tmp_path / "out/unreadable.csv").open() as file:
        assert [row["image"] for row in csv.DictReader(file)] == ["2.png"]
    assert cdgp(*command, "--overwrite").exit_code == 0
    assert not (tmp_path / "out/unreadable.csv").exists()


def test_a_resumed_prediction_is_of_the_same_images(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a reader: other folders with equal names were taken for finished."""
    from cdgp.inference import Detector

    for name in ("a/0.png", "a/1.png", "b/0.png", "b/1.png"):
        image(tmp_path / name, (96, 80), 0)

    def stop(self: Detector, path: Path) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Detector, "predict", stop)
        assert cdgp("predict", model, tmp_path / "a", "--out", tmp_path / "out").exit_code == 130
    other = cdgp("predict", model, tmp_path / "b", "--out", tmp_path / "out", "--resume")
    assert other.exit_code == 1 and "another list of images and folders" in plain(other)
    again = cdgp("predict", model, tmp_path / "a", "--out", tmp_path / "out", "--resume", "--quiet")
    assert again.exit_code == 0


def test_a_folder_and_what_lies_in_it_are_scored_once(model: Path, tmp_path: Path) -> None:
    for name in ("a/1.png", "a/b/2.png", "c/3.png"):
        image(tmp_path / name, (96, 80), 0)
    result = cdgp("predict", model, tmp_path / "a/b", tmp_path / "c", tmp_path / "a",
                  tmp_path / "a/1.png", "--out", tmp_path / "out", "--quiet")  # fmt: skip
    assert result.exit_code == 0
    with (tmp_path / "out/scores.csv").open() as file:
        names = [row["image"] for row in csv.DictReader(file)]
    assert names == ["a/1.png", "a/b/2.png", "c/3.png"]


def test_images_on_two_drives(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def commonpath(paths: object) -> str:
        raise ValueError("Paths don't have the same drive")

    monkeypatch.setattr("os.path.commonpath", commonpath)
    result = cdgp("predict", model, image(tmp_path / "a.png", (96, 80)), "--out",
                  tmp_path / "out")  # fmt: skip
    assert result.exit_code == 0
    assert "1 scored" in plain(result)


def test_names_that_no_file_can_have(model: Path, tmp_path: Path) -> None:
    name = "a" * 300 + ".png"
    (tmp_path / "m.csv").write_text(f"image,label\n{name},good\n")
    result = cdgp("evaluate", model, tmp_path / "m.csv")
    assert result.exit_code == 3 and "are missing" in plain(result)
    result = cdgp("predict", model, tmp_path / name, "--out", tmp_path / "out")
    assert result.exit_code == 1 and "File name too long" in plain(result)
    assert isinstance(result.exception, SystemExit)


def test_finished_run_resumes_without_its_log_but_not_with_other_images(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path
) -> None:
    from cdgp.errors import DataError
    from cdgp.training.fit import fit, read_log

    assert tiny_run.folder is not None
    run = tmp_path / "run"
    shutil.copytree(tiny_run.folder, run)
    (run / "log.jsonl").unlink()
    assert read_log(run) == []
    fit(surfaces.root, run, tiny_settings(), resume=True)
    shutil.copytree(surfaces.root, tmp_path / "parts")
    image(tmp_path / "parts/good/new.png", (96, 80))
    (tmp_path / "parts/manifest.csv").unlink()
    with pytest.raises(DataError, match="have changed"):
        fit(tmp_path / "parts", run, tiny_settings(), resume=True)


def test_a_config_of_one_preset_is_not_another(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('preset = "paper"\n')
    result = cdgp("train", tmp_path, "--out", tmp_path / "run", "--config", config,
                  "--preset", "lite")  # fmt: skip
    assert result.exit_code == 2
    assert "holds the settings of preset 'paper', but 'lite' is asked for" in plain(result)
    result = cdgp("train", tmp_path, "--out", tmp_path / "run", "--input-size", "")
    assert result.exit_code == 2 and "--input-size ''" in plain(result)


def test_a_phase_within_a_phase_gets_a_bar_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    progress = Bars()
    with progress.phase("Benchmark", 2) as advance:
        for _ in range(2):
            with progress.phase("Dual GP", 3) as inner:
                for _ in range(3):
                    inner("loss 0.1")
            advance("cell")
    with progress.phase("Again", 1) as advance:
        advance()
    shown = capsys.readouterr().err
    assert "Benchmark" in shown and "2/2" in shown
    assert "Again" in shown and "1/1" in shown
