"""Two models side by side against counting by hand, SciPy's bootstrap and simulated coverage."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats
from tests.helpers import raised

from cdgp.errors import SettingsError
from cdgp.metrics.ranking import image_auroc
from cdgp.station.compare import Change, Side, choose_thresholds, compare, outcome


@dataclass(frozen=True)
class TwoThresholds:
    accept_below: float
    reject_above: float

    def decide(self, score: float) -> str:
        if score > self.reject_above:
            return "reject"
        if score < self.accept_below or self.accept_below == self.reject_above:
            return "accept"
        return "unsure"


def test_comparison_by_hand() -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    labels = [False, False, False, True, True, True]
    live = Side([0.1, 0.5, 0.9, 0.2, 0.6, 0.95], TwoThresholds(0.3, 0.8))
    candidate = Side([0.1, 0.2, 0.5, 0.6, 0.2, 0.99], TwoThresholds(0.4, 0.7))
    found = compare(names, labels, live, candidate)
    assert found.changes == (
        Change("b", "unsure", "accept", False, 0.5, 0.2),
        Change("c", "reject", "unsure", False, 0.9, 0.5),
        Change("d", "accept", "unsure", True, 0.2, 0.6),
        Change("e", "unsure", "accept", True, 0.6, 0.2),
    )
    assert (found.images, found.groups) == (6, 6)
    assert [share[:2] for share in found.live] == [(2, 6), (2, 6), (2, 6), (1, 3), (1, 3)]
    assert [share[:2] for share in found.candidate] == [(3, 6), (2, 6), (1, 6), (0, 3), (1, 3)]
    assert found.overkill is not None and found.overkill.value == pytest.approx(-1 / 3)
    assert found.escape is not None and found.escape.value == 0
    assert found.escape.low < 0 < found.escape.high, "one escape for another"
    assert found.unsure is not None and found.unsure.value == 0
    assert found.live_auroc.value == pytest.approx(6 / 9)
    assert found.candidate_auroc.value == pytest.approx(7.5 / 9)
    assert found.auroc is not None and found.auroc.value == pytest.approx(1.5 / 9)


def test_intervals_are_scipys_where_each_image_is_a_group() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(80) < 30
    before, after = labels + rng.normal(size=(2, 80))
    policies = TwoThresholds(0.2, 0.9), TwoThresholds(0.1, 1.2)
    found = compare(
        [str(i) for i in range(80)], labels, Side(before, policies[0]), Side(after, policies[1])
    )

    def auroc_gain(drawn: np.ndarray) -> float:
        index = drawn.astype(int)
        values = [image_auroc(scores[index], labels[index]).value for scores in (after, before)]
        return math.nan if None in values else values[0] - values[1]  # type: ignore[operator]

    def escape_gain(drawn: np.ndarray) -> float:
        bad = drawn.astype(int)[labels[drawn.astype(int)]]
        return float(np.mean(after[bad] < 0.1) - np.mean(before[bad] < 0.2))

    for difference, statistic in ((found.auroc, auroc_gain), (found.escape, escape_gain)):
        oracle = stats.bootstrap(
            (np.arange(80.0),), statistic, method="percentile", n_resamples=2000,
            vectorized=False, rng=rng,
        ).confidence_interval  # fmt: skip
        assert difference is not None
        width = oracle.high - oracle.low
        assert difference.low == pytest.approx(oracle.low, abs=0.1 * width)
        assert difference.high == pytest.approx(oracle.high, abs=0.1 * width)


def test_copies_of_a_group_tell_nothing_new() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(40) < 15
    scores = labels + rng.normal(size=(2, 40))
    policy = TwoThresholds(0.3, 0.8)

    def compared(times: int) -> list[object]:
        of = np.repeat(np.arange(40), times)
        first, second = (Side(row[of], policy) for row in scores)
        names, groups = [str(i) for i in of], [f"group {i:02d}" for i in of]
        found = compare(names, labels[of], first, second, groups)
        assert found.groups == 40
        return [found.auroc, found.overkill, found.escape, found.live.overkill.interval]

    for once, thrice in zip(compared(1), compared(3), strict=True):
        assert once == pytest.approx(thrice, abs=1e-12)


@pytest.mark.parametrize("shots", [1, 4])
def test_intervals_cover_the_true_differences(shots: int) -> None:
    """In at least 90 % of draws: percentile intervals of few groups are somewhat too narrow."""
    rng, policy = np.random.default_rng(0), TwoThresholds(0.4, 1.0)
    parts, draws = 60, 30
    labels = np.repeat(np.arange(parts) < 25, shots)
    of_part = np.repeat(np.arange(parts), shots)
    # Truth of scores that are the label plus noise of variance 1, or 0.25 for the candidate.
    cut = stats.norm
    overkill = cut.sf(1.0, scale=0.5) - cut.sf(1.0)
    auroc = cut.cdf(1 / math.sqrt(0.5)) - cut.cdf(1 / math.sqrt(2))
    hits = np.zeros(2)
    for _ in range(draws):
        noise = rng.normal(size=(2, parts))[:, of_part] * 0.8
        noise += rng.normal(size=(2, parts * shots)) * 0.6
        found = compare(
            of_part.astype(str).tolist(), labels,
            Side(labels + noise[0], policy), Side(labels + noise[1] / 2, policy), of_part,
        )  # fmt: skip
        assert found.overkill is not None and found.auroc is not None
        hits += [found.overkill.low <= overkill <= found.overkill.high,
                 found.auroc.low <= auroc <= found.auroc.high]  # fmt: skip
    assert (hits / draws >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / draws)).all()


def test_no_changed_decision_is_no_certainty() -> None:
    labels = np.arange(20) < 8
    side = Side(labels.astype(float), TwoThresholds(0.3, 0.7))
    found = compare([str(i) for i in range(20)], labels, side, side)
    none = stats.binomtest(0, 12).proportion_ci(0.95, "exact").high
    assert found.overkill is not None and found.changes == ()
    assert found.overkill[:3] == pytest.approx((0, -none, none))
    only_good = compare(["a", "b"], [False, False], Side([0, 1], side.policy), side._replace(
        scores=[0, 1]))  # fmt: skip
    assert (only_good.escape, only_good.auroc) == (None, None)
    assert only_good.live_auroc.reason == "no defective image"


def test_outcome_of_yesterday() -> None:
    """Most labels are not known; the shares of all are told, and those of the known."""
    scores = [0.1, 0.2, 0.5, 0.6, 0.9, 0.95]
    labels = [None, True, None, False, False, None]
    found = outcome(scores, TwoThresholds(0.3, 0.8), labels)
    assert [share[:2] for share in found] == [(2, 6), (2, 6), (2, 6), (1, 2), (1, 1)]
    exact = stats.binomtest(2, 6).proportion_ci(0.95, "exact")
    assert found.accepted.interval == pytest.approx((exact.low, exact.high), abs=1e-9)
    in_pairs = outcome(scores, TwoThresholds(0.3, 0.8), labels, list("aabbcc"))
    exact = stats.binomtest(1, 3).proportion_ci(0.95, "exact")
    assert in_pairs.accepted.interval == pytest.approx((exact.low, exact.high), abs=1e-9)
    unknown = outcome(scores, TwoThresholds(0.3, 0.8))
    assert list(unknown.overkill) == [0, 0, None]
    assert unknown.overkill.rate is None
    assert unknown.accepted.rate == pytest.approx(1 / 3)


@pytest.mark.parametrize("levels", [None, 10])
def test_thresholds_keep_both_budgets(levels: int | None) -> None:
    """Over draws of held-out and new parts, with ties between scores and without."""
    rng, draws = np.random.default_rng(0), 1500
    rejected = doubted = 0
    for _ in range(draws):
        scores = rng.random((60, 2)) * 0.9
        if levels:
            scores = np.round(scores * levels) / levels
        held_out, new = scores[:59], scores[59]
        labels = np.r_[np.zeros(118), 1, 1]
        groups = [f"part {i}" for i in np.repeat(np.arange(60), 2)]
        found = choose_thresholds(np.r_[held_out.ravel(), 0.95, 1], labels, groups, 0.05, 0.2)
        assert (found.groups, found.reject_bound, found.doubt_bound) == (59, 3 / 60, 12 / 60)
        assert 0 <= found.accept_below <= found.reject_above <= 1
        decisions = [TwoThresholds(*found[:2]).decide(score) for score in new.tolist()]
        rejected += "reject" in decisions
        doubted += set(decisions) != {"accept"}
    for count, bound in ((rejected, 0.05), (doubted, 0.2)):
        assert count / draws <= bound + 3 * math.sqrt(bound * (1 - bound) / draws)
        if levels is None:
            assert count / draws >= bound - 3 * math.sqrt(bound * (1 - bound) / draws), "met"


def test_what_is_refused() -> None:
    scores, labels = np.linspace(0, 1, 30), np.zeros(30)
    raised(lambda: choose_thresholds(scores, labels, None, 0.2, 0.1), "fewer", error=SettingsError)
    raised(lambda: choose_thresholds(scores, labels), "too few groups", error=SettingsError)
    policy = TwoThresholds(0.1, 0.5)
    raised(lambda: outcome([0.1, math.nan], policy), "nan")
    raised(lambda: outcome([0.1], policy, [True, False]), "1 scores but 2 labels")
    raised(lambda: outcome([0.1], policy, [True], [1, 2]), "groups of shape (2,)")
    raised(lambda: compare([], [], Side([], policy), Side([], policy)), "at least one")
    raised(lambda: compare(["a"], [0, 1], Side([0, 1], policy), Side([0, 1], policy)), "a")
