"""From a folder or manifest to a trained detector: order of the stages, files of a run."""

import json
import logging
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cdgp import artifact
from cdgp.artifact import Decision, Model
from cdgp.audit.findings import Audit, Looks, audit
from cdgp.data import layouts
from cdgp.data.manifest import Manifest
from cdgp.data.splits import hashed, split
from cdgp.errors import DataError, OutputError, SettingsError, TrainingError
from cdgp.files import (
    RESULT_FOLDERS,
    absolute,
    check_not_replaced,
    remove_leftovers,
    remove_results,
    write_text,
)
from cdgp.inference import Detector
from cdgp.method.calibration import image_probability
from cdgp.method.graph import EvidenceGraph
from cdgp.method.network import Calibration
from cdgp.metrics.reliability import false_reject_threshold
from cdgp.presets import DecisionSettings, InferenceSettings, Settings, settings_from_json
from cdgp.presets import settings as preset_settings
from cdgp.progress import Progress, Quiet
from cdgp.runtimes import Runtime
from cdgp.runtimes.parity import compare
from cdgp.runtimes.torch import TiledRuntime, TorchRuntime
from cdgp.training.calibrate import CalibrationEvidence, collect_evidence, fit_calibration
from cdgp.training.dataset import WeakDataset
from cdgp.training.loop import json_log, new_fabric
from cdgp.training.stages import (
    Log,
    assemble,
    dual_gp_stage,
    new_images,
    pretrained,
    student_stage,
)

MODEL = "model.safetensors"
WITHOUT_BOUND = (
    "The training is kept: --resume with --set calibration.pictures=held_out in place of "
    "--max-false-rejects writes the model with a plain threshold"
)
WITHOUT_CALIBRATION = (
    "a class has too few images to set some aside, so the calibration rests on the training "
    "images themselves: probabilities are surer than they should be"
)
MOST_MOVED = 0.01
"""Most that a probability may move in another precision or mode than float32, eager."""
STATES = "state"
"""Folder of a run that holds the training state until the model is written."""


@dataclass(frozen=True)
class Run:
    """A finished training."""

    detector: Detector
    manifest: Manifest
    folder: Path | None
    separation: float
    audit: Audit
    """What was noticed of the images while they were read."""


