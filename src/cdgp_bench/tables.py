"""The paper's tables from rows: what each row and column holds."""

from collections.abc import Sequence

from cdgp_bench import appendix, grid
from cdgp_bench.formats import Table, TableRow
from cdgp_bench.plan import Plan
from cdgp_bench.results import NAMES, PIXEL, Results, Row
from cdgp_bench.statistics import CONFIDENCE, RESAMPLES, holm, paired_contrast

BLOCKS = {
    "normal": "Normal-only supervision",
    "image": "Image-level supervision",
    "control": "Controls",
}
SHORT = "less than a quarter of the published training, not ranked"
EXPERIMENT_TABLES = (
    ("2", "components", "Factorised contribution of the Dual GP", "Variant"),
    ("S2", "scoring", "Scoring and parameterisation controls", "Variant"),
    ("S3", "heteroscedastic", "Functional-form control", "Variant"),
    ("S4a", "hard_pool", "Hard-pool fraction", "Fraction"),
    ("S4b", "inducing_budgets", "Inducing budgets (M_N, M_A)", "Budgets"),
    ("S5", "kernels", "Kernels", "Kernel"),
    ("S6a", "fusion_weight", "Spatial fusion weight; each refits its normal tail", "w"),
    ("S6b", "image_weight", "Broadcast image weight", "λ_I"),
    ("X1", "held_out", "Calibration images seen by the Dual GP, or not", "Calibration images"),
)
"""Number, experiment, title, and heading of the first column; the last one is not in the paper."""
BUDGET_COLUMNS = (
    (grid.FULL, "image_auroc"),
    (grid.SPATIAL, "pixel_aupro_30"),
    (grid.FULL, "pixel_aupro_30"),
    (grid.SPATIAL, "pixel_aupro_05"),
    (grid.FULL, "pixel_aupro_05"),
)
"""Of Table S11."""


def all_tables(plan: Plan, rows: Sequence[Row], costs: Sequence[Row]) -> list[Table]:
    """Tables 1, 2 and S1-S14 of the paper, as far as the plan has run them."""
    results = Results(plan, rows)
    tables: list[Table] = []
    if results.sets("main"):
        tables += [_main(results, "1a", "Localisation", PIXEL),
                   _main(results, "1b", "Detection", ("image_auroc",))]  # fmt: skip
    for number, experiment, title, heading in EXPERIMENT_TABLES:
        if results.sets(experiment):
            tables.append(_experiment(results, experiment, number, title, heading))
    if all(results.sets(name) for name in ("components", "scoring")):
        tables.append(_paired(results))
    if results.sets("main") and "cdgp" in plan.methods:
        tables.append(_per_category(results))
    if results.sets("label_budget"):
        tables.append(_label_budget(results))
    if results.sets("budget_curve"):
        tables.append(_budget_curve(results))
    if costs:
        tables.append(appendix.complexity(results, costs))
    if any(grid.METHODS[name].options for name in plan.methods):
        tables.append(appendix.outside(results))
    tables += [appendix.settings(plan), appendix.provenance(plan, rows), appendix.machines(rows)]
    return sorted(tables, key=lambda table: _order(table.name))


def _order(name: str) -> tuple[str, int, str]:
    """The paper's text first, then its supplement, ours, and the machines."""
    number = name.split("-")[0].removeprefix("table_")
    digits = "".join(c for c in number if c.isdigit())
    return number[0] if number[0] in "SX" else ("" if digits else "Z"), int(digits or 0), number


def _main(results: Results, number: str, title: str, metrics: Sequence[str]) -> Table:
    sets = results.sets("main")
    rows = []
    variants = grid.variants_of("main", results.plan.methods)
    short = [variant for variant in variants if results.is_short(variant)]
    whole = [variant for variant in variants if variant not in short]
    for chosen, suffix in ((whole, ""), (short, f", {SHORT}")):
        for block in BLOCKS:
            for variant in (n for n in chosen if grid.METHODS[n.method].supervision == block):
                cells = [
                    "not run" if (d, variant.method) in results.not_run
                    else results.summary(d, variant, m)
                    for d in sets for m in metrics
                ]  # fmt: skip
                label = variant.label + _unseparated(results, sets, variant)
                rows.append(TableRow(label, cells, BLOCKS[block] + suffix, not suffix))
    head = ["Method", *(f"{d} {NAMES[m]}" for d in sets for m in metrics)]
    reasons = dict.fromkeys(f"Not run: {reason}." for reason in results.not_run.values())
    note = " ".join([_scored(results.plan), *reasons])
    return Table(f"table_{number}-main", title, head, rows, note=note)


def _scored(plan: Plan) -> str:
    size = "the network's input size" if plan.metric_size == "input" else "each image's own size"
    over = f"seeds {list(plan.seeds)}" if plan.folds is None else f"{plan.folds} folds"
    return f"× 100, mean ± standard deviation over {over}; scored at {size}."


def _unseparated(results: Results, sets: Sequence[str], variant: grid.Variant) -> str:
    rows = [r for d in sets for r in results.rows_of(d, variant)]
    bad = sum(not r.get("facts", {}).get("separated", True) for r in rows)
    return f" ({bad} of {len(rows)} did not separate)" if bad else ""


