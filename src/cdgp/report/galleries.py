"""Galleries of the report: which images they show, and thumbnails made while images are scored."""

import heapq
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdgp.audit.types import Suspect
from cdgp.data.images import reason
from cdgp.errors import ImageError
from cdgp.evaluation import ScoredImage
from cdgp.inference import Detector, Prediction
from cdgp.report.charts import log_odds
from cdgp.report.overlay import STACKED_FROM, Shrunk, shrunk
from cdgp.report.page import jpeg

SHOWN = 8
THUMBNAIL_SIDES = (256, 320)
"""Least and largest longer side of a thumbnail, in pixels."""


class Gallery(NamedTuple):
    """Images for a person to review, the most important first."""

    title: str
    why: str
    rows: tuple[ScoredImage, ...]
    remarks: Mapping[str, str] = {}
    """A further line below an image, by its name."""


@dataclass(frozen=True)
class Selection:
    """Which scored images a gallery shows, and in which order."""

    title: str
    why: str
    """Shown below the title; {count} is the number of images that qualify."""
    order: Callable[[ScoredImage, float], tuple[Any, ...]]
    """Sort key of a row at a threshold; the smallest come first."""
    wrong: bool | None = None
    """Only images with this label that were decided wrongly; all images where None."""
    none: str = ""
    """Shown below the title where no image qualifies."""

    def takes(self, row: ScoredImage) -> bool:
        return self.wrong is None or (row.defective == self.wrong and row.pred_label != self.wrong)

    def order_at(self, threshold: float) -> Callable[[ScoredImage], tuple[Any, ...]]:
        return lambda row: self.order(row, threshold)

    def of(self, rows: Collection[ScoredImage], threshold: float) -> Gallery:
        """The gallery of these rows."""
        first = heapq.nsmallest(SHOWN, filter(self.takes, rows), self.order_at(threshold))
        count = sum(map(self.takes, rows)) if self.wrong is not None else len(rows)
        why = self.why.format(count=count) if first else self.none
        return Gallery(self.title, why, tuple(first))


def _doubt(row: ScoredImage, threshold: float) -> float:
    """Distance to the threshold, in log-odds."""
    return abs(float(log_odds(row.pred_score)) - float(log_odds(threshold)))


def _peak(row: ScoredImage) -> float:
    return max((region.peak for region in row.regions), default=0.0)


SELECTIONS = (
    Selection(
        "Most wrong: defective parts that passed",
        "{count} in all, the least suspected first.",
        lambda row, threshold: (row.pred_score, row.name),
        wrong=True,
        none="None: every defective part was rejected.",
    ),
    Selection(
        "Most wrong: good parts that were rejected",
        "{count} in all, the most suspected first. A wrong label would show up here.",
        lambda row, threshold: (-row.pred_score, row.name),
        wrong=False,
        none="None: every good part passed.",
    ),
    Selection(
        "Most doubtful",
        "Closest to the threshold in log-odds: the parts that a person should look at.",
        lambda row, threshold: (_doubt(row, threshold), row.name),
    ),
    Selection(
        "Most defective",
        "Highest score first.",
        lambda row, threshold: (-row.pred_score, -_peak(row), row.name),
    ),
)


def galleries(rows: Collection[ScoredImage], threshold: float) -> list[Gallery]:
    """The galleries of scored images: wrong ones where all have labels, doubtful, defective."""
    labels = {row.defective for row in rows}
    return [
        selection.of(rows, threshold)
        for selection in SELECTIONS
        if selection.wrong is None or (None not in labels and selection.wrong in labels)
    ]


def shown_suspects(suspects: Sequence[Suspect], defective: bool) -> list[Suspect]:
    """The images of one label that the report shows: those that are doubted most."""
    return [s for s in suspects if s.defective == defective][:SHOWN]


