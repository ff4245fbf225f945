"""Metrics of labelled images: what rests on a single part, intervals, the share of defects."""

import re
from dataclasses import replace

import numpy as np
import pytest
from tests.cdgp.report.stubs import StubDetector, row

from cdgp.evaluation import ScoredImage, image_metrics, interval_text, single_groups, value_text
from cdgp.metrics.reliability import at_rate, expected_calibration_error, rate_interval


def rows_of(scores: list[float], labels: list[int]) -> list[ScoredImage]:
    return [
        row(f"{i}.png", s, bool(y)) for i, (s, y) in enumerate(zip(scores, labels, strict=True))
    ]


def test_metrics_name_their_groups_and_intervals() -> None:
    scores, labels = [0.1, 0.2, 0.7, 0.3, 0.9, 0.8, 0.4], [0, 0, 0, 0, 1, 1, 1]
    groups = [0, 0, 1, 2, 3, 3, 4]
    found = image_metrics(rows_of(scores, labels), StubDetector(), groups)
    assert (found["good_groups"], found["defective_groups"]) == (3, 2)
    assert found["overkill_interval"] == rate_interval([0, 0, 1, 0], [0, 0, 1, 2])
    assert found["escape_interval"] == rate_interval([0, 0, 1], [0, 0, 1])
    low, high = found["expected_calibration_error_interval"]
    assert low <= found["expected_calibration_error"] <= high
    assert (found["false_rejects"], found["misses"]) == (1, 1)
    assert value_text(found, "overkill") == "25.0 %"
    assert interval_text(found, "overkill").endswith(" %, 3 groups")
    assert interval_text(found, "escape").startswith("95 %: ")
    assert "3 good and 2 defective groups" in interval_text(found, "expected_calibration_error")
    assert interval_text(found, "image_auroc") == ""


@pytest.mark.parametrize("rate", [0.5, 0.02])
def test_the_calibration_error_is_at_the_sets_own_share(rate: float) -> None:
    """The same for every rate that the model is told: only the decision's line differs."""
    rng = np.random.default_rng(0)
    labels = (np.arange(60) % 4 == 0).astype(int).tolist()
    balanced = rng.random(60)
    detector = StubDetector()
    decision = detector.card.decision.at(rate)
    detector.card = detector.card._replace(decision=decision)
    told = at_rate(balanced, 0.5, rate).tolist()
    scored = [
        replace(row, pred_label=row.pred_score > decision.threshold)
        for row in rows_of(told, labels)
    ]
    found = image_metrics(scored, detector)
    assert found["expected_calibration_error_rate"] == 0.25
    expected = expected_calibration_error(at_rate(balanced, 0.5, 0.25), labels).value
    assert found["expected_calibration_error"] == pytest.approx(expected, abs=1e-9)
    assert (found["defect_rate"], found["threshold"]) == (rate, decision.threshold)
    rejects = sum(p > 0.5 and not y for p, y in zip(balanced, labels, strict=True))
    assert found["false_rejects"] == rejects, "as at equal numbers"


@pytest.mark.parametrize(
    ("labels", "groups", "reason"),
    [
        ([0, 0, 0, 1], [0, 1, 2, 3], "a single group of defective images"),
        ([0, 0, 1, 1], [0, 1, 3, 3], "a single group of defective images"),
        ([0, 1, 1, 1], [0, 1, 2, 3], "a single group of good images"),
        ([0, 0, 1, 1], [0, 0, 2, 3], "a single group of good images"),
        ([0, 0, 0, 0], [0, 1, 2, 3], "no defective image"),
        ([1, 1, 1, 1], [0, 1, 2, 3], "no good image"),
    ],
)
def test_a_calibration_error_of_one_part_is_none(
    labels: list[int], groups: list[int], reason: str
) -> None:
    found = image_metrics(rows_of([0.1, 0.6, 0.4, 0.9], labels), StubDetector(), groups)
    assert found["expected_calibration_error"] is None
    assert found["expected_calibration_error_interval"] is None
    assert found["expected_calibration_error_reason"] == reason
    assert "expected_calibration_error_rate" not in found


def test_a_rate_of_one_part_is_a_count() -> None:
    rows = rows_of([0.1, 0.6, 0.2, 0.3], [0, 0, 0, 1])
    found = image_metrics(rows, StubDetector(), range(4))
    assert value_text(found, "escape") == "1 of 1"
    assert found["escape"] == 1.0 and found["escape_interval"] == pytest.approx((0.025, 1.0))
    assert interval_text(found, "escape") == "95 %: 2.5 to 100.0 %, 1 group"
    assert value_text(found, "overkill") == "33.3 %"
    assert value_text(found, "image_auroc") == "0.67", "two digits"
    assert single_groups(rows, range(4)) == {"a_single_defective_part": ["3.png"]}
    assert single_groups(rows, [0, 0, 0, 1]) == {
        "a_single_good_part": ["0.png", "1.png", "2.png"],
        "a_single_defective_part": ["3.png"],
    }
    assert single_groups(rows[:3], [0, 1, 2]) == {}


@pytest.mark.parametrize(("groups", "text"), [(1, r"0\.\d\d"), (2, r"0\.\d{4}"), (0, r"0\.\d{4}")])
def test_a_calibration_on_one_part_has_no_four_digits(groups: int, text: str) -> None:
    """Whatever the number of images that it is tested on; 0 is a file that does not say."""
    detector = StubDetector()
    image = detector.card.image._replace(good_groups=5, defective_groups=groups)
    detector.card = detector.card._replace(image=image)
    found = image_metrics(rows_of([0.1, 0.2, 0.3, 0.7, 0.9], [0, 0, 1, 0, 1]), detector)
    assert found["calibration_defective_groups"] == groups
    assert re.fullmatch(text, value_text(found, "expected_calibration_error"))
    assert re.fullmatch(r"0\.\d{4}", value_text(found, "image_auroc")), "needs no calibration"
