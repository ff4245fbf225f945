"""The command line; commands import what they need when they run, so that help is fast."""

from typing import Annotated

import typer

from cdgp.cli.check import check
from cdgp.cli.common import (
    INTERRUPTED,
    escape_unprintable,
    handle_errors,
    say,
    show_warnings,
)
from cdgp.cli.demo import demo
from cdgp.cli.evaluate import evaluate
from cdgp.cli.export import export
from cdgp.cli.predict import WithAddress, predict
from cdgp.cli.station import station
from cdgp.cli.train import train
from cdgp.errors import SettingsError

COMMANDS = "cdgp.commands"
"""Entry-point group of the commands that other packages have: name = "module:function"."""
FURTHER = {
    "benchmark": "Compare methods and settings on data sets.",
    "bench-latency": "Measure what a prediction costs.",
}
"""Those commands with their line of help; the entry point is looked up only when one is called."""

HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="cdgp",
    help="Defect detection and localisation learnt from two bins of images, good and defective.",
    epilog="Start with: cdgp demo. Then: cdgp train FOLDER --out runs/mine",
    no_args_is_help=True,
    rich_markup_mode=None,  # with boxes, help would take three times as long
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings=HELP,
)
app.command()(check)
app.command()(train)
app.command(cls=WithAddress)(predict)
app.command()(evaluate)
app.command()(export)
app.command()(demo)
app.add_typer(station)


def add_further(app: typer.Typer, name: str, summary: str) -> None:
    """Add a command of another package; all its arguments are passed on."""
    passed_on = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

    @app.command(name, help=summary, context_settings=passed_on, add_help_option=False)
    @handle_errors
    def command(context: typer.Context) -> None:
        from importlib.metadata import entry_points

        found = entry_points(group=COMMANDS, name=name)
        if not found:
            raise SettingsError(
                f"{name}: is not installed: pip install 'cdgp[bench]', or in a clone "
                "pip install -e '.[bench]'"
            )
        own = typer.Typer(
            add_completion=False,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings=HELP,
        )
        own.command(name, cls=WithAddress)(found[name].load())
        code = own(context.args, prog_name=f"cdgp {name}", standalone_mode=False)
        raise typer.Exit(code or 0)


for name, summary in FURTHER.items():
    add_further(app, name, summary)


def show_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        from importlib.metadata import version

        say(f"cdgp {version('cdgp')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show version.")
    ] = False,
) -> None:
    """Defect detection and localisation learnt from two bins of images, good and defective."""


def run() -> None:
    """Entry point of the ``cdgp`` command."""
    escape_unprintable()
    show_warnings()
    try:
        app()
    except KeyboardInterrupt:  # before the command handles it
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    run()
