"""The paper's printed numbers beside ours, wherever a plan ran the same protocol."""

import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from cdgp_bench.datasets import LAYOUTS
from cdgp_bench.formats import Table, TableRow, cell_text, markdown
from cdgp_bench.grid import EXPERIMENTS, FULL, METHODS, SPATIAL, Line
from cdgp_bench.plan import Plan
from cdgp_bench.tables import NAMES, PIXEL, Evidence

NOT_RUN = "not run"
SAME_INPUT = {"mvtec_ad2": (256, 256), "visa": (256, 256), "ksdd2": (704, 256)}
BUDGET_COLUMNS = (
    (FULL, "image_auroc"),
    (SPATIAL, "pixel_aupro_30"),
    (FULL, "pixel_aupro_30"),
    (SPATIAL, "pixel_aupro_05"),
    (FULL, "pixel_aupro_05"),
)
"""Of Table S11, in its order."""


def published(evidence: Evidence) -> str:
    """The page, in Markdown."""
    text = (files("cdgp_bench") / "published.toml").read_text(encoding="utf-8")
    paper = tomllib.loads(text)
    plan = evidence.plan
    ours = {
        dataset.layout: name
        for name, dataset in plan.datasets.items()
        if same_protocol(plan, name) and whole(evidence, name)
    }
    tables = [
        *_main(evidence, ours, paper),
        *_experiments(evidence, ours.get("mvtec_ad2"), paper["experiments"]),
        _label_budget(evidence, ours.get("mvtec_ad2"), paper["label_budget"]),
        *_per_category(evidence, ours, paper["per_category"]),
        _paired(paper["paired"]),
    ]
    shown = "\n".join(f"## {t.title}\n\n{markdown(t, len(plan.seeds))}" for t in tables)
    cost = paper["complexity"]
    notes = "\n".join(f"- {note}" for note in paper["disagreements"]["notes"])
    return (
        "# The paper's printed numbers beside ours\n\n"
        "Each cell: printed → ours. Ours stand only where this plan ran the paper's protocol: the "
        "whole data set, its split and input size, preset `paper`, seeds 0–2, scored at that size; "
        f"elsewhere “{NOT_RUN}”. Ours of the paired contrasts: table_S1-paired.\n\n{shown}\n"
        f"## {cost['source']}: complexity\n\nPrinted: {cost['parameters_m']} M parameters, "
        f"{cost['latency_ms'][0]} ± {cost['latency_ms'][1]} ms, {cost['peak_mib']} MiB on "
        f"{cost['device']}. Another machine's latency is no comparison; ours are in table_S12.\n\n"
        f"## Where the paper's tables disagree\n\n{notes}\n"
    )


def _main(evidence: Evidence, ours: Mapping[str, str], paper: Mapping[str, Any]) -> list[Table]:
    tables = []
    for key, block in paper["main"].items():
        metrics = block["metrics"]
        lines = []
        for method, values in _values(block).items():
            title = METHODS[method].title
            run = method in evidence.plan.methods
            own = [_own(evidence, ours.get(key), Line(title, method), m, run) for m in metrics]
            lines.append(_beside(title, values, own))
        tables.append(_table(f"{block['source']}: {key}", metrics, lines))
    return tables


def _experiments(evidence: Evidence, name: str | None, blocks: Mapping[str, Any]) -> list[Table]:
    tables = []
    for experiment, block in blocks.items():
        run = name in evidence.plan.experiments.get(experiment, ())
        by_label = {line.label: line for line in EXPERIMENTS[experiment]}
        lines = [
            _beside(label, values, [_own(evidence, name, by_label[label], m, run) for m in PIXEL])
            for label, values in _values(block).items()
        ]
        tables.append(_table(f"{block['source']}: {experiment}", PIXEL, lines))
    return tables


def _label_budget(evidence: Evidence, name: str | None, block: Mapping[str, Any]) -> Table:
    run = name in evidence.plan.experiments.get("label_budget", ())
    lines = []
    for key, values in _values(block).items():
        budget = None if key == "full" else int(key)
        own = [_own(evidence, name, line, m, run, budget=budget) for line, m in BUDGET_COLUMNS]
        lines.append(_beside(key, values, own))
    heads = [
        f"{NAMES[m]} {'spatial' if line is SPATIAL else 'final'}" for line, m in BUDGET_COLUMNS
    ]
    return _table(f"{block['source']}: label_budget", heads, lines)


def _per_category(
    evidence: Evidence, ours: Mapping[str, str], blocks: Mapping[str, Any]
) -> list[Table]:
    tables = []
    run = "cdgp" in evidence.plan.methods
    for key, block in _values(blocks).items():
        metrics = tuple(NAMES)[: 4 if key == "mvtec_ad2" else 3]
        name = ours.get(key)
        lines = [
            _beside(category, values, [
                _own(evidence, name, Line("CDGP"), m, run, category) for m in metrics
            ])
            for category, values in block.items()
        ]  # fmt: skip
        tables.append(_table(f"{blocks['source']}: {key}", metrics, lines))
    return tables


def _paired(block: Mapping[str, Any]) -> Table:
    lines = []
    for label, values in _values(block).items():
        parts = [values[i : i + 4] for i in (0, 4, 8)]
        told = [f"{d:+.2f} [{low}, {high}] (p {p})" for d, low, high, p in parts]
        lines.append(TableRow(label, told))
    return _table(f"{block['source']}: paired contrasts, as printed", PIXEL, lines)


def _values(block: Mapping[str, Any]) -> dict[str, Any]:
    """A block without what describes it."""
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
        and {**plan.settings, "backbone": {"weights": ""}} == {"backbone": {"weights": ""}}
        and plan.settings.get("backbone", {}).keys() <= {"weights"}
        and dataset.settings == batch
        and all(given.keys() <= {"auxiliary", "teacher"} for given in plan.options.values())
    )


def whole(evidence: Evidence, name: str) -> bool:
    """Whether all published categories were found, with the published numbers of images."""
    published_counts = LAYOUTS[evidence.plan.datasets[name].layout].published
    if set(evidence.categories[name]) != set(published_counts):
        return False
    for category, counts in published_counts.items():
        row = evidence.row(name, category, Line("CDGP"), evidence.plan.seeds[0])
        if counts is None or row is None:
            continue
        parts = row["parts"]
        train = tuple(sum(pair) for pair in zip(parts["fit"], parts["calibration"], strict=True))
        if (train, tuple(parts["test"])) != (counts["train"], counts["test"]):
            return False
    return True


def _own(
    evidence: Evidence, dataset: str | None, line: Line, metric: str, planned: bool,
    category: str | None = None, budget: int | None = None,
) -> str:  # fmt: skip
    if dataset is None or not planned:
        return NOT_RUN
    if category is not None and category not in evidence.categories[dataset]:
        return NOT_RUN
    found = evidence.summary(dataset, line, metric, budget, category)
    return cell_text(found, len(evidence.plan.seeds)) if found else NOT_RUN


def _beside(label: str, values: Sequence[float], own: Sequence[str]) -> TableRow:
    printed = [f"{m:g} ± {s:g}" for m, s in zip(values[::2], values[1::2], strict=True)]
    return TableRow(label, [f"{p} → {o}" for p, o in zip(printed, own, strict=True)])


def _table(title: str, metrics: Sequence[str], lines: Sequence[TableRow]) -> Table:
    return Table("published", title, ["", *(NAMES.get(m, m) for m in metrics)], lines, False)
