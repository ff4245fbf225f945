"""The files of scored images: overlay, record and map of each at once, then tables and report."""

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cdgp.evaluation import ScoredImage, write_scores
from cdgp.files import atomic_write, printable, write_text
from cdgp.inference import Detector, Prediction
from cdgp.report.galleries import Thumbnails
from cdgp.report.html import TrainingFacts, write_report
from cdgp.report.overlay import output_name, write_overlay
from cdgp.run_folder import MAPS, METRICS, OVERLAY_SUFFIXES, OVERLAYS, REPORT, SCORES

Overlays = Literal["all", "rejected", "none"]
FEW = 1000
"""Of fewer images than this, all get an overlay where nothing is said; else those rejected."""


def overlays_of(asked: Overlays | None, images: int) -> Overlays:
    """Which overlays are drawn: what is asked for, or what fits a number of images."""
    return asked or ("all" if images < FEW else "rejected")


class ResultFiles:
    """Writes the results of one scoring into a folder, each file with the run id.

    Args:
        folder: to write into.
        run_id: of the run.
        detector: that scored.
        overlays: of which images an overlay and a record are written.
        save_maps: whether the raw maps are, of all images, each with a record.
        keep: images whose thumbnails the report shows in any case.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        detector: Detector,
        overlays: Overlays,
        save_maps: bool,
        keep: Collection[Path] = (),
    ) -> None:
        self.folder = folder
        self.run_id = run_id
        self._detector = detector
        self._overlays = overlays
        self._save_maps = save_maps
        self._thumbnails = Thumbnails(detector, keep)

    def add(self, row: ScoredImage, pixels: NDArray[np.float32], prediction: Prediction) -> None:
        """Write the record, the overlay and the map of one image, as far as they are asked for.

        The record comes first: --overwrite removes what has one. ``pixels`` are HWC float32 RGB in
        [0, 1]. Safe in threads.
        """
        self._thumbnails.add(row, pixels, prediction)
        drawn = self._overlays == "all" or (self._overlays == "rejected" and row.pred_label)
        if not drawn and not self._save_maps:
            return
        name = output_name(row.name)
        overlays = self.folder / OVERLAYS
        detector = self._detector
        decision = detector.card.decision
        record = {
            "image": printable(row.name),
            "pred_score": row.pred_score,
            "score_kind": prediction.score_kind,
            "rests_on": prediction.rests_on,
            "pred_label": "defective" if row.pred_label else "good",
            "threshold": detector.threshold,
            "defect_rate": None if decision.is_p_value else decision.defect_rate,
            "size": list(prediction.anomaly_map.shape),
            "regions": [asdict(region) for region in row.regions],
            "warnings": list(row.warnings),
            "run_id": self.run_id,
        }
        write_text(overlays / f"{name}.json", json.dumps(record, indent=1) + "\n")
        if drawn:
            place = overlays / f"{name}{OVERLAY_SUFFIXES[0]}"
            write_overlay(place, pixels, prediction, detector.colour_scale, detector.coarse)
        if self._save_maps:
            place = self.folder / MAPS / f"{name}.npy"
            with atomic_write(place) as temporary, temporary.open("wb") as file:
                np.save(file, prediction.anomaly_map.astype(np.float16))

    def write_tables(self, rows: Iterable[ScoredImage], metrics: dict[str, Any] | None) -> None:
        """Write ``scores.csv``, and ``metrics.json`` where there are metrics."""
        write_scores(self.folder / SCORES, rows, self._detector, self.run_id)
        if metrics is not None:
            record = {**metrics, "run_id": self.run_id}
            write_text(self.folder / METRICS, json.dumps(record, indent=2) + "\n")

    def write_report(
        self,
        rows: Collection[ScoredImage],
        metrics: dict[str, Any] | None,
        computed_on: str,
        training: TrainingFacts | None = None,
    ) -> None:
        """Write ``report.html``; arguments as `html.write_report`."""
        write_report(
            self.folder / REPORT, self.folder.name, self._detector, rows, metrics, computed_on,
            training, self._thumbnails, self.run_id,
        )  # fmt: skip
