"""Train on good images and any defective ones, evaluate on the test part, find suspect labels."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cdgp import artifact, run_folder
from cdgp.audit.duplicates import grouped
from cdgp.audit.findings import Audit, audit
from cdgp.audit.suspects import suspects, write_suspects
from cdgp.audit.types import Suspect
from cdgp.data import layouts
from cdgp.data.manifest import Manifest, WeakSplit
from cdgp.data.scan import check_readable, scan
from cdgp.data.splits import needed_labels, needed_splits, split
from cdgp.data.walk import Notice
from cdgp.errors import SettingsError
from cdgp.evaluation import ScoredImage
from cdgp.files import path_of, printable, shortened, write_text
from cdgp.inference import Detector
from cdgp.method.build import pretrained_encoder
from cdgp.presets import Settings
from cdgp.presets import settings as preset_settings
from cdgp.progress import Progress, Quiet
from cdgp.report.galleries import shown_suspects
from cdgp.report.html import TrainingFacts
from cdgp.report.results import ResultFiles, overlays_of
from cdgp.training.context import new_context
from cdgp.training.fit import check_calibration, train
from cdgp.training.processes import check_devices
from cdgp.workflows.evaluate import score_samples

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A finished training with its results."""

    detector: Detector
    manifest: Manifest
    """The images with their digests and splits."""
    folder: Path | None
    separation: float | None
    """AUROC of the training images at the end of training: how separable the two bins are; None
    where no defective image was trained on."""
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
    devices: int = 1,
    progress: Progress | None = None,
) -> Run:
    """Train on good images and defective ones, if any, and evaluate on the test part.

    Good images alone are enough to begin with: the score is then one minus a p-value, and no
    probability, see ``Detector.score_kind``. Every defective image makes the model better.

    Args:
        data: a folder with ``good/`` and, where there are any, ``defective/``, a CSV manifest, or a
            ``Manifest``.
        out: folder of the run; None writes nothing.
        settings: the `lite` preset where None.
        save_maps: also write the raw maps of the test images.
        resume: go on with the interrupted run in ``out``.
        overwrite: replace an earlier training in ``out``; files of other origin stay.
        devices: how many GPUs train, or processes where there is no GPU. The model differs by
            rounding alone. A script that gives more than one puts its work below
            ``if __name__ == "__main__":``.
        progress: where to show the progress; nowhere where None.

    Raises:
        OutputError: another process is writing into ``out``, or it holds something else.
        CdgpError: see ``cdgp.errors``; everything that can be is checked before training.

    Examples:
        >>> import cdgp                                                  # doctest: +SKIP
        >>> run = cdgp.fit("parts", out="runs/parts")                    # doctest: +SKIP
        >>> run.metrics["image_auroc"]                                   # doctest: +SKIP
        0.98
        >>> run.detector.predict("parts/good/001.png").pred_label        # doctest: +SKIP
        False
    """
    if settings is not None and not isinstance(settings, Settings):
        raise SettingsError(f'settings = {settings!r}: give cdgp.settings("lite", seed=1), for one')
    if not isinstance(data, Manifest):
        data = path_of(data, "data")
    settings, progress = settings or preset_settings(), progress or Quiet()
    check_devices(devices, settings)
    if out is None:
        manifest, weak, found = _prepared(data, settings, progress)
        context = new_context(None, None, progress, devices)
        model = _with_seen(train(weak, settings, context), manifest)
        return _evaluate_test(model, manifest, found, None, progress)
    folder = path_of(out, "out")
    if not isinstance(data, Manifest):
        layouts.check_outside(folder, Path(data), settings.data.good, settings.data.defective)
    with run_folder.lock(folder, "train"):
        run_folder.check_startable(folder, settings, resume, overwrite)
        manifest, weak, found = _prepared(data, settings, progress)
        model = _train_into(folder, manifest, weak, found, settings, resume, devices, progress)
        run_id = run_folder.run_id_of(model.provenance) or run_folder.go_on(folder, "train")
        place = _Place(folder, run_id, save_maps)
        return _evaluate_test(model, manifest, found, place, progress)


class _Place(NamedTuple):
    """Where the results of a run go."""

    folder: Path
    run_id: str
    save_maps: bool


