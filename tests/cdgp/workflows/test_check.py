"""Checking as a workflow."""

from pathlib import Path

import pytest
from tests.cdgp.workflows.watching import assert_same_files
from tests.helpers import cdgp, noise_image, plain, snapshot, two_bins

from cdgp.data.manifest import Manifest, read_csv
from cdgp.errors import SettingsError
from cdgp.workflows import check_data


def test_python_and_command_leave_the_same_files(surfaces: Manifest, tmp_path: Path) -> None:
    for name in ("python", "command"):
        (tmp_path / name).mkdir()
    ours, theirs = tmp_path / "python/out", tmp_path / "command/out"
    done = cdgp("check", surfaces.root, "--out", theirs, "--groups", theirs.parent / "groups.csv")
    assert done.exit_code == 0, done.output
    result = check_data(surfaces.root, ours, ours.parent / "groups.csv")
    assert result.page == ours / "check.html" and result.groups == ours.parent / "groups.csv"
    assert_same_files(ours.parent, theirs.parent)
    assert read_csv(ours.parent / "groups.csv").counts() == {"unsplit": (24, 12)}


def test_without_a_folder_nothing_is_written(surfaces: Manifest) -> None:
    before = snapshot(surfaces.root)
    result = check_data(surfaces.root)
    assert result.page is None and result.groups is None
    assert result.audit.counts == {"unsplit": (24, 12)}
    assert snapshot(surfaces.root) == before


def test_the_manifest_that_is_read_is_not_replaced(surfaces: Manifest) -> None:
    table = surfaces.root / "manifest.csv"
    before = table.read_bytes()
    with pytest.raises(SettingsError, match="is read here"):
        check_data(surfaces.root, groups=table, overwrite=True)
    assert table.read_bytes() == before


def test_what_is_not_read_is_a_warning(tmp_path: Path) -> None:
    """It changes the exit code where --strict asks for that, and nothing else."""
    data = two_bins(tmp_path / "data", 24, 12)
    assert cdgp("check", data, "--strict").exit_code == 0
    counts = check_data(data).audit.counts
    noise_image(data / "third/0.png")
    done = cdgp("check", data, "--out", tmp_path / "out")
    assert done.exit_code == 0 and "1 image is not read: third (1)" in plain(done)
    assert "1 image is not read: third (1)" in (tmp_path / "out/check.html").read_text("utf-8")
    assert cdgp("check", data, "--strict").exit_code == 1
    assert check_data(data).audit.counts == counts
