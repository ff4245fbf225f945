"""The folder of a run: every file name, what may be replaced, what resumes.

`cdgp train` leaves a run; `cdgp evaluate`, `predict` and `check` leave results in folders of their
own. Every file is written whole or not at all (see `files.atomic_write`), by one process at a time
(see `lock`).

| Name                | What it holds                                            | Left by         |
|---------------------|----------------------------------------------------------|-----------------|
| `run.json`          | that this is a folder of ours: run id, command, version  | all             |
| `model.safetensors` | the model: weights, calibration, threshold, settings     | train           |
| `config.json`       | all settings in effect; `cdgp train --config` reads it   | train           |
| `manifest.csv`      | every image: label, masks, group, split, SHA-256         | train           |
| `log.jsonl`         | the training, a JSON record a line: loss, margins        | train           |
| `suspects.csv`      | images by doubt of their label, most doubtful first      | train           |
| `check.json`        | findings on the images: broken, duplicate, leaking       | train, check    |
| `check.html`        | the same as a page, images side by side                  | check           |
| `scores.csv`        | a row an image: probability, decision, regions           | all but check   |
| `metrics.json`      | AUROC, AUPRO, overkill, escape; or why undefined         | train, evaluate |
| `overlays/`         | an image: JPEG of its map with boxes, its row as JSON    | all but check   |
| `maps/`             | with `--save-maps`: its map, float16 `.npy`, in nats     | all but check   |
| `report.html`       | all results as one page that needs no other file         | all but check   |
| `unreadable.csv`    | images that could not be read, and why                   | predict         |
| `checkpoints/`      | unfinished training; removed at its end                  | train           |
| `unfinished.sqlite` | unfinished prediction; removed at its end                | predict         |
| `unfinished.image`  | the image that it works on; removed at its end           | predict         |
| `best-runtime`      | with `--best-runtime`: the model as exported             | predict         |
| `.lock`             | held by the process that works in the folder             | all             |
| `.lock.json`        | which process that is, since when                        | all             |
| `.lock.soft`        | in place of `.lock` on a share without locks             | all             |

Files of one run carry one run id: a column `run_id` of the tables, a key of the JSON files, the
provenance of the model. Where model and manifest carry two, the folder is refused.

Without a test part, a training leaves no scores, metrics, overlays and maps. `--resume` goes on
from `checkpoints/` or `unfinished.sqlite`. `--overwrite` needs the `run.json` of an earlier run of
the same command; it removes what that run has left, and keeps every other file, in `overlays/`,
`maps/` and `checkpoints/` too.
"""

import csv
import json
import os
import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from cdgp.errors import DataError, OutputError, SettingsError
from cdgp.files import absolute, lies_in, write_text
from cdgp.locks import HOLDER, LOCK, MARKER, one_writer
from cdgp.presets import Settings, settings_from_json

RUN = "run.json"
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
OVERLAY_SUFFIXES = (".jpg", ".png")
"""Today's, and that of earlier versions. To encode a PNG takes as long as to score the image."""
MAPS = "maps"
REPORT = "report.html"
UNREADABLE = "unreadable.csv"
CHECKPOINTS = "checkpoints"
LEDGER = "unfinished.sqlite"
WORKING = "unfinished.image"

