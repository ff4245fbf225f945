"""One safetensors file with everything that prediction needs: weights, calibration, settings.

Metadata (JSON strings): ``format``, ``version``, ``settings``, ``calibration`` (the numbers),
``decision``, ``provenance`` and ``sha256``, the digest of all the others. Nothing in it can run
code. A file that is damaged, foreign or of another version, or that holds numbers from which no
prediction can be made, is a ModelFileError.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cdgp.decision import (
    SEEN_BYTES,
    Decision,
    check_image_calibrator,
    check_numbers,
    decision_of,
    digests,
    image_calibrator_of,
    object_of,
)
from cdgp.errors import CdgpError, ModelFileError
from cdgp.files import save_tensors
from cdgp.method.build import network_from_tensors
from cdgp.method.calibration import (
    BranchStatistics,
    Calibration,
    NormalTail,
)
from cdgp.method.network import Network
from cdgp.presets import Settings, settings_from_json

FORMAT = "cdgp-model"
VERSION = 4
READ = ("1", "2", "3", "4")
"""Versions that can be read; those of version 1 have no digests, before version 3 the dominance was
all the image evidence, and before version 4 it was not compressed."""
TAIL = "calibration.tail_scores"
SEEN = "provenance.seen"


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


def seen_rows(sha256: Iterable[str | None]) -> Tensor:
    """Hex digests as ``Model.seen`` holds them: cut, sorted, each once."""
    rows = [list(row) for row in sorted(digests(sha256))]
    return torch.tensor(rows, dtype=torch.uint8).reshape(-1, SEEN_BYTES)


def save(path: Path, model: Model) -> None:
    """Write a model file whole.

    Raises:
        ModelFileError: the model holds numbers that ``load`` would refuse.
        OutputError: the place cannot be written.
    """
    calibration = model.calibration
    tensors = {
        **model.network.state_dict(), TAIL: calibration.tail.scores, SEEN: model.seen,
    }  # fmt: skip
    try:
        check_calibration(calibration)
        _check_finite(tensors)
    except ValueError as error:
        raise ModelFileError(f"{path}: not written: {error}") from error
    tail = calibration.tail
    numbers = {
        "dominance": calibration.dominance._asdict(),
        "residual": calibration.residual._asdict(),
        "tail": {k: _null(v) for k, v in tail._asdict().items() if k != "scores"},
        "image": calibration.image._asdict(),
        "fusion_weight": calibration.fusion_weight,
        "image_weight": calibration.image_weight,
        "distance": calibration.distance._asdict(),
        "distance_weight": calibration.distance_weight,
        "dominance_cap": calibration.dominance_cap,
    }
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "settings": model.settings.model_dump_json(),
        "calibration": json.dumps(numbers),
        "decision": json.dumps(model.decision._asdict()),
        "provenance": json.dumps(model.provenance),
    }
    save_tensors(path, tensors, metadata | {"sha256": digest_of(metadata, tensors)})


def digest_of(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, in hex, of everything that a model file holds but this digest."""
    others = {key: value for key, value in metadata.items() if key != "sha256"}
    found = hashlib.sha256(json.dumps(others, sort_keys=True).encode())
    for key in sorted(tensors):
        value = tensors[key].detach().cpu().contiguous()
        found.update(f"{key} {value.dtype} {list(value.shape)}".encode())
        found.update(value.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


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
    if metadata.get("version") not in READ:
        raise ModelFileError(
            f"{path}: written in model format {metadata.get('version')}, this cdgp reads formats "
            f"{' and '.join(READ)}; use the version of cdgp that wrote it, or train again"
        )
    sealed = metadata["version"] != "1"
    if sealed and metadata.get("sha256") != digest_of(metadata, tensors):
        raise ModelFileError(
            f"{path}: incomplete or damaged model file: its content has changed since it was "
            "written; copy it again, or train again"
        )
    try:
        settings = settings_from_json(metadata["settings"], str(path))
        _check_finite(tensors)
        calibration = _calibration(json.loads(metadata["calibration"]), tensors.pop(TAIL))
        decision = decision_of(json.loads(metadata["decision"]), calibration.image)
        provenance = object_of(metadata["provenance"], "provenance")
        seen = _checked_seen(tensors.pop(SEEN, Model._field_defaults["seen"]))
        network = network_from_tensors(settings, tensors)
        found = len(calibration.image.slope)
        if found != network.entries:
            raise ValueError(
                f"the image score weighs {found} entries, and the networks give {network.entries}"
            )
    except (
        KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, CdgpError,
    ) as error:  # fmt: skip
        raise ModelFileError(f"{path}: incomplete or damaged model file ({error})") from error
    return Model(network, calibration, decision, settings, provenance, seen)


def _checked_seen(seen: Tensor) -> Tensor:
    if seen.dtype != torch.uint8 or seen.ndim != 2 or seen.shape[1] != SEEN_BYTES:
        raise ValueError("the digests of the training images are no list of digests")
    return seen


def check_calibration(calibration: Calibration) -> None:
    """ValueError where a calibration's numbers give no surprisal, or no probability, for certain.

    A tail without scores, or in another order, would call any pixel normal.
    """
    for name in ("dominance", "residual", "distance"):
        statistics: BranchStatistics = getattr(calibration, name)
        check_numbers(statistics._asdict())
        if statistics.std <= 0:
            raise ValueError(
                f"the standard deviation of the {name} over normal pixels is {statistics.std}: "
                "they are all alike, so nothing can be compared with them"
            )
    tail = calibration.tail
    scores = tail.scores
    if scores.ndim != 1 or not scores.is_floating_point() or not len(scores):
        raise ValueError("the scores of the normal tail are no list of numbers")
    if not bool(scores.isfinite().all()) or bool((scores[1:] < scores[:-1]).any()):
        raise ValueError("the scores of the normal tail are not finite, or not in order")
    fitted = [tail.start, tail.shape, tail.scale]
    if not all(map(math.isnan, fitted)):
        check_numbers({"start": tail.start, "shape": tail.shape, "scale": tail.scale})
        if tail.shape < 0 or tail.scale <= 0:
            raise ValueError(f"the normal tail has shape {tail.shape} and scale {tail.scale}")
    weights = {
        name: getattr(calibration, name)
        for name in ("fusion_weight", "image_weight", "distance_weight")
    }
    cap = {} if calibration.dominance_cap is None else {"cap": calibration.dominance_cap}
    check_numbers(weights | {"floor": tail.floor} | cap)
    shares = (calibration.fusion_weight, calibration.distance_weight)
    if not all(0 <= s <= 1 for s in shares) or calibration.image_weight < 0 or tail.floor <= 0:
        raise ValueError(f"a weight or the floor of the calibration is out of range ({weights})")
    check_image_calibrator(calibration.image)


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    for key, value in tensors.items():
        if not bool(value.isfinite().all()):
            raise ValueError(f"{key} holds values that are not finite")


def _calibration(numbers: dict[str, Any], scores: Tensor) -> Calibration:
    tail = {k: math.nan if v is None else v for k, v in numbers["tail"].items()}
    calibration = Calibration(
        BranchStatistics(**numbers["dominance"]),
        BranchStatistics(**numbers["residual"]),
        NormalTail(scores, **tail),
        image_calibrator_of(numbers["image"]),
        numbers["fusion_weight"],
        numbers["image_weight"],
        BranchStatistics(**numbers.get("distance", {"mean": 0.0, "std": 1.0})),
        numbers.get("distance_weight", 0.0),
        numbers.get("dominance_cap"),
    )
    check_calibration(calibration)
    return calibration


def _null(value: float) -> float | None:
    return None if math.isnan(value) else value
