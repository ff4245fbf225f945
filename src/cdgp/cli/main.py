"""The command line. Commands import what they need when they run, so that help comes at once."""

from importlib.metadata import entry_points
from typing import Annotated

import typer

from cdgp.cli.check import check
from cdgp.cli.common import INTERRUPTED, escape_unprintable, say
from cdgp.cli.demo import demo
from cdgp.cli.evaluate import evaluate
from cdgp.cli.export import export
from cdgp.cli.predict import predict
from cdgp.cli.train import train

app = typer.Typer(
    name="cdgp",
    help="Defect detection and localisation learnt from two bins of images, good and defective.",
    epilog="Start with: cdgp demo. Then: cdgp train FOLDER --out runs/mine",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: the boxes would triple the time that help takes
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(check)
app.command()(train)
app.command()(predict)
app.command()(evaluate)
app.command()(export)
app.command()(demo)
for entry in entry_points(group="cdgp.commands"):
    app.command(entry.name)(entry.load())


def show_version(wanted: bool) -> None:
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
    try:
        app()
    except KeyboardInterrupt:  # before the command itself could tell
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    run()
