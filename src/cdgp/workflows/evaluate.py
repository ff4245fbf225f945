"""Score labelled images, and compute the metrics over them."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdgp import run_folder
from cdgp.data import layouts
from cdgp.data.groups import group_numbers
from cdgp.data.manifest import Manifest, Sample
from cdgp.data.scan import digested
from cdgp.data.splits import check_leaks
from cdgp.evaluation import (
    MapFile,
    ScoredImage,
    image_metrics,
    odd_images,
    pixel_metrics,
    single_groups,
    true_mask,
)
from cdgp.inference import Detector, load
from cdgp.progress import Progress, Quiet
from cdgp.report.results import ResultFiles

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
    save_maps: bool = False,
    overwrite: bool = False,
    defect_rate: float | None = None,
    progress: Progress | None = None,
) -> EvaluatedRun:
    """Score labelled images with a trained model; returns rows and metrics.

    Args:
        model: as ``inference.load`` takes it.
        data: a CSV manifest, or a folder with ``good/`` and ``defective/``. Where splits are
            stated, the test images are scored; otherwise all.
        out: folder for scores, overlays and report; None writes nothing.
        good: name of the folder of good images; the model's own where None.
        defective: the same of defective images.
        save_maps: also write the raw maps.
        overwrite: replace the results in ``out``.
        defect_rate: as ``inference.load`` takes it.
        progress: where to show the progress; nowhere where None.

    Raises:
        DataError: images or masks that cannot be read, all listed; equal images or one group on
            two sides of a stated split.
        CdgpError: see ``cdgp.errors``.
    """
    progress, source = progress or Quiet(), Path(data)
    detector = load(model, defect_rate=defect_rate)
    names = detector.settings.data
    bins = good or names.good, defective or names.defective
    folder = None if out is None else Path(out)
    if folder is not None:
        layouts.check_outside(folder, source, *bins)
    manifest = _digested(layouts.load(source, *bins), names.white_level, progress)
    test = manifest.of("test")
    if test:
        check_leaks(manifest)
    samples = test or manifest.samples
    known = run_folder.trained_on(Path(model))
    seen = sum(sample.pixel_sha256 in known for sample in samples)
    computed_on = f"{len(samples)} {'test images' if test else 'images'} of {source}"
    if seen:  # before the long work, so that it can be stopped
        log.warning("the model was trained on %d of these images: no measure of new ones", seen)
        computed_on += f", {seen} of which the model was trained on"
    files = None
    if folder is not None:
        run_folder.make_results_folder(folder, overwrite, manifest.paths())
        files = ResultFiles(folder, detector, save_maps)
    rows, metrics = score_samples(detector, manifest, samples, files, progress)
    metrics["computed_on"] = computed_on
    if files is not None:
        files.write_tables(rows, metrics)
        files.write_report(rows, metrics, computed_on)
    return EvaluatedRun(folder, rows, metrics, seen)


def _digested(manifest: Manifest, white_level: int, progress: Progress) -> Manifest:
    """The manifest with digests; every image that cannot be read is listed before any is scored.

    Beside a stated test part, training images are only compared with: where the manifest has
    their digests, they are not read.
    """
    stated = bool(manifest.of("test"))
    known = [s for s in manifest.samples if stated and s.split != "test" and s.pixel_sha256]
    unread = [s for s in manifest.samples if not stated or s.split == "test" or not s.pixel_sha256]
    with progress.phase("Reading images", len(unread)) as advance:
        read = digested(replace(manifest, samples=tuple(unread)), white_level, advance)
    return replace(manifest, samples=(*read.samples, *known))


def score_samples(
    detector: Detector,
    manifest: Manifest,
    samples: Sequence[Sample],
    files: ResultFiles | None,
    progress: Progress,
) -> tuple[list[ScoredImage], dict[str, Any]]:
    """Score labelled samples; each image is decoded and predicted once.

    The pixel metrics take every good image (all of it unmarked) and every defective image with a
    marked mask, at the images' own sizes. A defective image without a mask, or with an empty one,
    counts in the image metrics alone and is listed in the notes. Masks are read after the score.
    Samples have digests: images of one group or with equal pixels count as one part.

    Returns:
        The rows, and the metrics as ``metrics.json`` holds them.

    Raises:
        ImageError: an image or mask that cannot be read.
    """
    rows: list[ScoredImage] = []
    maps, masks, names = MapFile(), list[NDArray[np.bool_]](), list[str]()
    notes: dict[str, list[str]] = defaultdict(list)
    with progress.phase("Evaluation", len(samples)) as advance:
        for sample in samples:
            pixels = detector.read(sample.image)
            prediction = detector.predict_pixels(pixels)
            name = manifest.name(sample.image)
            row = ScoredImage.of(prediction, name, sample.image, sample.split, sample.defective)
            rows.append(row)
            if files is not None:
                files.add(row, pixels, prediction)
            size = (pixels.shape[0], pixels.shape[1])
            mask = true_mask(sample, size, size, name, notes)
            if mask is not None:
                maps.append(prediction.anomaly_map)
                masks.append(mask)
                names.append(name)
            advance()
    groups = group_numbers(manifest, samples)
    notes |= single_groups(rows, groups)
    return rows, {
        **image_metrics(rows, detector, groups),
        **pixel_metrics(maps.maps(), masks, names),
        "notes": odd_images(notes, samples),
    }
