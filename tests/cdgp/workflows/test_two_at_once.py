"""Two processes at once: one is refused in a sentence, or both are right, and no folder is mixed.

The first of a pair is the real command in a process of its own, stopped in the middle of its work;
the second runs here meanwhile.
"""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors import safe_open
from tests.helpers import ROOT, TINY_OPTIONS, cdgp, plain, snapshot

from cdgp.data.manifest import Manifest
from cdgp.run_folder import read_run
from cdgp.workflows import Run

COMMAND = [sys.executable, "-m", "cdgp.cli.main"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
RUN_ID = re.compile("(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")


class Pairs(NamedTuple):
    """The first ones, stopped, and what the second ones need."""

    place: Path
    processes: dict[str, subprocess.Popen[bytes]]
    images: Path
    model: Path

    def arguments(self, text: str) -> list[str]:
        """The arguments of a command; capital words are places."""
        places = {"IMAGES": self.images, "GOOD": self.images / "good", "MODEL": self.model}
        words = [places.get(word, word) for word in text.split()]
        words = [self.place / str(w)[1:] if str(w).startswith("@") else w for w in words]
        return [str(w) for w in words] + (TINY_OPTIONS if words[0] == "train" else [])


def started(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *arguments], env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def stop(waiting: dict[subprocess.Popen[bytes], Callable[[], bool]]) -> None:
    """Stop each process once it is ready."""
    while waiting:
        for process, ready in list(waiting.items()):
            if ready():
                process.send_signal(signal.SIGSTOP)
                del waiting[process]
            else:
                assert process.poll() is None, process.stderr and process.stderr.read().decode()
        time.sleep(0.005)


FIRST = {
    "train": ("train IMAGES --out @train --seed 1", "@train/log.jsonl"),
    "predict": ("predict MODEL GOOD --out @predict --save-maps", "@predict/unfinished.image"),
    "evaluate": ("evaluate MODEL IMAGES --out @evaluate", "@evaluate/overlays"),
    "check": ("check IMAGES --out @check --groups @groups.csv", "@.groups.csv.lock.json"),
    "export": ("export MODEL --to onnx --out @a.onnx", "@.a.onnx.lock.json"),
    "benchmark": ("benchmark smoke --out @benchmark", "@benchmark/run.json"),
}
"""The first command of each pair, and the file that shows that it is at work."""


@pytest.fixture(scope="module")
def pairs(
    surfaces: Manifest, tiny_run: Run, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pairs]:
    assert tiny_run.folder is not None
    found = Pairs(tmp_path_factory.mktemp("pairs"), {}, surfaces.root, tiny_run.folder)
    try:
        for command, (text, _) in FIRST.items():
            found.processes[command] = started(found.arguments(text))
        signs = {name: Path(found.arguments(f"x {sign}")[1]) for name, (_, sign) in FIRST.items()}
        stop({process: signs[name].exists for name, process in found.processes.items()})
        yield found
    finally:
        for process in found.processes.values():
            process.kill()
            process.wait()


PAIRS = [
    ("train", "train IMAGES --out @train --seed 2"),
    ("train", "train IMAGES --out @train --seed 1 --resume"),
    ("train", "train IMAGES --out @train --seed 2 --overwrite"),
    ("train", "predict MODEL GOOD --out @train --overwrite"),
    ("train", "evaluate MODEL IMAGES --out @train"),
    ("train", "check IMAGES --out @train --overwrite"),
    ("train", "benchmark smoke --out @train"),
    ("predict", "predict MODEL GOOD --out @predict"),
    ("predict", "predict MODEL GOOD --out @predict --save-maps --resume"),
    ("predict", "predict MODEL GOOD --out @predict --overwrite"),
    ("predict", "evaluate MODEL IMAGES --out @predict --overwrite"),
    ("predict", "check IMAGES --out @predict"),
    ("predict", "train IMAGES --out @predict --overwrite"),
    ("evaluate", "evaluate MODEL IMAGES --out @evaluate --overwrite"),
    ("evaluate", "predict MODEL GOOD --out @evaluate --overwrite"),
    ("evaluate", "check IMAGES --out @evaluate"),
    ("check", "check IMAGES --out @check --overwrite"),
    ("check", "check IMAGES --groups @groups.csv --overwrite"),
    ("check", "train IMAGES --out @check --overwrite"),
    ("export", "export MODEL --to onnx --out @a.onnx --overwrite"),
    ("benchmark", "benchmark smoke --out @benchmark"),
    ("benchmark", "train IMAGES --out @benchmark --overwrite"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=[" then ".join(p) for p in PAIRS])
def test_the_second_is_refused_and_told_who_is_there(pairs: Pairs, first: str, second: str) -> None:
    before = snapshot(pairs.place)
    result = cdgp(*pairs.arguments(second))
    assert result.exit_code == 1, result.output
    process = pairs.processes[first].pid
    assert f"another process is writing there (cdgp {first}, process {process} on" in plain(result)
    assert snapshot(pairs.place) == before


@pytest.mark.slow
def test_a_run_that_is_being_made_is_read_by_none(pairs: Pairs) -> None:
    for text in ("evaluate @train IMAGES", "predict @train GOOD --out @new",
                 "export @train --to onnx --out @new.onnx"):  # fmt: skip
        result = cdgp(*pairs.arguments(text))
        assert result.exit_code == 1 and "no such model file" in plain(result)


@pytest.mark.slow
def test_the_first_ones_end_as_if_they_had_been_alone(pairs: Pairs) -> None:
    """The last test of this file: it lets them go on."""
    for command in ("train", "predict", "evaluate", "check", "export"):
        process = pairs.processes[command]
        process.send_signal(signal.SIGCONT)
        assert process.wait() == 0, process.stderr and process.stderr.read().decode()
        if command != "export":
            run = read_run(pairs.place / command)
            assert run is not None and run.command == command
            assert run_ids(pairs.place / command) == {run.run_id}
    assert not list(pairs.place.glob(".*"))
    result = cdgp(*pairs.arguments("evaluate @train @train/manifest.csv"))
    assert result.exit_code == 0 and "trained on" not in plain(result)


@pytest.mark.slow
def test_a_run_that_is_replaced_is_evaluated_whole_or_not_at_all(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path
) -> None:
    assert tiny_run.folder is not None
    run = shutil.copytree(tiny_run.folder, tmp_path / "run")
    first = read_run(run)
    arguments = ["train", str(surfaces.root), "--out", str(run), "--seed", "1", "--overwrite"]
    process = started([*arguments, *TINY_OPTIONS])
    try:
        stop({process: (run / ".lock.json").exists})
        assert cdgp("evaluate", run, run / "manifest.csv").exit_code == 0  # of the earlier run
        process.send_signal(signal.SIGCONT)
        stop({process: lambda: (run / "manifest.csv").exists() and read_run(run) != first})
        result = cdgp("evaluate", run, run / "manifest.csv")
        assert result.exit_code == 1 and "no such model file" in plain(result)
        # A model that was copied back beside the new manifest is not that manifest's.
        shutil.copy(tiny_run.folder / "model.safetensors", run)
        for command in (
            ("evaluate", run, run / "manifest.csv"),
            ("export", run, "--to", "onnx", "--out", tmp_path / "a.onnx"),
        ):
            result = cdgp(*command)
            assert result.exit_code == 3 and "mixes two runs" in plain(result)
        (run / "model.safetensors").unlink()
        process.send_signal(signal.SIGCONT)
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
    second = read_run(run)
    assert second is not None and second != first and run_ids(run) == {second.run_id}
    assert cdgp("evaluate", run, run / "manifest.csv").exit_code == 0


def run_ids(folder: Path) -> set[str]:
    """The run ids in all files of a folder; each file that can carry one must carry one."""
    found: set[str] = set()
    for path in (p for p in folder.rglob("*") if p.is_file()):
        ids = list(ids_in(path))
        assert ids or path.suffix in (".jpg", ".npy"), f"{path} says not which run it is of"
        found |= set(ids)
    return found


def ids_in(path: Path) -> Iterator[str]:
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            yield from (row["run_id"] for row in csv.DictReader(file))
    elif path.suffix == ".safetensors":
        with safe_open(path, "pt") as tensors:
            yield json.loads(tensors.metadata()["provenance"])["run_id"]
    elif path.suffix == ".jsonl":
        records = [json.loads(line) for line in path.read_text().splitlines()]
        yield from (r["run_id"] for r in records if r.get("stage") == "start")
    elif path.suffix == ".json":
        yield json.loads(path.read_text())["run_id"]
    elif path.suffix == ".html":  # the footer; the provenance names the run of the model
        yield RUN_ID.findall(path.read_text())[-1]
