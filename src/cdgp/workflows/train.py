"""Train on good and defective images, evaluate on the test part, look for suspect labels."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cdgp import artifact, run_folder
from cdgp.audit.duplicates import grouped
from cdgp.audit.findings import Audit, audit
from cdgp.audit.suspects import Suspect, suspects, write_suspects
from cdgp.data import layouts
from cdgp.data.manifest import Manifest, WeakSplit
from cdgp.data.scan import check_readable, scan
from cdgp.data.splits import split
from cdgp.evaluation import ScoredImage
from cdgp.files import shortened, write_text
from cdgp.inference import Detector
from cdgp.method.build import pretrained_encoder
from cdgp.presets import Settings
from cdgp.presets import settings as preset_settings
from cdgp.progress import Progress, Quiet
from cdgp.report.galleries import shown_suspects
from cdgp.report.html import TrainingFacts
from cdgp.report.results import ResultFiles
from cdgp.training.context import new_context
from cdgp.training.fit import check_calibration, train
from cdgp.workflows.evaluate import score_samples

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A finished training with its results."""

    detector: Detector
    manifest: Manifest
    """The images with their digests and splits."""
    folder: Path | None
    separation: float
    """AUROC of the training images at the end of training: how separable the two bins are."""
    audit: Audit
    suspects: list[Suspect]
    """All images by doubt of their label, the most doubtful first."""
    rows: list[ScoredImage]
    """The test images; empty where none were set aside."""
    metrics: dict[str, Any] | None
    """Of the test images, as ``metrics.json`` holds them; None where there are none."""


def train_run(
    data: str | Path | Manifest,
    out: str | Path | None = None,
    settings: Settings | None = None,
    *,
    save_maps: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Train on good and defective images, and evaluate on the test part.

    Args:
        data: a folder with ``good/`` and ``defective/``, a CSV manifest, or a ``Manifest``.
        out: folder of the run; None writes nothing.
        settings: the `lite` preset where None.
        save_maps: also write the raw maps of the test images.
        resume: go on with the interrupted run in ``out``.
        overwrite: replace an earlier run in ``out``; files of other origin stay.
        progress: where to show the progress; nowhere where None.

    Raises:
        CdgpError: see ``cdgp.errors``; everything that can be is checked before training.

    Examples:
        >>> import cdgp                                                  # doctest: +SKIP
        >>> run = cdgp.fit("parts", out="runs/parts")                    # doctest: +SKIP
        >>> run.metrics["image_auroc"]                                   # doctest: +SKIP
        0.98
        >>> run.detector.predict("parts/good/001.png").pred_label        # doctest: +SKIP
        False
    """
    settings, progress = settings or preset_settings(), progress or Quiet()
    folder = None if out is None else Path(out)
    if folder is not None:
        if not isinstance(data, Manifest):
            layouts.check_outside(folder, Path(data), settings.data.good, settings.data.defective)
        run_folder.check_startable(folder, settings, resume, overwrite)
    manifest, found = prepare_manifest(data, settings, progress)
    weak = manifest.weak_split(grouped(manifest, found))
    check_calibration(weak, settings)
    for finding in found.of("warning"):  # before the long work, so that it can be stopped
        log.warning("%s: %s", manifest.root, finding.text)
    if folder is None:
        model = train(weak, settings, new_context(None, None, progress))
    else:
        model = _train_into(folder, manifest, weak, found, settings, resume, progress)
    return _evaluate_test(model, manifest, found, folder, save_maps, progress)


def prepare_manifest(
    data: str | Path | Manifest, settings: Settings, progress: Progress
) -> tuple[Manifest, Audit]:
    """Read, digest, audit and split the images: what training starts from.

    Where the calibration images are held out of training, both classes must be among them.
    Otherwise a class of a single group leaves only the training images to calibrate on.
    """
    chosen = settings.data
    if isinstance(data, Manifest):
        manifest = data
    else:
        manifest = layouts.load(Path(data), chosen.good, chosen.defective)
    with progress.phase("Reading images", len(manifest.samples)) as advance:
        scanned = scan(manifest, chosen.white_level, advance)
    check_readable(scanned)
    held_out = settings.calibration.pictures == "held_out"
    divided = split(
        scanned.manifest, settings.seed, chosen.test_fraction, chosen.calibration_fraction,
        needed=("fit", "calibration") if held_out else ("fit",),
    )  # fmt: skip
    return divided, audit(scanned, chosen.white_level)


def _train_into(
    folder: Path,
    manifest: Manifest,
    weak: WeakSplit,
    found: Audit,
    settings: Settings,
    resume: bool,
    progress: Progress,
) -> artifact.Model:
    """Train in a run's folder, or take the model that a resumed run has finished."""
    kept = (run_folder.CHECKPOINTS, *run_folder.RESULT_FOLDERS)
    run_folder.check_not_replaced(folder, kept, manifest.paths())
    place = folder / run_folder.MODEL
    if resume:
        run_folder.remove_leftovers(folder)
        finished = artifact.load(place) if place.is_file() else None
        run_folder.check_same_data(folder, manifest.sha256, finished and finished.provenance)
        if finished is not None:
            return finished
    else:
        pretrained_encoder(settings)  # weights that cannot be loaded must not cost the earlier run
        run_folder.clear(folder)
    write_text(folder / run_folder.CONFIG, settings.model_dump_json(indent=2) + "\n")
    # Names relative to the run's folder, so that the file can be read where it lies.
    replace(manifest, root=folder.resolve()).write_csv(folder / run_folder.MANIFEST)
    write_text(folder / run_folder.CHECK, json.dumps(found.record(), indent=1) + "\n")
    context = new_context(folder / run_folder.CHECKPOINTS, folder / run_folder.LOG, progress)
    context.log({"stage": "start", "manifest_sha256": manifest.sha256, "resumed": resume})
    model = train(weak, settings, context)
    artifact.save(place, model)
    run_folder.remove_checkpoints(folder)
    return model


def _evaluate_test(
    model: artifact.Model,
    manifest: Manifest,
    found: Audit,
    folder: Path | None,
    save_maps: bool,
    progress: Progress,
) -> Run:
    """Score the test part of a trained run, look for suspect labels, and write the results."""
    detector, test = Detector.of(model), manifest.of("test")
    # First: the report shows suspects, and so keeps their thumbnails while they are scored.
    doubted = suspects(manifest, model.network.teacher, model.settings, progress)
    keep = [s.path for label in (False, True) for s in shown_suspects(doubted, label)]
    files = ResultFiles(folder, detector, save_maps, keep) if folder is not None else None
    rows: list[ScoredImage] = []
    metrics, computed_on = None, "nothing: no test images were set aside"
    if test:
        # Near duplicates are one group to the intervals, and nothing else.
        joined = grouped(manifest, found)
        rows, metrics = score_samples(detector, joined, joined.of("test"), files, progress)
        metrics["computed_on"] = computed_on = (
            f"{len(test)} test images that no stage was trained on"
        )
    if files is not None:
        write_suspects(files.folder / run_folder.SUSPECTS, doubted)
        if test:
            files.write_tables(rows, metrics)
        facts = TrainingFacts(
            run_folder.read_log(files.folder),
            manifest.counts(),
            [f"Data: {shortened(finding.text)}." for finding in found.of("warning")],
            doubted,
        )
        files.write_report(rows, metrics, computed_on, facts)
    separation = model.provenance["separation"]
    return Run(detector, manifest, folder, separation, found, doubted, rows, metrics)
