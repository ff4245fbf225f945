"""``cdgp benchmark`` as a whole: the smoke plan, killed and run again, and plans that are wrong."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from cdgp.cli.main import app
from cdgp.data.manifest import Manifest
from cdgp.errors import TrainingError
from cdgp.progress import Quiet
from cdgp_bench import grid
from cdgp_bench.fake_trees import ksdd2_tree
from cdgp_bench.plan import read_plan
from cdgp_bench.run import ROWS, only_one, plan_runs, read_rows, run_plan
from cdgp_bench.synthetic import make_dataset

COMMAND = [sys.executable, "-m", "cdgp.cli.main", "benchmark", "smoke", "--quiet"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
TABLES = (
    "1a-main", "1b-main", "2-components", "S1-paired", "S2-scoring", "S3-heteroscedastic",
    "S4a-hard_pool", "S4b-inducing_budgets", "S5-kernels", "S6a-fusion_weight", "S6b-image_weight",
    "S7-per_category", "S11-label_budget", "S12-complexity", "S13-settings", "S14-provenance",
)  # fmt: skip


def smoke(out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "--out", str(out)], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the smoke plan ran without interruption."""
    out = tmp_path_factory.mktemp("smoke") / "run"
    done = smoke(out)
    assert done.returncode == 0, done.stderr
    return out


def comparable(folder: Path) -> dict[str, bytes]:
    """All that two runs of a plan must have alike: everything rendered but measured times."""
    kept = {}
    for path in sorted([*(folder / "tables").iterdir(), *(folder / "figures").iterdir()]):
        if "S12" not in path.name and "machines" not in path.name:
            kept[path.name] = path.read_bytes()
    return kept


@pytest.mark.slow
def test_smoke_renders_every_table_and_figure(finished: Path) -> None:
    for name in TABLES:
        for ending in ("md", "tex", "csv"):
            text = (finished / "tables" / f"table_{name}.{ending}").read_text()
            assert len(text.splitlines()) > 2, name
    for name in ("label_budget-mvtec_ad2.png", "label_budget-mvtec_ad2.svg", "qualitative.png"):
        assert (finished / "figures" / name).stat().st_size > 5000
    page = (finished / "evidence.md").read_text()
    for link in re.findall(r"\]\(([^)]+)\)", page):
        assert (finished / link).exists()
    assert page.count("## Table ") == len(TABLES)
    beside = (finished / "published.md").read_text()
    assert "96.8 ± 0.7 → not run" in beside, "generated images are not the paper's"
    assert "should be" in beside.split("disagree")[1]
    rows = read_rows(finished / ROWS)
    plan = read_plan("smoke")
    parts = {("mvtec_ad2", "can"), ("mvtec_ad2", "vial"), ("ksdd2", "ksdd2"), ("visa", "candle")}
    assert len(rows) == len(plan_runs(plan, parts)) == 140
    for row in rows:
        assert row["status"] == "ok"
        assert row["metric_size"] == "input"
        assert {"python", "libraries", "processor"} <= row["machine"].keys()
        assert sum(c for p in row["audit"].values() for c in p.values()) == 0
    assert len(list((finished / "qualitative").iterdir())) == 4
    with np.load(finished / "qualitative" / "visa-candle.npz") as found:
        assert found["mask"].any()
        assert found["final"].shape == (64, 64)


@pytest.mark.slow
def test_a_finished_plan_runs_nothing_again(finished: Path) -> None:
    before = (finished / ROWS).stat().st_mtime_ns, comparable(finished)
    done = smoke(finished)
    assert done.returncode == 0, done.stderr
    assert ((finished / ROWS).stat().st_mtime_ns, comparable(finished)) == before


