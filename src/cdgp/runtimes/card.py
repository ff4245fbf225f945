"""The card: all that a prediction needs beside the graph, and how an exported file stores it."""

import base64
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cdgp.decision import SEEN_BYTES, Decision, decision_of, image_calibrator_of, object_of
from cdgp.errors import CdgpError, ModelFileError
from cdgp.method.score import ImageCalibrator
from cdgp.presets import Settings, settings_from_json

if TYPE_CHECKING:  # the model holds networks, and this is read where there is no torch
    from cdgp.artifact import Model

FORMAT = "cdgp-export"
FOREIGN = f"{FORMAT}-for-"
"""Before the name of another library, the format of a file for its inferencers alone."""
SECOND = f"{FORMAT}-outputs"
"""The format of the second file of a tiled export, which has no card."""
VERSION = 4
KEYS = ("format", "version", "settings", "decision", "image", "provenance", "export", "seen")
"""What the card takes of a file's metadata, each a text; all but the first two and the last are
JSON."""


class Card(NamedTuple):
    """All that a prediction needs beside the graph."""

    settings: Settings
    decision: Decision
    image: ImageCalibrator
    largest_surprisal: float
    """The largest surprisal that the normal tail gives, in nats: the end of the colour scale."""
    provenance: dict[str, Any]
    export: dict[str, Any]
    """How the file was made and how far its numbers are from torch's; empty for torch itself."""
    seen: frozenset[bytes] = frozenset()
    """The rows of ``artifact.Model.seen``: digests of the images that the model was trained on."""


def card_of(model: "Model") -> Card:
    """The card of a model that runs in torch."""
    tail = model.calibration.tail
    return Card(
        settings=model.settings,
        decision=model.decision,
        image=model.calibration.image,
        largest_surprisal=min(tail.floor, math.log(len(tail.scores) + 1)),
        provenance=model.provenance,
        export={},
        seen=frozenset(bytes(row) for row in model.seen.tolist()),
    )


def to_metadata(card: Card) -> dict[str, str]:
    """A card as the metadata of an exported file."""
    image = card.image._asdict() | {"largest_surprisal": card.largest_surprisal}
    return {
        "format": FORMAT,
        "version": str(VERSION),
        "settings": card.settings.model_dump_json(),
        "decision": json.dumps(card.decision._asdict()),
        "image": json.dumps(image),
        "provenance": json.dumps(card.provenance),
        "export": json.dumps(card.export),
        "seen": base64.b64encode(b"".join(sorted(card.seen))).decode(),
    }


def check_version(metadata: Mapping[str, str], source: str) -> None:
    """Raise ModelFileError where an exported file is not ours, or of another version."""
    found = metadata.get("format", "")
    if found.startswith(FOREIGN):
        raise ModelFileError(
            f"{source}: was exported for {found.removeprefix(FOREIGN)}, which runs it; export the "
            "model without --flavour to run it here"
        )
    if found == SECOND:
        raise ModelFileError(
            f"{source}: is the second file of a tiled export; give the one beside it"
        )
    if found != FORMAT:
        raise ModelFileError(f"{source}: not exported by this tool; make it with cdgp export")
    if metadata.get("version") != str(VERSION):
        raise ModelFileError(
            f"{source}: exported in format {metadata.get('version')}, this cdgp reads format "
            f"{VERSION}; export the model again, or use the version of cdgp that wrote it"
        )


def from_metadata(metadata: Mapping[str, str], source: str) -> Card:
    """The card of an exported file; ModelFileError where it is damaged or of another version."""
    check_version(metadata, source)
    try:
        image = json.loads(metadata["image"])
        largest = image.pop("largest_surprisal")
        if not isinstance(largest, float) or not 0 < largest < math.inf:
            raise ValueError(f"the largest surprisal is {largest!r}")
        calibrator = image_calibrator_of(image)
        return Card(
            settings_from_json(metadata["settings"], source),
            decision_of(json.loads(metadata["decision"]), calibrator),
            calibrator,
            largest,
            object_of(metadata["provenance"], "provenance"),
            object_of(metadata["export"], "export"),
            _seen(metadata.get("seen", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, CdgpError) as error:
        raise ModelFileError(
            f"{source}: incomplete or damaged export ({error}); export again"
        ) from error


def _seen(text: str) -> frozenset[bytes]:
    """Digests from their stored text; none in a file that was written before they were kept."""
    joined = base64.b64decode(text, validate=True)
    if len(joined) % SEEN_BYTES:
        raise ValueError("the digests of the training images are cut off")
    return frozenset(joined[i : i + SEEN_BYTES] for i in range(0, len(joined), SEEN_BYTES))
