"""Reliability over folds: equal bins, the set's own share of defects, groups within folds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdgp.metrics.reliability import rate_interval
from cdgp_bench import figures
from cdgp_bench.grid import Variant
from cdgp_bench.plan import Plan
from cdgp_bench.reliability import equal_count_bins, pooled_scores, reliability
from cdgp_bench.results import Results

CDGP = Variant("CDGP")


def in_folds(plan: Plan) -> Plan:
    return plan.model_copy(update={"seeds": (0,), "folds": 2})


def fold_row(fold: int, images: list[list[Any]], **more: Any) -> dict[str, Any]:
    return {
        "dataset": "mvtec_ad2", "category": "can", "method": "cdgp", "setting": "default",
        "seed": 0, "budget": None, "fold": fold, "status": "ok", "image_ece": 0.1,
        "images": images, **more,
    }  # fmt: skip


@pytest.mark.parametrize("count", [10, 37, 200])
def test_bins_of_distinct_values_are_equal_parts_of_their_order(count: int) -> None:
    values = np.random.default_rng(count).random(count)
    found = equal_count_bins(values, 10)
    sizes = np.bincount(found, minlength=10)
    assert sizes.max() - sizes.min() <= 1
    assert (np.diff(found[np.argsort(values)]) >= 0).all()


def test_equal_values_share_a_bin() -> None:
    """However the labels are ordered: half of the images are at exactly zero."""
    values = np.concatenate([np.zeros(50), np.linspace(0.1, 1, 50)])
    found = equal_count_bins(values, 10)
    assert len(set(found[:50])) == 1
    assert found[50:].min() > found[0] and found.max() == 9


def test_scores_of_all_folds_at_the_sets_own_share(plan: Plan) -> None:
    first = [["a", 0, 1, 0.9], ["b", 0, 0, 0.2], ["c", 1, 0, 0.0]]
    second = [["d", 0, 0, 0.5], ["e", 1, 0, 1.0]]
    folds = in_folds(plan)
    found = pooled_scores(
        Results(folds, [fold_row(0, first), fold_row(1, second)]), "mvtec_ad2", CDGP
    )
    assert found is not None
    share = 1 / 5

    def told(p: float) -> float:
        """Bayes' rule: the odds at equal numbers times the odds of the share."""
        return p * share / (p * share + (1 - p) * (1 - share))

    expected = [told(p) for p in (0.9, 0.2, 0.0, 0.5, 1.0)]
    assert found.probability.tolist() == pytest.approx(expected)
    assert found.defective.tolist() == [True, False, False, False, False]
    # Group 0 of one fold is not group 0 of another.
    assert found.group[0] == found.group[1]
    assert len(set(found.group.tolist())) == 4


def test_what_is_not_whole_or_no_probability_has_no_curve(plan: Plan) -> None:
    images = [["a", 0, 1, 0.9], ["b", 1, 0, 0.2]]
    folds = in_folds(plan)
    rows = [fold_row(0, images), fold_row(1, images)]
    assert pooled_scores(Results(folds, rows), "mvtec_ad2", CDGP) is not None
    assert pooled_scores(Results(folds, rows[:1]), "mvtec_ad2", CDGP) is None
    for key in ("image_ece", "images"):
        lacking = [{k: v for k, v in row.items() if k != key} for row in rows]
        assert pooled_scores(Results(folds, lacking), "mvtec_ad2", CDGP) is None


def test_bins_hold_rates_with_intervals_of_groups(plan: Plan, tmp_path: Path) -> None:
    """Against a loop over sorted images, of probabilities that are true."""
    rng = np.random.default_rng(0)
    probability = rng.permutation(np.linspace(0.01, 0.99, 400))
    defective = rng.random(400) < probability
    rows = []
    for fold in range(2):
        part = slice(200 * fold, 200 * fold + 200)
        images = [
            ["x", i // 2, int(d), float(p)]
            for i, (p, d) in enumerate(zip(probability[part], defective[part], strict=True))
        ]
        rows.append(fold_row(fold, images))
    found = pooled_scores(Results(in_folds(plan), rows), "mvtec_ad2", CDGP)
    assert found is not None
    order = np.argsort(found.probability)
    bins = reliability(found)
    assert [b.images for b in bins] == [40] * 10
    for place, one in enumerate(bins):
        inside = order[40 * place : 40 * place + 40]
        assert one.mean == pytest.approx(found.probability[inside].mean())
        assert one.rate == pytest.approx(found.defective[inside].mean())
        low, high = rate_interval(found.defective[inside], found.group[inside])
        assert (one.low, one.high) == pytest.approx((low, high))
        assert low <= one.rate <= high
    assert sum(one.low <= one.mean <= one.high for one in bins) >= 9
    figures.reliability({"one": found, "two": found}, tmp_path / "r")
    assert (tmp_path / "r.png").stat().st_size > 5000
    text = (tmp_path / "r.svg").read_text()
    assert text.count("predicted P(defective)") == 2, "a panel a set"
