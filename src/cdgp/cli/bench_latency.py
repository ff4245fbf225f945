"""``cdgp bench-latency``: what one prediction costs, in each runtime."""

import json
from pathlib import Path
from typing import Annotated

import typer

from cdgp.cli.common import bars, handle_errors, say


@handle_errors
def bench_latency(
    models: Annotated[
        list[Path], typer.Argument(help="Runs, model files and exported files, to compare.")
    ],
    out_folder: Annotated[Path, typer.Option("--out", help="Folder for latency.json and .png.")],
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of each runtime; its own choice if not given."),
    ] = None,
    runs: Annotated[int, typer.Option(min=3, help="Timed runs of each, taking turns.")] = 50,
    overwrite: Annotated[bool, typer.Option(help="Replace the files in --out.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress bars.")] = False,
) -> None:
    """Measure latency, throughput, memory and cold start, side by side.

    Each file runs in a process of its own and single runs take turns. Writes latency.json and
    latency.png; keep the machine free of other work meanwhile.

    Examples:

      cdgp bench-latency runs/parts parts.onnx parts.xml --threads 2 --out runs/latency
    """
    from cdgp.errors import OutputError, SettingsError
    from cdgp.files import write_text
    from cdgp_bench.measure.latency import measure, plot
    from cdgp_bench.plan import installed

    if not installed("matplotlib"):
        raise SettingsError(
            "bench-latency needs matplotlib: pip install 'cdgp[bench]', or in a clone "
            "pip install -e '.[bench]'"
        )
    places = out_folder / "latency.json", out_folder / "latency.png"
    for place in places:
        if place.exists() and not overwrite:
            raise OutputError(f"{place}: exists; choose another --out or give --overwrite")
    try:
        out_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{out_folder}: cannot be written: {error.strerror}") from error
    found = measure(models, threads, runs, bars(quiet))
    write_text(places[0], json.dumps(found, indent=1) + "\n")
    plot(found, places[1])
    first = found["files"][0]["latency_ms"]["median"]
    say(f"{'runtime':<12}{'precision':<10}{'÷ first':>8}{'median':>10}{'p95':>10}"
        f"{'images/s':>12}{'peak':>10}{'start':>8}")  # fmt: skip
    for facts in found["files"]:
        told_ms = facts["latency_ms"]
        batch, rate = max(facts["throughput"].items(), key=lambda item: item[1])
        memory = facts["peak_memory_mib"]
        say(
            f"{facts['runtime']:<12}{facts['precision']:<10}{told_ms['median'] / first:>8.2f}"
            f"{told_ms['median']:>7.1f} ms{told_ms['p95']:>7.1f} ms{f'{rate:.1f} (b {batch})':>12}"
            f"{f'{memory:.0f} MiB' if memory else '–':>10}{facts['cold_start_s']:>6.1f} s"
            f"  {facts['file']}"
        )
    say(f"written: {places[0]}, {places[1]}")
