"""Latency and memory of CDGP beside anomalib's methods, each in its own best exported runtime.

    python -m cdgp_bench.studies.side_by_side [--images 500] [--sessions 2] [--pause]
    python -m cdgp_bench.studies.side_by_side --table

256 x 256, batch one, two threads, `lite` options and backbone (EfficientNet-Lite0) as the adapters
in ``cdgp_bench.methods`` build them, from the image in [0, 1] to the map at 256 x 256 and the
image score; the methods' own upsampling and blur are inside, as CDGP's calibration is. What
decides latency is real, the rest is made up:

- PatchCore's bank holds random features with the real ones' mean and spread, as many as a 10 %
  coreset of IMAGES good images has (the adapter's own `lite` coreset is 1 %);
- PaDiM has one mean at all positions, and random positive definite inverse covariances;
- RD4AD's bottleneck and decoder, SuperSimpleNet's heads and all of EfficientAD-S are untrained;
- CDGP is trained for a few steps on synthetic surfaces, so that its graph is a real one.

Every method is exported in several ways (ONNX by torch's two exporters for onnxruntime, the first
of these and OpenVINO's own conversion for OpenVINO; CDGP by its own `cdgp export` only). A way
counts where its map is that of torch on a real input to 1 % of its range. All that are left are
timed, a clearly slower one only until that shows. The fastest way represents its runtime, and the
fastest runtime its method.

Rounds alternate over all (method, way), in a new order each. Every turn is a process of its own,
and nothing else runs: it loads, is compared with torch, runs WARM_UPS times and then TIMED times
(torch, slow to load, takes every second round and runs twice as often). A turn during which
anything else took more than FOREIGN of the processor is repeated. Peak memory is the resident set
of that process (VmHWM), libraries and loading included. With ``--pause`` every turn, once loaded,
waits for a line on standard input, so that other work on the machine can be stopped for it.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from cdgp.files import write_text
from cdgp_bench.measure.harness import Worker, in_process, machine
from cdgp_bench.studies import markdown_table
from cdgp_bench.studies.exported_methods import (
    METHODS,
    SIDE,
    THREADS,
    TOLERANCE,
    Exported,
    make_inputs,
    prepare,
)

Way = tuple[str, str]
"""A method, and the file that runs it."""
Facts = dict[str, Any]
RUNTIMES = {"onnxruntime": ".onnx", "openvino": ".xml", "torch": "torch"}
"""And the ending of the files that they run."""
WARM_UPS, TIMED = 3, 6
SLOWER = 1.1
"""A way that is slower than another one of its runtime by this factor is not timed any longer."""
FOREIGN, REPEATS = 0.1, 8
"""Share of the processor that others may take during a turn, and how often it is run at most."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/side_by_side"),
                        help="of exported files; remove it to export again")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("docs/results/side_by_side.json"))
    parser.add_argument("--images", type=int, default=500, help="good images of the coreset")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sessions", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--pause", action="store_true", help="wait for a line before each turn")
    parser.add_argument("--table", action="store_true", help="print the result file")
    given = parser.parse_args()
    if not given.table:
        os.environ["OMP_NUM_THREADS"] = str(THREADS)  # of the measuring processes
        measure(given)
    print(table(json.loads(given.out.read_text())))


def measure(given: argparse.Namespace) -> None:
    """Everything, into the result file."""
    folder: Path = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    in_process(make_inputs, folder)
    abouts: dict[str, Facts] = {}
    for name in given.only:
        path = folder / name / "about.json"
        if not path.exists():
            in_process(prepare, name, folder, given.images)
        abouts[name] = json.loads(path.read_text())
    ways = [(name, "torch") for name in abouts] + [
        (name, file)
        for name, about in abouts.items()
        for file, facts in about["exports"].items()
        if facts.get("parity", 1) < TOLERANCE
    ]
    sessions: list[dict[Way, Facts]] = []
    most = given.rounds * TIMED
    for seed in range(given.sessions):
        sessions.append(timed(given, ways, seed))
        ways = [way for way in ways if sessions[-1][way]["runs"] == most]
        write_text(given.out, json.dumps(record(given, abouts, sessions), indent=1) + "\n")


