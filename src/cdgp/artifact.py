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

from cdgp.errors import CdgpError, ModelFileError, SettingsError
from cdgp.files import save_tensors, shortened
from cdgp.method.build import network_from_tensors
from cdgp.method.calibration import (
    BALANCED,
    BranchStatistics,
    Calibration,
    ImageCalibrator,
    NormalTail,
)
from cdgp.method.network import Network
from cdgp.metrics.reliability import at_rate
from cdgp.presets import Settings, settings_from_json

FORMAT = "cdgp-model"
VERSION = 3
READ = ("1", "2", "3")
"""Versions that can be read; those of version 1 have no digests, and before version 3 the dominance
was all the image evidence."""
TAIL = "calibration.tail_scores"
SEEN = "provenance.seen"
SEEN_BYTES = 16
"""Of each SHA-256 that a model keeps of its training images: no two images share them by chance."""
GOOD_ALONE = "good images alone"
"""What a model without a defective training image rests on, as its provenance tells it."""
BELOW_ONE = math.nextafter(1, 0)
"""The largest threshold that an image score can be above."""


class Decision(NamedTuple):
    """The rule behind ``pred_label``: defective when the image score is above the threshold.

    The defect rate shifts score and threshold alike, so it changes no decision. A p-value refers to
    no rate.
    """

    threshold: float
    """On the image score, at the defect rate."""
    source: str
    """How the threshold came about, in words."""
    false_reject_bound: float | None
    """Bound on the share of good parts rejected, where one was asked for."""
    defect_rate: float = BALANCED
    """Share of defective parts on the line that the image score refers to."""
    rate_source: str = "the same number of good and defective parts"
    """Where the rate comes from, in words."""
    balanced_threshold: float | None = None
    """The threshold at a rate of one half, where decisions are made; None: ``threshold``."""
    is_p_value: bool = False
    """Whether the image score is one minus a p-value, and no probability."""

    @property
    def balanced(self) -> float:
        """The threshold at a rate of one half."""
        return self.threshold if self.balanced_threshold is None else self.balanced_threshold

    @property
    def refers_to(self) -> str:
        """What the image score refers to, in words: "33 % of parts defective (…)"."""
        if self.is_p_value:
            return "no defect rate: the score is one minus a p-value"
        return f"{100 * self.defect_rate:.3g} % of parts defective ({self.rate_source})"

    def at(self, defect_rate: float, source: str = "as stated") -> "Decision":
        """The same decisions, with scores that refer to another rate.

        ``source`` says in words where the rate comes from.

        Raises:
            SettingsError: a rate outside (0, 1), or a score that is a p-value.
        """
        if self.is_p_value:
            raise SettingsError(
                f"a defect rate of {defect_rate}: this model's score is one minus a p-value, since "
                "no defective image has calibrated it, and refers to no rate; leave --defect-rate "
                "out, or train with defective images of two parts or more"
            )
        if not 0 < defect_rate < 1:
            raise SettingsError(
                f"a defect rate of {defect_rate}: it is a share of the parts, between 0 and 1, for "
                "example 0.02"
            )
        told = float(at_rate(self.balanced, BALANCED, defect_rate))
        return self._replace(
            threshold=min(told, BELOW_ONE),
            defect_rate=defect_rate,
            rate_source=source,
            balanced_threshold=self.balanced,
        )

    def told(self, balanced: float, score: float) -> tuple[float, bool]:
        """The image score as it is told, and whether the image is called defective.

        ``balanced`` is the score at a rate of one half, which decides; ``score`` the one at
        ``defect_rate``. Where rounding would put it on the other side of the threshold, it is moved
        by the last digit.
        """
        if balanced > self.balanced:
            return max(score, math.nextafter(self.threshold, 1)), True
        return min(score, self.threshold), False


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


