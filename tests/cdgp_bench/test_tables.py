"""What the rows and columns of each table hold."""

import numpy as np
from tests.cdgp_bench.helpers import row

from cdgp_bench.formats import marks
from cdgp_bench.grid import FULL, GP_FREE, METHODS
from cdgp_bench.plan import Plan, read_plan
from cdgp_bench.tables import all_tables


def test_paired_contrasts_average_seeds_and_compare_categories(plan: Plan) -> None:
    """Eight categories, all better: p = 2/256, Holm-adjusted over three metrics: 6/256 = .023."""
    rng = np.random.default_rng(0)
    rows, gains = [], rng.uniform(0.05, 0.2, 8)
    for index, gain in enumerate(gains):
        for seed in (0, 1, 2):
            base = 0.5 + 0.01 * seed
            for variant, value in ((FULL, base + gain), (GP_FREE, base)):
                rows.append(row("cdgp", f"c{index}", seed, value, setting=variant.setting))
    rows += [row("linear_head", "c0", 0, 0.5)]
    (table,) = (t for t in all_tables(plan, rows, []) if t.name.startswith("table_S1-"))
    found = {r.label: r.cells for r in table.rows}
    difference, *ends, p, categories = found["Full CDGP − GP-free / AUPRO@.3"]
    assert difference == f"{100 * gains.mean():+.2f}"
    low, high = (float(str(end)) for end in ends)
    assert 100 * gains.min() <= low < 100 * gains.mean() < high <= 100 * gains.max()
    assert (p, categories) == ("0.023", "8")
    assert not any("direct linear" in label for label in found), "no pairs, no statement"


def test_the_main_table_counts_trainings_that_did_not_separate(plan: Plan) -> None:
    rows = [row("cdgp", "can", s, 0.5, facts={"separated": s > 0}) for s in (0, 1, 2)]
    table = next(t for t in all_tables(plan, rows, []) if "1a" in t.name)
    labels = [r.label for r in table.rows]
    assert "CDGP (1 of 3 did not separate)" in labels
    assert METHODS["grad_cam"].title in labels


def test_a_method_from_elsewhere_names_a_teacher_that_is_ours(plan: Plan) -> None:
    facts = {"code": "anomalib 2.7.0", "options": {"steps": 9}, "budget_share": 0.0013}
    said = facts | {"teacher": "distilled by us from tf_efficientnet_lite0, 80 steps"}
    for given, home in ((facts, "anomalib 2.7.0"),
                        (said, "anomalib 2.7.0, teacher distilled by us from "
                               "tf_efficientnet_lite0, 80 steps")):  # fmt: skip
        rows = [row("efficientad", "can", 0, 0.5, facts=given)]
        table = next(t for t in all_tables(plan, rows, []) if "X2" in t.name)
        (cells,) = (r.cells for r in table.rows)
        assert cells[2:] == ["0.1 %", home]


def test_budgets_beyond_the_images_say_so(plan: Plan) -> None:
    rows = [row("cdgp", "can", s, 0.5, budget=k, effective_budget=min(k or 10, 10))
            for k in (1, 16, None) for s in (0, 1, 2)]  # fmt: skip
    table = next(t for t in all_tables(plan, rows, []) if "S11" in t.name)
    assert [r.label for r in table.rows] == ["1", "2", "4", "8", "16 (only 10 in some)", "Full"]


def test_a_result_over_fewer_seeds_is_not_ranked(plan: Plan) -> None:
    rows = [row("cdgp", "can", 0, 0.95)]
    rows += [row("grad_cam", "can", s, 0.9) for s in (0, 1, 2)]
    rows += [row("mil_topk", "can", s, 0.5) for s in (0, 1, 2)]
    table = next(t for t in all_tables(plan, rows, []) if "1b" in t.name)
    found = {r.label: m for r, m in zip(table.rows, marks(table, plan.planned), strict=True)}
    assert found["CDGP"] == [""]
    assert found["Classifier + Grad-CAM"] == ["best"]
    assert found["MIL-TopK"] == ["second"]


def test_all_settings_are_those_of_the_rows() -> None:
    """The settings that a benchmark forces are listed; those without effect on a row are not."""
    smoke = read_plan("smoke")
    table = next(t for t in all_tables(smoke, [], []) if "S13" in t.name)
    cells = {r.label: [str(cell) for cell in r.cells] for r in table.rows}
    assert 'no_separation = "flag"' in cells["dual_gp"][0]
    assert "steps = 2;" in cells["dual_gp"][0]
    assert cells["dual_gp"][1] == "all"
    assert "decision" not in cells and "seed" not in cells
    assert len(table.rows) == len(cells), "a section that all sets share is one row"
