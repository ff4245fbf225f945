"""What the report's tests share: a detector without a network, rows, and a page taken apart."""

import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from cdgp.decision import Decision
from cdgp.evaluation import ScoredImage
from cdgp.inference import Detector, Prediction, Region, find_regions
from cdgp.method.score import ImageCalibrator
from cdgp.presets import settings
from cdgp.runtimes.base import Array, Outputs
from cdgp.runtimes.card import Card

SCALE = (0.0, 10.0)
LEVEL = 8.0
VOID = {"meta", "img", "br", "link", "input", "hr"}


class NoRuntime:
    """Runs nothing."""

    name = "none"

    def run(self, images: Array) -> Outputs:
        raise NotImplementedError


class StubDetector(Detector):
    """Bright pixels are surprising; nothing is trained. Counts the images that it predicts."""

    def __init__(self, notes: tuple[str, ...] = (), bound: float | None = None) -> None:
        card = Card(
            settings("lite", input_size=(64, 64), decision={"region_level": math.exp(-LEVEL)}),
            Decision(0.5, "the default", bound),
            ImageCalibrator((0.0,), (1.0,), (1.0,), 0.0, notes),
            SCALE[1],
            {"cdgp": "0.1.0", "versions": {"torch": "2.9"}},
            {},
        )
        super().__init__(card, NoRuntime())
        self.predicted = 0

    def predict_pixels(
        self,
        pixels: NDArray[np.float32],
        warnings: tuple[str, ...] = (),
        source: object = None,
    ) -> Prediction:
        self.predicted += 1
        return replace(predicted(pixels.max(axis=2) * 10), warnings=warnings)


def predicted(surprisal: ArrayLike, score: float = 0.9) -> Prediction:
    """A prediction with this surprisal."""
    values = np.asarray(surprisal, np.float32)
    regions = find_regions(values, LEVEL)
    return Prediction(values - np.float32(0.1), values, score, score > 0.5, regions, values > LEVEL)


def row(
    name: str,
    score: float,
    defective: bool | None = None,
    regions: tuple[Region, ...] = (),
    path: Path = Path("gone.png"),
) -> ScoredImage:
    return ScoredImage(name, path, "test", defective, score, score > 0.5, regions)


def on_disk(folder: Path, name: str, score: float, defective: bool | None = None) -> ScoredImage:
    """A row whose image exists: 40 × 30, dark, with a bright spot."""
    pixels = np.full((30, 40, 3), 60, np.uint8)
    pixels[10:14, 20:26] = 250
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "PNG")
    spot = Region(x=20, y=10, width=6, height=4, area=24, peak=9.8)
    return row(name, score, defective, (spot,), path)


ROWS = [
    row("good right", 0.01, False),
    row("good doubtful", 0.45, False),
    row("reject mild", 0.6, False),
    row("reject worst", 0.99, False),
    row("defective right", 0.98, True),
    row("miss mild", 0.3, True),
    row("miss worst", 0.02, True),
]

Attributes = list[tuple[str, str | None]]


class Page(HTMLParser):
    """Tags with attributes, the text, and whether every tag is closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Attributes) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Attributes) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def all(self, tag: str, key: str) -> list[str]:
        """The values of an attribute, of every tag that has it."""
        return [attrs[key] or "" for name, attrs in self.tags if name == tag and key in attrs]
