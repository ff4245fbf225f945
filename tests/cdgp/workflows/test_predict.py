"""Prediction as a workflow: the command's files, one pass, resumption."""

import csv
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cdgp.workflows.watching import Counted, assert_same_files
from tests.helpers import Interrupting, cdgp, noise_image, plain, save_image

from cdgp import inference, streaming
from cdgp.data.manifest import Manifest
from cdgp.errors import Interrupted, ModelFileError, OutputError
from cdgp.inference import Detector
from cdgp.workflows import Run, predict_folder
from cdgp.workflows.predict import outermost


def test_python_and_command_leave_the_same_files(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path
) -> None:
    assert tiny_run.folder is not None
    ours, theirs = tmp_path / "python/out", tmp_path / "command/out"
    done = cdgp("predict", tiny_run.folder, surfaces.root / "good", "--out", theirs, "--save-maps")
    assert done.exit_code == 0, done.output
    result = predict_folder(tiny_run.folder, [surfaces.root / "good"], ours, save_maps=True)
    assert (result.folder, result.scored, result.unreadable) == (ours, 24, 0)
    assert f"24 scored, {result.rejected} called defective" in done.output
    assert_same_files(ours, theirs)
    assert {path.name for path in ours.iterdir()} == {
        "maps", "overlays", "report.html", "run.json", "scores.csv",
    }  # fmt: skip


def test_each_image_is_decoded_and_predicted_once(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path, counted: Counted
) -> None:
    assert tiny_run.folder is not None
    predict_folder(tiny_run.folder, [surfaces.root / "good"], tmp_path / "out", save_maps=True)
    images = [sample.image for sample in surfaces.samples if not sample.defective]
    assert counted.reads == Counter(images)
    assert len(counted.inputs) == len(images) and max(counted.inputs.values()) == 1


def test_after_resumption_the_report_alone_reads_earlier_images(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path, counted: Counted
) -> None:
    assert tiny_run.folder is not None
    arguments = tiny_run.folder, [surfaces.root / "defective"], tmp_path / "out"
    with pytest.raises(Interrupted, match=r"after 5 of 12 images"):
        predict_folder(*arguments, workers=1, batch=1, progress=Interrupting("Prediction", 5))
    begun = Counter(counted.reads)
    assert sum(begun.values()) >= 5 and set(begun.values()) == {1}
    counted.reads.clear()
    result = predict_folder(*arguments, resume=True)
    assert result.scored == 12
    # Seven that were not finished, and what two galleries of eight show of the first five.
    assert set(counted.reads.values()) == {1} and 7 <= sum(counted.reads.values()) <= 12


def test_unreadable_images_are_counted_and_the_first_are_named(
    tiny_run: Run, tmp_path: Path
) -> None:
    assert tiny_run.folder is not None
    noise_image(tmp_path / "in/good.png")
    for i in range(25):
        (tmp_path / f"in/{i:02}.png").write_bytes(b"")
    result = predict_folder(tiny_run.folder, [tmp_path / "in"], tmp_path / "out")
    assert (result.scored, result.unreadable, len(result.problems)) == (1, 25, 20)
    assert "00.png" in result.problems[0]
    assert len((tmp_path / "out/unreadable.csv").read_text().splitlines()) == 26
    page = (tmp_path / "out/report.html").read_text()
    assert "25 more could not be read, see unreadable.csv" in page


def test_outermost_drops_what_lies_in_another_place() -> None:
    places = [Path("/a/b"), Path("/a"), Path("/ab"), Path("/a"), Path("/c/d.png")]
    assert outermost(places) == [Path("/a"), Path("/ab"), Path("/c/d.png")]


def scored(folder: Path) -> list[str]:
    with (folder / "scores.csv").open() as file:
        return [row["image"] for row in csv.DictReader(file)]


