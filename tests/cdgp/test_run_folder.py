"""The folder of a run: names, what may be replaced, what resumes, which run it is of."""

import json
import re
from pathlib import Path

import pytest
from tests.helpers import snapshot, tiny_settings

from cdgp import run_folder
from cdgp.errors import DataError, OutputError, SettingsError
from cdgp.locks import HOLDER, LOCK, MARKER
from cdgp.presets import read_settings, settings_from_json

NAMES = {
    value
    for name, value in vars(run_folder).items()
    if name.isupper() and isinstance(value, str) and name != "RUN_FORMAT"
}
LOCKS = {LOCK, HOLDER, MARKER}


def test_the_docstring_lists_every_name() -> None:
    listed = re.findall(r"^\| `([^`]+)`", run_folder.__doc__ or "", re.MULTILINE)
    assert {name.rstrip("/") for name in listed} == NAMES
    assert len(listed) == len(set(listed))


def fill(folder: Path, command: str) -> str:
    """Every file that a run of a command may have left; returns its run id."""
    run_id = run_folder.start(folder, command)
    for name in run_folder.OWN_FILES[command]:
        (folder / name).write_text("{}")
    for name in run_folder.OWN_FOLDERS:
        (folder / name / "line").mkdir(parents=True)
    record = json.dumps({"run_id": run_id})
    (folder / "overlays/line/1.png.json").write_text(record)
    for name in ("overlays/line/1.png.jpg", "maps/line/1.png.npy", "checkpoints/a.safetensors"):
        (folder / name).write_text("own")
    return run_id


@pytest.mark.parametrize("command", sorted(run_folder.OWN_FILES))
def test_clear_removes_what_a_run_has_left_and_nothing_else(tmp_path: Path, command: str) -> None:
    fill(tmp_path, command)
    foreign = {
        "notes.txt": "mine",
        "overlays/line/part.png": "mine",  # no record says that a run wrote it
        "overlays/line/other.png.json": json.dumps({"run_id": "0" * 32}),
        "overlays/line/other.png.jpg": "of another run",
        "maps/depth.npy": "mine",
        "checkpoints/readme.md": "mine",
    }
    for name, text in foreign.items():
        (tmp_path / name).write_text(text)
    run_folder.clear(tmp_path)
    left = {p.relative_to(tmp_path).as_posix(): p.read_text()
            for p in tmp_path.rglob("*") if p.is_file()}  # fmt: skip
    assert left == foreign