def timed(given: argparse.Namespace, ways: list[Way], seed: int) -> dict[Way, Facts]:
    """All ways alternating: medians, 95 % quantiles, peaks."""
    rng = np.random.default_rng(seed)
    turns: dict[Way, list[Facts]] = {way: [] for way in ways}
    left = list(ways)
    for index in range(given.rounds):
        for place in rng.permutation(len(left)):
            way = left[place]
            if way[1] == "torch" and index % 2:
                continue
            with Worker(Exported, *way, given.folder, given.images) as worker:
                turns[way].append(turn(worker, TIMED * (1 + (way[1] == "torch")), given.pause))
        slow = too_slow(turns, left)
        left = [way for way in left if way not in slow]
        print(f"round {index + 1} of {given.rounds}", flush=True)
    print("ended", flush=True)
    return {way: summary(of_way) for way, of_way in turns.items()}


def turn(worker: Worker, runs: int, pause: bool) -> Facts:
    """Warm-ups and timed runs, repeated while other work disturbs them."""
    facts: Facts = {}
    for again in range(REPEATS):
        if pause:
            print("ready: send a line to start", flush=True)
            sys.stdin.readline()
        before, began = busy(), time.perf_counter()
        facts = worker.call("turn", WARM_UPS, runs)
        passed = (time.perf_counter() - began) * (os.cpu_count() or 1)
        facts["foreign"], facts["again"] = (busy() - before - facts["used"]) / passed, again
        if pause:
            print("timed", flush=True)
        if facts["foreign"] < FOREIGN:
            break
    return facts | {"parity": worker.call("parity")}


def busy() -> float:
    """Seconds that all processors have worked since the machine started."""
    parts = [int(part) for part in Path("/proc/stat").read_text().split("\n")[0].split()[1:8]]
    return (sum(parts) - parts[3] - parts[4]) / os.sysconf("SC_CLK_TCK")


def too_slow(turns: dict[Way, list[Facts]], left: list[Way]) -> list[Way]:
    """The ways, of those left, that another one of the same method and runtime clearly beats."""
    medians = {way: float(np.median([ms for t in turns[way] for ms in t["ms"]])) for way in left}
    best: dict[Way, float] = {}
    for (name, file), median in medians.items():
        runtime = name, Path(file).suffix
        best[runtime] = min(median, best.get(runtime, median))
    return [(n, file) for n, file in left if medians[n, file] > SLOWER * best[n, Path(file).suffix]]


def summary(turns: list[Facts]) -> Facts:
    """Of all turns of one way in a session."""
    every = [ms for turn in turns for ms in turn["ms"]]
    return {
        "median_ms": float(np.median(every)),
        "p95_ms": float(np.percentile(every, 95)),
        "round_medians_ms": [round(float(np.median(turn["ms"])), 3) for turn in turns],
        "runs": len(every),
        "peak_mib": max(turn["peak_mib"] for turn in turns),
        "foreign_cpu_share": max(turn["foreign"] for turn in turns),
        "turns_again": sum(turn["again"] for turn in turns),
        "parity": turns[-1]["parity"],
    }


