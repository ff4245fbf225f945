"""The first ten steps of both stages: losses and time by number of devices and by precision.

    python -m cdgp_bench.studies.devices [--input-size 256] [--rates 1e-3 3e-3] [--out FILE]

Every variant trains on the same synthetic surfaces with the defaults of `lite`, in processes of its
own. ``one, two threads`` shows what another order of summation does to one process. ``--rates`` are
the learning rates of the two stages.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cdgp.data.manifest import WeakSplit
from cdgp.files import write_text
from cdgp.presets import PRESETS, Settings, settings
from cdgp.progress import Quiet
from cdgp.training import loop
from cdgp.training.context import TrainingContext, new_context
from cdgp.training.fit import train_stages_of_run
from cdgp.training.processes import run_on_devices
from cdgp.workflows.train import prepare_manifest
from cdgp_bench.measure.harness import machine
from cdgp_bench.synthetic import make_dataset

OUT = Path("docs/results/devices.json")
STEPS = 10
STAGES = ("Dual GP", "Reverse student")
VARIANTS = {
    "one": (1, 1, "float32"),
    "two": (2, 1, "float32"),
    "one, two threads": (1, 2, "float32"),
    "one, bfloat16": (1, 1, "bfloat16"),
}
"""Processes, threads of each, and precision."""


def every_step(context: TrainingContext, data: WeakSplit, chosen: Settings, threads: int) -> None:
    """Train both stages, log each step, and the processor time of this process at each one."""
    torch.set_num_threads(threads)
    loop.LOG_EVERY = 1
    began = time.process_time()
    log = context.log

    def timed(record: Any) -> None:
        log({**record, "cpu": time.process_time() - began, "at": time.monotonic()})

    train_stages_of_run(replace(context, log=timed), data, chosen)


def measured(data: WeakSplit, chosen: Settings, devices: int, threads: int) -> dict[str, Any]:
    """Losses; seconds a step after the first: of the clock, and of the first process's CPU."""
    records: list[dict[str, Any]] = []
    context = replace(
        new_context(None, None, Quiet(), devices), log=lambda r: records.append(dict(r))
    )
    run_on_devices(every_step, context, data, chosen, threads)
    found: dict[str, Any] = {}
    for stage in STAGES:
        steps = [r for r in records if r["stage"] == stage and "loss" in r]
        found[stage] = {
            "losses": [r["loss"] for r in steps],
            **{name: round((steps[-1][key] - steps[0][key]) / (len(steps) - 1), 3)
               for name, key in (("seconds", "at"), ("cpu_seconds", "cpu"))},
        }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--input-size", type=int, default=256)
    parser.add_argument("--rates", type=float, nargs=2, default=[
        PRESETS["lite"][stage]["learning_rate"] for stage in ("dual_gp", "student")
    ])  # fmt: skip
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    rates = [{"steps": STEPS, "learning_rate": rate} for rate in given.rates]
    record: dict[str, Any] = {
        "machine": machine(), "input_size": given.input_size, "rates": given.rates,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        surfaces = make_dataset(Path(folder), size=(given.input_size, given.input_size))
        for name, (devices, threads, precision) in VARIANTS.items():
            chosen = settings(
                "lite", input_size=(given.input_size, given.input_size),
                dual_gp={**rates[0], "no_separation": "flag"}, student=rates[1],
                training={"precision": precision},
            )  # fmt: skip
            manifest, _ = prepare_manifest(surfaces, chosen, Quiet())
            record[name] = measured(manifest.weak_split(), chosen, devices, threads)
    for name in VARIANTS:
        for stage in STAGES:
            pairs = zip(record[name][stage]["losses"], record["one"][stage]["losses"], strict=True)
            record[name][stage]["off"] = [round(abs(a - b), 6) for a, b in pairs]
    write_text(given.out, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
