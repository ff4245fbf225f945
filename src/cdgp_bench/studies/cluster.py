"""Scoring on Ray: what it costs beside a plain loop, what kills cost, what a driver needs.

    python -m cdgp_bench.studies.cluster MODEL IMAGES [--count 2000] [--kills 20] [--paths 1000000]
        [--only cost|kills|many]

MODEL is an exported file, IMAGES a folder. Writes docs/results/cluster.json: processor time of an
image in a plain loop of `Detector.predict` and in Ray's workers, in alternating turns; the seconds
of shards; rows after random SIGKILLs of workers and of the driver, beside those of an undisturbed
job; and the driver's peak memory for a list of many paths that lead nowhere, which cost the driver
the same as images.
"""

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from cdgp.cluster import engine, job, predict_on_ray
from cdgp.cluster.scorer import Facts, Piece, Scorer, Tally
from cdgp.data.walk import Search, walk_images
from cdgp.files import write_text
from cdgp.inference import load
from cdgp_bench.measure import harness

OUT = Path("docs/results/cluster.json")
ROUNDS = 3
KILLED_SHARD = 64
"""Images of a shard where workers and drivers are killed."""
KILLS_A_JOB = 7
DRIVERS = 0.25
"""Share of the kills that hit the driver."""


class Noting(Scorer):
    """Notes when each piece began and ended, and the processor time of its process, in a file."""

    def load(self) -> Facts:
        facts = super().load()
        self._note("loaded", "")
        return facts

    def score(self, piece: Piece) -> Tally:
        self._note("began", piece.name)
        found = super().score(piece)
        self._note("ended", piece.name)
        return found

    def _note(self, event: str, piece: str) -> None:
        facts = {"event": event, "piece": piece, "pid": os.getpid(), "at": time.time(),
                 "cpu": time.process_time()}  # fmt: skip
        with Path(f"{self.out.place}.notes").open("a") as file:
            file.write(json.dumps(facts) + "\n")


def drive(model: str, images: str, out: str, actors: str, shard: str, resume: str) -> None:
    """A job in this process; prints what it needed as JSON."""
    job.SHARDS = (int(shard),)
    engine.Scorer = Noting  # type: ignore[attr-defined]
    began = time.time()
    done = predict_on_ray(model, images, out, actors=int(actors), resume=bool(resume))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    # Not ru_maxrss: that of a process begins with its parent's.
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmHWM"))  # fmt: skip
    print(json.dumps({
        "images": done.images, "skipped": done.skipped, "ended": done.ended,
        "seconds": time.time() - began, "peak_mib": int(peak.split()[1]) / 1024,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }))  # fmt: skip


def driver(*arguments: object) -> subprocess.Popen[str]:
    """A process that drives a job; arguments as ``drive`` takes them."""
    call = "import sys; from cdgp_bench.studies.cluster import drive; drive(*sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", call, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def driven(*arguments: object) -> dict[str, Any]:
    """What a job needed that nothing disturbed."""
    process = driver(*arguments)
    text, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the job ended with exit code {process.returncode}")
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def notes(out: Path) -> list[dict[str, Any]]:
    path = Path(f"{out}.notes")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows(out: Path) -> list[dict[str, Any]]:
    """All rows of a job, by their paths."""
    found = [row for path in out.glob("part-*") for row in parquet.read_table(path).to_pylist()]
    return sorted(found, key=lambda row: str(row["path"]))


def looped(model: str, images: str) -> float:
    """Processor seconds of an image in a plain loop, in this process."""
    detector = load(model, threads=1)
    paths = sorted(Path(images).iterdir())
    detector.predict(paths[0])
    began = time.process_time()
    for path in paths:
        detector.predict(path)
    return (time.process_time() - began) / len(paths)


def on_ray(model: Path, images: Path, out: Path, actors: int) -> dict[str, float]:
    """Processor seconds of an image in workers, and seconds of a shard."""
    facts = driven(model, images, out, actors, 512, "")
    cpu = 0.0
    for pid in {note["pid"] for note in notes(out)}:
        own = [note["cpu"] for note in notes(out) if note["pid"] == pid]
        cpu += own[-1] - own[0]
    begun = {n["piece"]: n["at"] for n in notes(out) if n["event"] == "began"}
    took = [n["at"] - begun[n["piece"]] for n in notes(out) if n["event"] == "ended"]
    return {"cpu_s": cpu / facts["images"], "shard_s": median(took), "job_s": facts["seconds"]}