@pytest.mark.parametrize("command", sorted(run_folder.OWN_FILES))
def test_clear_leaves_no_folder_of_its_own(tmp_path: Path, command: str) -> None:
    fill(tmp_path, command)
    run_folder.clear(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "record",
    [
        None,
        "{",
        "[]",
        json.dumps({"format": "cdgp-run", "run_id": "12", "command": "train"}),
        json.dumps({"format": "other", "run_id": "a" * 32, "command": "train"}),
        json.dumps({"format": "cdgp-run", "run_id": "a" * 32, "command": "party"}),
    ],
)
def test_nothing_is_taken_without_a_run_that_validates(tmp_path: Path, record: str | None) -> None:
    """A foreign config.json once sufficed to have maps/ and state/ of somebody else deleted."""
    for name in ("config.json", "scores.csv", "maps/depth.npy", "state/a.pt", "overlays/a.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    if record is not None:
        (tmp_path / run_folder.RUN).write_text(record)
    before = snapshot(tmp_path)
    run_folder.clear(tmp_path)
    for command in ("train", "predict", "evaluate"):
        with pytest.raises(OutputError):
            run_folder.check_free(tmp_path, command, True, "")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("holds", sorted(run_folder.OWN_FILES))
@pytest.mark.parametrize("starts", ["train", "predict", "evaluate"])
def test_a_run_replaces_one_of_its_own_command_alone(
    tmp_path: Path, holds: str, starts: str
) -> None:
    fill(tmp_path, holds)
    for overwrite in (False, True):
        if overwrite and holds == starts:
            run_folder.check_free(tmp_path, starts, overwrite, "")
        else:
            with pytest.raises(OutputError, match="not empty" if holds == starts else "the folder"):
                run_folder.check_free(tmp_path, starts, overwrite, "")


def test_what_a_lock_or_a_kill_leaves_is_no_content(tmp_path: Path) -> None:
    for name in (*LOCKS, ".run.json.0a1b2c3d.json"):
        (tmp_path / name).touch()
    run_folder.check_free(tmp_path, "predict", False, "")
    run_folder.start(tmp_path, "predict")  # and was killed before it had done anything
    run_folder.check_free(tmp_path, "predict", False, "")
    assert {path.name for path in tmp_path.iterdir()} == {*LOCKS, run_folder.RUN}
    (tmp_path / ".mine").touch()
    with pytest.raises(OutputError):
        run_folder.check_free(tmp_path, "predict", False, "")


@pytest.mark.parametrize("name", run_folder.OWN_FOLDERS)
def test_nothing_is_removed_through_a_link(tmp_path: Path, name: str) -> None:
    """A link as overlays/ once cost ten input images."""
    images, out = tmp_path / "images", tmp_path / "out"
    out.mkdir()
    run_id = run_folder.start(out, "predict")
    images.mkdir()
    (images / "a.png").write_text("mine")
    (images / "a.json").write_text(json.dumps({"run_id": run_id}))
    (images / "a.safetensors").write_text("mine")
    (out / name).symlink_to(images)
    before = snapshot(images)
    with pytest.raises(OutputError, match="is a link"):
        run_folder.make_results_folder(out, "predict", True, [])
    assert snapshot(images) == before


def test_images_are_found_under_every_name(tmp_path: Path) -> None:
    out, images = tmp_path / "out", tmp_path / "images"
    (out / "overlays").mkdir(parents=True)
    (out / "overlays/a.png").touch()
    images.mkdir()
    (images / "linked.png").symlink_to(out / "overlays/a.png")
    (tmp_path / "alias").symlink_to(out)
    for read in (out / "overlays", tmp_path / "alias/overlays/a.png", images / "linked.png",
                 images / "../out/overlays/a.png"):  # fmt: skip
        for folder in (out, tmp_path / "alias", images / "../out"):
            with pytest.raises(OutputError, match="own files"):
                run_folder.check_not_replaced(folder, run_folder.RESULT_FOLDERS, [read])
    run_folder.check_not_replaced(out, run_folder.RESULT_FOLDERS, [images, tmp_path / "a.png"])


def test_leftovers_of_a_kill_go_and_hidden_files_stay(tmp_path: Path) -> None:
    (tmp_path / "overlays").mkdir()
    for name in (".report.html.abcd1234.html", "overlays/.a.png.jpg.0000aaaa.jpg", ".mine.txt"):
        (tmp_path / name).write_text("half")
    run_folder.remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [".mine.txt"]


def test_a_start_needs_an_empty_folder_or_overwrite(tmp_path: Path) -> None:
    chosen = tiny_settings()
    run_folder.check_startable(tmp_path / "new/deeper", chosen, False, False)
    assert not (tmp_path / "new").exists()
    run_folder.check_startable(tmp_path, chosen, False, False)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError):
        run_folder.check_startable(tmp_path, chosen, False, False)
    run_folder.check_startable(tmp_path, chosen, False, True)
    with pytest.raises(SettingsError):
        run_folder.check_startable(tmp_path, chosen, True, True)