@pytest.mark.slow
def test_killed_at_five_points_it_ends_with_the_same_tables(finished: Path, tmp_path: Path) -> None:
    """SIGKILL while reading, while training, and between rows; the same command goes on."""
    out = tmp_path / "run"
    for rows_before in (0, 1, 20, 50, 100):
        process = subprocess.Popen(
            [*COMMAND, "--out", str(out)], env=ENVIRONMENT,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while process.poll() is None:
            reached = len(read_rows(out / ROWS)) >= rows_before
            begun = (out / "checkpoints").exists() or (rows_before == 0 and (out / "manifests").exists())
            if reached and begun:
                break
            time.sleep(0.02)
        assert process.poll() is None, "it ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        for row in read_rows(out / ROWS):  # never a torn line
            assert row["status"] == "ok"
    done = smoke(out)
    assert done.returncode == 0, done.stderr
    assert comparable(out) == comparable(finished)


PLAN = """
title = "test"
preset = "lite"
seeds = [0]
metric_size = "native"
methods = ["static_max", "cdgp"]
settings.dual_gp = {{ steps = 2, batch_size = 4 }}
settings.student = {{ steps = 2, batch_size = 2 }}

[datasets.surfaces]
path = "{path}"
input_size = [64, 64]

[experiments]
main = ["surfaces"]
"""


def written(folder: Path, data: Path, *changes: tuple[str, str]) -> Path:
    text = PLAN.format(path=data)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "plan.toml").write_text(text)
    return folder / "plan.toml"


def run_cli(*arguments: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["benchmark", *map(str, arguments)])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


