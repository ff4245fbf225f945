"""What decides: the threshold, the image calibrator as stored, the digests of training images.

All that a prediction needs of a model file or an export but for the networks; no torch.
"""

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from cdgp.errors import SettingsError
from cdgp.files import shortened
from cdgp.method.score import BALANCED, ImageCalibrator
from cdgp.metrics.reliability import at_rate

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


def digests(sha256: Iterable[str | None]) -> frozenset[bytes]:
    """Hex digests as a model keeps them: cut to ``SEEN_BYTES``."""
    return frozenset(bytes.fromhex(text)[:SEEN_BYTES] for text in sha256 if text)


def decision_of(values: dict[str, Any], image: ImageCalibrator) -> Decision:
    """A decision from its stored values; ValueError where they are no rule for the image score."""
    decision = Decision(**values)
    bound = decision.false_reject_bound
    check_numbers({
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
    check_image_calibrator(calibrator)
    return calibrator


def object_of(text: str, name: str) -> dict[str, Any]:
    """A JSON object from its text; ValueError where it is JSON of another kind."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"{name} is {shortened(text, 40)} where a JSON object is expected")
    return values


def check_image_calibrator(calibrator: ImageCalibrator) -> None:
    """ValueError where an image calibrator's numbers give no score."""
    c = calibrator
    check_numbers({"intercept": c.intercept, "good": c.good_groups, "bad": c.defective_groups})
    lists = {"centre": c.centre, "scale": c.scale, "slope": c.slope, "logits": c.good_logits}
    for name, values in lists.items():
        check_numbers({f"{name} {place}": value for place, value in enumerate(values)})
    if not len(c.centre) == len(c.scale) == len(c.slope) > 0:
        raise ValueError("the image calibration has lists of unlike lengths")
    if min(c.scale) <= 0 or min(c.slope) < 0:
        raise ValueError(
            f"the image calibration has scale {c.scale} and slope {c.slope}: its score does not "
            "rise with the evidence"
        )
    if not isinstance(c.compressed, bool):
        raise ValueError(f"compressed is {c.compressed!r} where true or false is expected")
    if list(c.good_logits) != sorted(c.good_logits):
        raise ValueError("the good images' log-odds are not in order")


def check_numbers(values: dict[str, Any]) -> None:
    """ValueError where a value is no finite number."""
    for key, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise ValueError(f"{key} is {value!r} where a number is expected")