def _prepared(
    data: str | Path | Manifest, settings: Settings, progress: Progress
) -> tuple[Manifest, WeakSplit, Audit]:
    """What training starts from; warns before the long work, so that it can be stopped."""
    manifest, found = prepare_manifest(data, settings, progress)
    joined = grouped(manifest, found)
    weak = manifest.weak_split(joined, needed_labels(settings))
    check_calibration(weak, settings)
    for finding in found.of("warning"):
        text = finding.text.removeprefix(f"{manifest.root}: ")
        log.warning("%s", printable(f"{manifest.root}: {text}"))
    return manifest, weak, found


def _with_seen(model: artifact.Model, manifest: Manifest) -> artifact.Model:
    """The model with the digests of the images that it was trained and calibrated on."""
    samples = manifest.of("train")
    known = [text for sample in samples for text in (sample.sha256, sample.pixel_sha256)]
    return model._replace(seen=artifact.seen_rows(known))


def prepare_manifest(
    data: str | Path | Manifest, settings: Settings, progress: Progress
) -> tuple[Manifest, Audit]:
    """Read, digest, audit and split the images: what training starts from."""
    chosen, notices = settings.data, list[Notice]()
    if isinstance(data, Manifest):
        manifest = data
    else:
        manifest, notices = layouts.find(Path(data), chosen.good, chosen.defective)
    with progress.phase("Reading images", len(manifest.samples)) as advance:
        scanned = scan(manifest, chosen.white_level, advance, chosen.first_page)
    check_readable(scanned)
    divided = split(
        scanned.manifest, settings.seed, chosen.test_fraction, chosen.calibration_fraction,
        needed_splits(manifest, settings), needed_labels(settings),
    )  # fmt: skip
    return divided, audit(scanned, chosen.white_level, notices)


def _train_into(
    folder: Path,
    manifest: Manifest,
    weak: WeakSplit,
    found: Audit,
    settings: Settings,
    resume: bool,
    devices: int,
    progress: Progress,
) -> artifact.Model:
    """Train in a run's folder, or take the model that a resumed run has finished."""
    run_folder.check_not_replaced(folder, run_folder.OWN_FOLDERS, manifest.paths())
    place = folder / run_folder.MODEL
    if resume:
        run_folder.remove_leftovers(folder)
        finished = artifact.load(place) if place.is_file() else None
        if finished is not None:
            run_folder.check_one_run(folder, run_folder.run_id_of(finished.provenance))
        run_folder.check_same_data(folder, manifest.sha256, finished and finished.provenance)
        if finished is not None:
            return finished
        run_id = run_folder.go_on(folder, "train")
    else:
        pretrained_encoder(settings)  # weights that cannot be loaded must not cost the earlier run
        run_folder.clear(folder)
        run_id = run_folder.start(folder, "train")
    run_folder.write_config(folder, settings, run_id)
    # Names relative to the run's folder, so that the file can be read where it lies.
    replace(manifest, root=folder.resolve()).write_csv(folder / run_folder.MANIFEST, run_id)
    write_text(
        folder / run_folder.CHECK, json.dumps(found.record() | {"run_id": run_id}, indent=1) + "\n"
    )
    context = new_context(
        folder / run_folder.CHECKPOINTS, folder / run_folder.LOG, progress, devices
    )
    begun = {"stage": "start", "run_id": run_id, "manifest_sha256": manifest.sha256}
    context.log({**begun, "resumed": resume, "devices": devices})
    model = _with_seen(train(weak, settings, context), manifest)
    model = model._replace(provenance=model.provenance | {"run_id": run_id})
    artifact.save(place, model)
    run_folder.remove_checkpoints(folder)
    return model


def _evaluate_test(
    model: artifact.Model,
    manifest: Manifest,
    found: Audit,
    place: _Place | None,
    progress: Progress,
) -> Run:
    """Score the test part of a trained run, look for suspect labels, and write the results."""
    detector, test = Detector.of(model), manifest.of("test")
    # First: the report shows suspects, and so keeps their thumbnails while they are scored.
    doubted = suspects(manifest, model.network.teacher, model.settings, progress)
    keep = [s.path for label in (False, True) for s in shown_suspects(doubted, label)]
    folder, files = None, None
    if place is not None:
        folder = place.folder
        drawn = overlays_of(None, len(test))
        files = ResultFiles(folder, place.run_id, detector, drawn, place.save_maps, keep)
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
        write_suspects(files.folder / run_folder.SUSPECTS, doubted, files.run_id)
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
