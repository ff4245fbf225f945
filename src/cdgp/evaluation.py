"""Scored images as rows, and the metrics of labelled ones."""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cdgp.data.images import INVERTED, read_mask_with_facts, resize_mask
from cdgp.data.manifest import Sample
from cdgp.decision import Decision
from cdgp.errors import OutputError
from cdgp.files import path_cell, printable, write_csv
from cdgp.inference import Detector, Prediction, Region
from cdgp.metrics.ranking import Measure, image_auroc, pixel_auroc
from cdgp.metrics.regions import aupro
from cdgp.metrics.reliability import (
    Decisions,
    at_rate,
    calibration_error_interval,
    expected_calibration_error,
    overkill_and_escape,
)

RATES = {"overkill": ("false_rejects", "good"), "escape": ("misses", "defective")}
"""The count and the label of each rate."""
PARTS = {"image_auroc": "", "expected_calibration_error": "calibration_"}
"""How the numbers of groups are called whose digits a metric cannot exceed."""

COLUMNS = (
    "image", "split", "label", "pred_score", "pred_label", "regions", "warnings", "score_kind",
    "rests_on", "run_id",
)  # fmt: skip
"""Of ``scores.csv``."""


@dataclass(frozen=True)
class ScoredImage:
    """One row of ``scores.csv``."""

    name: str
    path: Path
    split: str | None
    defective: bool | None
    pred_score: float
    pred_label: bool
    regions: tuple[Region, ...]
    warnings: tuple[str, ...] = ()

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
            prediction.warnings,
        )  # fmt: skip


class MapFile:
    """Maps of many images in one temporary file: memory does not grow with their number.

    Args:
        folder: where it lies, without a name that anything shows; that of TMPDIR where None.

    Raises:
        OutputError: there is no such place, or no room in it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._place = folder
        self._shapes: list[tuple[int, ...]] = []
        with self._output_errors():
            self._file = tempfile.TemporaryFile(prefix=".cdgp-maps-", dir=folder)  # noqa: SIM115

    def append(self, anomaly_map: NDArray[np.float32]) -> None:
        with self._output_errors():
            self._file.write(np.ascontiguousarray(anomaly_map, dtype=np.float32).tobytes())
        self._shapes.append(anomaly_map.shape)

    @contextmanager
    def _output_errors(self) -> Iterator[None]:
        """Errors of the operating system as ours, with the name of the place."""
        try:
            yield
        except OSError as error:
            place = self._place or os.environ.get("TMPDIR") or "the folder of temporary files"
            raise OutputError(
                f"{place}: the maps cannot be kept there until they are measured: "
                f"{error.strerror or error}; make room, or set TMPDIR to a folder that has some "
                "(float32 maps of all labelled images)"
            ) from error

    def maps(self) -> list[NDArray[np.float32]]:
        with self._output_errors():
            self._file.flush()
        if not self._shapes:
            return []
        try:
            flat: NDArray[np.float32] = np.memmap(self._file, dtype=np.float32, mode="r")
        except OSError:  # some shares map no file into memory
            self._file.seek(0)
            flat = np.fromfile(self._file, dtype=np.float32)
        ends = np.cumsum([h * w for h, w in self._shapes])
        parts = np.split(flat, ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def true_mask(
    sample: Sample,
    native: tuple[int, int],
    size: tuple[int, int],
    name: str,
    notes: dict[str, list[str]],
) -> NDArray[np.bool_] | None:
    """The mask of an image, (H, W) bool; None where it takes no part in the pixel metrics.

    Args:
        sample: with its label and masks.
        native: (height, width) of the image.
        size: (height, width) of the result, resized by nearest neighbour.
        name: of the image, for the notes.
        notes: names of odd images by what is odd; added to.

    Raises:
        ImageError: a mask that cannot be used.
    """
    marked = _read_noted(sample, native, name, notes)
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


def _read_noted(
    sample: Sample, native: tuple[int, int], name: str, notes: dict[str, list[str]]
) -> NDArray[np.bool_] | None:
    """The union of an image's masks; None where there is none."""
    union = np.zeros(native, np.bool_)
    for path in sample.masks:
        mask, facts = read_mask_with_facts(path, native)
        union |= mask
        if facts.told:
            kind = "mask_cut_at_half" if facts.cut else "mask_of_several_values"
            notes[kind].append(f"{name}: {path.name}: {facts.told}")
    if union.mean() >= INVERTED:
        notes["mask_marks_nearly_all"].append(name)
    return union if sample.masks else None


def odd_images(notes: dict[str, list[str]], samples: Sequence[Sample]) -> dict[str, list[str]]:
    """The notes to report; missing masks are left out where no image has a mask at all."""
    if not any(sample.masks for sample in samples):
        notes = {key: names for key, names in notes.items() if key != "defective_without_mask"}
    return {key: names for key, names in notes.items() if names}