def test_every_file_is_scored_or_named(tiny_run: Run, tmp_path: Path) -> None:
    assert tiny_run.folder is not None
    folder, two_colours = tmp_path / "in", np.zeros((40, 40), np.uint8)
    two_colours[5:9, 5:9] = 255
    for i, name in enumerate(("a.png", "b.jpg", "sub/c.png", "c_1.png", "d.png")):
        noise_image(folder / name, seed=i)
    (folder / "d.png").rename(folder / "IMG_0001")
    for name in ("a_mask.png", "b.jpg_GT.png", "masks/a.png", "masks/b.png"):
        save_image(folder / name, two_colours)
    for name in ("x.heic", "set.zip", "film.mp4", "notes.txt", "a.json"):
        (folder / name).write_bytes(b"nothing")
    (folder / "sub/loop").symlink_to(folder, target_is_directory=True)
    result = cdgp("predict", tiny_run.folder, folder, "--out", tmp_path / "out", "--quiet")
    assert result.exit_code == 3, "x.heic cannot be read"
    assert scored(tmp_path / "out") == ["IMG_0001", "a.png", "b.jpg", "c_1.png", "sub/c.png"]
    with (tmp_path / "out/unreadable.csv").open() as file:
        assert [row["image"] for row in csv.DictReader(file)] == ["x.heic"]
    again = predict_folder(tiny_run.folder, [folder], tmp_path / "again")
    report = (tmp_path / "again/report.html").read_text(encoding="utf-8")
    listed, notes = again.not_scored
    for text in (listed, plain(result), report):
        assert "6 entries are not used" in text
        assert "label files of images beside them: 2 (a_mask.png, b.jpg_GT.png)" in text
        assert "give it by itself): 2 (masks)" in text
        assert "2 (film.mp4, set.zip)" in text
    assert "no images: 1 (notes.txt)" in notes and "linked folders" in notes and "a.json" in notes


def test_label_files_among_given_files_are_left_out(tiny_run: Run, tmp_path: Path) -> None:
    assert tiny_run.folder is not None
    one, mask = noise_image(tmp_path / "1.png", seed=1), noise_image(tmp_path / "1_mask.png")
    both = predict_folder(tiny_run.folder, [one, mask], tmp_path / "both")
    assert scored(tmp_path / "both") == ["1.png"] and "1_mask.png" in both.not_scored[0]
    alone = predict_folder(tiny_run.folder, [mask], tmp_path / "alone")
    assert scored(tmp_path / "alone") == ["1_mask.png"] and not alone.not_scored


def test_a_folder_that_two_places_lead_to_is_scored_once(tiny_run: Run, tmp_path: Path) -> None:
    assert tiny_run.folder is not None
    noise_image(tmp_path / "real/1.png")
    (tmp_path / "by_link").symlink_to(tmp_path / "real", target_is_directory=True)
    places = [tmp_path / "by_link", tmp_path / "real"]
    result = predict_folder(tiny_run.folder, places, tmp_path / "out")
    assert result.scored == 1 and scored(tmp_path / "out") == ["by_link/1.png"]
    assert "read elsewhere: 1 (real)" in result.not_scored[0]


def test_one_folder_may_be_given_as_it_is(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path
) -> None:
    """A text was once walked character by character."""
    assert tiny_run.folder is not None
    defective = surfaces.root / "defective"
    given: list[str | Path | list[Path]] = [str(defective), defective, [defective]]
    for number, images in enumerate(given):
        assert predict_folder(tiny_run.folder, images, tmp_path / str(number)).scored == 12


def test_a_full_disk_stops_and_an_error_of_one_image_does_not(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiny_run.folder is not None
    for i in range(4):
        noise_image(tmp_path / f"in/{i}.png")
    errors: list[Exception] = [
        RuntimeError("can't allocate memory"),
        MemoryError(),
        OutputError("full"),
    ]
    finish = Detector.finish

    def failing(self: Detector, *arguments: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return finish(self, *arguments)

    monkeypatch.setattr(Detector, "finish", failing)
    with pytest.raises(OutputError, match="full"):
        predict_folder(tiny_run.folder, tmp_path / "in", tmp_path / "out", workers=1)
    errors.append(RuntimeError("can't allocate memory"))
    arguments = tiny_run.folder, tmp_path / "in", tmp_path / "out"
    found = predict_folder(*arguments, resume=True, workers=1)
    assert (found.scored, found.unreadable) == (3, 1)
    assert "0.png: cannot be scored: RuntimeError: can't allocate memory" in found.problems[0]


def test_a_model_that_is_replaced_while_it_is_read_is_told(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest decides what --resume takes for finished."""
    assert tiny_run.folder is not None
    model = tmp_path / "model.safetensors"
    shutil.copy(tiny_run.folder / "model.safetensors", model)

    def replaced(path: Path, **options: Any) -> Detector:
        found = inference.load(path, **options)
        model.write_bytes(model.read_bytes() + b"another")
        return found

    monkeypatch.setattr(streaming, "load", replaced)
    with pytest.raises(ModelFileError, match="was replaced while it was read"):
        predict_folder(model, noise_image(tmp_path / "a.png"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
