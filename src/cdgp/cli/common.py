"""What the commands share: settings from options, errors to messages, results to files."""

import functools
import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from cdgp.errors import CdgpError, SettingsError

if TYPE_CHECKING:
    from cdgp.evaluation import OnPrediction, ScoredImage
    from cdgp.inference import Detector, Prediction
    from cdgp.presets import PresetName, Settings
    from cdgp.progress import Progress
    from cdgp.report.html import Extra

P = ParamSpec("P")
INTERRUPTED = 130


def say(text: str) -> None:
    """A line on standard output."""
    typer.echo(text)


def warn(text: str, error: bool = False) -> None:
    """A line on standard error, red where it is an error and a terminal shows it."""
    typer.secho(text, err=True, fg="red" if error else None)


def shortened(text: str, most: int = 400) -> str:
    """A text of many file names, cut where it would fill the screen."""
    return text if len(text) <= most else f"{text[:most].rstrip()} …"


def told(command: Callable[P, None]) -> Callable[P, None]:
    """End a command with a sentence and its exit code where we raised an error on purpose."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except CdgpError as error:
            warn(f"error: {error}", error=True)
            raise typer.Exit(error.exit_code) from None
        except OSError as error:  # a full disk, a name too long: no fault of the program's
            warn(f"error: {error.filename or 'files'}: {error.strerror or error}", error=True)
            raise typer.Exit(CdgpError.exit_code) from None
        except KeyboardInterrupt:
            warn(
                "interrupted; what is finished stays: train and predict go on with --resume, "
                "benchmark by itself"
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
    preset: "PresetName | None",
    config: Path | None,
    assignments: Sequence[str],
    options: dict[str, Any],
) -> "Settings":
    """Settings from preset, file, --set and options; the later wins.

    Args:
        preset: the preset, or None for the file's, or `lite`.
        config: a TOML file, or the config.json of an earlier run.
        assignments: the values of --set.
        options: ``section.key`` to value; None means that the option was not given.
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
    from cdgp.progress import Bars, Quiet

    return Quiet() if quiet else Bars()


def writer(folder: Path, detector: "Detector", save_maps: bool) -> "OnPrediction":
    """A function that stores overlay and JSON, and the raw map where asked, of each prediction."""
    import numpy as np

    from cdgp.data.images import read_image
    from cdgp.files import atomic_write, printable, write_text
    from cdgp.report.overlay import output_name, write_overlay

    white_level = detector.settings.data.white_level

    def write(row: "ScoredImage", prediction: "Prediction") -> None:
        name = output_name(row.name)
        image: np.ndarray = read_image(row.path, white_level)
        write_overlay(folder / "overlays" / f"{name}.png", image, prediction,
                      detector.colour_scale)  # fmt: skip
        record = {
            "image": printable(row.name),
            "pred_score": row.pred_score,
            "pred_label": "defective" if row.pred_label else "good",
            "threshold": detector.threshold,
            "size": list(prediction.anomaly_map.shape),
            "regions": [asdict(region) for region in row.regions],
        }
        write_text(folder / "overlays" / f"{name}.json", json.dumps(record, indent=1) + "\n")
        if save_maps:
            with atomic_write(folder / "maps" / f"{name}.npy") as path, path.open("wb") as file:
                np.save(file, prediction.anomaly_map.astype(np.float16))

    return write


def write_results(
    folder: Path,
    detector: "Detector",
    rows: "Collection[ScoredImage]",
    metrics: dict[str, Any] | None,
    computed_on: str,
    extra: "Extra",
) -> None:
    """``scores.csv``, the report, and ``metrics.json`` where there are metrics."""
    from cdgp.evaluation import write_scores
    from cdgp.files import write_text
    from cdgp.report.html import write_report

    write_scores(folder / "scores.csv", rows)
    if metrics is not None:
        write_text(folder / "metrics.json", json.dumps(metrics, indent=2) + "\n")
    write_report(
        folder / "report.html",
        title=folder.name,
        detector=detector,
        rows=rows,
        metrics=metrics,
        computed_on=computed_on,
        extra=extra,
    )


def show_metrics(metrics: dict[str, Any], computed_on: str) -> None:
    """A small table of the metrics on standard output."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"On {escape(computed_on)}", title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for key in ("image_auroc", "pixel_auroc", "pixel_aupro_30", "pixel_aupro_05",
                "expected_calibration_error", "overkill", "escape"):  # fmt: skip
        value = metrics.get(key)
        text = (
            f"{value:.4f}"
            if value is not None
            else f"– ({escape(metrics.get(f'{key}_reason', ''))})"
        )
        table.add_row(key, text)
    Console(highlight=False).print(table)
    for note, names in metrics.get("notes", {}).items():
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        warn(f"note: {note.replace('_', ' ')}: {shown}")


def hint_at_gpu(preset: str | None, config: Path | None) -> None:
    """Where a GPU is present and no preset was named, say that there is a larger one."""
    import torch

    if preset is None and config is None and torch.cuda.is_available():
        warn("hint: this machine has a GPU; --preset paper trains the paper's larger network")


def make_folder(
    folder: Path, overwrite: bool, read: Iterable[Path], resume: str | None = None
) -> None:
    """An output folder that is new or empty, or freed of earlier results where told to.

    Args:
        folder: to make.
        overwrite: whether earlier results may be replaced.
        resume: name of the file that unfinished results have, which ``--resume`` goes on with.
        read: what is about to be read, and must not lie where results are replaced.

    Raises:
        OutputError: it holds something else, or cannot be written.
    """
    from cdgp.errors import OutputError
    from cdgp.files import RESULT_FOLDERS, check_not_replaced, remove_results

    check_not_replaced(folder, RESULT_FOLDERS, read)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            return
        if (folder / "config.json").exists() or (folder / "model.safetensors").exists():
            raise OutputError(f"{folder}: is the folder of a training run; choose another --out")
        if not overwrite:
            unfinished = resume is not None and (folder / resume).exists()
            more = ", go on with what is unfinished there with --resume," if unfinished else ""
            raise OutputError(
                f"{folder}: exists and is not empty; choose another --out{more} or give --overwrite"
            )
        if not any((folder / name).exists() for name in ("scores.csv", resume or "scores.csv")):
            raise OutputError(
                f"{folder}: holds no scores.csv, so it is no earlier result to replace; choose "
                "another --out"
            )
        remove_results(folder)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror}") from error


def escape_unprintable() -> None:
    """Names that the terminal cannot show are escaped instead of stopping the program."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="backslashreplace")
