"""Time of `cdgp --help` against importing its command-line libraries alone.

    python benchmarks/help.py

Alternating runs of both, medians; writes docs/results/help.json.
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 21


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    beside = Path(sys.executable).with_name("cdgp")
    cdgp = str(beside) if beside.exists() else shutil.which("cdgp")
    assert cdgp, "install the package first"
    commands = {"help": [cdgp, "--help"], "imports": [sys.executable, "-c", "import typer, rich"]}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(RUNS + 1):
        for name, command in commands.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    result = {
        "command": "python benchmarks/help.py",
        "runs": RUNS,
        "median_seconds": {name: round(value, 4) for name, value in medians.items()},
        "ratio": round(medians["help"] / medians["imports"], 3),
    }
    text = json.dumps(result, indent=2)
    Path("docs/results/help.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
