"""The commands ``cdgp benchmark`` and ``cdgp bench-latency``.

``cdgp`` finds them by the entry points ``cdgp.commands``; each imports what it needs when it runs.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdgp.cli.common import bars, handle_errors, say, warn

if TYPE_CHECKING:
    from cdgp_bench.plan import Plan
    from cdgp_bench.run import Engine


@handle_errors
def benchmark(
    plan: Annotated[
        str, typer.Argument(help="Name of a ready plan (see --list), or a .toml file.")
    ] = "",
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of rows, tables and figures; runs/PLAN.")
    ] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder of trained stages; OUT/checkpoints.")
    ] = None,
    reuse: Annotated[
        list[Path] | None,
        typer.Option(help="Folder or rows of another run, taken over where they fit."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Backbone weights, a .safetensors file; the preset's own.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Compute several rows at the same time on Ray: on the cluster at HOST:PORT, or "
            "where nothing follows, at RAY_ADDRESS or else on this machine.",
            metavar="[ADDRESS]",
        ),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Name the ready plans.")] = False,
    quiet: Annotated[
        bool, typer.Option(help="Nothing but errors and where the results are.")
    ] = False,
) -> None:
    """Run methods, controls and sweeps over data sets; render the tables and figures.

    Finished rows stay: the same command goes on where it was stopped, and renders again. Plans
    name their data by the environment variable CDGP_DATA. With --ray several rows are computed at
    the same time; set OMP_NUM_THREADS to the threads of each.

    Examples:

      cdgp benchmark smoke

      CDGP_DATA=/data cdgp benchmark paper-visa --out runs/visa

      cdgp benchmark my_plan.toml

      OMP_NUM_THREADS=1 cdgp benchmark my_plan.toml --ray
    """
    from cdgp_bench.page import render
    from cdgp_bench.rows import run_name
    from cdgp_bench.run import Place, held, run_plan

    chosen = _chosen_plan(plan, weights, show_list)
    if chosen is None:
        return
    known = _row_files(reuse or [])
    folder = out_folder or Path("runs") / chosen.name
    lines = (lambda line: None) if quiet else say
    place = Place(folder, checkpoints or folder / "checkpoints", bars(quiet), lines)
    with held(folder):
        outcome = run_plan(chosen, place, known, _engine(ray))
        page = render(chosen, outcome.rows, outcome.costs, folder, outcome.failed)
    say(f"tables and figures: {page}")
    for row in outcome.failed:
        warn(f"failed: {run_name(row)}: {row['reason']}", error=True)
    if outcome.failed:
        warn(f"{len(outcome.failed)} runs failed; the same command tries them again", error=True)
        raise typer.Exit(1)


def _chosen_plan(name: str, weights: Path | None, show_list: bool) -> "Plan | None":
    """The plan, with the given weights; None where the ready plans were listed instead."""
    from cdgp.errors import SettingsError
    from cdgp.presets import merged
    from cdgp_bench.plan import read_plan, ready_plans, required_packages

    if show_list or not name:
        for ready in ready_plans():
            say(f"{ready:<18}{read_plan(ready).title}")
        if not show_list:
            raise SettingsError("name a plan, for example: cdgp benchmark smoke")
        return None
    plan = read_plan(name)
    _require("benchmark", required_packages(plan))
    if weights is None:
        return plan
    changes = merged(plan.settings, {"backbone": {"weights": str(weights)}})
    return plan.model_copy(update={"settings": changes})


def _engine(address: str | None) -> "Engine":
    """What computes the rows: this process, or Ray where an address is given, or an empty one."""
    from cdgp_bench.run import one_by_one

    if address is None:
        return one_by_one
    from cdgp_bench.on_ray import on_ray

    return on_ray(address)


def _row_files(reuse: list[Path]) -> list[Path]:
    """The files of rows that --reuse names, by themselves or by their folders."""
    from cdgp.errors import SettingsError
    from cdgp_bench.rows import ROWS

    files = [path / ROWS if path.is_dir() else path for path in reuse]
    for path in files:
        if not path.is_file():
            raise SettingsError(f"--reuse {path}: there is no such file")
    return files


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
    import json

    _keep_matplotlib_out_of_home()
    from cdgp.errors import OutputError
    from cdgp.files import write_text
    from cdgp.run_folder import lock
    from cdgp_bench.measure.latency import measure, plot

    _require("bench-latency", ["matplotlib"])
    places = out_folder / "latency.json", out_folder / "latency.png"
    with lock(out_folder, "bench-latency"):
        for place in places:
            if place.exists() and not overwrite:
                raise OutputError(f"{place}: exists; choose another --out or give --overwrite")
        found = measure(models, threads, runs, bars(quiet))
        write_text(places[0], json.dumps(found, indent=1) + "\n")
        plot(found, places[1])
    _print_latency(found["files"])
    say(f"written: {places[0]}, {places[1]}")


def _print_latency(files: list[dict[str, Any]]) -> None:
    """A line a file, each against the first."""
    first = files[0]["latency_ms"]["median"]
    say(f"{'runtime':<12}{'precision':<10}{'÷ first':>8}{'median':>10}{'p95':>10}"
        f"{'images/s':>12}{'peak':>10}{'start':>8}")  # fmt: skip
    for facts in files:
        latency = facts["latency_ms"]
        batch, rate = max(facts["throughput"].items(), key=lambda item: item[1])
        memory = facts["peak_memory_mib"]
        say(
            f"{facts['runtime']:<12}{facts['precision']:<10}{latency['median'] / first:>8.2f}"
            f"{latency['median']:>7.1f} ms{latency['p95']:>7.1f} ms{f'{rate:.1f} (b {batch})':>12}"
            f"{f'{memory:.0f} MiB' if memory else '–':>10}{facts['cold_start_s']:>6.1f} s"
            f"  {facts['file']}"
        )


def _keep_matplotlib_out_of_home() -> None:
    """Let it keep its list of fonts in a folder that goes with the process; before its import."""
    import atexit
    import os
    import shutil
    import tempfile

    if "MPLCONFIGDIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="cdgp-matplotlib-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["MPLCONFIGDIR"] = folder


def _require(command: str, packages: list[str]) -> None:
    """Check the packages of the extra `bench`, before hours of work."""
    from importlib.metadata import PackageNotFoundError, distribution

    from cdgp.errors import SettingsError

    missing = []
    for name in packages:
        try:
            distribution(name)
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        raise SettingsError(
            f"{command} needs {', '.join(missing)}: pip install 'cdgp[bench]', or in a clone "
            "pip install -e '.[bench]'"
        )