def decision_of(values: dict[str, Any], image: ImageCalibrator) -> Decision:
    """A decision from its stored values; ValueError where they are no rule for the image score."""
    decision = Decision(**values)
    bound = decision.false_reject_bound
    _check_numbers({
        "threshold": decision.threshold, "bound": 0 if bound is None else bound,
        "defect rate": decision.defect_rate, "balanced threshold": decision.balanced,
    })  # fmt: skip
    told = all(isinstance(text, str) for text in (decision.source, decision.rate_source))
    possible = 0 <= decision.balanced < 1 and (bound is None or 0 <= bound <= 1)
    if not possible or not 0 < decision.defect_rate < 1 or not told:
        raise ValueError(f"{decision} is no rule to decide by")
    if not isinstance(decision.is_p_value, bool):
        raise ValueError(f"is_p_value is {decision.is_p_value!r} where true or false is expected")
    if decision.is_p_value != image.is_p_value:
        raise ValueError(f"the threshold is no threshold of the score, a {image.score_kind}")
    if decision.is_p_value and decision.threshold == decision.balanced:
        return decision
    if decision.is_p_value or not math.isclose(
        decision.threshold, decision.at(decision.defect_rate).threshold
    ):
        raise ValueError(f"{decision} has two thresholds that do not fit together")
    return decision


def image_calibrator_of(values: dict[str, Any]) -> ImageCalibrator:
    """An image calibrator from its stored values; ValueError where no probability follows."""
    notes = values["notes"]
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise ValueError("the notes of the image calibration are no list of texts")
    lists = {key: values.get(key, []) for key in ("centre", "scale", "slope", "good_logits")}
    for key, value in lists.items():  # before version 3 each was a number
        lists[key] = tuple(value) if isinstance(value, list) else (value,)
    calibrator = ImageCalibrator(**values | {"notes": tuple(notes)} | lists)
    _check_image_calibrator(calibrator)
    return calibrator


def object_of(text: str, name: str) -> dict[str, Any]:
    """A JSON object from its text; ValueError where it is JSON of another kind."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"{name} is {shortened(text, 40)} where a JSON object is expected")
    return values


def check_calibration(calibration: Calibration) -> None:
    """ValueError where a calibration's numbers give no surprisal, or no probability, for certain.

    A tail without scores, or in another order, would call any pixel normal.
    """
    for name in ("dominance", "residual", "distance"):
        statistics: BranchStatistics = getattr(calibration, name)
        _check_numbers(statistics._asdict())
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
        _check_numbers({"start": tail.start, "shape": tail.shape, "scale": tail.scale})
        if tail.shape < 0 or tail.scale <= 0:
            raise ValueError(f"the normal tail has shape {tail.shape} and scale {tail.scale}")
    weights = {
        name: getattr(calibration, name)
        for name in ("fusion_weight", "image_weight", "distance_weight")
    }
    cap = {} if calibration.dominance_cap is None else {"cap": calibration.dominance_cap}
    _check_numbers(weights | {"floor": tail.floor} | cap)
    shares = (calibration.fusion_weight, calibration.distance_weight)
    if not all(0 <= s <= 1 for s in shares) or calibration.image_weight < 0 or tail.floor <= 0:
        raise ValueError(f"a weight or the floor of the calibration is out of range ({weights})")
    _check_image_calibrator(calibration.image)


def _check_image_calibrator(calibrator: ImageCalibrator) -> None:
    c = calibrator
    _check_numbers({"intercept": c.intercept, "good": c.good_groups, "bad": c.defective_groups})
    lists = {"centre": c.centre, "scale": c.scale, "slope": c.slope, "logits": c.good_logits}
    for name, values in lists.items():
        _check_numbers({f"{name} {place}": value for place, value in enumerate(values)})
    if not len(c.centre) == len(c.scale) == len(c.slope) > 0:
        raise ValueError("the image calibration has lists of unlike lengths")
    if min(c.scale) <= 0 or min(c.slope) < 0:
        raise ValueError(
            f"the image calibration has scale {c.scale} and slope {c.slope}: its score does not "
            "rise with the evidence"
        )
    if list(c.good_logits) != sorted(c.good_logits):
        raise ValueError("the good images' log-odds are not in order")


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    for key, value in tensors.items():
        if not bool(value.isfinite().all()):
            raise ValueError(f"{key} holds values that are not finite")


def _check_numbers(values: dict[str, Any]) -> None:
    for key, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise ValueError(f"{key} is {value!r} where a number is expected")


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
