"""Tables from rows: what is averaged, marked, set and set beside the paper's print."""

import csv
import io
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers import SHARED

from cdgp_bench.datasets import MVTEC_AD2_CATEGORIES
from cdgp_bench.formats import Table, TableRow, comma_separated, latex, markdown, marks
from cdgp_bench.grid import EXPERIMENTS, FULL, GP_FREE, METHODS
from cdgp_bench.page import render
from cdgp_bench.plan import Plan, read_plan
from cdgp_bench.published import published, same_protocol
from cdgp_bench.statistics import Summary
from cdgp_bench.tables import Evidence, all_tables

PAPER = SHARED / "paper" / "cdgp.tex"


def row(method: str, category: str, seed: int, value: float, **more: Any) -> dict[str, Any]:
    return {
        "dataset": "mvtec_ad2", "category": category, "method": method, "setting": "default",
        "seed": seed, "budget": None, "status": "ok", "preset": "paper", "input_size": [256, 256],
        "metric_size": "input", "image_auroc": value, "pixel_auroc": value,
        "pixel_aupro_30": value, "pixel_aupro_05": value, "facts": {}, "notes": {},
        "parts": {"fit": [1, 1], "calibration": [1, 1], "test": [1, 1]}, "effective_budget": 2,
        "audit": {p: {"path": 0, "pixel": 0} for p in ("calibration_test", "train_test")},
        **more,
    }  # fmt: skip


@pytest.fixture
def plan() -> Plan:
    return read_plan("paper-mvtec-ad2")


def test_summaries_average_categories_within_seeds(plan: Plan) -> None:
    rows = [row("cdgp", c, s, v + s / 10)
            for c, v in (("can", 0.2), ("vial", 0.6)) for s in (0, 1, 2)]  # fmt: skip
    found = ResultTable(plan, rows).summary("mvtec_ad2", FULL, "pixel_auroc")
    assert found == Summary(pytest.approx(0.5), pytest.approx(0.1), 3)
    incomplete = ResultTable(plan, rows[:-1]).summary("mvtec_ad2", FULL, "pixel_auroc")
    assert incomplete is not None and incomplete.seeds == 2


def test_failed_rows_are_no_numbers(plan: Plan) -> None:
    rows = [row("cdgp", "can", 0, 0.5, status="failed", reason="x")]
    assert ResultTable(plan, rows).summary("mvtec_ad2", FULL, "pixel_auroc") is None


def test_best_and_second_are_marked_as_they_print() -> None:
    """100.0 and 99.96 print alike, so both are best; the next is second."""
    values = (1.0, 0.9996, 0.98, 0.5, None)
    cells = [None if v is None else Summary(v, 0.01, 3) for v in values]
    table = Table("t", "T", ["m", "x"], [TableRow(f"r{i}", [c]) for i, c in enumerate(cells)])
    assert marks(table, 3) == [["best"], ["best"], ["second"], [""], [""]]
    text = markdown(table, 3)
    assert "| r0 | **100.0 ± 1.0** |" in text
    assert "| r2 | <u>98.0 ± 1.0</u> |" in text
    assert "| r4 | – |" in text
    assert r"r2 & $\underline{98.0}_{\pm1.0}$ \\" in latex(table, 3)
    assert "(3 of 4 seeds)" in markdown(table, 4)
    rows = list(csv.DictReader(io.StringIO(comma_separated(table))))
    assert float(rows[1]["x"]) == pytest.approx(99.96) and float(rows[1]["x std"]) == 1
    assert rows[4]["x"] == ""


def test_latex_escapes_what_it_must() -> None:
    table = Table("t", "T", ["a_b & 5 %"], [TableRow("{x}_$1", [])])
    assert r"a\_b \& 5 \%" in latex(table, 1)
    assert r"\{x\}\_\$1" in latex(table, 1)


