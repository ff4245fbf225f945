"""Crash recovery: kill training and prediction at random moments; the results must not change.

    python -m cdgp_bench.studies.crash_recovery [--kills 20] [--out runs/crash_recovery]

Trains and predicts on synthetic surfaces in processes that get SIGKILL after a random time, and
resumes each until it ends. Compares every tensor of the model, the log's losses, and every score,
overlay and map, byte by byte but for the run id, with an undisturbed run. Prints a Markdown table.
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file

from cdgp_bench.synthetic import make_dataset

CDGP = [sys.executable, "-m", "cdgp.cli.main"]
OPTIONS = ["--input-size", "64", "--set", "dual_gp.steps=60", "--set", "dual_gp.batch_size=4",
           "--set", "student.steps=60", "--set", "student.batch_size=2",
           "--set", "inducing.normal=16", "--set", "inducing.anomaly=8",
           "--set", "dual_gp.no_separation=flag", "--quiet"]  # fmt: skip
RUN_ID = re.compile(rb"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
MOST_KILLS = 4
"""Of one run: it is killed up to so many times, and must still end with the same result."""


class Command(NamedTuple):
    """A command of cdgp that can be resumed."""

    name: str
    arguments: Sequence[str]
    """Of the program; the folder of results follows."""
    begun: str
    """A file in that folder from which the command can go on."""

    def ended(self, folder: Path, after: float | None = None) -> bool:
        """Run it, or kill it after so many seconds; whether it ended by itself."""
        command = [*self.arguments, str(folder), *self.resume(folder)]
        try:  # a timeout sends SIGKILL
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=after
            )
        except subprocess.TimeoutExpired:
            return False
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
        return True

    def resume(self, folder: Path) -> list[str]:
        """--resume where there is something to go on with; else what a person would type."""
        if (folder / self.begun).exists():
            return ["--resume"]
        return ["--overwrite"] if folder.exists() and any(folder.iterdir()) else []

    def finished(self, folder: Path) -> bool:
        """Whether the report, written last, is there and nothing is unfinished."""
        done = (folder / "report.html").is_file()
        return done and (self.name == "train" or not (folder / self.begun).exists())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/crash_recovery"))
    parser.add_argument("--only", choices=("train", "predict"))
    given = parser.parse_args()
    out: Path = given.out
    shutil.rmtree(out, ignore_errors=True)
    make_dataset(out / "surfaces")
    make_dataset(out / "many", good=150, defective=50, seed=1)
    train = [*CDGP, "train", str(out / "surfaces/manifest.csv"), *OPTIONS, "--out"]
    predict = [*CDGP, "predict", str(out / "train-whole"), str(out / "many/good"),
               str(out / "many/defective"), "--quiet", "--save-maps", "--out"]  # fmt: skip
    commands = (Command("train", train, "config.json"),
                Command("predict", predict, "unfinished.sqlite"))  # fmt: skip
    print("| command | kills | when, in seconds after its start | differences |\n|---|---|---|---|")
    for command in commands:
        if given.only in (None, command.name):
            print(disturbed(command, out, given.kills), flush=True)
        elif command.name == "train":
            command.ended(out / "train-whole")  # the model that predicts


def disturbed(command: Command, out: Path, kills: int) -> str:
    """A table row: how a command that is killed differs from one that is not."""
    whole = out / f"{command.name}-whole"
    began = time.monotonic()
    command.ended(whole)
    seconds = time.monotonic() - began
    rng = random.Random(0)
    times: list[float] = []
    differences: list[str] = []
    number = 0
    while len(times) < kills:
        number += 1
        folder = out / f"{command.name}-{number}"
        for _ in range(min(MOST_KILLS, kills - len(times))):
            after = rng.uniform(0.2, seconds)
            if command.ended(folder, after):
                break
            times.append(after)
        while not command.finished(folder):
            command.ended(folder)
        differences += compared(whole, folder)
    moments = ", ".join(f"{t:.1f}" for t in times)
    return (f"| {command.name} ({seconds:.0f} s) | {len(times)} in {number} runs | {moments} | "
            f"{'; '.join(differences) or 'none'} |")  # fmt: skip


def compared(whole: Path, folder: Path) -> list[str]:
    """What differs between an undisturbed run and a resumed one."""
    found = []
    if (whole / "model.safetensors").exists():
        a, b = (load_file(place / "model.safetensors") for place in (whole, folder))
        found += [f"{folder.name}: tensor {key}" for key in a if not a[key].equal(b[key])]
        losses = [
            {(r["stage"], r["step"]): r["loss"] for r in map(json.loads, lines) if "loss" in r}
            for lines in ((p / "log.jsonl").read_text().splitlines() for p in (whole, folder))
        ]
        found += [f"{folder.name}: losses"] if losses[0] != losses[1] else []
    found += [f"{folder.name}: {name}" for name in ("scores.csv", "unreadable.csv")
              if content(whole / name) != content(folder / name)]  # fmt: skip
    names = {p.relative_to(whole) for part in ("overlays", "maps")
             for p in (whole / part).rglob("*") if p.is_file()}  # fmt: skip
    for name in sorted(names):
        if content(whole / name) != content(folder / name):
            found.append(f"{folder.name}: {name}")
    left = [p for p in folder.rglob(".*") if p.is_file()]
    return found + [f"{folder.name}: left behind {p.name}" for p in left]


def content(path: Path) -> bytes:
    """What a file holds, without the run id; nothing where there is none."""
    return RUN_ID.sub(b"RUN", path.read_bytes()) if path.is_file() else b""


if __name__ == "__main__":
    main()
