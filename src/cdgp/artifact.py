"""One safetensors file with everything that prediction needs: weights, calibration, settings.

Metadata (JSON strings): ``format``, ``version``, ``settings``, ``calibration`` (the numbers),
``decision`` and ``provenance``. Nothing in it can run code. A file that is damaged, foreign or of
another version is a ModelFileError.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cdgp.errors import CdgpError, ModelFileError
from cdgp.files import save_tensors
from cdgp.method.build import network_from_tensors
from cdgp.method.calibration import BranchStatistics, Calibration, ImageCalibrator, NormalTail
from cdgp.method.network import Network
from cdgp.presets import Settings, settings_from_json

FORMAT = "cdgp-model"
VERSION = 1
TAIL = "calibration.tail_scores"
SEEN = "provenance.seen"
SEEN_BYTES = 16
"""Of each SHA-256 that a model keeps of its training images: no two images share them by chance."""


class Decision(NamedTuple):
    """The rule behind ``pred_label``: defective when the image score is above the threshold."""

    threshold: float
    source: str
    """How the threshold came about, in words."""
    false_reject_bound: float | None
    """Bound on the share of good parts rejected, where one was asked for."""


class Model(NamedTuple):
    """The content of a model file."""

    network: Network
    calibration: Calibration
    decision: Decision
    settings: Settings
    provenance: dict[str, Any]
    seen: Tensor = torch.empty((0, SEEN_BYTES), dtype=torch.uint8)
    """(n, 16) uint8: the first bytes of the SHA-256 of the pixels and of the file of every image
    that the model was trained or calibrated on; empty where that is not known."""


def digests(sha256: Iterable[str | None]) -> Tensor:
    """Hex digests as ``Model.seen`` holds them: cut, sorted, each once."""
    rows = sorted({bytes.fromhex(text)[:SEEN_BYTES] for text in sha256 if text})
    return torch.tensor([list(row) for row in rows], dtype=torch.uint8).reshape(-1, SEEN_BYTES)


def save(path: Path, model: Model) -> None:
    """Write a model file whole."""
    calibration = model.calibration
    tail = calibration.tail
    numbers = {
        "dominance": calibration.dominance._asdict(),
        "residual": calibration.residual._asdict(),
        "tail": {k: _null(v) for k, v in tail._asdict().items() if k != "scores"},
        "image": calibration.image._asdict(),
        "fusion_weight": calibration.fusion_weight,
        "image_weight": calibration.image_weight,
    }
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "settings": model.settings.model_dump_json(),
        "calibration": json.dumps(numbers),
        "decision": json.dumps(model.decision._asdict()),
        "provenance": json.dumps(model.provenance),
    }
    tensors = {**model.network.state_dict(), TAIL: tail.scores, SEEN: model.seen}
    save_tensors(path, tensors, metadata)


def load(path: Path) -> Model:
    """Read a model file.

    Raises:
        ModelFileError: no such file, damaged, not ours, or of a newer version.
    """
    if not path.is_file():
        raise ModelFileError(f"{path}: no such model file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelFileError(
            f"{path}: incomplete or damaged, or not a model file of this tool ({error})"
        ) from error
    if metadata.get("format") != FORMAT:
        raise ModelFileError(f"{path}: not a model file of this tool")
    if metadata.get("version") != str(VERSION):
        raise ModelFileError(
            f"{path}: written in model format {metadata.get('version')}, this cdgp reads format "
            f"{VERSION}; use the version of cdgp that wrote it, or train again"
        )
    try:
        settings = settings_from_json(metadata["settings"], str(path))
        calibration = _calibration(json.loads(metadata["calibration"]), tensors.pop(TAIL))
        decision = decision_of(json.loads(metadata["decision"]))
        provenance = json.loads(metadata["provenance"])
        seen = _checked_seen(tensors.pop(SEEN, Model._field_defaults["seen"]))
        network = network_from_tensors(settings, tensors)
    except (
        KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, CdgpError,
    ) as error:  # fmt: skip
        raise ModelFileError(f"{path}: incomplete or damaged model file ({error})") from error
    return Model(network, calibration, decision, settings, provenance, seen)


def _checked_seen(seen: Tensor) -> Tensor:
    if seen.dtype != torch.uint8 or seen.ndim != 2 or seen.shape[1] != SEEN_BYTES:
        raise ValueError("the digests of the training images are no list of digests")
    return seen


def decision_of(values: dict[str, Any]) -> Decision:
    """A decision from its stored values; ValueError where they are no rule to decide by."""
    decision = Decision(**values)
    bound = decision.false_reject_bound
    _check_numbers({"threshold": decision.threshold, "bound": 0 if bound is None else bound})
    if not 0 <= decision.threshold < 1 or not isinstance(decision.source, str):
        raise ValueError(f"{decision} is no rule to decide by")
    return decision


def image_calibrator_of(values: dict[str, Any]) -> ImageCalibrator:
    """An image calibrator from its stored values; ValueError where one is no number."""
    _check_numbers({k: v for k, v in values.items() if k != "notes"})
    return ImageCalibrator(**values | {"notes": tuple(values["notes"])})


def _check_numbers(values: dict[str, Any]) -> None:
    for key, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise ValueError(f"{key} is {value!r} where a number is expected")


def _calibration(numbers: dict[str, Any], scores: Tensor) -> Calibration:
    for part in ("dominance", "residual"):
        _check_numbers(numbers[part])
    _check_numbers({k: v for k, v in numbers["tail"].items() if v is not None})
    _check_numbers({k: numbers[k] for k in ("fusion_weight", "image_weight")})
    if scores.ndim != 1 or not scores.is_floating_point():
        raise ValueError("the scores of the normal tail are no list of numbers")
    tail = {k: math.nan if v is None else v for k, v in numbers["tail"].items()}
    return Calibration(
        BranchStatistics(**numbers["dominance"]),
        BranchStatistics(**numbers["residual"]),
        NormalTail(scores, **tail),
        image_calibrator_of(numbers["image"]),
        numbers["fusion_weight"],
        numbers["image_weight"],
    )


def _null(value: float) -> float | None:
    return None if math.isnan(value) else value
