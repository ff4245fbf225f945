"""``cdgp predict``: damaged models and images, interruption, resumption."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from tests.cdgp.data.profiles import png_with
from tests.cdgp.workflows.watching import contents
from tests.helpers import cdgp, noise_image, plain, save_image, snapshot

from cdgp.artifact import digest_of
from cdgp.errors import SettingsError
from cdgp.inference import Detector
from cdgp.report import results


@pytest.mark.parametrize("keep", [0, 7, 1000, -10])
def test_truncated_model_file(model: Path, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "model.safetensors"
    cut.write_bytes(model.read_bytes()[:keep])
    result = cdgp("predict", cut, noise_image(tmp_path / "a.png"), "--out", tmp_path / "out")
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
    metadata["sha256"] = digest_of(metadata, tensors)  # else that alone would refuse it
    other = tmp_path / "model.safetensors"
    save_file(tensors, other, metadata=metadata)
    result = cdgp("predict", other, noise_image(tmp_path / "a.png"), "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert message in plain(result)


def test_image_smaller_than_the_least(model: Path, tmp_path: Path) -> None:
    tiny = noise_image(tmp_path / "in" / "thin.png", (96, 1))
    fine = noise_image(tmp_path / "in" / "fine.png", (33, 33))
    result = cdgp("predict", model, tiny, fine, "--out", tmp_path / "out", "--quiet")
    assert result.exit_code == 3
    assert "thin.png" in plain(result) and "8" in plain(result)
    assert [r["image"] for r in csv.DictReader((tmp_path / "out" / "scores.csv").open())] == [
        "fine.png"
    ]


def test_results_inside_the_scored_folder_are_refused(model: Path, tmp_path: Path) -> None:
    noise_image(tmp_path / "a.png")
    result = cdgp("predict", model, tmp_path, "--out", tmp_path / "scores")
    assert result.exit_code == 1 and "lies in a folder that is scored" in plain(result)
    assert not (tmp_path / "scores").exists()


def test_missing_model_and_missing_images(model: Path, tmp_path: Path) -> None:
    result = cdgp("predict", tmp_path / "none", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 1 and "no such model file" in plain(result)
    result = cdgp("predict", model, tmp_path / "none.png", "--out", tmp_path / "out")
    assert result.exit_code == 3 and "no such file" in plain(result)
    (tmp_path / "empty").mkdir()
    result = cdgp("predict", model, tmp_path / "empty", "--out", tmp_path / "out")
    assert result.exit_code == 3 and "no images" in plain(result)


def test_overwritten_results_hold_the_new_ones_alone(model: Path, tmp_path: Path) -> None:
    for i in range(3):
        noise_image(tmp_path / f"images/{i}.png", (96, 80), i)
    out = tmp_path / "out"
    assert cdgp("predict", model, tmp_path / "images", "--out", out).exit_code == 0
    assert len(list(out.rglob("*.jpg"))) == 3
    one = tmp_path / "images/1.png"
    assert cdgp("predict", model, one, "--out", out, "--overwrite").exit_code == 0
    assert len(list(out.rglob("*.jpg"))) == 1
    before = snapshot(out)
    result = cdgp("predict", model, out / "overlays", "--out", out, "--overwrite")
    assert result.exit_code == 1 and "where a run keeps its own files" in plain(result)
    assert snapshot(out) == before
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    result = cdgp("predict", model, one, "--out", foreign, "--overwrite")
    assert result.exit_code == 1 and "no earlier result" in plain(result)


def test_interrupted_prediction_keeps_its_scores(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(4):
        noise_image(tmp_path / f"images/{i}.png", (96, 80), i)
    original, calls = Detector.read_with_warnings, list[Path]()

    def read(self: Detector, path: Path) -> object:
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, path)

    monkeypatch.setattr(Detector, "read_with_warnings", read)
    result = cdgp("predict", model, tmp_path / "images", "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert "interrupted after 2 of 4 images; --resume" in plain(result)
    assert not (tmp_path / "out/scores.csv").exists()

    again = ("predict", model, tmp_path / "images", "--out", tmp_path / "out")
    assert "--resume" in plain(cdgp(*again))  # refused, with the way to go on
    other = cdgp(*again, "--resume", "--save-maps")
    assert other.exit_code == 1 and "another --save-maps" in plain(other)
    assert cdgp(*again, "--resume", "--overwrite").exit_code == 2
    monkeypatch.undo()
    seen: list[Path] = []
    # What a kill in the middle of a write leaves behind goes; what is the user's stays.
    for name in ("overlays/.1.png.jpg.abcd1234.jpg", ".report.html.abcd1234.html", "notes.txt"):
        (tmp_path / "out" / name).write_text("half")

    def count(self: Detector, path: Path) -> object:
        seen.append(path)
        return original(self, path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Detector, "read_with_warnings", count)
        assert cdgp(*again, "--resume").exit_code == 0
    assert [path.name for path in seen[:2]] == ["2.png", "3.png"]
    # Then the report's thumbnails of the images that were scored before.
    assert sorted(path.name for path in seen[2:]) == ["0.png", "1.png"]
    whole = cdgp("predict", model, tmp_path / "images", "--out", tmp_path / "whole")
    assert whole.exit_code == 0
    ours, theirs = contents(tmp_path / "out"), contents(tmp_path / "whole")
    for name in ("scores.csv", "overlays/0.png.json", "overlays/3.png.json"):
        assert ours[name] == theirs[name]
    assert not (tmp_path / "out/unfinished.sqlite").exists()
    left = {p.name for p in (tmp_path / "out").rglob("*") if p.suffix != ".json"}
    assert left == {"overlays", *(f"{i}.png.jpg" for i in range(4)), "scores.csv", "report.html",
                    "notes.txt"}  # fmt: skip
    assert "holds no unfinished prediction" in plain(cdgp(*again, "--resume"))


def test_a_file_that_goes_away_is_listed_and_the_others_are_scored(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(4):
        noise_image(tmp_path / f"images/{i}.png", (96, 80), i)
    original = Detector.read_with_warnings

    def read(self: Detector, path: Path) -> object:
        (tmp_path / "images/2.png").unlink(missing_ok=True)
        return original(self, path)

    monkeypatch.setattr(Detector, "read_with_warnings", read)
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
    """Other folders with images of equal names are not taken for finished."""
    for name in ("a/0.png", "a/1.png", "b/0.png", "b/1.png"):
        noise_image(tmp_path / name, (96, 80), 0)

    def stop(self: Detector, path: Path) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Detector, "read_with_warnings", stop)
        assert cdgp("predict", model, tmp_path / "a", "--out", tmp_path / "out").exit_code == 130
    other = cdgp("predict", model, tmp_path / "b", "--out", tmp_path / "out", "--resume")
    assert other.exit_code == 1 and "another list of images and folders" in plain(other)
    again = cdgp("predict", model, tmp_path / "a", "--out", tmp_path / "out", "--resume", "--quiet")
    assert again.exit_code == 0


def test_a_folder_and_what_lies_in_it_are_scored_once(model: Path, tmp_path: Path) -> None:
    for name in ("a/1.png", "a/b/2.png", "c/3.png"):
        noise_image(tmp_path / name, (96, 80), 0)
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
    result = cdgp("predict", model, noise_image(tmp_path / "a.png", (96, 80)), "--out",
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


def test_warnings_reach_every_result_and_the_exit_code_stays(model: Path, tmp_path: Path) -> None:
    """Table, record, report and terminal name the images; a resumed prediction has kept them."""
    pics = tmp_path / "pics"
    noise_image(pics / "0.png", (96, 80))
    for i in range(6):  # with the next, as many as a gallery of the report shows
        save_image(pics / f"black{i}.png", np.zeros((96, 80), np.uint8))
    png_with(noise_image(pics / "linear.png", (96, 80), 9), gAMA=(100_000).to_bytes(4, "big"))
    out = tmp_path / "out"
    result = cdgp("predict", model, pics, "--out", out, "--quiet")
    assert result.exit_code == 0
    assert "7 images carry warnings" in result.stderr and "black0.png: holds nothing" in plain(
        result
    )
    assert "and 2 more" in result.stderr
    with (out / "scores.csv").open() as file:
        rows = {row["image"]: row for row in csv.DictReader(file)}
    assert list(rows["0.png"])[-4:] == ["warnings", "score_kind", "rests_on", "run_id"]
    assert {name for name, row in rows.items() if row["warnings"]} == {
        *(f"black{i}.png" for i in range(6)), "linear.png",
    }  # fmt: skip
    assert rows["linear.png"]["warnings"].startswith("gAMA states a gamma of 1")
    assert all(rows[f"black{i}.png"]["pred_label"] == "defective" for i in range(6))
    record = json.loads((out / "overlays/black0.png.json").read_text())
    assert record["pred_label"] == "defective" and "nothing to see" in record["warnings"][0]
    assert json.loads((out / "overlays/0.png.json").read_text())["warnings"] == []
    page = (out / "report.html").read_text()
    assert "7 images carry warnings" in page and "⚠" in page
    one = cdgp("predict", model, pics / "0.png", "--out", tmp_path / "one", "--quiet")
    assert "carry warnings" not in one.output and "carries warnings" not in one.output
    assert "⚠" not in (tmp_path / "one/report.html").read_text()


@pytest.mark.parametrize("overlays", ["all", "rejected", "none"])
def test_overlays_are_of_the_images_that_are_asked_for(
    model: Path, tmp_path: Path, overlays: str
) -> None:
    for i in range(6):
        noise_image(tmp_path / f"images/{i}.png", (96, 80), i)
    save_image(tmp_path / "images/black.png", np.zeros((64, 64, 3), np.uint8))  # always rejected
    out, options = tmp_path / "out", ("--overlays", overlays, "--workers", "3", "--batch", "2")
    assert cdgp("predict", model, tmp_path / "images", "--out", out, *options).exit_code == 0
    with (out / "scores.csv").open(newline="") as file:
        rejected = {r["image"] for r in csv.DictReader(file) if r["pred_label"] == "defective"}
    assert "black.png" in rejected
    wanted = {"all": {f"{i}.png" for i in range(6)} | {"black.png"}, "rejected": rejected,
              "none": set()}[overlays]  # fmt: skip
    for suffix in (".jpg", ".json"):
        assert {p.name.removesuffix(suffix) for p in out.rglob(f"*{suffix}")
                if p.parent.name == "overlays"} == wanted  # fmt: skip


def test_of_many_images_only_rejected_ones_are_drawn_and_that_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FEW", 3)
    for i in range(3):
        noise_image(tmp_path / f"images/{i}.png", (96, 80), i)
    save_image(tmp_path / "images/black.png", np.zeros((64, 64, 3), np.uint8))
    done = cdgp("predict", model, tmp_path / "images", "--out", tmp_path / "out")
    assert done.exit_code == 0
    assert "3 images or more: overlays of the rejected ones; --overlays all" in plain(done)
    assert (tmp_path / "out/overlays/black.png.jpg").is_file()
    asked = cdgp(
        "predict", model, tmp_path / "images", "--out", tmp_path / "b", "--overlays", "all"
    )
    assert "overlays of the rejected ones" not in plain(asked)
    assert len(list((tmp_path / "b/overlays").glob("*.jpg"))) == 4


def test_numbers_below_one_are_refused_before_anything_is_read(model: Path, tmp_path: Path) -> None:
    noise_image(tmp_path / "a.png")
    for option in ("--workers", "--batch"):
        done = cdgp("predict", model, tmp_path / "a.png", "--out", tmp_path / "out", option, "0")
        assert done.exit_code == SettingsError.exit_code
        assert f"{option} 0: at least 1 is needed" in plain(done)
    assert not (tmp_path / "out").exists()
