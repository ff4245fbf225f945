"""``cdgp benchmark``: the evidence, from a plan to tables and figures."""

from pathlib import Path
from typing import Annotated

import typer

from cdgp.cli.common import bars, handle_errors, say, warn


@handle_errors
def benchmark(
    plan: Annotated[
        str, typer.Argument(help="Name of a ready plan (see --list), or a .toml file.")
    ] = "",
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of rows, tables and figures; runs/PLAN.")
    ] = None,
    states: Annotated[
        Path | None, typer.Option(help="Folder of trained stages; OUT/states.")
    ] = None,
    reuse: Annotated[
        list[Path] | None,
        typer.Option(help="Folder or rows of another run, taken over where they fit."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Backbone weights, a .safetensors file; the preset's own.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Name the ready plans.")] = False,
    quiet: Annotated[
        bool, typer.Option(help="Nothing but errors and where the results are.")
    ] = False,
) -> None:
    """Run methods, controls and sweeps over data sets; render the tables and figures.

    What is finished stays: the same command goes on where it was stopped, and renders again.
    Plans name their data by the environment variable CDGP_DATA.

    Examples:

      cdgp benchmark smoke

      CDGP_DATA=/data cdgp benchmark paper-visa --out runs/visa

      cdgp benchmark my_plan.toml
    """
    from cdgp.errors import SettingsError
    from cdgp.presets import merged
    from cdgp_bench.page import render
    from cdgp_bench.plan import read_plan, ready_plans, require_packages
    from cdgp_bench.run import ROWS, run_plan
    from cdgp_bench.scoring import cell_name

    if show_list or not plan:
        for name in ready_plans():
            say(f"{name:<18}{read_plan(name).title}")
        if not show_list:
            raise SettingsError("name a plan, for example: cdgp benchmark smoke")
        return
    chosen = read_plan(plan)
    require_packages(chosen)
    if weights is not None:
        changes = merged(chosen.settings, {"backbone": {"weights": str(weights)}})
        chosen = chosen.model_copy(update={"settings": changes})
    known = [path / ROWS if path.is_dir() else path for path in reuse or []]
    for path in known:
        if not path.is_file():
            raise SettingsError(f"--reuse {path}: there is no such file")

    folder = out_folder or Path("runs") / chosen.name
    outcome = run_plan(
        chosen, folder, states or folder / "states", known, bars(quiet),
        say if not quiet else lambda line: None,
    )  # fmt: skip
    page = render(chosen, outcome.rows, outcome.costs, folder, outcome.failed)
    say(f"tables and figures: {page}")
    for row in outcome.failed:
        warn(f"failed: {cell_name(row)}: {row['reason']}", error=True)
    if outcome.failed:
        warn(f"{len(outcome.failed)} cells failed; the same command tries them again", error=True)
        raise typer.Exit(1)
