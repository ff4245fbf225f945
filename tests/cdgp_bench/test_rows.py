"""Rows that were made with something else, and rows of other runs that still fit."""

from pathlib import Path

import pytest
from PIL import Image
from tests.cdgp_bench.helpers import run_cli, written

from cdgp.data.manifest import Manifest
from cdgp_bench import grid
from cdgp_bench.rows import ROWS, read_rows
from cdgp_bench.synthetic import make_dataset


def test_changed_masks_make_rows_stale(tmp_path: Path) -> None:
    made = make_dataset(tmp_path / "data", good=24, defective=14)
    plan = written(tmp_path, made.root, (', "cdgp"', ""))
    assert run_cli(plan, "--out", tmp_path / "out", "--quiet")[0] == 0
    for mask in (tmp_path / "data" / "masks").iterdir():
        Image.new("1", Image.open(mask).size, 1).save(mask)
    code, output = run_cli(plan, "--out", tmp_path / "out", "--quiet")
    assert code == 1
    assert "1 rows" in output and "masks_sha256" in output


def test_rows_of_other_settings_are_refused_and_of_the_same_reused(
    tmp_path: Path, surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = written(tmp_path, surfaces.root)
    assert run_cli(plan, "--out", tmp_path / "a", "--quiet")[0] == 0
    method = grid.METHODS["static_max"]
    monkeypatch.setitem(
        grid.METHODS, "static_max", method._replace(fit=lambda *a: pytest.fail("computed again"))
    )
    reuse = ["--reuse", tmp_path / "a", "--checkpoints", tmp_path / "a" / "checkpoints"]
    code, output = run_cli(plan, "--out", tmp_path / "b", *reuse)
    assert code == 0, output
    assert "(taken over)" in output
    first, second = (
        {r["method"]: r for r in read_rows(tmp_path / name / ROWS)} for name in ("a", "b")
    )
    taken = second["static_max"].pop("computed_as")
    assert taken == "surfaces/surfaces static_max default seed 0"
    assert second["static_max"] == first["static_max"]
    changed = written(tmp_path, surfaces.root, ("batch_size = 2", "batch_size = 3"))
    code, output = run_cli(changed, "--out", tmp_path / "a", "--quiet")
    assert code == 1
    assert "1 rows" in output and "config_sha256" in output
