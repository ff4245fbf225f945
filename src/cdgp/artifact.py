"""One safetensors file with everything that prediction needs: weights, calibration, settings.

Metadata (JSON strings): ``format``, ``version``, ``settings``, ``calibration`` (the numbers),
``decision`` and ``provenance``. Nothing in it can run code. A file that is damaged, foreign or of
another version is a ModelFileError.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from cdgp.errors import CdgpError, ModelFileError, SettingsError
from cdgp.files import save_tensors
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
VERSION = 1
TAIL = "calibration.tail_scores"
BELOW_ONE = math.nextafter(1, 0)
"""The largest threshold that an image score can be above."""


class Decision(NamedTuple):
    """The rule behind ``pred_label``: defective when the image score is above the threshold.

    The defect rate shifts score and threshold alike, so it changes no decision.
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

    @property
    def balanced(self) -> float:
        """The threshold at a rate of one half."""
        return self.threshold if self.balanced_threshold is None else self.balanced_threshold

    @property
    def refers_to(self) -> str:
        """What the image score refers to, in words: "33 % of parts defective (…)"."""
        return f"{100 * self.defect_rate:.3g} % of parts defective ({self.rate_source})"

    def at(self, defect_rate: float, source: str = "as stated") -> "Decision":
        """The same decisions, with scores that refer to another rate; SettingsError outside (0, 1).

        ``source`` says in words where the rate comes from.
        """
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
    save_tensors(path, {**model.network.state_dict(), TAIL: tail.scores}, metadata)


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
        network = network_from_tensors(settings, tensors)
    except (
        KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, CdgpError,
    ) as error:  # fmt: skip
        raise ModelFileError(f"{path}: incomplete or damaged model file ({error})") from error
    return Model(network, calibration, decision, settings, provenance)


def decision_of(values: dict[str, Any]) -> Decision:
    """A decision from its stored values; ValueError where they are no rule to decide by."""
    decision = Decision(**values)
    bound = decision.false_reject_bound
    _check_numbers({
        "threshold": decision.threshold, "bound": 0 if bound is None else bound,
        "defect rate": decision.defect_rate, "balanced threshold": decision.balanced,
    })  # fmt: skip
    told = all(isinstance(text, str) for text in (decision.source, decision.rate_source))
    if not 0 <= decision.balanced < 1 or not 0 < decision.defect_rate < 1 or not told:
        raise ValueError(f"{decision} is no rule to decide by")
    if not math.isclose(decision.threshold, decision.at(decision.defect_rate).threshold):
        raise ValueError(f"{decision} has two thresholds that do not fit together")
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