def test_paired_contrasts_average_seeds_and_compare_categories(plan: Plan) -> None:
    """Eight categories, all better: p = 2/256, Holm-adjusted over three metrics: 6/256 = .023."""
    rng = np.random.default_rng(0)
    rows, gains = [], rng.uniform(0.05, 0.2, 8)
    for index, gain in enumerate(gains):
        for seed in (0, 1, 2):
            base = 0.5 + 0.01 * seed
            for line, value in ((FULL, base + gain), (GP_FREE, base)):
                rows.append(row("cdgp", f"c{index}", seed, value, setting=line.setting))
    rows += [row("linear_head", "c0", 0, 0.5)]
    (table,) = (t for t in all_tables(plan, rows, []) if t.name.startswith("table_S1-"))
    found = {r.label: r.cells for r in table.rows}
    difference, *ends, p, categories = found["Full CDGP − GP-free / AUPRO@.3"]
    assert difference == f"{100 * gains.mean():+.2f}"
    low, high = (float(str(end)) for end in ends)
    assert 100 * gains.min() <= low < 100 * gains.mean() < high <= 100 * gains.max()
    assert (p, categories) == ("0.023", "8")
    assert not any("direct linear" in label for label in found), "no pairs, no statement"


def test_every_paper_number_is_typed_as_printed() -> None:
    if not PAPER.exists():
        pytest.skip("needs ../shared/paper")
    text = PAPER.read_text(encoding="utf-8")
    typed = tomllib.loads((files("cdgp_bench") / "published.toml").read_text(encoding="utf-8"))
    start, end = "%% file: tables/main_v2.tex", "%% file: tables/component_analysis.tex"
    main = text[text.index(start) : text.index(end)]
    starts = {
        "padim": "PaDiM", "patchcore": "PatchCore", "rd4ad": "RD4AD", "draem": "DRAEM",
        "efficientad": "EfficientAD", "grad_cam": "Classifier + Grad-CAM", "mil_topk": "MIL-TopK",
        "supersimplenet": "SuperSimpleNet", "weakrest": "WeakREST", "static_max": "Static max",
        "cdgp": r"\textbf{CDGP",
    }  # fmt: skip
    for method, first in starts.items():
        located, detected = (
            [float(v) for v in re.findall(r"\{(\d+\.\d+)\}", line)]
            for line in main.splitlines()
            if line.startswith(first) and "&" in line
        )
        assert typed["main"]["mvtec_ad2"][method] == detected[:2] + located[:6]
        assert typed["main"]["ksdd2"][method] == detected[2:4] + located[6:10]
        assert typed["main"]["visa"][method] == detected[4:6] + located[10:14]
    printed = {
        tuple(map(float, re.findall(r"\d+\.\d+", re.sub(r"^[^&]*&", "", line))))
        for line in text.splitlines()
        if "pm" in line
    }
    blocks = [*typed["experiments"].values(), typed["label_budget"]]
    blocks += [typed["per_category"][name] for name in ("mvtec_ad2", "ksdd2", "visa")]
    checked = 0
    for block in blocks:
        for label, values in block.items():
            if label != "source":
                assert any(line[-len(values) :] == tuple(values) for line in printed), label
                checked += 1
    assert checked == 55
    for label, values in typed["paired"].items():
        if label != "source":
            for metric in range(3):
                difference, low, high, p = values[4 * metric : 4 * metric + 4]
                assert (
                    f"{difference:+.2f}\\ [{low:.2f},{high:.2f}]\\ ({p:.3f}".replace("(0.", "(.")
                    in text
                ), label


def test_labels_of_the_print_are_lines_of_the_experiments() -> None:
    typed = tomllib.loads((files("cdgp_bench") / "published.toml").read_text(encoding="utf-8"))
    for experiment, block in typed["experiments"].items():
        labels = {line.label for line in EXPERIMENTS[experiment]}
        assert set(block) - {"source"} == labels, experiment