@pytest.mark.parametrize(
    ("old", "new", "code", "message"),
    [
        ('"cdgp"]', '"cdpg"]', 2, "unknown method 'cdpg': did you mean 'cdgp'?"),
        ("main =", "mian =", 2, "unknown experiment 'mian': did you mean 'main'?"),
        ('["surfaces"]', '["surface"]', 2, "unknown data set 'surface': did you mean 'surfaces'?"),
        ("seeds = [0]", "seeds = []", 2, "seeds: Tuple should have at least 1 item"),
        ("title", "titel", 2, "titel: Extra inputs are not permitted"),
        (
            "[64, 64]",
            "[60, 64]",
            2,
            "plan.toml: datasets.surfaces: settings: input_size 60x64: each side must be",
        ),
        ("steps = 2, b", "stpes = 2, b", 2, "unknown key 'dual_gp.stpes': did you mean 'steps'?"),
        ("input_size", "layout = 'visa3'\ninput_size", 2, "unknown layout 'visa3'"),
        ("path =", "path = 'a'  #", 3, "a: there is no such folder or file"),
        ("path =", "path = '$NOWHERE/x'  #", 2, "the environment variable $NOWHERE is not set"),
        ("path =", "generated = true\n#", 2, "name the layout that is generated"),
        ("path =", "#", 2, "needs either path or generated = true"),
        ("title =", "title", 2, "not a valid TOML file"),
        ('main = ["surfaces"]', "", 2, "experiments: Dictionary should have at least 1 item"),
        ('["surfaces"]', '"surfaces"', 2, "experiments.main: Input should be a valid list"),
        ("[datasets", "[options.pdim]\n[datasets", 2, "options.pdim: did you mean 'padim'?"),
        ("[datasets", "[options.cdgp]\n[datasets", 2, "options.cdgp: "),
        (
            "[datasets",
            "[options.padim]\nfeature = 3\n[datasets",
            2,
            "options.padim.feature: Extra inputs are not permitted; its options are features",
        ),
        (
            "[datasets",
            "[options.rd4ad]\nepochs = 0\n[datasets",
            2,
            "options.rd4ad.epochs: Input should be greater than or equal to 1",
        ),
    ],
)
def test_bad_plans_are_told_before_anything_runs(
    old: str, new: str, code: int, message: str, tmp_path: Path, surfaces: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    plan = written(tmp_path, surfaces.root, (old, new))
    found, output = run_cli(plan, "--out", tmp_path / "out", "--quiet")
    assert (found, message in output) == (code, True), output
    assert not (tmp_path / "out" / ROWS).exists()


@pytest.mark.parametrize(
    ("key", "where"),
    [("seed = 3", "seeds"), ("preset = 'paper'", "preset"),
     ("input_size = [64, 64]", "datasets.NAME.input_size")],
)  # fmt: skip
def test_settings_that_a_plan_sets_elsewhere(
    key: str, where: str, tmp_path: Path, surfaces: Manifest
) -> None:
    plan = written(tmp_path, surfaces.root, ("[datasets", f"[settings]\n{key}\n[datasets"),
                   ("settings.dual_gp", "#"), ("settings.student", "#"))  # fmt: skip
    code, output = run_cli(plan, "--out", tmp_path / "out")
    assert code == 2
    assert f"is set by {where} in a plan" in output


def test_missing_packages_and_rows_are_told_before_anything_runs(
    tmp_path: Path, surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = written(tmp_path, surfaces.root, ('"cdgp"]', '"cdgp", "grad_cam"]'))
    code, output = run_cli(plan, "--out", tmp_path / "out", "--reuse", tmp_path / "no.jsonl")
    assert code == 2 and "no.jsonl: there is no such file" in output
    monkeypatch.setattr("cdgp_bench.plan.installed", lambda name: False)
    code, output = run_cli(plan, "--out", tmp_path / "out")
    assert code == 2
    assert "benchmarks need statsmodels, matplotlib, grad-cam: pip install" in output
    assert not (tmp_path / "out").exists()


def test_one_process_at_a_time(tmp_path: Path, surfaces: Manifest) -> None:
    plan = written(tmp_path, surfaces.root, (', "cdgp"', ""))
    with only_one(tmp_path / "out"):
        code, output = run_cli(plan, "--out", tmp_path / "out", "--quiet")
    assert code == 1
    assert "another benchmark is running there" in output
    assert run_cli(plan, "--out", tmp_path / "out", "--quiet")[0] == 0


def test_weights_that_cannot_be_had_are_told_before_anything_runs(
    tmp_path: Path, surfaces: Manifest
) -> None:
    plan = written(tmp_path, surfaces.root)
    weights = tmp_path / "none.safetensors"
    code, output = run_cli(plan, "--out", tmp_path / "out", "--weights", weights)
    assert code == 1
    assert "none.safetensors" in output
    assert not (tmp_path / "out" / ROWS).exists()


def test_sets_without_masks_are_measured_by_image(tmp_path: Path) -> None:
    made = make_dataset(tmp_path / "data", good=24, defective=14)
    (made.root / "manifest.csv").unlink()
    shutil.rmtree(made.root / "masks")
    plan = written(tmp_path, made.root, (', "cdgp"', ""))
    code, output = run_cli(plan, "--out", tmp_path / "out")
    assert code == 0, output
    assert "surfaces/surfaces: no masks, so only the image metrics are defined" in output
    (row,) = read_rows(tmp_path / "out" / ROWS)
    assert row["image_auroc"] is not None
    assert row["pixel_auroc"] is None
    assert row["notes"] == {}


def test_half_a_generated_data_set_is_never_used(
    tmp_path: Path, surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = read_plan(str(written(
        tmp_path, surfaces.root, (f'path = "{surfaces.root}"', "layout = 'visa'\ngenerated = true"),
        (', "cdgp"', ""),
    )))  # fmt: skip
    out = tmp_path / "out"

    def stopped(layout: str, root: Path) -> None:
        (root / "candle").mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("cdgp_bench.run.generate", stopped)
        with pytest.raises(KeyboardInterrupt):
            run_plan(plan, out, out / "checkpoints", [], Quiet(), lambda line: None)
    assert not (out / "data" / "surfaces").exists()
    found = run_plan(plan, out, out / "checkpoints", [], Quiet(), lambda line: None)
    assert [r["category"] for r in found.rows] == ["candle", "pcb1"]


def test_changed_masks_make_rows_stale(tmp_path: Path) -> None:
    made = make_dataset(tmp_path / "data", good=24, defective=14)
    plan = written(tmp_path, made.root, (', "cdgp"', ""))
    assert run_cli(plan, "--out", tmp_path / "out", "--quiet")[0] == 0
    for mask in (tmp_path / "data" / "masks").iterdir():
        Image.new("1", Image.open(mask).size, 1).save(mask)
    code, output = run_cli(plan, "--out", tmp_path / "out", "--quiet")
    assert code == 1
    assert "1 rows were made with other settings, images or masks" in output


def test_failed_examples_and_costs_do_not_cost_the_tables(
    tmp_path: Path, surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = written(
        tmp_path, surfaces.root,
        ('main = ["surfaces"]', 'main = ["surfaces"]\nqualitative = ["surfaces"]\n'
         'complexity = ["surfaces"]'),
        ('"static_max", ', ""),
    )  # fmt: skip

    def broken(*arguments: object) -> None:
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


def test_an_unknown_plan_names_the_nearest(tmp_path: Path) -> None:
    assert run_cli("smok") == (2, "error: plan 'smok': did you mean 'smoke'?; or give the path of "
                                  "a .toml file\n")  # fmt: skip
    code, output = run_cli(tmp_path / "none.toml")
    assert code == 2 and "none.toml: cannot be read" in output
    code, output = run_cli("--list")
    assert code == 0 and "paper-mvtec-ad2" in output


def test_a_category_without_defects_is_told_before_anything_runs(tmp_path: Path) -> None:
    ksdd2_tree(tmp_path / "data", good=12, bad=6)
    for mask in (tmp_path / "data" / "train").glob("*_GT.png"):
        Image.new("L", Image.open(mask).size).save(mask)
    plan = written(tmp_path, tmp_path / "data", ("input_size", "layout = 'ksdd2'\ninput_size"))
    code, output = run_cli(plan, "--out", tmp_path / "out", "--quiet")
    assert code == 3
    assert "fit has no defective image" in output
    assert not (tmp_path / "out" / ROWS).exists()


def test_images_without_masks_are_counted(tmp_path: Path) -> None:
    """Pixel metrics take the masks that there are, and everyone is told how many."""
    made = make_dataset(tmp_path / "data", good=24, defective=14)
    masks = sorted((tmp_path / "data" / "masks").iterdir())
    (tmp_path / "data" / "manifest.csv").unlink()
    for mask in masks[::2]:
        mask.unlink()
    plan = written(tmp_path, made.root, (', "cdgp"', ""))
    code, output = run_cli(plan, "--out", tmp_path / "out")
    assert code == 0, output
    assert "surfaces/surfaces: 7 of 14 defective images have a mask" in output
    (row,) = read_rows(tmp_path / "out" / ROWS)
    without = len(row["notes"]["defective_without_mask"])
    good, defective = row["parts"]["test"]
    assert 0 < without < defective
    assert row["pictures_with_pixels"] == good + defective - without
    assert f"{without} × defective without mask" in (tmp_path / "out" / "evidence.md").read_text()


def test_a_failed_cell_is_a_row_and_the_rest_goes_on(
    tmp_path: Path, surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = written(tmp_path, surfaces.root)

    def broken(*arguments: object) -> None:
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
    """The row and the table say so; once the plan gives it, the row is run."""
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
    """Trained for too little, it stands apart, with its learning curve."""
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


def test_variables_in_options_are_put_in(
    tmp_path: Path, surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELSEWHERE", "/textures")
    change = ("[datasets", "[options.draem]\nauxiliary = '$ELSEWHERE/dtd'\n[datasets")
    plan = read_plan(str(written(tmp_path, surfaces.root, change)))
    assert plan.options_of("draem").auxiliary == "/textures/dtd"
    assert plan.options_of("cdgp") is None


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
    assert "1 rows were made with other settings, images or masks" in output


def test_a_plan_scores_test_images_after_training_without_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every mask gone once training begins, training ends well and scoring tells."""
    made = make_dataset(tmp_path / "data", good=24, defective=12)
    plan = read_plan(str(written(tmp_path, made.root, (', "cdgp"', ""))))
    method = grid.METHODS["static_max"]

    def fit(*arguments: object) -> object:
        shutil.rmtree(tmp_path / "data" / "masks")
        return method.fit(*arguments)  # type: ignore[arg-type]

    monkeypatch.setitem(grid.METHODS, "static_max", method._replace(fit=fit))
    found = run_plan(plan, tmp_path / "out", tmp_path / "s", [], Quiet(), lambda line: None)
    (row,) = found.failed
    assert "masks" in row["reason"], "training did not need them; the metrics did"
    assert json.loads((tmp_path / "out" / ROWS).read_text())["status"] == "failed"
