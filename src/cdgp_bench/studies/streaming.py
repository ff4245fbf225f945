"""Peak memory and time per 1,000 images of `cdgp predict`, at growing numbers of images.

    python -m cdgp_bench.studies.streaming [--counts 1000 5000 20000] [--out runs/streaming]

Trains a small model on synthetic surfaces, makes as many images as the largest count, and predicts
the first of them in processes of their own, overlays and report included. Writes
docs/results/stream.jsonl: one row a count, with the largest resident memory of the process.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cdgp.presets import settings
from cdgp.progress import Bars
from cdgp.workflows import train_run
from cdgp_bench.measure.harness import CommandCost, command_cost, machine
from cdgp_bench.rows import write_rows
from cdgp_bench.synthetic import make_dataset, make_surface, save

OUT = Path("docs/results/stream.jsonl")
SIZE = (80, 96)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 5000, 20_000])
    parser.add_argument("--out", type=Path, default=Path("runs/streaming"))
    arguments = parser.parse_args()
    out: Path = arguments.out
    shutil.rmtree(out, ignore_errors=True)
    make_dataset(out / "surfaces")
    chosen = settings(
        "lite", input_size=(64, 64), dual_gp={"steps": 20, "no_separation": "flag"},
        student={"steps": 20},
    )  # fmt: skip
    train_run(out / "surfaces", out / "run", chosen, progress=Bars())
    made = make_images(out / "pictures", max(arguments.counts))
    rows = []
    for count in sorted(arguments.counts):
        folder, result = out / f"images-{count}", out / f"result-{count}"
        folder.mkdir()
        for path in made[:count]:  # one flat folder, the hardest case for a list of names
            os.link(path, folder / path.name)
        seconds, peak = cost_of(["predict", out / "run", folder, "--out", result, "--quiet"])
        rows.append({
            "pictures": count, "peak_mib": round(peak / 1024, 1),
            "seconds_a_1000": round(1000 * seconds / count, 2), "size": list(SIZE),
            "input_size": list(chosen.input_size), "machine": machine(),
        })  # fmt: skip
        print(rows[-1], flush=True)
        shutil.rmtree(result)
    write_rows(OUT, rows)


def make_images(folder: Path, count: int) -> list[Path]:
    """Different images: one surface, shifted and lightened."""
    folder.mkdir()
    made = []
    base = make_surface(SIZE, np.random.default_rng(0))
    with Bars().phase("Making images", count) as advance:
        for i in range(count):
            image = np.roll(base, (i % 80, i // 80 % 96), (0, 1)) * (0.8 + 0.2 * (i % 7) / 7)
            path = folder / f"{i:06d}.png"
            save(path, image)
            made.append(path)
            advance()
    return made


def cost_of(arguments: Sequence[object]) -> CommandCost:
    """Seconds and peak memory of a ``cdgp`` command in a process of its own."""
    return command_cost([sys.executable, "-m", "cdgp.cli.main", *map(str, arguments)])


if __name__ == "__main__":
    main()