RESULT_FOLDERS = (OVERLAYS, MAPS)
OWN_FOLDERS = (*RESULT_FOLDERS, CHECKPOINTS)
BEST = "best-runtime"
"""The name of what ``--best-runtime`` keeps beside a model, without its suffix."""
OWN_FILES = {
    "train": (
        MODEL,
        SCORES,
        METRICS,
        SUSPECTS,
        CHECK,
        LOG,
        MANIFEST,
        CONFIG,
        REPORT,
        *(f"{BEST}{suffix}" for suffix in (".xml", ".bin", ".onnx")),
    ),
    "predict": (SCORES, UNREADABLE, LEDGER, f"{LEDGER}-journal", WORKING, REPORT),
    "evaluate": (SCORES, METRICS, REPORT),
    "check": (CHECK, CHECK_PAGE),
}
"""What ``--overwrite`` removes after each command, beside what it has left in ``OWN_FOLDERS``."""
KINDS = {
    "train": "a training run", "predict": "a prediction", "evaluate": "an evaluation",
    "check": "a data check", "benchmark": "a benchmark",
}  # fmt: skip
"""What ``run.json`` marks a folder as, by command."""
RUN_FORMAT = "cdgp-run"
RUN_ID = re.compile("[0-9a-f]{32}")
LEFTOVER = re.compile(r"\..+(\.[^.]+)\.[a-z0-9_]{8}\1")
"""How ``atomic_write`` names what it has not finished: .NAME.SUFFIX.12345678.SUFFIX"""
CHANGEABLE = ("decision.", "dual_gp.no_separation", "inference.")
"""Settings that --resume may change before the model is written: no weight depends on them."""


class Started(NamedTuple):
    """What ``run.json`` says of the folder that it lies in."""

    run_id: str
    command: str


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


def trained_on(model: Path, run_id: str | None) -> set[str]:
    """Pixel digests of the images that a run or its model trained on; empty without a manifest.

    Args:
        model: the model file, an exported one, or the folder of a run.
        run_id: of the model, None where it was written before there were any. A manifest of
            another run is none of this model.
    """
    table = model_file(model).parent / MANIFEST
    if run_id and _table_id(table) not in (None, run_id):
        return set()
    return {
        row["pixel_sha256"]
        for row in _table_rows(table)
        if row.get("split") in ("fit", "calibration") and row.get("pixel_sha256")
    }


# Which run a file is of


def start(folder: Path, command: str) -> str:
    """Mark a folder as that of a new run of a command; returns the run id."""
    remove_leftovers(folder)
    record = {
        "format": RUN_FORMAT,
        "run_id": uuid.uuid4().hex,
        "command": command,
        "version": version("cdgp"),
        "started": datetime.now().astimezone().isoformat(" ", "seconds"),
    }
    write_text(folder / RUN, json.dumps(record, indent=1) + "\n")
    return str(record["run_id"])


def go_on(folder: Path, command: str) -> str:
    """The run id of a folder to go on in; a new one where it was begun before there were any."""
    found = read_run(folder)
    return found.run_id if found and found.command == command else start(folder, command)


def read_run(folder: Path) -> Started | None:
    """What ``run.json`` says; None where there is none, or one that no command of ours wrote."""
    try:
        record = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("format") != RUN_FORMAT:
        return None
    run_id, command = record.get("run_id"), record.get("command")
    if not _is_run_id(run_id) or command not in KINDS:
        return None
    return Started(run_id, command)


def check_one_run(model: Path, run_id: str | None) -> None:
    """Check that a model in the folder of its run and the files beside it are of one run.

    ``run_id`` is the model's own; None, and files without one, were written before there were any.

    Raises:
        DataError: they are of two.
    """
    path = model_file(model)
    if path.name != MODEL or run_id is None:
        return
    run = read_run(path.parent)
    config, _ = _read_config(path.parent / CONFIG)
    beside = {
        RUN: run.run_id if run and run.command == "train" else None,
        CONFIG: config,
        MANIFEST: _table_id(path.parent / MANIFEST),
    }
    for name, other in beside.items():
        if other not in (None, run_id):
            raise DataError(
                f"{path.parent}: mixes two runs: {MODEL} is of run {run_id[:8]}, {name} of run "
                f"{other[:8]}; copy the model alone into a folder of its own, or train again"
            )


def run_id_of(model: Mapping[str, Any]) -> str | None:
    """The run id in a model's provenance; None where it was written before there were any."""
    found = model.get("run_id")
    return found if _is_run_id(found) else None