def image_metrics(
    rows: Sequence[ScoredImage], detector: Detector, groups: ArrayLike | None = None
) -> dict[str, Any]:
    """Image AUROC, calibration error, overkill and escape, with counts and intervals.

    ``groups`` are (n,) numbers of the part that each image shows; each shows one of its own where
    None. The calibration error is None where a class has a single part, and of p-values.
    """
    scores = np.array([row.pred_score for row in rows], dtype=np.float64)
    labels = np.array([bool(row.defective) for row in rows], dtype=np.bool_)
    decision = detector.card.decision
    # By the decisions: an image without content is rejected whatever its score.
    rejected = np.array([row.pred_label for row in rows], dtype=np.float64)
    found = overkill_and_escape(rejected, labels, 0.5, groups)
    return {
        "score_kind": detector.score_kind,
        "rests_on": detector.rests_on,
        "good": found.good,
        "defective": found.defective,
        "good_groups": found.good_groups,
        "defective_groups": found.defective_groups,
        **_with_reason(
            "image_auroc", image_auroc(scores, labels, names=[row.name for row in rows])
        ),
        **_calibration_error(scores, labels, groups, decision, found),
        "calibration_good_groups": detector.card.image.good_groups,
        "calibration_defective_groups": detector.card.image.defective_groups,
        "threshold": detector.threshold,
        "threshold_source": decision.source,
        "false_reject_bound": decision.false_reject_bound,
        "defect_rate": None if decision.is_p_value else decision.defect_rate,
        "defect_rate_source": decision.refers_to if decision.is_p_value else decision.rate_source,
        **_with_reason("overkill", found.overkill),
        "false_rejects": found.false_rejects,
        "overkill_interval": found.overkill_interval,
        **_with_reason("escape", found.escape),
        "misses": found.misses,
        "escape_interval": found.escape_interval,
    }


def _calibration_error(
    scores: NDArray[np.float64],
    labels: NDArray[np.bool_],
    groups: ArrayLike | None,
    decision: Decision,
    found: Decisions,
) -> dict[str, Any]:
    """The calibration error at these images' own share of defects, with its interval.

    A set for evaluation rarely has as many defects as the line. At another rate the error would
    measure that difference, so scores are brought to the set's share first.
    """
    name = "expected_calibration_error"
    if decision.is_p_value:
        reason = "the score is one minus a p-value, and no probability"
        return {name: None, f"{name}_reason": reason, f"{name}_interval": None}
    for word, number in (("good", found.good_groups), ("defective", found.defective_groups)):
        if number < 2:
            reason = f"no {word} image" if not number else f"a single group of {word} images"
            return {name: None, f"{name}_reason": reason, f"{name}_interval": None}
    share = float(labels.mean())
    told = at_rate(scores, decision.defect_rate, share)
    return {
        name: expected_calibration_error(told, labels).value,
        f"{name}_interval": calibration_error_interval(told, labels, groups),
        f"{name}_rate": share,
    }


def single_groups(rows: Sequence[ScoredImage], groups: ArrayLike) -> dict[str, list[str]]:
    """Notes: the images of a label that has a single group, which figures then rest on."""
    numbers, notes = np.asarray(groups), {}
    for word, label in (("good", False), ("defective", True)):
        places = [i for i, row in enumerate(rows) if row.defective is label]
        if len(set(numbers[places].tolist())) == 1:
            notes[f"a_single_{word}_part"] = [rows[i].name for i in places]
    return notes


def value_text(metrics: Mapping[str, Any], name: str) -> str:
    """A metric for reading; what rests on a single part is a count, or has two digits."""
    value = metrics.get(name)
    if value is None:
        return "–"
    if name in RATES:
        count, label = RATES[name]
        if metrics.get(f"{label}_groups") == 1:
            return f"{metrics[count]} of {metrics[label]}"
        return f"{100 * value:.1f} %"
    part = PARTS.get(name)
    groups = [metrics.get(f"{part}{label}_groups") for label in ("good", "defective")]
    return f"{value:.2f}" if part is not None and 1 in groups else f"{value:.4f}"


def interval_text(metrics: Mapping[str, Any], name: str) -> str:
    """The 95 % interval of a metric and the number of groups that it rests on; "" without one."""
    ends = metrics.get(f"{name}_interval")
    if ends is None:
        return ""
    low, high = ends
    if name not in RATES:
        groups = f"{metrics['good_groups']} good and {metrics['defective_groups']} defective groups"
        return f"95 %: {low:.2f} to {high:.2f}, {groups}"
    number = metrics[f"{RATES[name][1]}_groups"]
    groups = f"{number} group" if number == 1 else f"{number} groups"
    return f"95 %: {100 * low:.1f} to {100 * high:.1f} %, {groups}"


def pixel_metrics(
    maps: Sequence[NDArray[np.float32]], masks: Sequence[NDArray[np.bool_]], names: Sequence[str]
) -> dict[str, Any]:
    """Pixel AUROC, and AUPRO up to 0.3 and 0.05, of maps against masks of the same sizes."""
    regions = aupro(maps, masks, limits=(0.3, 0.05), names=names)
    return {
        "pictures_with_pixels": len(maps),
        "metric_size": "native",
        **_with_reason("pixel_auroc", pixel_auroc(maps, masks, names=names)),
        **_with_reason("pixel_aupro_30", regions[0.3]),
        **_with_reason("pixel_aupro_05", regions[0.05]),
    }


def _with_reason(name: str, measure: Measure) -> dict[str, Any]:
    """A metric by its name, and the reason where it is undefined."""
    entry: dict[str, Any] = {name: measure.value}
    if measure.value is None:
        entry[f"{name}_reason"] = measure.reason
    return entry


def write_scores(path: Path, rows: Iterable[ScoredImage], detector: Detector, run_id: str) -> None:
    """Write ``scores.csv``: a row an image, with its regions as JSON, its warnings, what the score
    is and rests on, its run."""
    words = {True: "defective", False: "good", None: ""}
    cells = (
        (
            path_cell(printable(row.name)),
            row.split or "",
            words[row.defective],
            row.pred_score,  # as the shortest text that reads back as the same number
            words[row.pred_label],
            json.dumps([asdict(region) for region in row.regions]),
            printable("; ".join(row.warnings)),
            detector.score_kind,
            detector.rests_on,
            run_id,
        )
        for row in rows
    )
    write_csv(path, COLUMNS, cells)
