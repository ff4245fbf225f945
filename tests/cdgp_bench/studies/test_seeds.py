"""Two standard deviations on one test part: of training, and of the split."""

import statistics
from pathlib import Path

import pytest
from tests import helpers
from tests.cdgp_bench.helpers import here, written

from cdgp.data.manifest import Manifest
from cdgp_bench import grid
from cdgp_bench.folds import cross_test
from cdgp_bench.plan import read_plan
from cdgp_bench.rows import read_rows
from cdgp_bench.studies.seeds import table, trained


def test_training_and_split_vary_apart_on_one_test_part(
    tmp_path: Path, surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, surfaces.root, ("seeds = [0]", "seeds = [0]\nfolds = 3"))
    plan, out = read_plan(str(file)), tmp_path / "seeds.jsonl"
    rows = trained(plan, "surfaces", "static_max", here(tmp_path / "out"), out)
    assert read_rows(out) == rows
    assert all(row["status"] == "ok" and row["fold"] == 0 for row in rows)
    trainings = [r for r in rows if r["split_seed"] == 0]
    splits = [r for r in rows if r["seed"] == 0]
    assert [r["seed"] for r in trainings] == [r["split_seed"] for r in splits] == [0, 1, 2, 3, 4]
    assert len(rows) == 9, "one training is in both"
    assert len({r["manifest_sha256"] for r in trainings}) == 1
    assert len({r["config_sha256"] for r in trainings}) == 5
    assert len({r["manifest_sha256"] for r in splits}) == 5
    assert len({r["config_sha256"] for r in splits}) == 1
    # The masks of the test part have one digest, so it is one test part; it is the first fold.
    assert len({r["masks_sha256"] for r in rows}) == 1
    first = cross_test(helpers.digested(surfaces), 3)[0]
    assert {tuple(r["parts"]["test"]) for r in rows} == {first.counts()["test"]}
    text = table(rows)
    line = next(line for line in text.splitlines() if "AUPRO@.3 " in line)
    cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
    values, others = ([100 * r["pixel_aupro_30"] for r in group] for group in (trainings, splits))
    assert cells[3:] == [
        f"{statistics.mean(values):.1f}", f"{statistics.stdev(values):.1f}", "5",
        f"{statistics.stdev(others):.1f}", "5",
    ]  # fmt: skip

    method = grid.METHODS["static_max"]
    monkeypatch.setitem(
        grid.METHODS, "static_max", method._replace(fit=lambda *a: pytest.fail("computed again"))
    )
    assert trained(plan, "surfaces", "static_max", here(tmp_path / "out"), out) == rows


def test_a_single_training_has_no_spread() -> None:
    row = {"dataset": "d", "method": "cdgp", "status": "ok", "split_seed": 0, "seed": 0,
           "image_auroc": 0.5, "pixel_auroc": 0.5, "pixel_aupro_30": 0.5,
           "pixel_aupro_05": 0.5}  # fmt: skip
    assert "| AUROC-I | 50.0 | – | 1 | – | 1 |" in table([row])
