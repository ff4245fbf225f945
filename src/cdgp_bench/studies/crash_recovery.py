"""Kill training and prediction at random moments; what is finished must equal an unbroken run.

    python benchmarks/kills.py [--kills 20] [--out runs/kills]

Trains and predicts on made surfaces in processes of their own that get SIGKILL after a random time,
each going on with --resume until it ends. Compares every tensor of the model, the log's losses, and
every score, overlay and JSON file, byte by byte. Prints a Markdown table.
"""

import argparse
import csv
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

from cdgp_bench.synthetic import make_dataset

CDGP = [sys.executable, "-m", "cdgp.cli.main"]
OPTIONS = ["--input-size", "64", "--set", "dual_gp.steps=60", "--set", "dual_gp.batch_size=4",
           "--set", "student.steps=60", "--set", "student.batch_size=2",
           "--set", "inducing.normal=16", "--set", "inducing.anomaly=8",
           "--set", "dual_gp.no_separation=flag", "--quiet"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/kills"))
    parser.add_argument("--only", choices=("train", "predict"))
    arguments = parser.parse_args()
    out: Path = arguments.out
    shutil.rmtree(out, ignore_errors=True)
    make_dataset(out / "surfaces")
    make_dataset(out / "many", good=150, defective=50, seed=1)
    train = [*CDGP, "train", str(out / "surfaces/manifest.csv"), *OPTIONS, "--out"]
    predict = [*CDGP, "predict", str(out / "train-whole"), str(out / "many/good"),
               str(out / "many/defective"), "--quiet", "--save-maps", "--out"]  # fmt: skip
    print("| command | kills | when, in seconds after its start | differences |\n|---|---|---|---|")
    for name, command in (("train", train), ("predict", predict)):
        whole = out / f"{name}-whole"
        if arguments.only == "predict" and name == "train":
            run([*command, str(whole)])  # the model that predicts
        if arguments.only not in (None, name):
            continue
        took = run([*command, str(whole)])
        times, number = [], 0
        rng = random.Random(0)
        differences: list[str] = []
        while len(times) < arguments.kills:
            number += 1
            folder = out / f"{name}-{number}"
            # A new run is killed up to four times on its way, and must still come out the same.
            for _ in range(4):
                if len(times) == arguments.kills:
                    break
                after = rng.uniform(0.2, took)
                if killed([*command, str(folder), *resumed(folder, name)], after):
                    times.append(after)
                else:
                    break
            while not finished(folder, name):
                run([*command, str(folder), *resumed(folder, name)])
            differences += compared(whole, folder)
        moments = ", ".join(f"{t:.1f}" for t in times)
        print(f"| {name} ({took:.0f} s) | {len(times)} in {number} runs | {moments} | "
              f"{'; '.join(differences) or 'none'} |", flush=True)  # fmt: skip


def resumed(folder: Path, name: str) -> list[str]:
    """--resume where there is something to go on with; else what a person would type."""
    sign = "config.json" if name == "train" else "unfinished.sqlite"
    if (folder / sign).exists():
        return ["--resume"]
    return ["--overwrite"] if folder.exists() and any(folder.iterdir()) else []


def finished(folder: Path, name: str) -> bool:
    """Whether the report, the last thing that is written, is there and nothing is unfinished."""
    done = (folder / "report.html").is_file()
    return done and (name == "train" or not (folder / "unfinished.sqlite").exists())


def run(command: list[str]) -> float:
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return time.monotonic() - began


def killed(command: list[str], after: float) -> bool:
    """Start, wait, kill; False where it had ended by itself."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: {process.returncode}\n{process.stderr.read()}")
    return False


def compared(whole: Path, folder: Path) -> list[str]:
    """What differs between an unbroken run and a resumed one."""
    found = []
    if (whole / "model.safetensors").exists():
        a, b = (load_file(place / "model.safetensors") for place in (whole, folder))
        found += [f"{folder.name}: tensor {key}" for key in a if not a[key].equal(b[key])]
        losses = [
            {(r["stage"], r["step"]): r["loss"] for r in map(json.loads, lines) if "loss" in r}
            for lines in ((p / "log.jsonl").read_text().splitlines() for p in (whole, folder))
        ]
        found += [f"{folder.name}: losses"] if losses[0] != losses[1] else []
    tables = [list(csv.reader((place / "scores.csv").open())) for place in (whole, folder)]
    found += [f"{folder.name}: scores.csv"] if tables[0] != tables[1] else []
    names = {p.relative_to(whole) for part in ("overlays", "maps")
             for p in (whole / part).rglob("*") if p.is_file()}  # fmt: skip
    for name in sorted(names):
        if (whole / name).read_bytes() != (folder / name).read_bytes():
            found.append(f"{folder.name}: {name}")
    left = [p for p in folder.rglob(".*") if p.is_file()]
    return found + [f"{folder.name}: left behind {p.name}" for p in left]


if __name__ == "__main__":
    main()
