"""What the commands share: errors to messages, options to settings, results on the screen."""

import functools
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from cdgp.errors import CdgpError, SettingsError
from cdgp.files import visible

if TYPE_CHECKING:
    from cdgp.presets import Settings
    from cdgp.progress import Progress
    from cdgp.workflows import Run

P = ParamSpec("P")
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
SHOWN = 5


def say(text: str) -> None:
    """A line on standard output; control characters are escaped."""
    typer.echo(visible(text))


def warn(text: str, error: bool = False) -> None:
    """The same on standard error, red where it is an error and a terminal shows it."""
    typer.secho(visible(text), err=True, fg="red" if error else None)


def handle_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Turn the errors of a command into one message on standard error and an exit code."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except CdgpError as error:
            warn(f"error: {error}", error=True)
            raise typer.Exit(error.exit_code) from None
        except OSError as error:  # a full disk, a name that is too long
            warn(f"error: {error.filename or 'files'}: {error.strerror or error}", error=True)
            raise typer.Exit(CdgpError.exit_code) from None
        except KeyboardInterrupt as stop:
            warn(
                str(stop)
                or "interrupted; finished work is kept: train and predict go on with --resume, "
                "benchmark with the same command"
            )
            raise typer.Exit(INTERRUPTED) from None

    return wrapped


def parse_size(text: str) -> tuple[int, int]:
    """``HxW`` or one number for a square, as (height, width)."""
    sides = text.lower().replace("×", "x").split("x")
    if len(sides) == 1:
        sides *= 2
    if len(sides) != 2 or not all(side.strip().isdecimal() for side in sides):
        raise SettingsError(f"--input-size {text!r}: expected HEIGHTxWIDTH, for example 384x160")
    return int(sides[0]), int(sides[1])


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """``section.key=value`` options as nested mappings; values are read as JSON, else as text."""
    changes: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise SettingsError(
                f"--set {assignment!r}: expected KEY=VALUE, for example dual_gp.steps=200"
            )
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        *sections, key = name.strip().split(".")
        place = changes
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise SettingsError(f"--set {assignment!r}: {section!r} was given a value before")
        place[key] = value
    return changes


def build_settings(
    preset: str | None, config: Path | None, assignments: Sequence[str], options: dict[str, Any]
) -> "Settings":
    """Settings from preset, file, --set and options; the later ones win.

    Args:
        preset: that of the file, or `lite`, where None.
        config: a TOML file, or the config.json of a run.
        assignments: the values of --set.
        options: values by ``section.key``; None where an option was not given.
    """
    from cdgp.presets import merged, read_settings, settings

    changes = parse_assignments(assignments)
    for name, value in options.items():
        if value is not None:
            changes = merged(changes, parse_assignments([f"{name}={json.dumps(value)}"]))
    if preset is not None:
        changes["preset"] = preset
    if config is not None:
        return read_settings(config, **changes)
    return settings(changes.pop("preset", "lite"), **changes)


def bars(quiet: bool) -> "Progress":
    """Progress bars, or nothing."""
    from cdgp.progress import Bars, Quiet

    return Quiet() if quiet else Bars()


def show_run(run: "Run") -> None:
    """The notes, metrics and files of a finished training."""
    from cdgp.run_folder import MODEL, OVERLAYS, REPORT, SUSPECTS

    detector, folder = run.detector, run.folder
    for note in detector.card.image.notes:
        warn(f"note: {note}")
    decision = detector.card.decision
    say(score_line(detector.score_kind, detector.rests_on))
    refers = f"probabilities refer to a line with {decision.refers_to}"
    if decision.is_p_value:
        say(f"called defective: {decision.source}")
    elif detector.settings.decision.defect_rate is None:
        warn(f"note: {refers}; give --defect-rate where the line's own rate is known")
    else:
        say(refers)
    if detector.settings.calibration.tail == "counting" and (
        detector.region_level >= detector.colour_scale[1]
    ):
        warn(
            "note: with so few normal pixels no surprisal can exceed decision.region_level, so no "
            "regions will be reported; raise the level, or use calibration.tail=pareto"
        )
    if run.metrics is not None:
        show_metrics(run.metrics)
    else:
        warn("note: no test images were set aside, so there are no metrics")
    if folder is None:
        return
    say(f"model:    {folder / MODEL}")
    if run.metrics is not None:
        say(f"overlays: {folder / OVERLAYS}")
    if run.suspects:
        say(f"suspect labels: {folder / SUSPECTS}")
    say(f"report:   {folder / REPORT}")


def score_line(kind: str, rests_on: str) -> str:
    """What an image score is and rests on."""
    from cdgp.decision import GOOD_ALONE

    what = "the probability of being defective"
    if kind == "p-value":
        what = "1 - p, where p is the share of good images that look at least as odd"
    beside = "" if rests_on == GOOD_ALONE else " beside good images"
    return f"scores are {what}" + (f", learnt from {rests_on}{beside}" if rests_on else "")


def show_metrics(metrics: dict[str, Any]) -> None:
    """A small table of the metrics, with their notes."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from cdgp.evaluation import interval_text, value_text

    title = escape(visible(metrics["computed_on"]))
    table = Table(title=f"On {title}", title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("interval, or why there is none")
    for key in ("image_auroc", "pixel_auroc", "pixel_aupro_30", "pixel_aupro_05",
                "expected_calibration_error", "overkill", "escape"):  # fmt: skip
        reason = escape(visible(metrics.get(f"{key}_reason", "")))
        table.add_row(key, value_text(metrics, key), reason or interval_text(metrics, key))
    Console(highlight=False).print(table)
    for note, names in metrics.get("notes", {}).items():
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        warn(f"note: {note.replace('_', ' ')}: {', '.join(names[:SHOWN])}{more}")


def hint_at_gpu(preset: str | None, config: Path | None) -> None:
    """Name the larger preset where a GPU is present and no preset was chosen."""
    import torch

    if preset is None and config is None and torch.cuda.is_available():
        warn("hint: this machine has a GPU; --preset paper trains the paper's larger network")


def escape_unprintable() -> None:
    """Escape names that the terminal cannot show, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="backslashreplace")


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def show_warnings() -> None:
    """Show the warnings of the log on standard error; control characters are escaped."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Visible("%(message)s"))
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
