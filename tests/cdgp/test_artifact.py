"""The decision at any defect rate: scores and threshold move, no decision does."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdgp.decision import Decision, decision_of
from cdgp.errors import SettingsError
from cdgp.method.score import BALANCED, ImageCalibrator, image_score

SAME = ImageCalibrator((0.0,), (1.0,), (1.0,), 0.0)
"""Its log-odds are the pooled evidence itself."""
RATES = [1e-5, 0.02, 0.3, 0.5, 0.7, 0.999]


def told(decision: Decision, pooled: torch.Tensor) -> list[tuple[float, bool]]:
    """Scores and decisions as a detector tells them."""
    both = [
        image_score(pooled[:, None], SAME, r).tolist() for r in (BALANCED, decision.defect_rate)
    ]
    return [decision.told(balanced, score) for balanced, score in zip(*both, strict=True)]


def test_score_and_threshold_move_by_the_log_odds_of_the_rate() -> None:
    """Against Bayes' rule written with the densities of both classes."""
    pooled = torch.linspace(-4, 4, 41)
    ratio = np.exp(pooled.double().numpy())  # density of defective over that of good parts
    for rate in RATES:
        decision = Decision(0.25, "", None).at(rate)
        scores = [score for score, _ in told(decision, pooled)]
        np.testing.assert_allclose(scores, rate * ratio / (rate * ratio + 1 - rate), rtol=1e-12)
        posterior = rate * (1 / 3) / (rate * (1 / 3) + 1 - rate)  # 0.25 is a ratio of a third
        assert decision.threshold == pytest.approx(posterior, rel=1e-12)


@given(
    threshold=st.floats(0, 1, exclude_max=True),
    rate=st.floats(1e-9, 1 - 1e-9),
    others=st.lists(st.floats(-40, 40), max_size=20),
)
def test_no_rate_changes_a_decision_or_the_order(
    threshold: float, rate: float, others: list[float]
) -> None:
    """Images at the threshold and one step beside it, and thresholds at both ends, among them."""
    logits = [math.log(threshold / (1 - threshold))] if 0 < threshold < 1 else []
    pooled = torch.tensor([*logits, *others], dtype=torch.float64)
    pooled = torch.cat([pooled, pooled.nextafter(pooled + 1), pooled.nextafter(pooled - 1)])
    balanced = Decision(threshold, "", None)
    decision = balanced.at(rate)
    expected, found = told(balanced, pooled), told(decision, pooled)
    assert [label for _, label in found] == [score > threshold for score, _ in expected]
    assert [score > decision.threshold for score, _ in found] == [label for _, label in found]
    order = torch.argsort(pooled).tolist()
    scores = [found[i][0] for i in order]
    # One step apart in float64, the sigmoid itself may round its last digit either way.
    assert all(b >= a * (1 - 1e-15) for a, b in itertools.pairwise(scores))
    assert all(0 <= score <= 1 for score in scores)


def test_an_image_at_a_calibrated_threshold_stays_good_at_any_rate() -> None:
    """The threshold of a bound is the score of a calibration image, bit by bit."""
    pooled = torch.randn(500, generator=torch.Generator().manual_seed(0))
    scores = image_score(pooled[:, None], SAME)
    for place in range(0, 500, 25):
        decision = Decision(float(scores[place]), "", None)
        for rate in RATES:
            score, label = told(decision.at(rate), pooled[place : place + 1])[0]
            assert not label and score <= decision.at(rate).threshold


def test_the_rate_can_change_again_and_one_half_is_where_it_began() -> None:
    first = Decision(0.3, "why", 0.05)
    moved = first.at(0.02, "as stated").at(0.9)
    assert moved.balanced == 0.3
    assert (moved.source, moved.false_reject_bound) == ("why", 0.05)
    assert moved.at(0.5).threshold == 0.3
    assert moved.threshold == pytest.approx(first.at(0.9).threshold, rel=1e-15)
    assert "90 % of parts defective (as stated)" in moved.refers_to


def test_files_without_a_rate_are_those_of_one_half() -> None:
    old = decision_of({"threshold": 0.3, "source": "why", "false_reject_bound": None}, SAME)
    assert (old.defect_rate, old.balanced) == (0.5, 0.3)
    for rate in RATES:
        decision = Decision(0.3, "why", None).at(rate)
        assert decision_of(decision._asdict(), SAME) == decision


@pytest.mark.parametrize("rate", [0, 1, -0.1, 2, math.nan, math.inf])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(SettingsError, match="between 0 and 1"):
        Decision(0.5, "", None).at(rate)


@pytest.mark.parametrize(
    "changes",
    [
        {"threshold": 0.4},  # moved by hand, so that it does not fit the balanced one
        {"balanced_threshold": 0.4},
        {"defect_rate": 0.5},
        {"defect_rate": 0},
        {"defect_rate": 1.0},
        {"defect_rate": "0.02"},
        {"defect_rate": math.nan},
        {"rate_source": None},
        {"balanced_threshold": 1.0},
        {"balanced_threshold": None},
    ],
)
def test_a_decision_that_contradicts_itself_is_damaged(changes: dict[str, object]) -> None:
    values = Decision(0.3, "why", None).at(0.02)._asdict()
    with pytest.raises((ValueError, TypeError)):
        decision_of(values | changes, SAME)
