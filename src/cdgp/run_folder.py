"""The folder of a run: every file name, what may be replaced, what resumes.

`cdgp train` leaves a run; `cdgp evaluate`, `predict` and `check` leave results in folders of their
own. Every file is written whole or not at all (see `files.atomic_write`).

| Name                | What it holds                                            | Left by         |
|---------------------|----------------------------------------------------------|-----------------|
| `model.safetensors` | the model: weights, calibration, threshold, settings     | train           |
| `config.json`       | all settings in effect; `cdgp train --config` reads it   | train           |
| `manifest.csv`      | every image: label, masks, group, split, SHA-256         | train           |
| `log.jsonl`         | the training, a JSON record a line: loss, margins        | train           |
| `suspects.csv`      | images by doubt of their label, most doubtful first      | train           |
| `check.json`        | findings on the images: broken, duplicate, leaking       | train, check    |
| `check.html`        | the same as a page, images side by side                  | check           |
| `scores.csv`        | a row an image: probability, decision, regions           | all but check   |
| `metrics.json`      | AUROC, AUPRO, overkill, escape; or why undefined         | train, evaluate |
| `overlays/`         | an image: PNG of its map with boxes, its row as JSON     | all but check   |
| `maps/`             | with `--save-maps`: its map, float16 `.npy`, in nats     | all but check   |
| `report.html`       | all results as one page that needs no other file         | all but check   |
| `unreadable.csv`    | images that could not be read, and why                   | predict         |
| `checkpoints/`      | unfinished training; removed at its end                  | train           |
| `unfinished.sqlite` | unfinished prediction; removed at its end                | predict         |
| `.lock`             | held by the process that works in the folder, see `lock` | benchmark       |

Without a test part, a training leaves no scores, metrics, overlays and maps. `--resume` goes on
from `checkpoints/` or `unfinished.sqlite`. `--overwrite` removes what an earlier run or prediction
has left under these names, `overlays/`, `maps/` and `checkpoints/` with all they hold, and keeps
every other file; `cdgp check --overwrite` replaces its own two files alone.
"""

import csv
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cdgp.errors import DataError, OutputError, SettingsError
from cdgp.files import absolute
from cdgp.presets import Settings, settings_from_json

MODEL = "model.safetensors"
CONFIG = "config.json"
MANIFEST = "manifest.csv"
LOG = "log.jsonl"
SUSPECTS = "suspects.csv"
CHECK = "check.json"
CHECK_PAGE = "check.html"
SCORES = "scores.csv"
METRICS = "metrics.json"
OVERLAYS = "overlays"
MAPS = "maps"
REPORT = "report.html"
UNREADABLE = "unreadable.csv"
CHECKPOINTS = "checkpoints"
LEDGER = "unfinished.sqlite"
LOCK = ".lock"

RESULT_FOLDERS = (OVERLAYS, MAPS)
RESULT_FILES = (
    SCORES, METRICS, REPORT, SUSPECTS, CHECK, UNREADABLE, LEDGER, f"{LEDGER}-journal",
)  # fmt: skip
"""What ``remove_results`` removes, beside the two folders."""
LEFTOVER = re.compile(r"\..+(\.[^.]+)\.[a-z0-9_]{8}\1")
"""How ``atomic_write`` names what it has not finished: .NAME.SUFFIX.12345678.SUFFIX"""
CHANGEABLE = ("decision.", "dual_gp.no_separation", "inference.")
"""Settings that --resume may change before the model is written: no weight depends on them."""


def model_file(path: Path) -> Path:
    """The model file that a path means: itself, or the one in the folder of a run."""
    return path / MODEL if path.is_dir() else path


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's log, none where there is no log; a line that is cut off is skipped."""
    path = folder / LOG
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def trained_on(model: Path) -> set[str]:
    """Pixel digests of the images that a run or its model trained on; empty without a manifest."""
    table = model_file(model).parent / MANIFEST
    if not table.is_file():
        return set()
    # Not read_csv: the images need not be there any more.
    with table.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        rows = [row for row in csv.DictReader(file) if row.get("split") in ("fit", "calibration")]
    return {row["pixel_sha256"] for row in rows if row.get("pixel_sha256")}


# Starting and resuming a run


def check_startable(folder: Path, settings: Settings, resume: bool, overwrite: bool) -> None:
    """Check that a training can start or go on in a folder; changes nothing.

    Raises:
        OutputError: it exists, cannot be written, or holds no run to resume.
        SettingsError: the run to resume was started with other settings.
    """
    check_not_both(resume, overwrite)
    with _output_errors(folder):
        if resume:
            _check_same_settings(folder, settings)
        elif folder.exists() and any(folder.iterdir()) and not overwrite:
            raise OutputError(
                f"{folder}: exists and is not empty; choose another --out, go on with an "
                "interrupted run with --resume, or replace it with --overwrite"
            )
        check_writable(folder, folder)