def record(
    given: argparse.Namespace, abouts: dict[str, Facts], sessions: list[dict[Way, Facts]]
) -> Facts:
    """The result file, from all sessions so far."""
    import torch

    rows = [row_of(name, about, sessions, given.rounds * TIMED) for name, about in abouts.items()]
    own = next((row for row in rows if row["method"] == "cdgp"), rows[0])
    for row in rows:
        for key, runtimes, of in (
            ("latency_ratio", (own["best"], row["best"]), "median_ms"),
            ("memory_ratio", (own["best"], row["best"]), "peak_mib"),
            ("torch_ratio", ("torch", "torch"), "median_ms"),
        ):
            pairs = zip(_sessions(own, runtimes[0]), _sessions(row, runtimes[1]), strict=True)
            row[key] = [a[of] / b[of] for a, b in pairs]
    torch.set_num_threads(THREADS)
    return {
        "command": "python -m cdgp_bench.studies.side_by_side",
        "input": [1, 3, SIDE, SIDE],
        "threads": THREADS,
        "rounds": given.rounds,
        "runs_a_round": TIMED,
        "warm_ups_a_round": WARM_UPS,
        "ratio": "CDGP's median over the method's, each in its best exported runtime; by session",
        "made_up": "PatchCore's bank (random features, 10 % coreset size), PaDiM's statistics; "
        "untrained: RD4AD's decoder, SuperSimpleNet's heads, EfficientAD-S; none of their values "
        "changes the work done",
        "torch_layout": "channels last for CDGP, as its runtime does; as anomalib runs them else",
        "pictures": given.images,
        "versions": {p: version(p) for p in ("anomalib", "onnx", "onnxruntime", "openvino")},
        "machine": machine() | {"cpus": os.cpu_count()},
        "rows": rows,
    }


def row_of(name: str, about: Facts, sessions: list[dict[Way, Facts]], most: int) -> Facts:
    """A method with the fastest file of each runtime; its facts get the times of each export.

    ``most`` is the number of runs of a way that was timed to the end.
    """
    by_file = {file: [s[name, file] for s in sessions if (name, file) in s]
               for of, file in sessions[0] if of == name}  # fmt: skip
    for file, facts in about["exports"].items():
        if file in by_file:
            facts["median_ms"] = [s["median_ms"] for s in by_file[file]]
            facts["runs"] = [s["runs"] for s in by_file[file]]
    means = {  # of ways that were timed to the end
        file: float(np.mean([s["median_ms"] for s in found])) for file, found in by_file.items()
        if len(found) == len(sessions) and all(s["runs"] == most for s in found)
    }  # fmt: skip
    fastest = {}
    for runtime, ending in RUNTIMES.items():
        files = [file for file in means if file.endswith(ending)]
        if files:
            fastest[runtime] = min(files, key=means.__getitem__)
    exported = [runtime for runtime in fastest if runtime != "torch"]
    best = min(exported, key=lambda runtime: means[fastest[runtime]], default="torch")
    runtimes = {r: {"file": file, "sessions": by_file[file]} for r, file in fastest.items()}
    return {"method": name, "title": METHODS[name], **about, "runtimes": runtimes, "best": best}


def _sessions(row: Facts, runtime: str) -> list[Facts]:
    sessions: list[Facts] = row["runtimes"][runtime]["sessions"]
    return sessions


def table(found: Facts) -> str:
    """The result as a Markdown table, ratios first."""

    def each(values: Iterable[float], form: str) -> str:
        return " / ".join(format(value, form) for value in values)

    def of(row: Facts, runtime: str, key: str, form: str) -> str:
        known = runtime in row["runtimes"]
        return each((s[key] for s in _sessions(row, runtime)), form) if known else "–"

    lines = [
        [
            row["title"],
            *(each(row[f"{ratio}_ratio"], ".2f") for ratio in ("latency", "memory", "torch")),
            row["best"],
            f"{of(row, row['best'], 'median_ms', '.1f')} ({of(row, row['best'], 'p95_ms', '.1f')})",
            *(of(row, runtime, "median_ms", ".1f") for runtime in RUNTIMES),
            of(row, row["best"], "peak_mib", ".0f"),
        ]
        for row in found["rows"]
    ]
    head = ["method", "CDGP's latency ÷ its", "CDGP's memory ÷ its", "CDGP's ÷ its in torch",
            "best runtime", "ms (95 %)", "onnxruntime ms", "OpenVINO ms", "torch ms",
            "peak MiB"]  # fmt: skip
    return markdown_table(head, lines)


if __name__ == "__main__":
    main()