def _is_run_id(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and RUN_ID.fullmatch(value) is not None


def _table_rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a manifest, none where there is none; the images need not be there any more."""
    if path.is_file():
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
            yield from csv.DictReader(file)


def _table_id(path: Path) -> str | None:
    """The run id of a manifest; None where it has none."""
    found = next(_table_rows(path), {}).get("run_id")
    return found if _is_run_id(found) else None


def _read_config(path: Path) -> tuple[str | None, str]:
    """The run id of ``config.json``, None where it has none, and the settings as JSON."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    try:
        values = json.loads(text)
    except ValueError:
        return None, text
    run_id = values.pop("run_id", None) if isinstance(values, dict) else None
    return run_id if _is_run_id(run_id) else None, json.dumps(values)


def write_config(folder: Path, settings: Settings, run_id: str) -> None:
    """Write ``config.json``: all settings in effect, and the run id."""
    record = settings.model_dump(mode="json") | {"run_id": run_id}
    write_text(folder / CONFIG, json.dumps(record, indent=2) + "\n")


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
            check_no_links(folder)
        else:
            more = "go on with an interrupted run with --resume, or replace it with --overwrite"
            check_free(folder, "train", overwrite, more)
        check_writable(folder, folder)


def check_free(folder: Path, command: str, overwrite: bool, more: str) -> None:
    """Check that a command may start in a folder: it is new, empty, or holds what it may replace.

    Args:
        folder: it may be missing.
        command: that starts.
        overwrite: whether an earlier run of the command may be replaced.
        more: what to do instead of choosing another folder, for the message.

    Raises:
        OutputError: it holds something else.
    """
    if not folder.exists() or not (names := _names(folder)):
        return
    found = read_run(folder)
    trained = command != "train" and found is None and bool(names & {CONFIG, MODEL})
    if trained or (found and found.command != command):
        kind = KINDS["train" if found is None else found.command]
        raise OutputError(f"{folder}: is the folder of {kind}; choose another --out")
    if found and names == {RUN}:  # killed before it had done anything
        return
    if not overwrite:
        raise OutputError(f"{folder}: exists and is not empty; choose another --out, {more}")
    check_no_links(folder)
    if found is not None:
        return
    # A training may begin beside files that it leaves alone, and replaces a report by name; no
    # other file under one of its names is known to be its own.
    taken = sorted(names & {*OWN_FILES["train"], *OWN_FOLDERS} - {REPORT})
    if command == "train" and taken:
        raise OutputError(
            f"{folder}: holds {taken[0]} where a run keeps its own files, and no {RUN} that marks "
            "it as a run of cdgp; choose another --out"
        )
    if command != "train":
        raise OutputError(
            f"{folder}: holds no {RUN} of cdgp {command}, so it is no earlier result to replace; "
            "choose another --out"
        )


def check_no_links(folder: Path) -> None:
    """Raise OutputError where a folder of a run's files is a link to another place."""
    for name in OWN_FOLDERS:
        if (folder / name).is_symlink():
            raise OutputError(
                f"{folder / name}: is a link, and no run writes or removes files through one; "
                "remove the link, or choose another --out"
            )


def _names(folder: Path) -> set[str]:
    """What a folder holds, beside locks and what a kill has left half written."""
    found = {path.name for path in folder.iterdir()} - {LOCK, HOLDER, MARKER}
    return {name for name in found if not LEFTOVER.fullmatch(name)}


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


# Replacing


def clear(folder: Path) -> None:
    """Remove what the run of a folder has left there, its ``run.json`` last; all else stays.

    Nothing is removed where no ``run.json`` of ours says which files those are.
    """
    with _output_errors(folder):
        found = read_run(folder)
        if found is None:
            return
        remove_leftovers(folder)
        for name in OWN_FILES[found.command]:
            (folder / name).unlink(missing_ok=True)
        _remove_overlays(folder, found.run_id)
        remove_checkpoints(folder)
        (folder / RUN).unlink()


def _remove_overlays(folder: Path, run_id: str) -> None:
    """Remove overlays and maps: those whose record has the run id."""
    for here, _, names in os.walk(folder / OVERLAYS):
        for record in (Path(here, name) for name in names if name.endswith(".json")):
            if _record_id(record) != run_id:
                continue
            map_file = folder / MAPS / record.relative_to(folder / OVERLAYS).with_suffix(".npy")
            drawn = (record.with_suffix(suffix) for suffix in OVERLAY_SUFFIXES)
            for path in (*drawn, map_file, record):
                path.unlink(missing_ok=True)
    for name in RESULT_FOLDERS:
        _remove_empty(folder / name)


def _record_id(path: Path) -> object:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record.get("run_id") if isinstance(record, dict) else None


def _remove_empty(folder: Path) -> None:
    """Remove a folder and those in it, as far as they are empty."""
    for here, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            Path(here).rmdir()


def remove_checkpoints(folder: Path) -> None:
    """Remove what an unfinished training has saved."""
    for path in (folder / CHECKPOINTS).glob("*.safetensors"):
        path.unlink()
    _remove_empty(folder / CHECKPOINTS)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of writes that a kill has cut off; everything else stays."""
    places = [folder, *(p for name in OWN_FOLDERS for p in _folders(folder / name))]
    for path in (path for place in places for path in place.glob(".*")):
        if LEFTOVER.fullmatch(path.name) and path.is_file():
            path.unlink()


def _folders(place: Path) -> Iterator[Path]:
    """A folder and those below it, without links."""
    if not place.is_symlink():
        yield from (Path(here) for here, _, _ in os.walk(place))


# Results


def make_results_folder(folder: Path, command: str, overwrite: bool, read: Iterable[Path]) -> str:
    """Start a run of results in a folder that is new or empty, or free it with --overwrite.

    Args:
        folder: to start in; held by the caller.
        command: ``predict`` or ``evaluate``.
        overwrite: whether results of an earlier run of the command may be replaced.
        read: files and folders that are about to be read; they must not lie where results go.

    Returns:
        The run id.

    Raises:
        OutputError: it holds something else, or cannot be written.
    """
    check_not_replaced(folder, RESULT_FOLDERS, read)
    with _output_errors(folder):
        unfinished = (folder / LEDGER).exists()
        resume = "go on with what is unfinished there with --resume, " if unfinished else ""
        check_free(folder, command, overwrite, f"{resume}or give --overwrite")
        clear(folder)
    return start(folder, command)


def check_not_replaced(folder: Path, names: Collection[str], read: Iterable[Path]) -> None:
    """Raise OutputError where what is read lies in one of the sub-folders that are replaced."""
    own = [folder / name for name in names if (folder / name).exists()]
    if not own:
        return
    places: dict[Path, Path] = {}  # many images lie in few folders
    for path in read:
        real = path.resolve() if path.is_symlink() else path
        places.setdefault(real if real.is_dir() else real.parent, path)
    for place, path in places.items():
        if any(lies_in(place, other) for other in own):
            raise OutputError(
                f"{folder}: holds {path} where a run keeps its own files; choose another --out"
            )


@contextmanager
def lock(folder: Path, command: str = "", instead: str = "choose another --out") -> Iterator[None]:
    """Hold a folder for this call, else OutputError; see ``locks.one_writer``."""
    with one_writer(folder, command, instead):
        yield


def _check_same_settings(folder: Path, settings: Settings) -> None:
    config, run = folder / CONFIG, read_run(folder)
    if not config.is_file() or (run and run.command != "train"):
        raise OutputError(f"{folder}: holds no run to resume; leave --resume out to start one")
    run_id, text = _read_config(config)
    if run and run_id not in (None, run.run_id):
        raise DataError(f"{folder}: mixes two runs ({RUN}, {CONFIG}); start again with --overwrite")
    started = settings_from_json(text, str(config))
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
