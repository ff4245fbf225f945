"""Score labelled images, and compute the metrics over them."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdgp import run_folder
from cdgp.data import layouts
from cdgp.data.groups import group_numbers
from cdgp.data.manifest import Manifest, Sample
from cdgp.data.scan import digested
from cdgp.data.splits import check_leaks
from cdgp.decision import digests
from cdgp.errors import ImageError
from cdgp.evaluation import (
    MapFile,
    ScoredImage,
    image_metrics,
    odd_images,
    pixel_metrics,
    single_groups,
    true_mask,
)
from cdgp.inference import Detector, Prediction, Prepared
from cdgp.presets import DataSettings
from cdgp.progress import Progress, Quiet
from cdgp.report.results import Overlays, ResultFiles, overlays_of
from cdgp.streaming import Threads, load_for, stream

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluatedRun:
    """Labelled images, scored."""

    folder: Path | None
    rows: list[ScoredImage]
    metrics: dict[str, Any]
    """As ``metrics.json`` holds them."""
    trained_on: int
    """Number of these images that the model was trained on."""


def evaluate_run(
    model: str | Path,
    data: str | Path,
    out: str | Path | None = None,
    *,
    good: str | None = None,
    defective: str | None = None,
    overlays: Overlays | None = None,
    save_maps: bool = False,
    overwrite: bool = False,
    defect_rate: float | None = None,
    workers: int | None = None,
    batch: int | None = None,
    progress: Progress | None = None,
) -> EvaluatedRun:
    """Score labelled images with a trained model; returns rows and metrics.

    Args:
        model: as ``inference.load`` takes it.
        data: a CSV manifest, or a folder with ``good/`` and, where there are any, ``defective/``.
            Where splits are stated, the test images are scored; otherwise all.
        out: folder for scores, overlays and report; None writes nothing.
        good: name of the folder of good images; the model's own where None.
        defective: the same of defective images.
        save_maps: also write the raw maps.
        overwrite: replace the results in ``out``.
        defect_rate: as ``inference.load`` takes it.
        progress: where to show the progress; nowhere where None.

    Raises:
        DataError: images or masks that cannot be read, all listed; equal images or one group on
            two sides of a stated split; a model beside the files of another run.
        OutputError: another process is writing into ``out``, or it holds something else.
        CdgpError: see ``cdgp.errors``.
    """
    progress, source, threads = progress or Quiet(), Path(data), Threads.of(workers, batch)
    detector = load_for(model, threads, defect_rate)
    names = detector.settings.data
    bins = good or names.good, defective or names.defective
    if out is None:
        data_set = _data_set(Path(model), detector, source, bins, progress)
        return _score(detector, data_set, None, threads, progress)
    folder = Path(out)
    layouts.check_outside(folder, source, *bins)
    with run_folder.lock(folder, "evaluate"):
        run_folder.check_free(folder, "evaluate", overwrite, "or give --overwrite")
        data_set = _data_set(Path(model), detector, source, bins, progress)
        paths = data_set.manifest.paths()
        run_id = run_folder.make_results_folder(folder, "evaluate", overwrite, paths)
        drawn = overlays_of(overlays, len(data_set.samples))
        files = ResultFiles(folder, run_id, detector, drawn, save_maps)
        return _score(detector, data_set, files, threads, progress)


class _DataSet(NamedTuple):
    """What is scored, and what of it the model has seen."""

    manifest: Manifest
    samples: Sequence[Sample]
    seen: list[str]
    """Names of the samples that the model was trained on."""
    computed_on: str


def _data_set(
    model: Path, detector: Detector, source: Path, bins: tuple[str, str], progress: Progress
) -> _DataSet:
    """Read what is to be scored; warns of images that the model was trained on.

    Those are recognised by their digests, whatever they are called and whatever the manifest says.
    """
    run_id = run_folder.run_id_of(detector.card.provenance)
    listed = layouts.load(source, *bins)
    run_folder.check_one_run(model, run_id)  # now: a training may have replaced some files
    manifest = _digested(listed, detector.settings.data, progress)
    test = manifest.of("test")
    if test:
        check_leaks(manifest)
    samples = test or manifest.samples
    older = run_folder.trained_on(model, run_id)
    known = detector.card.seen | digests(older)
    seen = [
        manifest.name(sample.image)
        for sample in samples
        if not known.isdisjoint(digests((sample.sha256, sample.pixel_sha256)))
    ]
    computed_on = f"{len(samples)} {'test images' if test else 'images'} of {source}"
    if seen:  # before the long work, so that it can be stopped
        log.warning(
            "the model was trained on %d of these images: no measure of new ones", len(seen)
        )
        computed_on += f", {len(seen)} of which the model was trained on"
    return _DataSet(manifest, samples, seen, computed_on)


def _score(
    detector: Detector,
    data_set: _DataSet,
    files: ResultFiles | None,
    threads: Threads,
    progress: Progress,
) -> EvaluatedRun:
    rows, metrics = score_samples(
        detector, data_set.manifest, data_set.samples, files, progress, threads
    )
    if data_set.seen:
        metrics["notes"]["trained_on"] = data_set.seen
    metrics["computed_on"] = data_set.computed_on
    if files is not None:
        files.write_tables(rows, metrics)
        files.write_report(rows, metrics, data_set.computed_on)
    return EvaluatedRun(files.folder if files else None, rows, metrics, len(data_set.seen))


def _digested(manifest: Manifest, data: DataSettings, progress: Progress) -> Manifest:
    """The manifest with digests; every image that cannot be read is listed before any is scored.

    Beside a stated test part, training images are only compared with: where the manifest has
    their digests, they are not read.
    """
    stated = bool(manifest.of("test"))
    known = [s for s in manifest.samples if stated and s.split != "test" and s.pixel_sha256]
    unread = [s for s in manifest.samples if not stated or s.split == "test" or not s.pixel_sha256]
    with progress.phase("Reading images", len(unread)) as advance:
        new = replace(manifest, samples=tuple(unread))
        read = digested(new, data.white_level, advance, data.first_page)
    return replace(manifest, samples=(*read.samples, *known))


def score_samples(
    detector: Detector,
    manifest: Manifest,
    samples: Sequence[Sample],
    files: ResultFiles | None,
    progress: Progress,
    threads: Threads | None = None,
) -> tuple[list[ScoredImage], dict[str, Any]]:
    """Score labelled samples; each image is decoded and predicted once.

    The pixel metrics take every good image (all of it unmarked) and every defective image with a
    marked mask, at the images' own sizes. A defective image without a mask, or with one that is
    empty or cannot be used, counts in the image metrics alone and is listed in the notes, as are
    images with warnings. Masks are read after the score. Samples have digests: images of one group
    or with equal pixels count as one part.

    Returns:
        The rows, and the metrics as ``metrics.json`` holds them.

    Raises:
        ImageError: an image that cannot be read.
    """
    rows: list[ScoredImage] = []
    maps = MapFile(files.folder if files else None)
    masks, names = list[NDArray[np.bool_]](), list[str]()
    notes: dict[str, list[str]] = defaultdict(list)

    def finish(
        sample: Sample, image: Prepared, prediction: Prediction
    ) -> tuple[ScoredImage, NDArray[np.float32]]:
        name = manifest.name(sample.image)
        row = ScoredImage.of(prediction, name, sample.image, sample.split, sample.defective)
        if files is not None:
            files.add(row, image.pixels, prediction)
        return row, prediction.anomaly_map

    scored = stream(detector, ((s, s.image) for s in samples), finish, threads or Threads.of())
    with closing(scored), progress.phase("Evaluation", len(samples)) as advance:
        for sample, found in scored:
            if isinstance(found, Exception):
                raise found
            row, anomaly_map = found
            rows.append(row)
            if row.warnings:
                notes["images_with_warnings"].append(f"{row.name}: {'; '.join(row.warnings)}")
            size = (anomaly_map.shape[0], anomaly_map.shape[1])
            try:
                mask = true_mask(sample, size, size, row.name, notes)
            except ImageError as error:  # of a training's test part: it costs no finished training
                notes["mask_unusable"].append(f"{row.name}: {error}")
                mask = None
            if mask is not None:
                maps.append(anomaly_map)
                masks.append(mask)
                names.append(row.name)
            advance()
    groups = group_numbers(manifest, samples)
    notes |= single_groups(rows, groups)
    return rows, {
        **image_metrics(rows, detector, groups),
        **pixel_metrics(maps.maps(), masks, names),
        "notes": odd_images(notes, samples),
    }
