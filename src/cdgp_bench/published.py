"""The paper's printed numbers beside ours, wherever a plan ran the same protocol."""

import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from cdgp_bench.datasets import LAYOUTS
from cdgp_bench.formats import Table, TableRow, cell_text, markdown
from cdgp_bench.grid import EXPERIMENTS, METHODS, SPATIAL, Variant
from cdgp_bench.plan import Plan
from cdgp_bench.results import NAMES, PIXEL, Results
from cdgp_bench.tables import BUDGET_COLUMNS, SHORT

NOT_RUN = "not run"
SAME_INPUT = {"mvtec_ad2": (256, 256), "visa": (256, 256), "ksdd2": (704, 256)}


def published(results: Results) -> str:
    """The page, in Markdown."""
    text = (files("cdgp_bench") / "published.toml").read_text(encoding="utf-8")
    paper = tomllib.loads(text)
    plan = results.plan
    ours = {
        dataset.layout: name
        for name, dataset in plan.datasets.items()
        if same_protocol(plan, name) and whole(results, name)
    }
    tables = [
        *_main(results, ours, paper),
        *_experiments(results, ours.get("mvtec_ad2"), paper["experiments"]),
        _label_budget(results, ours.get("mvtec_ad2"), paper["label_budget"]),
        *_per_category(results, ours, paper["per_category"]),
        _paired(paper["paired"]),
    ]
    shown = "\n".join(f"## {t.title}\n\n{markdown(t, plan.planned)}" for t in tables)
    cost = paper["complexity"]
    notes = "\n".join(f"- {note}" for note in paper["disagreements"]["notes"])
    return (
        "# The paper's printed numbers beside ours\n\n"
        "Each cell: printed → ours. Ours only where this plan ran the paper's protocol: the "
        "whole data set, its split and input size, preset `paper`, seeds 0–2, scored at that size; "
        f"elsewhere “{NOT_RUN}”. Ours of the paired contrasts: table_S1-paired.\n\n{shown}\n"
        f"## {cost['source']}: complexity\n\nPrinted: {cost['parameters_m']} M parameters, "
        f"{cost['latency_ms'][0]} ± {cost['latency_ms'][1]} ms, {cost['peak_mib']} MiB on "
        f"{cost['device']}. Another machine's latency is no comparison; ours are in table_S12.\n\n"
        f"## Where the paper's tables disagree\n\n{notes}\n"
    )


def _main(results: Results, ours: Mapping[str, str], paper: Mapping[str, Any]) -> list[Table]:
    tables = []
    for key, block in paper["main"].items():
        metrics = block["metrics"]
        rows = []
        for method, values in _values(block).items():
            variant = Variant(METHODS[method].title, method)
            run = method in results.plan.methods
            own = [_own(results, ours.get(key), variant, m, run) for m in metrics]
            shown = any(cell != NOT_RUN for cell in own)
            short = f" ({SHORT})" if shown and results.is_short(variant) else ""
            rows.append(_beside(variant.label + short, values, own))
        tables.append(_table(f"{block['source']}: {key}", metrics, rows))
    return tables


def _experiments(results: Results, name: str | None, blocks: Mapping[str, Any]) -> list[Table]:
    tables = []
    for experiment, block in blocks.items():
        run = name in results.plan.experiments.get(experiment, ())
        by_label = {variant.label: variant for variant in EXPERIMENTS[experiment]}
        rows = [
            _beside(label, values, [_own(results, name, by_label[label], m, run) for m in PIXEL])
            for label, values in _values(block).items()
        ]
        tables.append(_table(f"{block['source']}: {experiment}", PIXEL, rows))
    return tables


def _label_budget(results: Results, name: str | None, block: Mapping[str, Any]) -> Table:
    run = name in results.plan.experiments.get("label_budget", ())
    rows = []
    for key, values in _values(block).items():
        budget = None if key == "full" else int(key)
        own = [_own(results, name, v, m, run, budget=budget) for v, m in BUDGET_COLUMNS]
        rows.append(_beside(key, values, own))
    heads = [f"{NAMES[m]} {'spatial' if v is SPATIAL else 'final'}" for v, m in BUDGET_COLUMNS]
    return _table(f"{block['source']}: label_budget", heads, rows)