def suspect_galleries(suspects: Sequence[Suspect], thumbnails: "Thumbnails") -> Iterable[Gallery]:
    """A gallery for each label, of the images whose label is doubted most."""
    for defective, word, other in ((False, "good", "defective"), (True, "defective", "good")):
        rows, remarks = [], {}
        for suspect in shown_suspects(suspects, defective):
            row = thumbnails.of(suspect).row
            if row is None:  # unreadable by now; suspects.csv still lists it
                continue
            rows.append(row)
            remarks[row.name] = (
                f"looks {other} with P = {suspect.doubt:.2f} to a classifier trained without it"
            )
        if rows:
            yield Gallery(
                f"Suspect labels: labelled {word}",
                f"Labelled {word}, but a classifier that was trained without them finds them "
                f"{other}. Check these labels first; nothing was relabelled. suspects.csv lists "
                "all images.",
                tuple(rows),
                remarks,
            )


class Thumbnail(NamedTuple):
    """A scored image and its map, small, as data URIs; or why there are none."""

    row: ScoredImage | None
    """None where the image cannot be read any more."""
    image: str = ""
    heat: str = ""
    stacked: bool = False
    """Whether the map goes below the image, not beside it."""
    problem: str | None = None


class Thumbnails:
    """Thumbnails for the galleries, made while the images are scored.

    A thumbnail is kept while one of the galleries would show its image, so that memory does not
    grow with the number of images. An image that was not scored here (suspects among the training
    images, images from before a --resume) is read and predicted when it is asked for. Those to
    ``keep`` are kept in any case.
    """

    def __init__(self, detector: Detector, keep: Collection[Path] = ()) -> None:
        self._detector = detector
        self._keep = frozenset(keep)
        self._first: list[list[ScoredImage]] = [[] for _ in SELECTIONS]
        self._kept: dict[Path, tuple[ScoredImage, Shrunk]] = {}
        self._made: dict[Path, Thumbnail] = {}
        """Encoded once, however many galleries show the image."""
        self._lock = Lock()

    def add(self, row: ScoredImage, pixels: NDArray[np.float32], prediction: Prediction) -> None:
        """Take a scored image, its pixels (HWC float32 RGB in [0, 1]) and its prediction.

        Safe in threads: which images are shown does not depend on their order.
        """
        with self._lock:
            dropped = self._rank(row)
            shown = self._shown()
            for other in dropped - shown:
                self._kept.pop(other, None)
        if row.path in shown:
            small = shrunk(pixels, prediction, THUMBNAIL_SIDES)
            with self._lock:
                if row.path in self._shown():  # another thread may have displaced it
                    self._kept[row.path] = row, small

    def of(self, image: ScoredImage | Suspect) -> Thumbnail:
        """The thumbnail of an image, predicted now where it was not scored here."""
        if image.path not in self._made:
            try:
                row, small = self._kept.get(image.path) or self._predicted(image)
            except ImageError as error:
                self._made[image.path] = Thumbnail(None, problem=reason(error, image.path))
            else:
                self._made[image.path] = self._encoded(row, small)
        return self._made[image.path]

    def _predicted(self, image: ScoredImage | Suspect) -> tuple[ScoredImage, Shrunk]:
        pixels, warnings = self._detector.read_with_warnings(image.path)
        found = self._detector.predict_pixels(pixels, warnings)
        row = ScoredImage.of(found, image.name, image.path, image.split, image.defective)
        return row, shrunk(pixels, found, THUMBNAIL_SIDES)

    def _encoded(self, row: ScoredImage, small: Shrunk) -> Thumbnail:
        plain, heat = small.panels(self._detector.colour_scale)
        stacked = plain.width >= STACKED_FROM * plain.height
        return Thumbnail(row, jpeg(plain), jpeg(heat), stacked)

    def _rank(self, row: ScoredImage) -> set[Path]:
        """Insert a row where a gallery would show it; returns the images that this displaced."""
        dropped = set()
        for selection, first in zip(SELECTIONS, self._first, strict=True):
            if selection.takes(row):
                insort(first, row, key=selection.order_at(self._detector.threshold))
                dropped |= {other.path for other in first[SHOWN:]}
                del first[SHOWN:]
        return dropped

    def _shown(self) -> set[Path]:
        return {row.path for first in self._first for row in first} | self._keep
