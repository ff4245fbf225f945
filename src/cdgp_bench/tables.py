"""The paper's tables from rows: what stands in each line and column."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cdgp_bench.formats import Table, TableRow
from cdgp_bench.grid import (
    CONTRASTS,
    EXPERIMENTS,
    FULL,
    METHODS,
    SPATIAL,
    Line,
    budgets_of,
    lines_of,
)
from cdgp_bench.measure.complexity import TIMED, WARM_UPS
from cdgp_bench.plan import Plan
from cdgp_bench.statistics import CONFIDENCE, RESAMPLES, Summary, holm, paired_contrast, summarise

Row = Mapping[str, Any]
NAMES = {
    "image_auroc": "AUROC-I",
    "pixel_auroc": "AUROC-P",
    "pixel_aupro_30": "AUPRO@.3",
    "pixel_aupro_05": "AUPRO@.05",
}
PIXEL = ("pixel_auroc", "pixel_aupro_30", "pixel_aupro_05")
BLOCKS = {
    "normal": "Normal-only supervision",
    "image": "Image-level supervision",
    "control": "Controls",
}
FAIR_SHARE = 0.25
"""A method that trained for less than this share of its published training is not ranked."""
REDUCED = "less than a quarter of the published training, not ranked"


class Evidence:
    """A plan's rows, found by what names them."""

    def __init__(self, plan: Plan, rows: Iterable[Row]) -> None:
        self.plan = plan
        rows = list(rows)
        self._rows = {
            (r["dataset"], r["category"], r["method"], r["setting"], r["seed"], r["budget"]): r
            for r in rows
            if r["status"] == "ok"
        }
        self.not_run = {
            (r["dataset"], r["method"]): r["reason"] for r in rows if r["status"] == "not run"
        }
        # Of failed rows too: a mean over the other categories would be another quantity.
        self.categories = {
            name: sorted({r["category"] for r in rows if r["dataset"] == name})
            for name in plan.datasets
        }

    def sets(self, experiment: str) -> list[str]:
        """The data sets of an experiment that have rows."""
        wanted = self.plan.experiments.get(experiment, ())
        return [name for name in wanted if self.categories[name]]

    def row(
        self, dataset: str, category: str, line: Line, seed: int, budget: int | None = None
    ) -> Row | None:
        return self._rows.get((dataset, category, line.method, line.setting, seed, budget))

    def rows_of(self, dataset: str, line: Line, budget: int | None = None) -> list[Row]:
        found = [
            self.row(dataset, category, line, seed, budget)
            for seed in self.plan.seeds
            for category in self.categories[dataset]
        ]
        return [row for row in found if row is not None]

    def summary(
        self,
        dataset: str,
        line: Line,
        metric: str,
        budget: int | None = None,
        category: str | None = None,
    ) -> Summary | None:
        """Category mean within each seed, then mean and standard deviation over seeds."""
        chosen = self.categories[dataset] if category is None else [category]
        values = {}
        for seed in self.plan.seeds:
            of_seed = {c: self.row(dataset, c, line, seed, budget) for c in chosen}
            values[seed] = {c: None if r is None else r[metric] for c, r in of_seed.items()}
        return summarise(values)

    def by_category(self, dataset: str, line: Line, metric: str) -> dict[str, float | None]:
        """The mean over seeds of each category, None where one is missing."""
        means: dict[str, float | None] = {}
        for category in self.categories[dataset]:
            found = self.summary(dataset, line, metric, category=category)
            complete = found is not None and found.seeds == len(self.plan.seeds)
            means[category] = found.mean if found is not None and complete else None
        return means


def reduced(evidence: Evidence, line: Line) -> bool:
    """Whether any of a line's rows in the main table had less than its fair share of training."""
    rows = [row for d in evidence.sets("main") for row in evidence.rows_of(d, line)]
    return any(row.get("facts", {}).get("budget_share", 1) < FAIR_SHARE for row in rows)


