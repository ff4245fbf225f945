"""Evaluation as a workflow: the command's files, results without files, one pass."""

from pathlib import Path

import pytest
from tests.cdgp.workflows.watching import Counted, assert_same_files
from tests.helpers import cdgp

from cdgp.data.manifest import Manifest
from cdgp.workflows import Run, evaluate_run


def test_python_and_command_leave_the_same_files(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path
) -> None:
    assert tiny_run.folder is not None
    ours, theirs = tmp_path / "python/out", tmp_path / "command/out"
    done = cdgp("evaluate", tiny_run.folder, surfaces.root, "--out", theirs, "--save-maps")
    assert done.exit_code == 0, done.output
    result = evaluate_run(tiny_run.folder, surfaces.root, ours, save_maps=True)
    assert result.folder == ours
    assert_same_files(ours, theirs)
    assert {path.name for path in ours.iterdir()} == {
        "maps", "metrics.json", "overlays", "report.html", "run.json", "scores.csv",
    }  # fmt: skip


def test_without_a_folder_nothing_is_written_and_rows_come_back(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiny_run.folder is not None
    monkeypatch.chdir(tmp_path)
    before = sorted(tiny_run.folder.rglob("*"))
    result = evaluate_run(tiny_run.folder, tiny_run.folder / "manifest.csv")
    assert result.folder is None and not list(tmp_path.iterdir())
    assert sorted(tiny_run.folder.rglob("*")) == before
    assert result.trained_on == 0
    assert [row.pred_score for row in result.rows] == [row.pred_score for row in tiny_run.rows]
    assert tiny_run.metrics is not None
    changed = {"computed_on", "notes"}  # names are relative to the manifest
    for key in tiny_run.metrics.keys() - changed:
        assert result.metrics[key] == tiny_run.metrics[key], key


def test_each_image_is_read_to_check_it_and_to_score_it(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path, counted: Counted
) -> None:
    assert tiny_run.folder is not None
    evaluate_run(tiny_run.folder, surfaces.root, tmp_path / "out")
    assert counted.reads == {sample.image: 2 for sample in surfaces.samples}
    assert len(counted.inputs) == len(surfaces.samples)
    assert max(counted.inputs.values()) == 1
