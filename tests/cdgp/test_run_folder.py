"""The folder of a run: names, what may be replaced, what resumes, the lock."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers import tiny_settings

from cdgp import run_folder
from cdgp.errors import DataError, OutputError, SettingsError

NAMES = {
    value
    for name, value in vars(run_folder).items()
    if name.isupper() and isinstance(value, str) and name != "LEFTOVER"
}


def test_the_docstring_lists_every_name() -> None:
    listed = re.findall(r"^\| `([^`]+)`", run_folder.__doc__ or "", re.MULTILINE)
    assert {name.rstrip("/") for name in listed} == NAMES
    assert len(listed) == len(set(listed))


def test_clear_removes_a_runs_files_and_keeps_all_others(tmp_path: Path) -> None:
    for name in NAMES - {run_folder.LOCK}:
        if "." in name:
            (tmp_path / name).write_text("{}")
        else:
            (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    run_folder.clear(tmp_path)
    # These three are written anew, or belong to check.
    kept = {run_folder.CONFIG, run_folder.MANIFEST, run_folder.CHECK_PAGE, "notes.txt"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_clear_takes_nothing_where_no_run_is(tmp_path: Path) -> None:
    (tmp_path / run_folder.SCORES).write_text("mine")
    run_folder.clear(tmp_path)
    assert (tmp_path / run_folder.SCORES).read_text() == "mine"


def test_leftovers_of_a_kill_go_and_hidden_files_stay(tmp_path: Path) -> None:
    (tmp_path / "overlays").mkdir()
    for name in (".report.html.abcd1234.html", "overlays/.a.png.png.0000aaaa.png", ".mine.txt"):
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
    run_folder.make_results_folder(out, False, [])
    (out / run_folder.LEDGER).touch()
    with pytest.raises(OutputError, match="--resume"):
        run_folder.make_results_folder(out, False, [], resumable=True)
    with pytest.raises(OutputError, match="no earlier result"):
        run_folder.make_results_folder(out, True, [])
    run_folder.make_results_folder(out, True, [], resumable=True)
    assert not list(out.iterdir())
    (out / run_folder.SCORES).touch()
    (out / run_folder.OVERLAYS).mkdir()
    with pytest.raises(OutputError, match="own files"):
        run_folder.make_results_folder(out, True, [out / "overlays/a.png"])
    run_folder.make_results_folder(out, True, [tmp_path / "a.png"])
    assert not list(out.iterdir())
    (out / run_folder.MODEL).touch()
    with pytest.raises(OutputError, match="training run"):
        run_folder.make_results_folder(out, True, [])


def test_pixels_that_a_run_was_trained_on(tmp_path: Path) -> None:
    assert run_folder.trained_on(tmp_path) == set()
    (tmp_path / run_folder.MANIFEST).write_text(
        "image,label,split,pixel_sha256\na,good,fit,1\nb,good,calibration,2\n"
        "c,good,test,3\nd,good,fit,\n"
    )
    assert run_folder.trained_on(tmp_path) == {"1", "2"}
    assert run_folder.trained_on(tmp_path / run_folder.MODEL) == {"1", "2"}


HOLD = """
import sys
from pathlib import Path
from cdgp.run_folder import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None and other.stdout.readline() == b"held\n"
    with pytest.raises(OutputError, match="another process"), run_folder.lock(folder):
        pass
    other.kill()  # the lock goes with its process
    other.wait()
    with run_folder.lock(folder):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(OutputError), run_folder.lock(tmp_path / "file"):
        pass