def all_tables(plan: Plan, rows: Sequence[Row], costs: Sequence[Row]) -> list[Table]:
    """Tables 1, 2 and S1-S14 of the paper, as far as the plan has run them."""
    evidence = Evidence(plan, rows)
    tables: list[Table] = []
    if evidence.sets("main"):
        tables += [_main(evidence, "1a", "Localisation", PIXEL),
                   _main(evidence, "1b", "Detection", ("image_auroc",))]  # fmt: skip
    for number, experiment, title, heading in (
        ("2", "components", "Factorised contribution of the Dual GP", "Variant"),
        ("S2", "scoring", "Scoring and parameterisation controls", "Variant"),
        ("S3", "heteroscedastic", "Functional-form control", "Variant"),
        ("S4a", "hard_pool", "Hard-pool fraction", "Fraction"),
        ("S4b", "inducing_budgets", "Inducing budgets (M_N, M_A)", "Budgets"),
        ("S5", "kernels", "Kernels", "Kernel"),
        ("S6a", "fusion_weight", "Spatial fusion weight; each refits its normal tail", "w"),
        ("S6b", "image_weight", "Broadcast image weight", "λ_I"),
    ):
        if evidence.sets(experiment):
            lines = EXPERIMENTS[experiment]
            tables.append(_experiment(evidence, experiment, number, title, heading, lines))
    if evidence.sets("held_out"):
        tables.append(_held_out(evidence))
    if all(evidence.sets(name) for name in ("components", "scoring")):
        tables.append(_paired(evidence))
    if evidence.sets("main") and "cdgp" in plan.methods:
        tables.append(_per_category(evidence))
    if evidence.sets("label_budget"):
        tables.append(_label_budget(evidence))
    if costs:
        tables.append(_complexity(evidence, costs))
    if any(METHODS[name].options for name in plan.methods):
        tables.append(_outside(evidence))
    tables += [_settings(plan), _provenance(plan, rows), _machines(rows)]
    return sorted(tables, key=lambda table: _order(table.name))


def _order(name: str) -> tuple[str, int, str]:
    """Tables of the paper's text, of its supplement, ours, and the machines."""
    number = name.split("-")[0].removeprefix("table_")
    digits = "".join(c for c in number if c.isdigit())
    return number[0] if number[0] in "SX" else ("" if digits else "Z"), int(digits or 0), number


def _main(evidence: Evidence, number: str, title: str, metrics: Sequence[str]) -> Table:
    sets = evidence.sets("main")
    rows = []
    lines = lines_of("main", evidence.plan.methods)
    short = [line for line in lines if reduced(evidence, line)]
    whole = [line for line in lines if line not in short]
    for chosen, suffix in ((whole, ""), (short, f", {REDUCED}")):
        for block in BLOCKS:
            for line in (n for n in chosen if METHODS[n.method].supervision == block):
                cells = [
                    "not run" if (d, line.method) in evidence.not_run
                    else evidence.summary(d, line, m)
                    for d in sets for m in metrics
                ]  # fmt: skip
                label = line.label + _unseparated(evidence, sets, line)
                rows.append(TableRow(label, cells, BLOCKS[block] + suffix, not suffix))
    head = ["Method", *(f"{d} {NAMES[m]}" for d in sets for m in metrics)]
    reasons = dict.fromkeys(f"Not run: {reason}." for reason in evidence.not_run.values())
    note = " ".join([_scored(evidence.plan), *reasons])
    return Table(f"table_{number}-main", title, head, rows, note=note)


def _scored(plan: Plan) -> str:
    size = "the network's input size" if plan.metric_size == "input" else "each image's own size"
    return f"× 100, mean ± standard deviation over seeds {list(plan.seeds)}; scored at {size}."


def _unseparated(evidence: Evidence, sets: Sequence[str], line: Line) -> str:
    rows = [r for d in sets for r in evidence.rows_of(d, line)]
    bad = sum(not r.get("facts", {}).get("separated", True) for r in rows)
    return f" ({bad} of {len(rows)} did not separate)" if bad else ""


def _experiment(
    evidence: Evidence,
    experiment: str,
    number: str,
    title: str,
    heading: str,
    lines: Sequence[Line],
) -> Table:
    sets = evidence.sets(experiment)
    rows = [
        TableRow(
            line.label + _unseparated(evidence, sets, line),
            [evidence.summary(d, line, m) for d in sets for m in NAMES],
        )
        for line in lines
    ]
    head = [heading, *(f"{d} {NAMES[m]}" for d in sets for m in NAMES)]
    note = _scored(evidence.plan)
    return Table(f"table_{number}-{experiment}", title, head, rows, note=note)


def _held_out(evidence: Evidence) -> Table:
    """Not in the paper: what calibrating on images that the Dual GP has seen costs."""
    sets, metrics = evidence.sets("held_out"), (*NAMES, "image_ece")
    rows = [
        TableRow(line.label, [evidence.summary(d, line, m) for d in sets for m in metrics])
        for line in EXPERIMENTS["held_out"]
    ]
    head = ["Calibration images", *(f"{d} {NAMES.get(m, 'ECE')}" for d in sets for m in metrics)]
    note = "ECE: expected calibration error of the image score. " + _scored(evidence.plan)
    title = "Calibration images seen by the Dual GP, or not"
    return Table("table_X1-held_out", title, head, rows, False, note)


def paired_groups(evidence: Evidence) -> dict[str, list[str]]:
    """The categories that are compared together: a set's; sets of one category are pooled."""
    sets = [d for d in evidence.sets("components") if d in evidence.sets("scoring")]
    groups = {d: [d] for d in sets if len(evidence.categories[d]) > 1}
    single = [d for d in sets if len(evidence.categories[d]) == 1]
    if single:
        groups[" + ".join(single)] = single
    return groups