def test_ours_stand_beside_the_print_only_under_the_same_protocol(plan: Plan) -> None:
    rows = [row("cdgp", c, s, 0.5 + s / 100) for c in MVTEC_AD2_CATEGORIES for s in (0, 1, 2)]
    text = published(ResultTable(plan, rows))
    assert "| CDGP | 100 ± 0 → 51.0 ± 1.0 | 96.8 ± 0.7 → 51.0 ± 1.0 |" in text
    assert "| PaDiM | 69.9 ± 1.4 → not run |" in text
    assert "| can | 100 ± 0 → 51.0 ± 1.0 |" in text
    assert "51.0" not in published(ResultTable(plan, rows[3:])), "a category is missing"
    lost = [r if r["category"] != "can" else {**r, "status": "failed"} for r in rows]
    assert "| CDGP | 100 ± 0 → not run |" in published(ResultTable(plan, lost)), "a category failed"
    for change in ({"preset": "lite"}, {"metric_size": "native"}, {"seeds": (0, 1)},
                   {"settings": {"dual_gp": {"steps": 9}}}):  # fmt: skip
        assert not same_protocol(plan.model_copy(update=change), "mvtec_ad2")
        other = published(ResultTable(plan.model_copy(update=change), rows))
        assert "51.0" not in other and "96.8 ± 0.7 → not run" in other
    for name in ("paper-ksdd2", "paper-visa", "paper-mvtec-ad2"):
        chosen = read_plan(name)
        assert all(same_protocol(chosen, d) for d in chosen.datasets)


def test_a_half_finished_plan_renders(plan: Plan, tmp_path: Path) -> None:
    """What is not there yet is a dash or a missing table, never an error or a zero."""
    rows = [row("cdgp", "can", 0, 0.5), row("grad_cam", "can", 0, 0.4, status="failed", reason="r")]
    page = render(plan, rows, [], tmp_path, rows[1:]).read_text()
    assert "| CDGP | 50.0 (1 of 3 seeds) |" in page.replace("**", "")
    assert "| Classifier + Grad-CAM | – |" in page
    assert "- mvtec_ad2/can grad_cam default seed 0: r" in page
    assert render(plan, [], [], tmp_path / "none").exists()


def test_the_main_table_tells_of_runs_that_did_not_separate(plan: Plan) -> None:
    rows = [row("cdgp", "can", s, 0.5, facts={"separated": s > 0}) for s in (0, 1, 2)]
    table = next(t for t in all_tables(plan, rows, []) if "1a" in t.name)
    labels = [r.label for r in table.rows]
    assert "CDGP (1 of 3 did not separate)" in labels
    assert METHODS["grad_cam"].title in labels


def test_counts_other_than_the_published_are_another_protocol() -> None:
    plan = read_plan("paper-ksdd2")
    whole = {"fit": [1668, 197], "calibration": [417, 49], "test": [894, 110]}
    rows = [row("cdgp", "ksdd2", s, 0.5, dataset="ksdd2", parts=whole) for s in (0, 1, 2)]
    assert "| CDGP | 97.4 ± 0.2 → 50.0 ± 0.0 |" in published(ResultTable(plan, rows))
    for r in rows:
        r["parts"] = whole | {"test": [894, 109]}
    assert "| CDGP | 97.4 ± 0.2 → not run |" in published(ResultTable(plan, rows))


def test_a_failed_category_is_no_part_of_a_mean(plan: Plan) -> None:
    rows = [row("cdgp", c, s, 0.9, status="ok" if c == "can" else "failed", reason="r")
            for c in ("can", "vial") for s in (0, 1, 2)]  # fmt: skip
    assert ResultTable(plan, rows).summary("mvtec_ad2", FULL, "pixel_auroc") is None


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
    found = {r.label: m for r, m in zip(table.rows, marks(table, 3), strict=True)}
    assert found["CDGP"] == [""]
    assert found["Classifier + Grad-CAM"] == ["best"]
    assert found["MIL-TopK"] == ["second"]


def test_all_settings_are_those_of_the_rows() -> None:
    """What a benchmark forces is told, and what has no part in a row is not."""
    smoke = read_plan("smoke")
    table = next(t for t in all_tables(smoke, [], []) if "S13" in t.name)
    told = {r.label: r.cells for r in table.rows}
    assert 'no_separation = "flag"' in told["dual_gp"][0]
    assert "steps = 2;" in told["dual_gp"][0]
    assert told["dual_gp"][1] == "all"
    assert "decision" not in told and "seed" not in told
    assert len(table.rows) == len(told), "a section that all sets share stands once"
