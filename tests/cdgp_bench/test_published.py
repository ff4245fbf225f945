"""The paper's printed numbers, and ours beside them under the same protocol."""

import re
import tomllib
from importlib.resources import files

import pytest
from tests.cdgp_bench.helpers import row
from tests.helpers import SHARED

from cdgp_bench.datasets import MVTEC_AD2_CATEGORIES
from cdgp_bench.grid import EXPERIMENTS
from cdgp_bench.plan import Plan, read_plan
from cdgp_bench.published import published, same_protocol
from cdgp_bench.results import Results

PAPER = SHARED / "paper" / "cdgp.tex"


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


def test_labels_of_the_print_are_variants() -> None:
    typed = tomllib.loads((files("cdgp_bench") / "published.toml").read_text(encoding="utf-8"))
    for experiment, block in typed["experiments"].items():
        labels = {variant.label for variant in EXPERIMENTS[experiment]}
        assert set(block) - {"source"} == labels, experiment


def test_ours_are_shown_only_under_the_same_protocol(plan: Plan) -> None:
    rows = [row("cdgp", c, s, 0.5 + s / 100) for c in MVTEC_AD2_CATEGORIES for s in (0, 1, 2)]
    text = published(Results(plan, rows))
    assert "| CDGP | 100 ± 0 → 51.0 ± 1.0 | 96.8 ± 0.7 → 51.0 ± 1.0 |" in text
    assert "| PaDiM | 69.9 ± 1.4 → not run |" in text
    assert "| can | 100 ± 0 → 51.0 ± 1.0 |" in text
    assert "51.0" not in published(Results(plan, rows[3:])), "a category is missing"
    lost = [r if r["category"] != "can" else {**r, "status": "failed"} for r in rows]
    assert "| CDGP | 100 ± 0 → not run |" in published(Results(plan, lost)), "a category failed"
    for change in ({"preset": "lite"}, {"metric_size": "native"}, {"seeds": (0, 1)},
                   {"settings": {"dual_gp": {"steps": 9}}}):  # fmt: skip
        assert not same_protocol(plan.model_copy(update=change), "mvtec_ad2")
        other = published(Results(plan.model_copy(update=change), rows))
        assert "51.0" not in other and "96.8 ± 0.7 → not run" in other
    for name in ("paper-ksdd2", "paper-visa", "paper-mvtec-ad2"):
        chosen = read_plan(name)
        assert all(same_protocol(chosen, d) for d in chosen.datasets)


def test_what_was_trained_too_little_says_so(plan: Plan) -> None:
    rows = [row("efficientad", c, s, 0.5, facts={"budget_share": 0.2})
            for c in MVTEC_AD2_CATEGORIES for s in (0, 1, 2)]  # fmt: skip
    said = "EfficientAD (less than a quarter of the published training, not ranked)"
    ours = next(line for line in published(Results(plan, rows)).splitlines() if said in line)
    assert "→ 50.0 ± 0.0" in ours
    whole = [r | {"facts": {"budget_share": 0.25}} for r in rows]
    assert said not in published(Results(plan, whole))
    other = Results(plan.model_copy(update={"preset": "lite"}), rows)
    assert said not in published(other), "no number of ours is shown"


def test_counts_other_than_the_published_are_another_protocol() -> None:
    plan = read_plan("paper-ksdd2")
    whole = {"fit": [1668, 197], "calibration": [417, 49], "test": [894, 110]}
    rows = [row("cdgp", "ksdd2", s, 0.5, dataset="ksdd2", parts=whole) for s in (0, 1, 2)]
    assert "| CDGP | 97.4 ± 0.2 → 50.0 ± 0.0 |" in published(Results(plan, rows))
    for r in rows:
        r["parts"] = whole | {"test": [894, 109]}
    assert "| CDGP | 97.4 ± 0.2 → not run |" in published(Results(plan, rows))