def _paired(evidence: Evidence) -> Table:
    rows = []
    for group, sets in paired_groups(evidence).items():
        for title, first, second in CONTRASTS:
            contrasts = []
            for metric in PIXEL:
                differences: list[float] = []
                for d in sets:
                    a = evidence.by_category(d, first, metric)
                    b = evidence.by_category(d, second, metric)
                    pairs = ((a[c], b[c]) for c in a)
                    differences += [x - y for x, y in pairs if x is not None and y is not None]
                contrasts.append(paired_contrast(differences) if differences else None)
            found = [c for c in contrasts if c is not None]
            adjusted = dict(zip(map(id, found), holm([c.p for c in found]), strict=True))
            for metric, c in zip(PIXEL, contrasts, strict=True):
                if c is None:
                    continue
                told = [f"{100 * c.difference:+.2f}", _signed(c.low), _signed(c.high),
                        f"{adjusted[id(c)]:.3f}", str(c.categories)]  # fmt: skip
                rows.append(TableRow(f"{title} / {NAMES[metric]}", told, group))
    note = (
        f"Percentage points, first minus second, after averaging over seeds. Intervals: "
        f"{CONFIDENCE:.0%} percentile bootstrap over categories, {RESAMPLES:,} resamples. p: exact "
        "two-sided sign-flip test, Holm-adjusted within the three metrics of a contrast. n "
        "categories cannot give a p below 2 / 2^n."
    )
    head = ["Contrast / metric", "Difference", "95 % from", "to", "p", "Categories"]
    return Table("table_S1-paired", "Paired analysis over categories", head, rows, False, note)


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:+.2f}"


def _per_category(evidence: Evidence) -> Table:
    line, metrics = Line("CDGP"), tuple(NAMES)
    rows = []
    for d in evidence.sets("main"):
        for c in evidence.categories[d]:
            cells = [evidence.summary(d, line, m, category=c) for m in metrics]
            rows.append(TableRow(c, cells, d))
        rows.append(TableRow("Mean", [evidence.summary(d, line, m) for m in metrics], d))
    head = ["Category", *(NAMES[m] for m in metrics)]
    note = _scored(evidence.plan)
    return Table("table_S7-per_category", "CDGP by category", head, rows, False, note)


def _label_budget(evidence: Evidence) -> Table:
    rows = []
    for d in evidence.sets("label_budget"):
        for budget in budgets_of("label_budget", evidence.plan.budgets):
            cells = [
                evidence.summary(d, line, metric, budget)
                for line, metric in (
                    (FULL, "image_auroc"),
                    (SPATIAL, "pixel_aupro_30"), (FULL, "pixel_aupro_30"),
                    (SPATIAL, "pixel_aupro_05"), (FULL, "pixel_aupro_05"),
                )
            ]  # fmt: skip
            rows.append(TableRow(_budget_name(evidence, d, budget), cells, d))
    head = ["Defective images a category", "AUROC-I", "AUPRO@.3 spatial", "AUPRO@.3 final",
            "AUPRO@.05 spatial", "AUPRO@.05 final"]  # fmt: skip
    note = (
        "All good training images, k defective ones. Spatial leaves the image term out. "
        + _scored(evidence.plan)
    )
    return Table("table_S11-label_budget", "Label budget", head, rows, False, note)


def _budget_name(evidence: Evidence, dataset: str, budget: int | None) -> str:
    """The budget, and how many there were where some category has fewer defective images."""
    if budget is None:
        return "Full"
    rows = evidence.rows_of(dataset, FULL, budget)
    least = min((r["effective_budget"] for r in rows), default=budget)
    return str(budget) if least == budget else f"{budget} (only {least} in some)"


def _outside(evidence: Evidence) -> Table:
    """Not in the paper: what the methods from elsewhere ran with."""
    rows = []
    for line in lines_of("main", evidence.plan.methods):
        for d in evidence.sets("main"):
            found = [r["facts"] for r in evidence.rows_of(d, line) if "options" in r["facts"]]
            for facts in found[:1]:
                options = "; ".join(f"{k} = {json.dumps(v)}" for k, v in facts["options"].items())
                share = facts.get("budget_share")
                home = facts["code"] + (", decoder ours" if "decoder" in facts else "")
                told = [d, options, "–" if share is None else f"{100 * share:.1f} %", home]
                rows.append(TableRow(line.label, told))
    head = ["Method", "Data set", "Options", "Share of the published training", "Code"]
    note = "A dash: the method is not trained by steps, or its published training is not known."
    return Table("table_X2-outside", "Methods from elsewhere", head, rows, False, note)