def test_an_unfinished_run_may_change_what_no_weight_depends_on(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        run_folder.check_startable(tmp_path, tiny_settings(), True, False)
    (tmp_path / run_folder.CONFIG).write_text(tiny_settings().model_dump_json())
    run_folder.check_startable(tmp_path, tiny_settings(), True, False)
    other = tiny_settings(decision={"threshold": 0.3})
    run_folder.check_startable(tmp_path, other, True, False)
    with pytest.raises(SettingsError, match=r"\(seed\)"):
        run_folder.check_startable(tmp_path, tiny_settings(seed=1), True, False)
    (tmp_path / run_folder.MODEL).touch()
    with pytest.raises(SettingsError, match=r"decision\.threshold"):
        run_folder.check_startable(tmp_path, other, True, False)


def test_a_run_resumes_with_the_data_it_began_with(tmp_path: Path) -> None:
    run_folder.check_same_data(tmp_path, "a", None)  # killed before its first record
    (tmp_path / run_folder.LOG).write_text(
        '{"stage": "start", "manifest_sha256": "a"}\n{"stage": "Dual GP", "st'
    )
    assert len(run_folder.read_log(tmp_path)) == 1
    run_folder.check_same_data(tmp_path, "a", None)
    with pytest.raises(DataError):
        run_folder.check_same_data(tmp_path, "b", None)
    run_folder.check_same_data(tmp_path, "b", {"manifest_sha256": "b"})
    with pytest.raises(DataError):
        run_folder.check_same_data(tmp_path, "a", {"manifest_sha256": "b"})


def test_results_replace_results_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    first = run_folder.make_results_folder(out, "predict", False, [])
    assert run_folder.read_run(out) == (first, "predict")
    (out / run_folder.LEDGER).touch()
    with pytest.raises(OutputError, match="--resume"):
        run_folder.make_results_folder(out, "predict", False, [])
    with pytest.raises(OutputError, match="the folder of a prediction"):
        run_folder.make_results_folder(out, "evaluate", True, [])
    assert run_folder.go_on(out, "predict") == first
    second = run_folder.make_results_folder(out, "predict", True, [])
    assert second != first and [p.name for p in out.iterdir()] == [run_folder.RUN]
    (out / run_folder.OVERLAYS).mkdir()
    with pytest.raises(OutputError, match="own files"):
        run_folder.make_results_folder(out, "predict", True, [out / "overlays/a.png"])
    (out / run_folder.RUN).unlink()
    with pytest.raises(OutputError, match="no earlier result"):
        run_folder.make_results_folder(out, "predict", True, [])
    (out / run_folder.MODEL).touch()
    with pytest.raises(OutputError, match="training run"):
        run_folder.make_results_folder(out, "predict", True, [])


ONE, OTHER = "1" * 32, "2" * 32


def test_pixels_that_a_run_was_trained_on(tmp_path: Path) -> None:
    assert run_folder.trained_on(tmp_path, None) == set()
    (tmp_path / run_folder.MANIFEST).write_text(
        "image,label,split,pixel_sha256\na,good,fit,1\nb,good,calibration,2\n"
        "c,good,test,3\nd,good,fit,\n"
    )
    for run_id in (None, ONE):  # a manifest without an id is that of an older run
        assert run_folder.trained_on(tmp_path, run_id) == {"1", "2"}
        assert run_folder.trained_on(tmp_path / run_folder.MODEL, run_id) == {"1", "2"}
    (tmp_path / run_folder.MANIFEST).write_text(
        f"image,label,split,pixel_sha256,run_id\na,good,fit,1,{ONE}\n"
    )
    assert run_folder.trained_on(tmp_path / "a.onnx", ONE) == {"1"}
    assert run_folder.trained_on(tmp_path / "a.onnx", OTHER) == set()


def test_a_model_beside_the_files_of_another_run_is_refused(tmp_path: Path) -> None:
    model = tmp_path / run_folder.MODEL
    files = {
        run_folder.RUN: json.dumps({"format": "cdgp-run", "run_id": ONE, "command": "train"}),
        run_folder.CONFIG: json.dumps({"run_id": ONE}),
        run_folder.MANIFEST: f"image,label,run_id\na,good,{ONE}\n",
    }
    run_folder.check_one_run(model, ONE)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        for path in (tmp_path, model):
            run_folder.check_one_run(path, ONE)
            run_folder.check_one_run(path, None)
            with pytest.raises(DataError, match="mixes two runs"):
                run_folder.check_one_run(path, OTHER)
        run_folder.check_one_run(tmp_path / "parts.onnx", OTHER)
        (tmp_path / name).unlink()
    foreign = {
        run_folder.RUN: json.dumps({"format": "other", "run_id": ONE, "command": "train"}),
        run_folder.CONFIG: json.dumps({"run_id": "night shift"}),
        run_folder.MANIFEST: "image,label,run_id\na,good,7\n",
    }
    for name, text in foreign.items():
        (tmp_path / name).write_text(text)
    run_folder.check_one_run(model, OTHER)
    (tmp_path / run_folder.CONFIG).write_text("{")
    run_folder.check_one_run(model, OTHER)


def test_the_run_id_in_config_json_is_no_setting(tmp_path: Path) -> None:
    chosen = tiny_settings(seed=3)
    run_folder.write_config(tmp_path, chosen, ONE)
    assert read_settings(tmp_path / run_folder.CONFIG) == chosen
    run_folder.check_startable(tmp_path, chosen, True, False)
    with pytest.raises(SettingsError, match="run_id"):
        settings_from_json((tmp_path / run_folder.CONFIG).read_text(), "a model file")
    toml = tmp_path / "a.toml"
    toml.write_text('run_id = "1"')
    with pytest.raises(SettingsError, match="run_id"):
        read_settings(toml)
    run_folder.start(tmp_path, "train")  # another run began, and was killed before its config
    with pytest.raises(DataError, match="mixes two runs"):
        run_folder.check_startable(tmp_path, chosen, True, False)
