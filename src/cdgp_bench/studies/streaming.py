"""Peak memory and time per 1,000 images of `cdgp predict`, at growing numbers of images.

    python benchmarks/stream.py [--counts 1000 5000 20000] [--out runs/stream]

Trains a small model on made surfaces, makes as many images as the largest count, and predicts the
first of them in processes of their own, overlays and report included. Writes
docs/results/stream.jsonl: one row a count, with the largest resident memory of the process.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

from cdgp.presets import settings
from cdgp.progress import Bars
from cdgp.workflows import train_run as fit
from cdgp_bench.measure.complexity import machine
from cdgp_bench.run import write_rows
from cdgp_bench.synthetic import make_dataset, make_surface

OUT = Path("docs/results/stream.jsonl")
SIZE = (80, 96)
SMALL = (
    "import resource, subprocess, sys\n"
    "subprocess.run(sys.argv[1:], check=True)\n"
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 5000, 20_000])
    parser.add_argument("--out", type=Path, default=Path("runs/stream"))
    arguments = parser.parse_args()
    out: Path = arguments.out
    shutil.rmtree(out, ignore_errors=True)
    make_dataset(out / "surfaces")
    chosen = settings(
        "lite", input_size=(64, 64), dual_gp={"steps": 20, "no_separation": "flag"},
        student={"steps": 20},
    )  # fmt: skip
    fit(out / "surfaces", out / "run", chosen, progress=Bars())
    made = make_images(out / "pictures", max(arguments.counts))
    rows = []
    for count in sorted(arguments.counts):
        folder, result = out / f"images-{count}", out / f"result-{count}"
        folder.mkdir()
        for path in made[:count]:  # one flat folder, the hardest for a list of names
            os.link(path, folder / path.name)
        seconds, peak = measured(["predict", out / "run", folder, "--out", result, "--quiet"])
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
            Image.fromarray(np.rint(image * 255).astype(np.uint8)).save(path)
            made.append(path)
            advance()
    return made


def measured(arguments: list[object]) -> tuple[float, int]:
    """Seconds and the largest resident memory, in KiB, of one command.

    Started by a small process: what a child takes over from a large one counts as its own peak.
    """
    command = [sys.executable, "-m", "cdgp.cli.main", *map(str, arguments)]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SMALL, *command], stdout=subprocess.PIPE, text=True, check=True
    )
    return time.monotonic() - began, int(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