def _training_seconds(evidence: Evidence, dataset: str, method: str) -> str:
    line = Line(METHODS[method].title, method)
    seconds = [row["seconds"] for row in evidence.rows_of(dataset, line)]
    return f"{sum(seconds) / len(seconds):.0f}" if seconds else "–"


def _complexity(evidence: Evidence, costs: Sequence[Row]) -> Table:
    rows = []
    for cost in costs:
        latency, memory = cost["latency_ms"], cost["peak_memory_mib"]
        height, width = cost["input_size"]
        told = [f"{height}×{width}", f"{cost['parameters'] / 1e6:.2f}"]
        told += [f"{cost['stored'] / 1e6:.2f}"]
        told += [f"{latency[key]:.1f}" for key in ("mean", "std", "median", "p95")]
        told += ["–" if memory is None else f"{memory:.0f}"]
        told += [_training_seconds(evidence, cost["dataset"], cost["method"])]
        device = cost["machine"].get("device", cost["machine"]["processor"])
        block = f"{cost['dataset']} on {device}, {cost['machine'].get('threads')} threads"
        rows.append(TableRow(METHODS[cost["method"]].title, told, block))
    head = ["Model", "Input", "Params. (M)", "Stored (M)", "Latency (ms)", "std", "median", "p95",
            "Peak MiB", "Training (s)"]  # fmt: skip
    of = " and ".join(sorted({c["memory_of"] for c in costs}))
    note = (
        f"Batch one, after {WARM_UPS} warm-ups, over {TIMED} runs, from the network's input to map "
        f"and score. Stored: all numbers of the network, memories and statistics among them. Peak "
        f"memory of {of}. Training: mean seconds over the rows of the main table."
    )
    return Table("table_S12-complexity", "Inference complexity", head, rows, False, note)


def _settings(plan: Plan) -> Table:
    """Of CDGP, as its rows ran; a section that all sets share stands once."""
    told: dict[tuple[str, str], list[str]] = {}
    for name in plan.datasets:
        chosen = plan.settings_of(name, Line("CDGP"), 0)
        for section, values in chosen.model_dump(
            mode="json", include=set(METHODS["cdgp"].uses)
        ).items():
            if section != "seed":
                pairs = values if isinstance(values, dict) else {section: values}
                text = "; ".join(f"{k} = {json.dumps(v)}" for k, v in pairs.items())
                told.setdefault((section, text), []).append(name)
    rows = [
        TableRow(section, [text, "all" if len(sets) == len(plan.datasets) else ", ".join(sets)])
        for (section, text), sets in told.items()
    ]
    head = ["Component", "Setting", "Data sets"]
    return Table("table_S13-settings", "All settings of CDGP", head, rows, False)


def _provenance(plan: Plan, rows: Sequence[Row]) -> Table:
    found = []
    for name, dataset in plan.datasets.items():
        splits = {
            (r["category"], r["seed"], r["budget"]): r for r in rows
            if r["dataset"] == name and "parts" in r
        }  # fmt: skip
        for category in sorted({key[0] for key in splits}):
            first = splits.get((category, plan.seeds[0], None))
            parts = first["parts"] if first else {}
            told = [f"{parts[p][0]} + {parts[p][1]}" if p in parts else "–"
                    for p in ("fit", "calibration", "test")]  # fmt: skip
            found.append(TableRow(category, [*told, ""], name))
        overlaps = [
            sum(row["audit"][f"{part}_test"][how] for row in splits.values())
            for part in ("calibration", "train") for how in ("path", "pixel")
        ]  # fmt: skip
        told_overlap = (
            f"{len(splits)} audits; calibration–test {overlaps[0]} by path, {overlaps[1]} by "
            f"pixels; train–test {overlaps[2]} by path, {overlaps[3]} by pixels"
        )
        layout = f"layout {dataset.layout}" + (", generated" if dataset.generated else "")
        found.append(TableRow("overlaps", [layout, "", "", told_overlap], name))
    head = ["Category", "Fit", "Calibration", "Test", "Overlaps"]
    note = f"Good + defective images of seed {plan.seeds[0]}; audits over all seeds and budgets."
    return Table("table_S14-provenance", "Parts and overlaps", head, found, False, note)


def _machines(rows: Sequence[Row]) -> Table:
    """What the numbers were made with; rows that were taken over from earlier runs, too."""
    counts: dict[str, int] = {}
    for row in rows:
        if "machine" in row:
            text = json.dumps(row["machine"], sort_keys=True)
            counts[text] = counts.get(text, 0) + 1
    found = []
    for text, count in counts.items():
        for key, value in json.loads(text).items():
            if isinstance(value, dict):
                value = ", ".join(f"{name} {number}" for name, number in value.items())
            found.append(TableRow(key, [str(value)], f"{count} rows"))
    return Table("machines", "Machines and versions", ["What", "Which"], found, False)
