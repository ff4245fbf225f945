"""Where the time of training goes, its minutes, and whether another version's losses are the same.

    python -m cdgp_bench.studies.training --data DATA
    python -m cdgp_bench.studies.training --data DATA --against OTHER/src --rounds 2

Runs the first steps of both stages of ``lite`` over a few images, whose inputs are in memory
before. In some steps the student's teacher sees an image for the first time, in others again, so
these are two numbers. "minutes" is what the steps of a whole training on all of DATA take at the
median step. "phases" are the medians of making a batch, of the forward pass, and of the rest:
gradients and optimiser. "operations" are torch's, with their share of the time of some more steps.

``--against`` names the ``src`` folder of another version with the same modules; each round then
starts a process for either, in turns. Writes docs/results/training.json.
"""

import argparse
import contextlib
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
from torch import nn
from torch.profiler import ProfilerActivity, profile

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
STEPS = {"Dual GP": 43, "Reverse student": 43}
"""So many steps of each stage are run, the first one and ``WARM_UP`` more without being timed."""
WARM_UP = 2
PROFILED = (10, 14)
"""Steps of a further run that are profiled: the student has seen all images by then."""
SHOWN = 12
"""So many operations are named, those that take most."""
COMPARED = 5
"""So many losses of each stage are recorded and compared."""
FIT_SHARE = 0.64
"""Share of the good images that the student trains on where the manifest names no split."""


class EnoughError(Exception):
    """Ends a stage whose steps have been timed."""


class Clock(Quiet):
    """Records when each step of a stage ended, and stops the stage after some."""

    def __init__(self, steps: int, after: Callable[[int], object] = lambda step: None) -> None:
        self.steps, self.after = steps, after
        self.ends: list[float] = []

    @contextlib.contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Advance]:
        def advance(note: str = "") -> None:
            if name in STEPS:
                self.ends.append(time.perf_counter())
                self.after(len(self.ends))
                if len(self.ends) == self.steps:
                    raise EnoughError

        yield advance


def run(kind: type[nn.Module], train: Callable[[Clock], object], steps: int) -> dict[str, Any]:
    """Losses, seconds and phases of a stage's first steps; its module returns the loss first."""
    losses: list[float] = []
    forwards: list[tuple[float, float]] = []
    forward = kind.forward

    def recording(self: nn.Module, *batch: Any) -> Any:
        began = time.perf_counter()
        loss, diagnostics = forward(self, *batch)
        forwards.append((began, time.perf_counter()))
        if len(losses) < COMPARED:  # reading a later one would wait for the GPU
            losses.append(float(loss.detach()))
        return loss, diagnostics

    clock = Clock(steps)
    with patched(kind, recording), contextlib.suppress(EnoughError):
        train(clock)
    timed = list(zip(clock.ends[:-1], forwards[1:], clock.ends[1:], strict=True))
    return {
        "losses": losses,
        "seconds": [end - start for start, _, end in timed],
        "phases": {
            "batch": [began - start for start, (began, _), _ in timed],
            "forward": [ended - began for _, (began, ended), _ in timed],
            "backward": [end - ended for _, (_, ended), end in timed],
        },
    }


@contextlib.contextmanager
def patched(kind: type[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Within it, modules of a kind have another forward pass."""
    own = kind.forward
    kind.forward = forward
    try:
        yield
    finally:
        kind.forward = own


def operations(train: Callable[[Clock], object]) -> dict[str, float]:
    """The operations that take most of a stage's steps, with their share of the time."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    profiler = profile(activities=activities)
    first, last = PROFILED

    def after(step: int) -> None:
        if step == first:
            profiler.start()

    with contextlib.suppress(EnoughError):
        train(Clock(last, after))
    profiler.stop()
    seconds = {
        event.key: event.self_device_time_total if on_gpu else event.self_cpu_time_total
        for event in profiler.key_averages()
    }
    total = sum(seconds.values())
    most = sorted(seconds, key=seconds.__getitem__, reverse=True)[:SHOWN]
    return {key: round(seconds[key] / total, 4) for key in most}


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

    stages = {"Dual GP": (DualGPTraining, dual), "Reverse student": (StudentTraining, student)}
    found: dict[str, Any] = {"good": sum(not s.defective for s in manifest.samples)}
    for name, (kind, train) in stages.items():
        found[name] = run(kind, train, STEPS[name]) | {"operations": operations(train)}
    return found


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


def phases(stages: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of each phase of a stage's steps, over all rounds."""
    return {
        name: statistics.median(t for stage in stages for t in stage["phases"][name][WARM_UP:])
        for name in stages[0]["phases"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="as for `cdgp train`")
    parser.add_argument("--against", type=Path, help="src folder of another version")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each version")
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
        if name == "this":
            record["phases"] = {key: phases([r[key] for r in results]) for key in STEPS}
            record["operations"] = {key: results[0][key]["operations"] for key in STEPS}
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
