"""The tables of the supplement that hold no scores: costs, settings, data, machines."""

import json
from collections import Counter
from collections.abc import Sequence

from cdgp_bench.formats import Table, TableRow
from cdgp_bench.grid import METHODS, Variant, variants_of
from cdgp_bench.measure.complexity import TIMED, WARM_UPS
from cdgp_bench.plan import Plan
from cdgp_bench.results import Results, Row


def outside(results: Results) -> Table:
    """Not in the paper: the options of the methods from elsewhere."""
    rows = []
    for variant in variants_of("main", results.plan.methods):
        for d in results.sets("main"):
            found = [r["facts"] for r in results.rows_of(d, variant) if "options" in r["facts"]]
            for facts in found[:1]:
                options = "; ".join(f"{k} = {json.dumps(v)}" for k, v in facts["options"].items())
                share = facts.get("budget_share")
                home = facts["code"] + (", decoder ours" if "decoder" in facts else "")
                home += f", teacher {facts['teacher']}" if "teacher" in facts else ""
                cells = [d, options, "–" if share is None else f"{100 * share:.1f} %", home]
                rows.append(TableRow(variant.label, cells))
    head = ["Method", "Data set", "Options", "Share of the published training", "Code"]
    note = "A dash: the method is not trained by steps, or its published training is not known."
    return Table("table_X2-outside", "Methods from elsewhere", head, rows, False, note)


def _training_seconds(results: Results, dataset: str, method: str) -> str:
    variant = Variant(METHODS[method].title, method)
    seconds = [row["seconds"] for row in results.rows_of(dataset, variant)]
    return f"{sum(seconds) / len(seconds):.0f}" if seconds else "–"


def complexity(results: Results, costs: Sequence[Row]) -> Table:
    """Table S12: what each method costs."""
    rows = []
    for cost in costs:
        latency, memory = cost["latency_ms"], cost["peak_memory_mib"]
        height, width = cost["input_size"]
        cells = [
            f"{height}×{width}",
            f"{cost['parameters'] / 1e6:.2f}",
            f"{cost['stored'] / 1e6:.2f}",
            *(f"{latency[key]:.1f}" for key in ("mean", "std", "median", "p95")),
            "–" if memory is None else f"{memory:.0f}",
            _training_seconds(results, cost["dataset"], cost["method"]),
        ]
        device = cost["machine"].get("device", cost["machine"]["processor"])
        block = f"{cost['dataset']} on {device}, {cost['machine'].get('threads')} threads"
        rows.append(TableRow(METHODS[cost["method"]].title, cells, block))
    head = ["Model", "Input", "Params. (M)", "Stored (M)", "Latency (ms)", "std", "median", "p95",
            "Peak MiB", "Training (s)"]  # fmt: skip
    of = " and ".join(sorted({c["memory_of"] for c in costs}))
    note = (
        f"Batch one, after {WARM_UPS} warm-ups, over {TIMED} runs, from the network's input to map "
        f"and score. Stored: all numbers of the network, memories and statistics among them. Peak "
        f"memory of {of}. Training: mean seconds over the rows of the main table."
    )
    return Table("table_S12-complexity", "Inference complexity", head, rows, False, note)


def settings(plan: Plan) -> Table:
    """Table S13: CDGP's settings; a section that all data sets share is one row."""
    sections: dict[tuple[str, str], list[str]] = {}
    for name in plan.datasets:
        chosen = plan.settings_of(name, Variant("CDGP"), 0)
        for section, values in chosen.model_dump(
            mode="json", include=set(METHODS["cdgp"].uses)
        ).items():
            if section != "seed":
                pairs = values if isinstance(values, dict) else {section: values}
                text = "; ".join(f"{k} = {json.dumps(v)}" for k, v in pairs.items())
                sections.setdefault((section, text), []).append(name)
    rows = [
        TableRow(section, [text, "all" if len(sets) == len(plan.datasets) else ", ".join(sets)])
        for (section, text), sets in sections.items()
    ]
    head = ["Component", "Setting", "Data sets"]
    return Table("table_S13-settings", "All settings of CDGP", head, rows, False)


def provenance(plan: Plan, rows: Sequence[Row]) -> Table:
    """Table S14: the images of each part, and the overlaps that the audits found."""
    found = []
    for name, dataset in plan.datasets.items():
        splits = {
            (r["category"], r["seed"], r["fold"], r["budget"]): r for r in rows
            if r["dataset"] == name and "parts" in r
        }  # fmt: skip
        for category in sorted({key[0] for key in splits}):
            first = splits.get((category, *plan.repeats[0], None))
            parts = first["parts"] if first else {}
            cells = [f"{parts[p][0]} + {parts[p][1]}" if p in parts else "–"
                     for p in ("fit", "calibration", "test")]  # fmt: skip
            found.append(TableRow(category, [*cells, ""], name))
        overlaps = [
            sum(row["audit"][f"{part}_test"][how] for row in splits.values())
            for part in ("calibration", "train") for how in ("path", "pixel")
        ]  # fmt: skip
        counted = (
            f"{len(splits)} audits; calibration–test {overlaps[0]} by path, {overlaps[1]} by "
            f"pixels; train–test {overlaps[2]} by path, {overlaps[3]} by pixels"
        )
        layout = f"layout {dataset.layout}" + (", generated" if dataset.generated else "")
        found.append(TableRow("overlaps", [layout, "", "", counted], name))
    head = ["Category", "Fit", "Calibration", "Test", "Overlaps"]
    seed, fold = plan.repeats[0]
    of = f"seed {seed}" if fold is None else f"fold {fold}"
    note = f"Good + defective images of {of}; audits over all {plan.planned.word} and budgets."
    return Table("table_S14-provenance", "Parts and overlaps", head, found, False, note)


def machines(rows: Sequence[Row]) -> Table:
    """The machines and versions of all rows, reused ones too."""
    counts = Counter(json.dumps(r["machine"], sort_keys=True) for r in rows if "machine" in r)
    found = []
    for text, count in counts.items():
        for key, value in json.loads(text).items():
            if isinstance(value, dict):
                value = ", ".join(f"{name} {number}" for name, number in value.items())
            found.append(TableRow(key, [str(value)], f"{count} rows"))
    return Table("machines", "Machines and versions", ["What", "Which"], found, False)
