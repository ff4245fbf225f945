"""Means over seeds and categories."""

import pytest
from tests.cdgp_bench.helpers import row

from cdgp_bench.grid import FULL
from cdgp_bench.plan import Plan
from cdgp_bench.results import Results


def test_summaries_average_categories_within_seeds(plan: Plan) -> None:
    rows = [row("cdgp", c, s, v + s / 10)
            for c, v in (("can", 0.2), ("vial", 0.6)) for s in (0, 1, 2)]  # fmt: skip
    found = Results(plan, rows).summary("mvtec_ad2", FULL, "pixel_auroc")
    assert found is not None and found.repeats == 3
    assert (found.mean, found.std) == pytest.approx((0.5, 0.1))
    incomplete = Results(plan, rows[:-1]).summary("mvtec_ad2", FULL, "pixel_auroc")
    assert incomplete is not None and incomplete.repeats == 2


def test_failed_rows_are_no_numbers(plan: Plan) -> None:
    rows = [row("cdgp", "can", 0, 0.5, status="failed", reason="x")]
    assert Results(plan, rows).summary("mvtec_ad2", FULL, "pixel_auroc") is None


def test_a_failed_category_is_no_part_of_a_mean(plan: Plan) -> None:
    rows = [row("cdgp", c, s, 0.9, status="ok" if c == "can" else "failed", reason="r")
            for c in ("can", "vial") for s in (0, 1, 2)]  # fmt: skip
    assert Results(plan, rows).summary("mvtec_ad2", FULL, "pixel_auroc") is None
