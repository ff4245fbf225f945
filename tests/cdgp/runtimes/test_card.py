"""The card: what comes back from an exported file's metadata, and what is refused."""

import json
import math

import pytest

from cdgp.errors import ModelFileError
from cdgp.runtimes.card import KEYS, VERSION, card_of, from_metadata, to_metadata
from cdgp.workflows import Run


@pytest.fixture
def metadata(tiny_run: Run) -> dict[str, str]:
    return to_metadata(card_of(tiny_run.detector.model))


def test_metadata_gives_the_card_back(tiny_run: Run) -> None:
    card = card_of(tiny_run.detector.model)._replace(export={"runtime": "onnxruntime"})
    metadata = to_metadata(card)
    assert tuple(metadata) == KEYS
    assert from_metadata(metadata, "a.onnx") == card


def test_the_colour_scale_ends_at_the_largest_surprisal(tiny_run: Run) -> None:
    model = tiny_run.detector.model
    tail = model.calibration.tail
    assert card_of(model).largest_surprisal == min(tail.floor, math.log(len(tail.scores) + 1))
    floored = model.calibration._replace(tail=tail._replace(floor=2.5))
    assert card_of(model._replace(calibration=floored)).largest_surprisal == 2.5


@pytest.mark.parametrize(
    "changes", [{"format": "another"}, {"version": str(VERSION + 1)}, {"version": ""}]
)
def test_files_of_others_are_refused(metadata: dict[str, str], changes: dict[str, str]) -> None:
    with pytest.raises(ModelFileError, match=r"^a\.onnx: "):
        from_metadata(metadata | changes, "a.onnx")
    with pytest.raises(ModelFileError):
        from_metadata({}, "a.onnx")


@pytest.mark.parametrize("key", ["settings", "decision", "image"])
@pytest.mark.parametrize("value", [None, "", "{}", "[1]", "nan"])
def test_damaged_metadata(metadata: dict[str, str], key: str, value: str | None) -> None:
    check_damaged(metadata, key, value)


@pytest.mark.parametrize("key", ["provenance", "export"])
@pytest.mark.parametrize("value", [None, ""])
def test_damaged_descriptions(metadata: dict[str, str], key: str, value: str | None) -> None:
    """They are shown, not computed with, so only their form counts."""
    check_damaged(metadata, key, value)


@pytest.mark.parametrize("largest", [0.0, -1.0, None, "3", math.nan])
def test_damaged_colour_scale(metadata: dict[str, str], largest: float | str | None) -> None:
    image = json.loads(metadata["image"]) | {"largest_surprisal": largest}
    check_damaged(metadata, "image", json.dumps(image))


def check_damaged(metadata: dict[str, str], key: str, value: str | None) -> None:
    damaged = {k: v for k, v in metadata.items() if k != key}
    if value is not None:
        damaged[key] = value
    with pytest.raises(ModelFileError, match=r"^a\.onnx: "):
        from_metadata(damaged, "a.onnx")
