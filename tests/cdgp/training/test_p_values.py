"""Decisions by a p-value: where good images alone calibrate the score."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cdgp.data.manifest import WeakSample, WeakSplit
from cdgp.decision import Decision, decision_of
from cdgp.errors import SettingsError
from cdgp.method.calibration import BranchStatistics, Calibration, fit_image_evidence, fit_tail
from cdgp.method.network import Evidence
from cdgp.method.score import TIED, image_score
from cdgp.presets import DecisionSettings
from cdgp.training.calibrate import CalibrationEvidence
from cdgp.training.fit import decide, rests_on, with_groups

SETTINGS = DecisionSettings()


def weak(fit: Sequence[tuple[int, bool]], calibration: Sequence[tuple[int, bool]]) -> WeakSplit:
    """A split of images given by their groups and labels."""
    a = tuple(WeakSample(Path(f"f{i}"), bad) for i, (_, bad) in enumerate(fit))
    b = tuple(WeakSample(Path(f"c{i}"), bad) for i, (_, bad) in enumerate(calibration))
    groups = tuple(g for g, _ in fit), tuple(g for g, _ in calibration)
    return WeakSplit(a, b, (*a, *b), "", "", True, {}, *groups)


def decided(
    pooled: NDArray[np.float64], settings: DecisionSettings
) -> tuple[Decision, Calibration]:
    """The decision and calibration of good images with this evidence, (n, 2)."""
    image = fit_image_evidence(pooled, np.zeros(len(pooled), np.bool_), has_dominance=False)
    assert image.is_p_value
    split = weak([(-1, False)], [(i, False) for i in range(len(pooled))])
    tail = fit_tail(torch.zeros(1), "counting", 16.0)
    none = BranchStatistics(0.0, 1.0)
    calibration = Calibration(none, none, tail, with_groups(image, split), 0.0, 1 / 3)
    one = torch.zeros(1, 1, 1)
    found = [Evidence(None, one, one, torch.tensor(row)[None]) for row in pooled]
    collected = CalibrationEvidence(found, torch.zeros(len(pooled), dtype=torch.bool), [(4, 4)])
    return decide(collected, calibration, settings, split), calibration


def oddness(pooled: NDArray[np.float64], good: NDArray[np.float64]) -> NDArray[np.float64]:
    """The one-class score written out: a third of the first entry, two of the second, each in
    interquartile ranges of good images above their median, compressed."""
    spread = np.subtract(*np.percentile(good, [75, 25], axis=0))
    z = (pooled - np.median(good, axis=0)) / spread
    found: NDArray[np.float64] = 2 * np.arcsinh(z / 2) @ np.array([1 / 3, 2 / 3])
    return found


@pytest.mark.parametrize("count", [1, 5, 18, 19, 25, 38])
def test_few_good_images_reject_what_is_odder_than_all(count: int) -> None:
    rng = np.random.default_rng(count)
    good, new = rng.normal(size=(count, 2)), rng.normal(size=(400, 2)) * 2
    if count == 1:  # without a spread there are no interquartile ranges
        good, new = np.zeros((1, 2)), np.repeat(np.linspace(-1, 1, 21)[:, None], 2, axis=1)
    decision, calibration = decided(good, SETTINGS)
    rejected = image_score(new, calibration.image) > decision.threshold
    expected = new[:, 0] > 0
    if count > 1:
        expected = oddness(new, good) > oddness(good, good).max()
    assert expected.any() and not expected.all()
    np.testing.assert_array_equal(rejected, expected)
    assert "odder than all" in decision.source and decision.is_p_value


@pytest.mark.parametrize("count", [39, 60, 200])
@pytest.mark.parametrize("limit", [0.05, 0.2])
def test_many_good_images_reject_below_the_limit(count: int, limit: float) -> None:
    """The counted p-value of what is rejected is at most the limit; what is let pass is away from
    it by no more ranks than images tie, which are nearer than a hundredth."""
    rng = np.random.default_rng(count)
    good, new = rng.normal(size=(count, 2)), rng.normal(size=(1000, 2)) * 2
    decision, calibration = decided(good, DecisionSettings(p_value=limit))
    rejected = image_score(new, calibration.image) > decision.threshold
    ahead = oddness(good, good)[None] - oddness(new, good)[:, None]
    p, tied = ((1 + (ahead >= least).sum(1)) / (count + 1) for least in (0, -TIED))
    assert (p[rejected] <= limit).all() and rejected.any()
    known = oddness(good, good)
    ties = (np.abs(known - known[:, None]) < TIED).sum(1).max()
    assert (tied[~rejected] > limit - ties / (count + 1) - 1e-12).all()
    assert decision.threshold == 1 - limit
    assert str(limit) in decision.source


def test_new_good_images_are_rejected_no_more_often_than_stated() -> None:
    """Over draws of 60 good images and a new one: 5 %, within four standard errors."""
    rng, draws, rejected = np.random.default_rng(0), 400, 0
    for _ in range(draws):
        good = rng.normal(size=(60, 2))
        decision, calibration = decided(good, SETTINGS)
        new = rng.normal(size=(1, 2))
        rejected += int(image_score(new, calibration.image)[0] > decision.threshold)
    assert rejected / draws <= 0.05 + 4 * np.sqrt(0.05 * 0.95 / draws)
    assert rejected > 0


def test_a_bound_on_false_rejects_is_the_rank_of_a_good_image() -> None:
    good = np.random.default_rng(3).normal(size=(19, 2))
    decision, calibration = decided(good, DecisionSettings(max_false_rejects=0.2))
    scores = np.sort(image_score(good, calibration.image))
    assert decision.threshold == scores[15], "ceil(20 * 0.8) = 16 th"
    assert decision.false_reject_bound == pytest.approx(0.2)
    assert decision.is_p_value


def test_a_p_value_refers_to_no_rate() -> None:
    decision = Decision(0.95, "of the test", None, is_p_value=True)
    with pytest.raises(SettingsError, match=r"defect rate of 0\.02.*p-value"):
        decision.at(0.02)
    assert decision.balanced == 0.95
    assert decision.told(0.96, 0.96) == (0.96, True)
    assert decision.told(0.95, 0.95) == (0.95, False)
    assert "p-value" in decision.refers_to and "%" not in decision.refers_to
    image = fit_image_evidence(np.arange(8.0)[:, None], np.zeros(8, np.bool_), False)
    assert decision_of(decision._asdict(), image) == decision
    for changed in (
        {"balanced_threshold": 0.5}, {"is_p_value": "yes"}, {"is_p_value": False},
        {"threshold": 1.0},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            decision_of(decision._asdict() | changed, image)


def test_a_single_good_part_is_noted() -> None:
    image = fit_image_evidence(np.zeros((2, 2)), np.zeros(2, np.bool_), has_dominance=False)
    noted = with_groups(image, weak([(1, False)], [(0, False), (0, False)]))
    assert noted.rests_on_one
    assert any(
        "p-value rests on a single good part (group) with 2 images" in n for n in noted.notes
    )


@pytest.mark.parametrize(
    ("fit", "calibration", "words"),
    [
        ([(0, False)], [(1, False)], "good images alone"),
        ([(0, False), (2, True)], [(1, False)], "1 defect"),
        ([(0, False), (2, True)], [(1, False), (3, True)], "2 defects"),
        ([(0, False), (2, True), (2, True)], [(1, False)], "2 defects of 1 part"),
        ([(2, True), (2, True), (4, True)], [(1, False)], "3 defects of 2 parts"),
    ],
)
def test_what_a_model_rests_on(
    fit: list[tuple[int, bool]], calibration: list[tuple[int, bool]], words: str
) -> None:
    assert rests_on(weak(fit, calibration)) == words