def fit(
    data: str | Path | Manifest,
    out: str | Path | None = None,
    settings: Settings | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Train on two bins of images.

    Args:
        data: a folder with ``good/`` and ``defective/``, a CSV manifest, or a ``Manifest``.
        out: folder of the run, for the model, its manifest, settings and log; None keeps nothing.
        settings: the `lite` preset where None.
        resume: go on with the interrupted run in ``out``.
        overwrite: replace an earlier run in ``out``; files of other origin stay.
        progress: where to tell the progress; nothing where None.

    Raises:
        CdgpError: see ``cdgp.errors``; everything that can be known is checked before training.

    Example:
        >>> import cdgp                                                  # doctest: +SKIP
        >>> run = cdgp.fit("parts", out="runs/parts")                    # doctest: +SKIP
        >>> run.detector.predict("parts/good/001.png").pred_label        # doctest: +SKIP
        False
    """
    settings = settings or preset_settings()
    progress = progress or Quiet()
    folder = None if out is None else Path(out)
    if folder is not None:
        if not isinstance(data, Manifest):
            layouts.check_outside(folder, Path(data), settings.data.good, settings.data.defective)
        check_folder(folder, settings, resume, overwrite)
    manifest, found = prepare_manifest(data, settings, progress)
    check_calibration(manifest, settings)
    for finding in found.of("warning"):  # before the long work, so that it can be stopped
        logging.getLogger(__name__).warning("%s: %s", manifest.root, finding.text)
    if folder is not None:
        check_not_replaced(folder, (STATES, *RESULT_FOLDERS), manifest.paths())
        if resume:
            remove_leftovers(folder)
            finished = artifact.load(folder / MODEL) if (folder / MODEL).is_file() else None
            check_same_data(folder, manifest, finished)
            if finished is not None:
                separation = finished.provenance["separation"]
                return Run(Detector.of(finished), manifest, folder, separation, found)
        else:
            pretrained(settings)  # weights that cannot be had must not cost the earlier run
            clear_folder(folder)
        write_text(folder / "config.json", settings.model_dump_json(indent=2) + "\n")
        # Seen from the run's folder, so that the file can be read where it lies.
        replace(manifest, root=folder.resolve()).write_csv(folder / "manifest.csv")
        write_text(folder / "check.json", json.dumps(found.record(), indent=1) + "\n")
    states = folder / STATES if folder else None
    log = json_log(folder / "log.jsonl" if folder else None)
    log({"stage": "start", "manifest_sha256": manifest.sha256, "resumed": resume})
    model, separation = train(manifest, settings, states, log, progress)
    if folder is not None:
        artifact.save(folder / MODEL, model)
        shutil.rmtree(folder / STATES, ignore_errors=True)
    return Run(Detector.of(model), manifest, folder, separation, found)


def train(
    manifest: Manifest,
    settings: Settings,
    states: Path | None,
    log: Log,
    progress: Progress,
) -> tuple[Model, float]:
    """Both trained stages and the calibration; returns the model and its separation."""
    fabric = new_fabric()
    data = manifest.weak_split()
    dual = dual_gp_stage(data, settings, fabric, states, log, progress)
    teacher, student = student_stage(data, settings, fabric, states, log, progress)
    network = assemble(dual, teacher, student, settings).to(fabric.device)
    dataset = new_images(data.calibration, settings)
    # By the graph that predicts: a good image at the threshold stays on its good side.
    graph = EvidenceGraph(network).to(fabric.device)
    collected = collect_evidence(graph, dataset, fabric.device, progress)
    calibration = fit_calibration(collected, settings.calibration)
    if not manifest.has_calibration:
        calibration = noted(calibration, WITHOUT_CALIBRATION)
    log({"stage": "calibration", "slope": calibration.image.slope,
         "intercept": calibration.image.intercept, "notes": calibration.image.notes})  # fmt: skip
    decision = decide(collected, calibration, settings.decision)
    made = provenance(manifest, dual.separation)
    model = Model(network, calibration, decision, settings, made)
    if fabric.device.type == "cuda" and settings.inference != InferenceSettings():
        fast = TorchRuntime(model, fabric.device, settings.inference)
        made["inference"] = check_inference(fast, model, dataset)
    return model, dual.separation


def check_inference(fast: TorchRuntime, model: Model, dataset: WeakDataset) -> dict[str, float]:
    """How far another precision or mode is from float32 on the calibration images.

    Raises:
        TrainingError: a probability moves by more than ``MOST_MOVED``, or a decision changes.
    """
    plain = TorchRuntime(model, fast.device)
    runtimes: tuple[Runtime, Runtime] = (plain, fast)
    if dataset.tile:
        runtimes = (TiledRuntime(plain, dataset.size), TiledRuntime(fast, dataset.size))
    parity = compare(*runtimes, map(dataset.input, range(len(dataset))), model, batches=(1,))
    # A bound on false rejects sets the threshold to the score of one of these images.
    limit = model.decision.threshold
    near = [abs(score - limit) <= MOST_MOVED for score in parity.expected_scores]
    changed = sum(not near[position] for position in parity.changed)
    if changed or parity.pred_score > MOST_MOVED:
        chosen = fast.inference
        raise TrainingError(
            f"inference.precision = {chosen.precision!r}, inference.mode = {chosen.mode!r}: "
            f"against float32 a probability moves by {parity.pred_score:.2g} ({MOST_MOVED:g} is "
            f"allowed) and {changed} of {len(dataset)} decisions change. The training is kept: "
            "--resume with --set inference.precision=float32 --set inference.mode=eager writes "
            "the model"
        )
    return {
        "fused": parity.fused,
        "pooled": parity.pooled,
        "pred_score": parity.pred_score,
        "decisions_changed": float(changed),
    }


def noted(calibration: Calibration, note: str) -> Calibration:
    """The calibration with one more note, which every report of the model shows."""
    image = calibration.image
    return calibration._replace(image=image._replace(notes=(*image.notes, note)))


def decide(
    collected: CalibrationEvidence, calibration: Calibration, settings: DecisionSettings
) -> Decision:
    """The threshold on the image score: as set, or from held-out good images.

    The logistic is increasing, so ranks of the pooled evidence are ranks of the probability, and
    the finite-sample bound carries over. A slope of zero would tie all images and is refused;
    that can only be known after training.

    Raises:
        SettingsError: too few good images for the rate, or a probability without ranking.
    """
    rate = settings.max_false_rejects
    if rate is None:
        return Decision(settings.threshold, f"decision.threshold = {settings.threshold:g}", None)
    if calibration.image.slope == 0:
        raise SettingsError(
            "decision.max_false_rejects: the image probability does not rise with the evidence, so "
            "no threshold can bound the false rejects; see the calibration notes in log.jsonl. "
            + WITHOUT_BOUND
        )
    # On the path of prediction, so that an image equal to the threshold's stays on its good side.
    scores = image_probability(collected.pooled, calibration.image)
    found = false_reject_threshold(scores[~collected.defective].numpy(), rate)
    threshold = found.threshold
    if threshold >= 1:
        raise SettingsError(
            "decision.max_false_rejects: good calibration images score 1, so no threshold bounds "
            "the false rejects; look for wrong labels in the calibration part of manifest.csv. "
            + WITHOUT_BOUND
        )
    return Decision(
        threshold,
        f"at most {rate:.3g} of good parts rejected: from {found.normals} good images that no "
        f"stage has trained on, the chance that the next good part is rejected is at most "
        f"{found.bound:.3g}",
        found.bound,
    )


def prepare_manifest(
    data: str | Path | Manifest, settings: Settings, progress: Progress
) -> tuple[Manifest, Audit]:
    """Read, hash, audit and split: what training starts from.

    Where the calibration images are held out of training, both classes must be among them; else
    a class of a single group leaves the training images themselves to calibrate on.

    Raises:
        DataError: anything wrong with images, labels or splits.
    """
    if isinstance(data, Manifest):
        manifest = data
    else:
        manifest = layouts.load(Path(data), settings.data.good, settings.data.defective)
    looks = Looks()
    with progress.phase("Reading images", len(manifest.samples)) as advance:
        manifest = hashed(manifest, advance, settings.data.white_level, looks.add)
    chosen = settings.data
    held_out = settings.calibration.pictures == "held_out"
    divided = split(
        manifest, settings.seed, chosen.test_fraction, chosen.calibration_fraction,
        needed=("fit", "calibration") if held_out else ("fit",),
    )  # fmt: skip
    return divided, audit(manifest, looks, chosen.white_level)


def check_calibration(manifest: Manifest, settings: Settings) -> None:
    """Refuse a false-reject rate that the good calibration images cannot support."""
    rate = settings.decision.max_false_rejects
    if rate is not None:
        good, _ = manifest.counts()["calibration"]
        false_reject_threshold([float(i) for i in range(good)], rate)


def check_folder(folder: Path, settings: Settings, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that holds something, or no run to resume; changes nothing.

    Raises:
        OutputError: it exists, cannot be written, or holds no run to resume.
        SettingsError: the run to resume was started with other settings.
    """
    if resume and overwrite:
        raise SettingsError("--resume goes on and --overwrite starts again: give one of them")
    config = folder / "config.json"
    try:
        if resume:
            if not config.is_file():
                raise OutputError(
                    f"{folder}: holds no run to resume; leave --resume out to start one"
                )
            started = settings_from_json(config.read_text(encoding="utf-8"), str(config))
            changed = sorted(_differences(started.model_dump(), settings.model_dump()))
            if not (folder / MODEL).is_file():  # no training went into these
                free = ("decision.", "dual_gp.no_separation", "inference.")
                changed = [key for key in changed if not key.startswith(free)]
            if changed:
                raise SettingsError(
                    f"{folder}: was started with other settings ({', '.join(changed)}); give the "
                    "same ones to resume, or another --out"
                )
        elif folder.exists() and any(folder.iterdir()) and not overwrite:
            raise OutputError(
                f"{folder}: exists and is not empty; choose another --out, go on with an "
                "interrupted run with --resume, or replace it with --overwrite"
            )
        nearest = next(place for place in (folder, *absolute(folder).parents) if place.exists())
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise OutputError(f"{folder}: cannot be written: no right to write into {nearest}")
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror}") from error