def check_writable(out: Path, folder: Path) -> None:
    """Raise OutputError where ``out`` cannot be written since its folder cannot be made or used."""
    nearest = next(place for place in (folder, *absolute(folder).parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise OutputError(f"{out}: cannot be written: no right to write into {nearest}")


def check_not_both(resume: bool, overwrite: bool) -> None:
    """Raise SettingsError where --resume and --overwrite are both given."""
    if resume and overwrite:
        raise SettingsError("--resume goes on and --overwrite starts again: give one of them")


def check_same_data(folder: Path, manifest_sha256: str, finished: Mapping[str, Any] | None) -> None:
    """Check that a run to resume has the images, labels and split that it began with.

    ``finished`` is the provenance of the run's model, where there is one.

    Raises:
        DataError: something has changed since.
    """
    if finished is not None:
        started = {finished["manifest_sha256"]}
    else:
        started = {r["manifest_sha256"] for r in read_log(folder) if r.get("stage") == "start"}
    if started and manifest_sha256 not in started:
        raise DataError(
            f"{folder}: images, labels or groups have changed since this run began; restore them "
            "to resume, or start again with --overwrite"
        )


def clear(folder: Path) -> None:
    """Make a run's folder, and remove the files of an earlier run; all other files stay."""
    with _output_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / CONFIG).is_file():
            return
        remove_results(folder)
        for name in (MODEL, LOG):
            (folder / name).unlink(missing_ok=True)
        remove_checkpoints(folder)


def remove_checkpoints(folder: Path) -> None:
    """Remove what an unfinished training has saved."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


# Results


def make_results_folder(
    folder: Path, overwrite: bool, read: Iterable[Path], resumable: bool = False
) -> None:
    """Make an output folder that is new or empty, or free it of earlier results with --overwrite.

    Args:
        folder: to make.
        overwrite: whether earlier results may be replaced.
        read: files and folders that are about to be read; they must not lie where results go.
        resumable: whether the command can go on with an unfinished prediction.

    Raises:
        OutputError: it holds something else, or cannot be written.
    """
    check_not_replaced(folder, RESULT_FOLDERS, read)
    with _output_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            return
        if (folder / CONFIG).exists() or (folder / MODEL).exists():
            raise OutputError(f"{folder}: is the folder of a training run; choose another --out")
        unfinished = resumable and (folder / LEDGER).exists()
        if not overwrite:
            more = ", go on with what is unfinished there with --resume," if unfinished else ""
            raise OutputError(
                f"{folder}: exists and is not empty; choose another --out{more} or give --overwrite"
            )
        if not unfinished and not (folder / SCORES).exists():
            raise OutputError(
                f"{folder}: holds no {SCORES}, so it is no earlier result to replace; choose "
                "another --out"
            )
        remove_results(folder)


def check_not_replaced(folder: Path, names: Collection[str], read: Iterable[Path]) -> None:
    """Raise OutputError where what is read lies in one of the sub-folders that are replaced."""
    own = [absolute(folder / name) for name in names]
    for path in read:
        if any(path.is_relative_to(place) for place in own):
            raise OutputError(
                f"{folder}: holds {path} where a run keeps its own files; choose another --out"
            )


def remove_results(folder: Path) -> None:
    """Remove what an earlier scoring left in a folder; everything else stays."""
    for name in RESULT_FILES:
        (folder / name).unlink(missing_ok=True)
    for name in RESULT_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of writes that a kill has cut off; everything else stays."""
    places = [folder.glob(".*"), *((folder / name).rglob(".*") for name in RESULT_FOLDERS)]
    for path in (path for place in places for path in place):
        if LEFTOVER.fullmatch(path.name) and path.is_file():
            path.unlink()


@contextmanager
def lock(folder: Path, instead: str = "choose another --out") -> Iterator[None]:
    """Hold a folder for this process, else OutputError; freed when the process ends."""
    from filelock import FileLock, Timeout

    with _output_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        held = FileLock(folder / LOCK, timeout=0)
        try:
            held.acquire()
        except Timeout as error:
            raise OutputError(
                f"{folder}: another process is writing there; wait for it, or {instead}"
            ) from error
    try:
        yield
    finally:
        held.release()


def _check_same_settings(folder: Path, settings: Settings) -> None:
    config = folder / CONFIG
    if not config.is_file():
        raise OutputError(f"{folder}: holds no run to resume; leave --resume out to start one")
    started = settings_from_json(config.read_text(encoding="utf-8"), str(config))
    changed = sorted(_differences(started.model_dump(), settings.model_dump()))
    if not (folder / MODEL).is_file():
        changed = [key for key in changed if not key.startswith(CHANGEABLE)]
    if changed:
        raise SettingsError(
            f"{folder}: was started with other settings ({', '.join(changed)}); give the same "
            "ones to resume, or another --out"
        )


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> set[str]:
    """The dotted keys whose values differ."""
    found: set[str] = set()
    for key in a.keys() | b.keys():
        x, y = a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            found |= _differences(x, y, f"{prefix}{key}.")
        elif x != y:
            found.add(prefix + key)
    return found


@contextmanager
def _output_errors(folder: Path) -> Iterator[None]:
    """Errors of the operating system as ours, with the folder's name."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror}") from error
