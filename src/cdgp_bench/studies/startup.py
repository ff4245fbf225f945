"""Time of `cdgp --help` against importing its command-line libraries alone.

    python -m cdgp_bench.studies.startup

Alternating runs of both, medians; writes docs/results/help.json.
"""

import json
import shutil
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from cdgp.files import write_text
from cdgp_bench.measure.harness import alternate, seconds_of

OUT = Path("docs/results/help.json")
RUNS = 21


def main() -> None:
    beside = Path(sys.executable).with_name("cdgp")
    cdgp = str(beside) if beside.exists() else shutil.which("cdgp")
    assert cdgp, "install the package first"
    commands = {"help": [cdgp, "--help"], "imports": [sys.executable, "-c", "import typer, rich"]}
    turns = {
        name: partial(seconds_of, partial(subprocess.run, command, check=True, capture_output=True))
        for name, command in commands.items()
    }
    times = alternate(turns, RUNS, warm_ups=1)
    medians = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "command": "python -m cdgp_bench.studies.startup",
        "runs": RUNS,
        "median_seconds": {name: round(value, 4) for name, value in medians.items()},
        "ratio": round(medians["help"] / medians["imports"], 3),
    }
    text = json.dumps(result, indent=2)
    write_text(OUT, text + "\n")
    print(text)


if __name__ == "__main__":
    main()