def cost(model: Path, images: Path, folder: Path) -> dict[str, Any]:
    """Turns of a plain loop and of one and two actors."""
    turns = []
    for i in range(ROUNDS):
        plain = harness.in_process(looped, str(model), str(images))
        turn: dict[str, Any] = {"loop_cpu_ms": 1000 * plain}
        for actors in (1, 2):
            found = on_ray(model, images, folder / f"cost-{i}-{actors}", actors)
            turn[f"actors_{actors}"] = {
                "cpu_ms": 1000 * found["cpu_s"], "cpu_over_loop": found["cpu_s"] / plain,
                "shard_of_512_s": found["shard_s"], "job_s": found["job_s"],
            }  # fmt: skip
        print(turn, flush=True)
        turns.append(turn)
    return {
        "images": len(list(images.iterdir())),
        "turns": turns,
        "cpu_over_loop": {
            str(n): median(turn[f"actors_{n}"]["cpu_over_loop"] for turn in turns) for n in (1, 2)
        },
    }


def running(pid: int) -> bool:
    try:
        return "ray::" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def killed(model: Path, images: Path, folder: Path, kills: int) -> dict[str, Any]:
    """Jobs whose workers and drivers get SIGKILL at random moments, beside one that is left."""
    whole = folder / "kills-none"
    driven(model, images, whole, 2, KILLED_SHARD, "")
    expected, rng = rows(whole), random.Random(0)
    jobs: list[dict[str, Any]] = []
    while (before := sum(one["workers"] + one["drivers"] for one in jobs)) < kills:
        out = folder / f"kills-{len(jobs)}"
        hits = Counter[str]()
        most = min(KILLS_A_JOB, kills - before)
        while True:
            process = driver(model, images, out, 2, KILLED_SHARD, "y" if (out / job.JOB).exists()
                             else "")  # fmt: skip
            began = len(notes(out))
            while process.poll() is None:
                time.sleep(rng.uniform(0.2, 1.0))
                workers = sorted({n["pid"] for n in notes(out)[began:] if running(n["pid"])})
                if hits.total() >= most or not workers or process.poll() is not None:
                    continue
                if rng.random() < DRIVERS:
                    process.send_signal(signal.SIGKILL)
                    hits["driver"] += 1
                    break
                os.kill(rng.choice(workers), signal.SIGKILL)
                hits["worker"] += 1
            process.communicate()
            if process.returncode == 0:
                break
            if process.returncode != -signal.SIGKILL:
                raise SystemExit(f"the job ended with exit code {process.returncode}")
        found = rows(out)
        times = Counter(str(row["path"]) for row in found)
        begun = Counter(n["piece"] for n in notes(out) if n["event"] == "began")
        jobs.append({
            "workers": hits["worker"], "drivers": hits["driver"], "rows": len(found),
            "equal": found == expected, "twice": sum(n > 1 for n in times.values()),
            "missing": len({str(r["path"]) for r in expected} - set(times)),
            "shards_begun": begun.total(), "shards": len(begun),
            "redone_at_most": hits["worker"] + 2 * hits["driver"],
        })  # fmt: skip
        print(jobs[-1], flush=True)
    return {"images": len(expected), "shard": KILLED_SHARD, "jobs": jobs}


def many(model: Path, folder: Path, paths: int) -> dict[str, Any]:
    """What a driver needs for a list of many paths."""
    listed, schema = folder / "paths.parquet", pa.schema([("path", pa.string())])
    with parquet.ParquetWriter(listed, schema) as table:
        for start in range(0, paths, 10_000):
            names = [f"/none/line-{i % 7}/2026-11-30/part-{i:09}.png"
                     for i in range(start, min(paths, start + 10_000))]  # fmt: skip
            table.write_table(pa.table([names], schema=schema))
    out = folder / "many"
    facts = driven(model, listed, out, 1, 1024, "")
    shards = sum(1 for note in notes(out) if note["event"] == "ended")
    again = driven(model, listed, out, 1, 1024, "y")
    return {
        "paths": facts["images"], "shards": shards, "driver_peak_mib": facts["peak_mib"],
        "driver_cpu_s": facts["cpu_seconds"], "job_s": facts["seconds"],
        "resumed_peak_mib": again["peak_mib"], "resumed_s": again["seconds"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--paths", type=int, default=1_000_000)
    parser.add_argument("--only", choices=("cost", "kills", "many"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        images = folder / "images"
        images.mkdir()
        there = sorted(walk_images(given.images, Search([given.images], None)))
        for i, path in enumerate(islice(cycle(there), given.count)):
            (images / f"{i:06}{path.suffix}").symlink_to(path.resolve())
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "cost": lambda: cost(given.model, images, folder),
            "kills": lambda: killed(given.model, images, folder, given.kills),
            "many": lambda: many(given.model, folder, given.paths),
        }
        found = json.loads(OUT.read_text()) if OUT.exists() else {}
        for name, part in parts.items():
            if given.only in (None, name):
                found[name] = {"machine": harness.machine(), **part()}
                write_text(OUT, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