def clear_folder(folder: Path) -> None:
    """Make the run's folder, without the files of an earlier run; foreign files stay.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.json").is_file():
            return
        remove_results(folder)
        for name in (MODEL, "log.jsonl"):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / STATES, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror}") from error


def check_same_data(folder: Path, manifest: Manifest, finished: Model | None) -> None:
    """A run goes on only with the images, labels and split that it began with.

    Raises:
        DataError: something has changed since.
    """
    if finished is not None:
        started = {finished.provenance["manifest_sha256"]}
    else:
        started = {r["manifest_sha256"] for r in read_log(folder) if r.get("stage") == "start"}
    if started and manifest.sha256 not in started:
        raise DataError(
            f"{folder}: images, labels or groups have changed since this run began; restore them "
            "to resume, or start again with --overwrite"
        )


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for key in a.keys() | b.keys():
        x, y = a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            found |= _differences(x, y, f"{prefix}{key}.")
        elif x != y:
            found.add(prefix + key)
    return found


def provenance(manifest: Manifest, separation: float) -> dict[str, Any]:
    """Where a model comes from: data digest, counts, versions, machine, time."""
    return {
        "manifest_sha256": manifest.sha256,
        "counts": {name: list(counts) for name, counts in manifest.counts().items()},
        "separation": separation,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version(name) for name in ("cdgp", "torch", "timm", "numpy")},
    }


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The records of a run's ``log.jsonl``, where there is one; a cut-off line is left out."""
    path = folder / "log.jsonl"
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records
