"""Runs that fail, lack something or train for too little; the others go on."""

import json
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.cdgp_bench.helpers import here, run_cli, written

from cdgp.data.manifest import Manifest
from cdgp.errors import TrainingError
from cdgp_bench import grid
from cdgp_bench.methods import Fitted
from cdgp_bench.plan import read_plan
from cdgp_bench.rows import ROWS, read_rows
from cdgp_bench.run import run_plan
from cdgp_bench.synthetic import make_dataset


def test_failed_examples_and_costs_do_not_cost_the_tables(
    tmp_path: Path, surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = written(
        tmp_path, surfaces.root,
        ('main = ["surfaces"]', 'main = ["surfaces"]\nqualitative = ["surfaces"]\n'
         'complexity = ["surfaces"]'),
        ('"static_max", ', ""),
    )  # fmt: skip

    def broken(*arguments: object) -> NoReturn:
        raise TrainingError("no")

    with monkeypatch.context() as patched:
        patched.setattr("cdgp_bench.run.save_example", broken)
        patched.setattr("cdgp_bench.run.measured", broken)
        code, output = run_cli(plan, "--out", tmp_path / "out", "--quiet")
    assert code == 1
    assert output.count("TrainingError: no") == 2
    assert "| CDGP" in (tmp_path / "out" / "evidence.md").read_text()
    code, output = run_cli(plan, "--out", tmp_path / "out", "--quiet")
    assert code == 0, output
    assert (tmp_path / "out" / "figures" / "qualitative.png").exists()
    assert "Inference complexity" in (tmp_path / "out" / "evidence.md").read_text()


def test_a_failed_run_is_a_row_and_the_rest_goes_on(
    tmp_path: Path, surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = written(tmp_path, surfaces.root)

    def broken(*arguments: Any) -> NoReturn:
        raise TrainingError("the loss is not finite at step 3")

    method = grid.METHODS["static_max"]
    monkeypatch.setitem(grid.METHODS, "static_max", method._replace(fit=broken))
    code, output = run_cli(plan, "--out", tmp_path / "out", "--quiet")
    assert code == 1
    assert "failed: surfaces/surfaces static_max default seed 0: TrainingError: the loss" in output
    rows = {r["method"]: r for r in read_rows(tmp_path / "out" / ROWS)}
    assert rows["static_max"]["status"] == "failed"
    assert rows["static_max"]["reason"] == "TrainingError: the loss is not finite at step 3"
    assert rows["cdgp"]["status"] == "ok"
    assert "## Failed" in (tmp_path / "out" / "evidence.md").read_text()
    monkeypatch.setitem(grid.METHODS, "static_max", method)
    code, output = run_cli(plan, "--out", tmp_path / "out", "--quiet")
    assert code == 0, output
    again = {r["method"]: r for r in read_rows(tmp_path / "out" / ROWS)}
    assert again["static_max"]["status"] == "ok"
    assert again["cdgp"] == rows["cdgp"]


def test_a_method_that_lacks_something_is_not_run_and_nothing_fails(
    tmp_path: Path, surfaces: Manifest
) -> None:
    """The row and the table say so."""
    plan = written(tmp_path, surfaces.root, ('"cdgp"]', '"cdgp", "efficientad"]'))
    code, output = run_cli(plan, "--out", tmp_path / "out", "--quiet")
    assert code == 0, output
    rows = {r["method"]: r for r in read_rows(tmp_path / "out" / ROWS)}
    assert rows["efficientad"]["status"] == "not run"
    assert rows["cdgp"]["status"] == "ok"
    page = (tmp_path / "out" / "evidence.md").read_text()
    assert "| EfficientAD | not run |" in page
    assert "Not run: efficientad needs its teacher's weights" in page


def test_options_of_a_plan_reach_the_method_and_its_row(tmp_path: Path, surfaces: Manifest) -> None:
    """Trained for too little, it has a block of its own and a learning curve."""
    change = ("[datasets", "[options.rd4ad]\nepochs = 1\n[datasets")
    plan = written(tmp_path, surfaces.root, ('"cdgp"]', '"cdgp", "rd4ad"]'), change)
    code, output = run_cli(plan, "--out", tmp_path / "out", "--quiet")
    assert code == 0, output
    row = next(r for r in read_rows(tmp_path / "out" / ROWS) if r["method"] == "rd4ad")
    assert row["facts"]["options"] == {"epochs": 1}
    assert row["facts"]["budget_share"] == 1 / 200
    page = (tmp_path / "out" / "evidence.md").read_text()
    apart = page.index("Normal-only supervision, less than a quarter of the published training")
    assert apart < page.index("| RD4AD |"), "nowhere among the ranked"
    assert (tmp_path / "out" / "figures" / "learning_curves-surfaces.png").is_file()
    assert "| RD4AD | surfaces | epochs = 1 | 0.5 % | anomalib 2.7.0, decoder ours |" in page


def test_a_plan_scores_test_images_after_training_without_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every mask gone once training begins, training ends well and scoring fails."""
    made = make_dataset(tmp_path / "data", good=24, defective=12)
    plan = read_plan(str(written(tmp_path, made.root, (', "cdgp"', ""))))
    method = grid.METHODS["static_max"]

    def fit(*arguments: Any) -> Fitted:
        shutil.rmtree(tmp_path / "data" / "masks")
        return method.fit(*arguments)

    monkeypatch.setitem(grid.METHODS, "static_max", method._replace(fit=fit))
    found = run_plan(plan, here(tmp_path / "out"))
    (row,) = found.failed
    assert "masks" in row["reason"], "training did not need them; the metrics did"
    assert json.loads((tmp_path / "out" / ROWS).read_text())["status"] == "failed"
