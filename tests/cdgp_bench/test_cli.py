"""``cdgp benchmark`` as a whole: the smoke plan, killed and run again, and wrong calls."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.cdgp_bench.helpers import run_cli, written

from cdgp.data.manifest import Manifest
from cdgp.run_folder import lock
from cdgp.workflows import Run
from cdgp_bench.plan import read_plan
from cdgp_bench.rows import ROWS, read_rows
from cdgp_bench.run import plan_runs

COMMAND = [sys.executable, "-m", "cdgp.cli.main", "benchmark"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
TABLES = (
    "1a-main", "1b-main", "2-components", "S1-paired", "S2-scoring", "S3-heteroscedastic",
    "S4a-hard_pool", "S4b-inducing_budgets", "S5-kernels", "S6a-fusion_weight", "S6b-image_weight",
    "S7-per_category", "S11-label_budget", "S12-complexity", "S13-settings", "S14-provenance",
)  # fmt: skip


SHORT = """
title = "Killed and run again"
preset = "lite"
seeds = [0]
metric_size = "input"
methods = ["mil_topk", "static_max", "cdgp"]

[settings]
dual_gp = { steps = 2, batch_size = 4 }
student = { steps = 2, batch_size = 2 }
inducing = { tokens_per_class = 2000 }

[datasets.ksdd2]
layout = "ksdd2"
generated = true
input_size = [64, 64]

[experiments]
main = ["ksdd2"]
fusion_weight = ["ksdd2"]
qualitative = ["ksdd2"]
"""


def run(plan: str, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, plan, "--quiet", "--out", str(out)],
        env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the smoke plan ran without interruption."""
    out = tmp_path_factory.mktemp("smoke") / "run"
    done = run("smoke", out)
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
    done = run("smoke", finished)
    assert done.returncode == 0, done.stderr
    assert ((finished / ROWS).stat().st_mtime_ns, comparable(finished)) == before


@pytest.mark.slow
def test_killed_at_four_points_it_ends_with_the_same_tables(tmp_path: Path) -> None:
    """SIGKILL while reading, while training, and between rows; the same command goes on."""
    plan, out = tmp_path / "short.toml", tmp_path / "run"
    plan.write_text(SHORT)
    for rows_before in (0, 1, 3, 6):
        process = subprocess.Popen(
            [*COMMAND, str(plan), "--quiet", "--out", str(out)], env=ENVIRONMENT,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while process.poll() is None:
            reached = len(read_rows(out / ROWS)) >= rows_before
            begun = (out / "checkpoints").exists() or (
                rows_before == 0 and (out / "manifests").exists()
            )
            if reached and begun:
                break
            time.sleep(0.02)
        assert process.poll() is None, "it ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        for row in read_rows(out / ROWS):  # never a torn line
            assert row["status"] == "ok"
    for folder in (out, tmp_path / "at_once"):
        done = run(str(plan), folder)
        assert done.returncode == 0, done.stderr
    assert len(read_rows(out / ROWS)) > 6
    assert comparable(out) == comparable(tmp_path / "at_once")


def test_missing_packages_and_rows_are_found_before_anything_runs(
    tmp_path: Path, surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = written(tmp_path, surfaces.root)
    code, output = run_cli(plan, "--out", tmp_path / "out", "--reuse", tmp_path / "no.jsonl")
    assert code == 2 and "no.jsonl" in output
    monkeypatch.setattr("cdgp_bench.plan.required_packages", lambda plan: ["torch", "no-such"])
    code, output = run_cli(plan, "--out", tmp_path / "out")
    assert code == 2
    assert "no-such: pip install 'cdgp[bench]'" in output and "torch" not in output
    assert not (tmp_path / "out").exists()


def test_one_process_at_a_time(tmp_path: Path, surfaces: Manifest) -> None:
    plan = written(tmp_path, surfaces.root, (', "cdgp"', ""))
    with lock(tmp_path / "out"):
        code, output = run_cli(plan, "--out", tmp_path / "out", "--quiet")
    assert code == 1 and "--checkpoints" in output
    assert run_cli(plan, "--out", tmp_path / "out", "--quiet")[0] == 0


def test_weights_that_cannot_be_had_stop_the_plan(tmp_path: Path, surfaces: Manifest) -> None:
    plan = written(tmp_path, surfaces.root)
    weights = tmp_path / "none.safetensors"
    code, output = run_cli(plan, "--out", tmp_path / "out", "--weights", weights)
    assert code == 1 and "none.safetensors" in output
    assert not (tmp_path / "out" / ROWS).exists()


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [('"cdgp"]', '"cdpg"]', 2), ("path =", "path = '$NOWHERE/x'  #", 2),
     ("path =", "path = 'a'  #", 3)],
)  # fmt: skip
def test_exit_codes_of_wrong_plans(
    old: str, new: str, code: int, tmp_path: Path, surfaces: Manifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    plan = written(tmp_path, surfaces.root, (old, new))
    assert run_cli(plan, "--out", tmp_path / "out", "--quiet")[0] == code
    assert not (tmp_path / "out" / ROWS).exists()


def test_an_unknown_plan_names_the_nearest(tmp_path: Path) -> None:
    code, output = run_cli("smok")
    assert code == 2 and "did you mean 'smoke'?" in output
    assert run_cli(tmp_path / "none.toml")[0] == 2
    assert run_cli()[0] == 2
    code, output = run_cli("--list")
    assert code == 0 and "paper-mvtec-ad2" in output


def test_latency_of_two_files(tiny_run: Run, tmp_path: Path) -> None:
    assert tiny_run.folder is not None
    arguments = [tiny_run.folder, tiny_run.folder / "model.safetensors", "--out", tmp_path,
                 "--threads", 1, "--runs", 3, "--quiet"]  # fmt: skip
    code, output = run_cli(*arguments, command="bench-latency")
    assert code == 0, output
    found = json.loads((tmp_path / "latency.json").read_text())
    assert (tmp_path / "latency.png").stat().st_size > 10_000
    assert len(found["files"]) == 2 and found["threads"] == 1 and found["machine"]["processor"]
    for facts in found["files"]:
        assert 0 < facts["latency_ms"]["median"] <= facts["latency_ms"]["p95"]
        assert facts["throughput"].keys() == {"1", "2", "4", "8", "16"}
        assert facts["peak_memory_mib"] > 100 and facts["cold_start_s"] > 0.1
    code, output = run_cli(*arguments, command="bench-latency")
    assert code == 1 and "--overwrite" in output


@pytest.mark.parametrize("name", ["none.onnx", "none"])
def test_latency_of_a_missing_file(name: str, tmp_path: Path) -> None:
    code, output = run_cli(
        tmp_path / name, "--out", tmp_path / "out", "--quiet", command="bench-latency"
    )
    assert code == 1 and name in output
    assert not (tmp_path / "out/latency.json").exists()


def test_latency_into_an_unwritable_folder(tiny_run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, output = run_cli(
        tiny_run.folder, "--out", tmp_path / "file/x", "--quiet", command="bench-latency"
    )
    assert code == 1 and "file/x" in output
