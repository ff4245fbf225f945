"""Seconds a step of both trained stages, and whether another version's losses are the same.

    python -m cdgp_bench.studies.training --data DATA --against OTHER/src

``--against`` names the ``src`` folder of another version with the same modules; each round then
starts a process for either, in turns. Both run the first steps of both stages of ``lite`` over the
same few images, whose inputs are in memory before. In some steps the student's teacher sees an
image for the first time, in others again, so these are two numbers. "minutes" is what the steps of
a whole training on all of DATA take at these medians. Writes docs/results/training.json.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cdgp.data import layouts
from cdgp.data.manifest import WeakSample
from cdgp.files import subsample_evenly, write_text
from cdgp.presets import Settings, settings
from cdgp.progress import Advance, Quiet
from cdgp.training.context import new_context
from cdgp.training.dataset import WeakDataset, new_inputs
from cdgp.training.dual_gp import DualGPTraining, train_dual_gp
from cdgp.training.student import StudentTraining, train_student
from cdgp_bench.measure.harness import alternate, machine

OUT = Path("docs/results/training.json")
GOOD, DEFECTIVE = 50, 20
"""So many images of each label are trained on."""
STEPS = {"Dual GP": 12, "Reverse student": 26}
WARM_UP = 2
COMPARED = 5
"""So many losses of each stage are recorded and compared."""
FIT_SHARE = 0.64
"""Share of the good images that the student trains on where the manifest names no split."""


class EnoughError(Exception):
    """Ends a stage whose steps have been timed."""


class Clock(Quiet):
    """Records when each step of a stage ended, and stops the stage after some."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    @contextlib.contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Advance]:
        def advance(note: str = "") -> None:
            if name in STEPS:
                self.ends.append(time.perf_counter())
                if len(self.ends) == STEPS[name]:
                    raise EnoughError

        yield advance


def stage(kind: type[torch.nn.Module], train: Callable[[Clock], object]) -> dict[str, Any]:
    """Losses and seconds of a stage's first steps; calls of its module return the loss first."""
    losses: list[float] = []
    forward = kind.forward

    def recording(self: torch.nn.Module, *batch: Any) -> Any:
        loss, diagnostics = forward(self, *batch)
        if len(losses) < COMPARED:  # reading a later one would wait for the GPU
            losses.append(float(loss.detach()))
        return loss, diagnostics

    clock = Clock()
    kind.forward = recording
    with contextlib.suppress(EnoughError):
        train(clock)
    kind.forward = forward
    ends = clock.ends
    return {"losses": losses, "seconds": [b - a for a, b in itertools.pairwise(ends)]}


def one(data: Path, threads: int) -> dict[str, Any]:
    """Both stages in this process, with the code that Python finds."""
    torch.set_num_threads(threads)
    chosen = settings("lite")
    manifest = layouts.load(data, chosen.data.good, chosen.data.defective)
    images = {}
    for label, count in ((False, GOOD), (True, DEFECTIVE)):
        samples = [s for s in manifest.samples if s.defective == label]
        images[label] = [WeakSample(s.image, label) for s in subsample_evenly(samples, count)]
    inputs = new_inputs(chosen)
    both = WeakDataset(images[False] + images[True], inputs)
    good = WeakDataset(images[False], inputs)
    both.batch(range(len(both)))  # decoded once, before the clock runs

    def dual(clock: Clock) -> object:
        return train_dual_gp(both, chosen, new_context(None, None, clock), "")

    def student(clock: Clock) -> object:
        return train_student(good, chosen, new_context(None, None, clock), "")

    return {
        "Dual GP": stage(DualGPTraining, dual),
        "Reverse student": stage(StudentTraining, student),
        "good": sum(not s.defective for s in manifest.samples),
    }


def in_process_of(source: Path, data: Path, threads: int) -> dict[str, Any]:
    """``one`` in a process of its own, with the code under ``source``."""
    command = [sys.executable, "-m", "cdgp_bench.studies.training", "--one",
               "--data", str(data.absolute()), "--threads", str(threads)]  # fmt: skip
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(source.absolute())}, stdout=subprocess.PIPE,
        check=True,
    )  # fmt: skip
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def medians(rounds: list[dict[str, Any]], chosen: Settings) -> dict[str, float]:
    """Seconds a step over all rounds, and minutes of a whole training."""
    epoch = -(-GOOD // chosen.student.batch_size)
    seconds: dict[str, list[float]] = {"dual_gp": [], "student_first": [], "student_again": []}
    for result in rounds:
        seconds["dual_gp"] += result["Dual GP"]["seconds"][WARM_UP:]
        # The first interval ends step 1.
        seconds["student_first"] += result["Reverse student"]["seconds"][WARM_UP : epoch - 1]
        seconds["student_again"] += result["Reverse student"]["seconds"][epoch - 1 :]
    found = {key: statistics.median(values) for key, values in seconds.items()}
    first = min(
        chosen.student.steps, round(FIT_SHARE * rounds[0]["good"] / chosen.student.batch_size)
    )
    dual = chosen.dual_gp.steps * found["dual_gp"]
    student = first * found["student_first"]
    student += (chosen.student.steps - first) * found["student_again"]
    return found | {"minutes_dual_gp": dual / 60, "minutes_student": student / 60,
                    "minutes": (dual + student) / 60}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="as for `cdgp train`")
    parser.add_argument("--against", type=Path, help="src folder of another version")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.data, given.threads)))
        return
    sources = {"this": Path(__file__).parents[2]}
    if given.against:
        sources["other"] = given.against
    turns = {
        name: partial(in_process_of, source, given.data, given.threads)
        for name, source in sources.items()
    }
    record = compared(alternate(turns, given.rounds, warm_ups=0), given.threads)
    write_text(OUT, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def compared(rounds: dict[str, list[dict[str, Any]]], threads: int) -> dict[str, Any]:
    """What the result file holds: medians of each version and, of two, their ratio."""
    chosen = settings("lite")
    record: dict[str, Any] = {"machine": machine() | {"threads": threads}}
    for name, results in rounds.items():
        record[name] = medians(results, chosen) | {
            f"losses_{key}": results[0][key]["losses"] for key in STEPS
        }
    if "other" in record:
        this, other = record["this"], record["other"]
        record["ratio"] = {
            key: other[key] / this[key] for key in this if not key.startswith("losses")
        }
        record["largest_difference"] = max(
            abs(a - b)
            for key in STEPS
            for a, b in zip(this[f"losses_{key}"], other[f"losses_{key}"], strict=True)
        )
    return record


if __name__ == "__main__":
    main()