def _experiment(results: Results, experiment: str, number: str, title: str, heading: str) -> Table:
    sets, names, note, ranked = results.sets(experiment), dict(NAMES), _scored(results.plan), True
    if experiment == "held_out":
        names["image_ece"], ranked = "ECE", False
        note = "ECE: expected calibration error of the image score. " + note
    rows = [
        TableRow(
            variant.label + (_unseparated(results, sets, variant) if ranked else ""),
            [results.summary(d, variant, m) for d in sets for m in names],
        )
        for variant in grid.EXPERIMENTS[experiment]
    ]
    head = [heading, *(f"{d} {name}" for d in sets for name in names.values())]
    return Table(f"table_{number}-{experiment}", title, head, rows, ranked, note)


def paired_groups(results: Results) -> dict[str, list[str]]:
    """The data sets whose categories are compared together; sets of one category are pooled."""
    sets = [d for d in results.sets("components") if d in results.sets("scoring")]
    groups = {d: [d] for d in sets if len(results.categories[d]) > 1}
    single = [d for d in sets if len(results.categories[d]) == 1]
    if single:
        groups[" + ".join(single)] = single
    return groups


def _paired(results: Results) -> Table:
    rows = []
    for group, sets in paired_groups(results).items():
        for title, first, second in grid.CONTRASTS:
            found = {}
            for metric in PIXEL:
                differences: list[float] = []
                for d in sets:
                    a = results.by_category(d, first, metric)
                    b = results.by_category(d, second, metric)
                    pairs = ((a[c], b[c]) for c in a)
                    differences += [x - y for x, y in pairs if x is not None and y is not None]
                if differences:
                    found[metric] = paired_contrast(differences)
            adjusted = holm([c.p for c in found.values()])
            for (metric, c), p in zip(found.items(), adjusted, strict=True):
                cells = [*map(_signed, (c.difference, c.low, c.high)), f"{p:.3f}",
                         str(c.categories)]  # fmt: skip
                rows.append(TableRow(f"{title} / {NAMES[metric]}", cells, group))
    note = (
        f"Percentage points, first minus second, after averaging over {results.plan.planned.word}. "
        "Intervals: "
        f"{CONFIDENCE:.0%} percentile bootstrap over categories, {RESAMPLES:,} resamples. p: exact "
        "two-sided sign-flip test, Holm-adjusted within the three metrics of a contrast. n "
        "categories cannot give a p below 2 / 2^n."
    )
    head = ["Contrast / metric", "Difference", "95 % from", "to", "p", "Categories"]
    return Table("table_S1-paired", "Paired analysis over categories", head, rows, False, note)


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:+.2f}"


def _per_category(results: Results) -> Table:
    variant, metrics = grid.Variant("CDGP"), tuple(NAMES)
    rows = []
    for d in results.sets("main"):
        for c in results.categories[d]:
            cells = [results.summary(d, variant, m, category=c) for m in metrics]
            rows.append(TableRow(c, cells, d))
        rows.append(TableRow("Mean", [results.summary(d, variant, m) for m in metrics], d))
    head = ["Category", *(NAMES[m] for m in metrics)]
    note = _scored(results.plan)
    return Table("table_S7-per_category", "CDGP by category", head, rows, False, note)


def _label_budget(results: Results) -> Table:
    rows = []
    for d in results.sets("label_budget"):
        for budget in grid.budgets_of("label_budget", results.plan.budgets):
            cells = [results.summary(d, v, metric, budget) for v, metric in BUDGET_COLUMNS]
            rows.append(TableRow(_budget_name(results, d, grid.FULL, budget), cells, d))
    head = ["Defective images a category", "AUROC-I", "AUPRO@.3 spatial", "AUPRO@.3 final",
            "AUPRO@.05 spatial", "AUPRO@.05 final"]  # fmt: skip
    note = (
        "All good training images, k defective ones. Spatial leaves the image term out. "
        + _scored(results.plan)
    )
    return Table("table_S11-label_budget", "Label budget", head, rows, False, note)


def _budget_curve(results: Results) -> Table:
    """Every method by its number of defective training images; of those without, one line."""
    rows = []
    for d in results.sets("budget_curve"):
        for variant in grid.variants_of("budget_curve", results.plan.methods):
            for budget in grid.budgets_of("budget_curve", results.plan.budgets):
                if grid.own_row("budget_curve", variant, budget):
                    name = _budget_name(results, d, variant, budget)
                    if grid.METHODS[variant.method].supervision == "normal":
                        name = "any"
                    cells = [results.summary(d, variant, m, budget) for m in NAMES]
                    rows.append(TableRow(f"{variant.label}: {name}", cells, d))
    head = ["Method: defective images", *NAMES.values()]
    note = (
        "All good training images, k defective ones; any: the method uses good images alone. "
        + _scored(results.plan)
    )
    return Table("table_X3-budget_curve", "Label budgets by method", head, rows, False, note)


def _budget_name(results: Results, dataset: str, variant: grid.Variant, budget: int | None) -> str:
    """The budget, and how many there were where some category has fewer defective images."""
    if budget is None:
        return "Full"
    rows = results.rows_of(dataset, variant, budget)
    least = min((r["effective_budget"] for r in rows), default=budget)
    return str(budget) if least == budget else f"{budget} (only {least} in some)"
