"""Score labelled images with a detector: one row an image, and the metrics over them."""

import csv
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cdgp.data.images import read_masks, resize_mask
from cdgp.data.manifest import Manifest, Sample
from cdgp.files import atomic_write, printable
from cdgp.inference import Detector, Prediction, Region
from cdgp.metrics.ranking import Measure, image_auroc, pixel_auroc
from cdgp.metrics.regions import aupro
from cdgp.metrics.reliability import expected_calibration_error, overkill_and_escape
from cdgp.progress import Progress


@dataclass(frozen=True)
class ScoredImage:
    """One row of ``scores.csv``."""

    name: str
    """As the manifest names it."""
    path: Path
    split: str | None
    defective: bool | None
    """Its label, or None where there is none."""
    pred_score: float
    pred_label: bool
    regions: tuple[Region, ...]

    @classmethod
    def of(
        cls,
        prediction: Prediction,
        name: str,
        path: Path,
        split: str | None = None,
        defective: bool | None = None,
    ) -> Self:
        """The row of a prediction."""
        return cls(
            name, path, split, defective,
            prediction.pred_score, prediction.pred_label, prediction.regions,
        )  # fmt: skip


OnPrediction = Callable[[ScoredImage, Prediction], None]


class MapFile:
    """Maps of many images in one temporary file, so that memory does not grow with them."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="cdgp-maps-")  # noqa: SIM115
        self._shapes: list[tuple[int, ...]] = []

    def append(self, anomaly_map: NDArray[np.float32]) -> None:
        self._file.write(np.ascontiguousarray(anomaly_map, dtype=np.float32).tobytes())
        self._shapes.append(anomaly_map.shape)

    def maps(self) -> list[NDArray[np.float32]]:
        self._file.flush()
        if not self._shapes:
            return []
        flat = np.memmap(self._file, dtype=np.float32, mode="r")
        ends = np.cumsum([h * w for h, w in self._shapes])
        parts = np.split(flat, ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def evaluate(
    detector: Detector,
    manifest: Manifest,
    samples: Sequence[Sample],
    progress: Progress,
    on_prediction: OnPrediction = lambda row, prediction: None,
) -> tuple[list[ScoredImage], dict[str, Any]]:
    """Score samples; their masks are read into the metrics, after an image is scored.

    Pixel metrics take every good image (all of it unmarked) and every defective image with a
    marked mask, at the images' own sizes; a defective image without a mask, or with an empty
    one, takes part in the image metrics alone, and is listed.

    Args:
        detector: a trained detector.
        manifest: that the samples belong to, for their names.
        samples: images with labels and, where there are any, masks.
        progress: where to tell the progress.
        on_prediction: called with each row and its prediction, to draw or store it.

    Returns:
        The rows, and the metrics as ``metrics.json`` holds them.

    Raises:
        ImageError: an image or mask that cannot be read.
    """
    rows: list[ScoredImage] = []
    store, masks, names = MapFile(), list[NDArray[np.bool_]](), list[str]()
    notes: dict[str, list[str]] = defaultdict(list)
    with progress.phase("Evaluation", len(samples)) as advance:
        for sample in samples:
            prediction = detector.predict(sample.image)
            name = manifest.name(sample.image)
            row = ScoredImage.of(prediction, name, sample.image, sample.split, sample.defective)
            rows.append(row)
            on_prediction(row, prediction)
            height, width = prediction.anomaly_map.shape
            mask = true_mask(sample, (height, width), (height, width), name, notes)
            if mask is not None:
                store.append(prediction.anomaly_map)
                masks.append(mask)
                names.append(name)
            advance()
    metrics = image_metrics(rows, detector) | pixel_metrics(store.maps(), masks, names)
    metrics["notes"] = odd_images(notes, samples)
    return rows, metrics


def true_mask(
    sample: Sample,
    native: tuple[int, int],
    size: tuple[int, int],
    name: str,
    notes: dict[str, list[str]],
) -> NDArray[np.bool_] | None:
    """(H, W) bool, or None where the image takes no part in the pixel metrics.

    Args:
        sample: with its masks.
        native: (height, width) of the image.
        size: (height, width) that is scored; where it is another, nearest neighbours are taken.
        name: of the image, for the notes.
        notes: lists of odd images, added to.
    """
    marked = read_masks(sample.masks, native) if sample.masks else None
    if not sample.defective:
        if marked is not None and marked.any():
            notes["good_with_marked_mask"].append(name)
        return np.broadcast_to(np.False_, size)
    if marked is None:
        notes["defective_without_mask"].append(name)
        return None
    if not marked.any():
        notes["defective_with_empty_mask"].append(name)
        return None
    scored = resize_mask(marked, size)
    if not scored.any():
        notes["defect_vanishes_at_metric_size"].append(name)
        return None
    return scored


def odd_images(notes: dict[str, list[str]], samples: Sequence[Sample]) -> dict[str, list[str]]:
    """The notes worth telling; that no image at all has a mask is no oddity of an image."""
    if not any(sample.masks for sample in samples):
        notes = {key: names for key, names in notes.items() if key != "defective_without_mask"}
    return {key: names for key, names in notes.items() if names}


def image_metrics(rows: Sequence[ScoredImage], detector: Detector) -> dict[str, Any]:
    """Image AUROC, calibration error, and what the decision costs, with the counts."""
    scores = np.array([row.pred_score for row in rows], dtype=np.float64)
    labels = np.array([bool(row.defective) for row in rows], dtype=np.bool_)
    decisions = overkill_and_escape(scores, labels, detector.threshold)
    return {
        "good": int((~labels).sum()),
        "defective": int(labels.sum()),
        **_told("image_auroc", image_auroc(scores, labels, names=[row.name for row in rows])),
        **_told("expected_calibration_error", expected_calibration_error(scores, labels)),
        "threshold": detector.threshold,
        "threshold_source": detector.card.decision.source,
        "false_reject_bound": detector.card.decision.false_reject_bound,
        **_told("overkill", decisions.overkill),
        **_told("escape", decisions.escape),
    }


def pixel_metrics(
    maps: Sequence[NDArray[np.float32]],
    masks: Sequence[NDArray[np.bool_]],
    names: Sequence[str],
) -> dict[str, Any]:
    """Pixel AUROC and AUPRO at 0.3 and 0.05 of maps against masks of the same sizes."""
    regions = aupro(maps, masks, limits=(0.3, 0.05), names=names)
    return {
        "pictures_with_pixels": len(maps),
        "metric_size": "native",
        **_told("pixel_auroc", pixel_auroc(maps, masks, names=names)),
        **_told("pixel_aupro_30", regions[0.3]),
        **_told("pixel_aupro_05", regions[0.05]),
    }


def _told(name: str, measure: Measure) -> dict[str, Any]:
    """A metric, and the reason where it is undefined."""
    told: dict[str, Any] = {name: measure.value}
    if measure.value is None:
        told[f"{name}_reason"] = measure.reason
    return told


def write_scores(path: Path, rows: Iterable[ScoredImage]) -> None:
    """``scores.csv``: image, split, label, pred_score, pred_label, regions (JSON)."""
    words = {True: "defective", False: "good", None: ""}
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as f:
        table = csv.writer(f)
        table.writerow(["image", "split", "label", "pred_score", "pred_label", "regions"])
        for row in rows:
            table.writerow([
                printable(row.name),
                row.split or "",
                words[row.defective],
                repr(row.pred_score),  # shortest that reads back the same: 0.9999999 stays below 1
                words[row.pred_label],
                json.dumps([asdict(region) for region in row.regions]),
            ])  # fmt: skip