def _per_category(
    results: Results, ours: Mapping[str, str], blocks: Mapping[str, Any]
) -> list[Table]:
    tables = []
    run = "cdgp" in results.plan.methods
    for key, block in _values(blocks).items():
        metrics = tuple(NAMES)[: 4 if key == "mvtec_ad2" else 3]
        name = ours.get(key)
        rows = [
            _beside(category, values, [
                _own(results, name, Variant("CDGP"), m, run, category) for m in metrics
            ])
            for category, values in block.items()
        ]  # fmt: skip
        tables.append(_table(f"{blocks['source']}: {key}", metrics, rows))
    return tables


def _paired(block: Mapping[str, Any]) -> Table:
    rows = []
    for label, values in _values(block).items():
        parts = [values[i : i + 4] for i in (0, 4, 8)]
        cells = [f"{d:+.2f} [{low}, {high}] (p {p})" for d, low, high, p in parts]
        rows.append(TableRow(label, cells))
    return _table(f"{block['source']}: paired contrasts, as printed", PIXEL, rows)


def _values(block: Mapping[str, Any]) -> dict[str, Any]:
    """A block's numbers, without its source and metrics."""
    return {key: value for key, value in block.items() if key not in ("source", "metrics")}


def same_protocol(plan: Plan, name: str) -> bool:
    """Whether a data set was run as the paper ran it; weights may come from a file."""
    dataset = plan.datasets[name]
    batch = {"student": {"batch_size": 3}} if dataset.layout == "ksdd2" else {}
    return (
        dataset.layout in SAME_INPUT
        and not dataset.generated
        and not dataset.categories
        and plan.preset == "paper"
        and plan.metric_size == "input"
        and tuple(dataset.input_size) == SAME_INPUT[dataset.layout]
        and plan.seeds == (0, 1, 2)
        and plan.folds is None
        and {**plan.settings, "backbone": {"weights": ""}} == {"backbone": {"weights": ""}}
        and plan.settings.get("backbone", {}).keys() <= {"weights"}
        and dataset.settings == batch
        and all(given.keys() <= {"auxiliary", "teacher"} for given in plan.options.values())
    )


def whole(results: Results, name: str) -> bool:
    """Whether all published categories were found, with the published numbers of images."""
    published_counts = LAYOUTS[results.plan.datasets[name].layout].published
    if set(results.categories[name]) != set(published_counts):
        return False
    for category, counts in published_counts.items():
        row = results.row(name, category, Variant("CDGP"), results.plan.repeats[0])
        if counts is None or row is None:
            continue
        parts = row["parts"]
        train = tuple(sum(pair) for pair in zip(parts["fit"], parts["calibration"], strict=True))
        if (train, tuple(parts["test"])) != (counts["train"], counts["test"]):
            return False
    return True


def _own(
    results: Results, dataset: str | None, variant: Variant, metric: str, planned: bool,
    category: str | None = None, budget: int | None = None,
) -> str:  # fmt: skip
    if dataset is None or not planned:
        return NOT_RUN
    if category is not None and category not in results.categories[dataset]:
        return NOT_RUN
    found = results.summary(dataset, variant, metric, budget, category)
    return cell_text(found, results.plan.planned) if found else NOT_RUN


def _beside(label: str, values: Sequence[float], own: Sequence[str]) -> TableRow:
    printed = [f"{m:g} ± {s:g}" for m, s in zip(values[::2], values[1::2], strict=True)]
    return TableRow(label, [f"{p} → {o}" for p, o in zip(printed, own, strict=True)])


def _table(title: str, metrics: Sequence[str], rows: Sequence[TableRow]) -> Table:
    return Table("published", title, ["", *(NAMES.get(m, m) for m in metrics)], rows, False)
