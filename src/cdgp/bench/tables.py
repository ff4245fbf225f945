"""The paper's tables from rows, in Markdown, LaTeX and CSV; best in bold, second underlined."""

import csv
import io
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from cdgp.bench import figures
from cdgp.bench.grid import (
    CONTRASTS,
    EXPERIMENTS,
    FULL,
    METHODS,
    SPATIAL,
    Line,
    budgets_of,
    lines_of,
)
from cdgp.bench.plan import Plan
from cdgp.bench.qualitative import RULE, example_path
from cdgp.data.datasets import LAYOUTS
from cdgp.files import write_text
from cdgp.metrics.statistics import CONFIDENCE, RESAMPLES, Summary, holm, paired_contrast, summarise
from cdgp.presets import merged, settings

Row = Mapping[str, Any]
NAMES = {
    "image_auroc": "AUROC-I",
    "pixel_auroc": "AUROC-P",
    "pixel_aupro_30": "AUPRO@.3",
    "pixel_aupro_05": "AUPRO@.05",
}
PIXEL = ("pixel_auroc", "pixel_aupro_30", "pixel_aupro_05")
NOT_RUN = "not run"
BLOCKS = {
    "normal": "Normal-only supervision",
    "image": "Image-level supervision",
    "control": "Controls",
}
SAME_INPUT = {"mvtec_ad2": (256, 256), "visa": (256, 256), "ksdd2": (704, 256)}


class TableRow(NamedTuple):
    """A line of a table; cells are measured, plain text, or missing."""

    label: str
    cells: Sequence[Summary | str | None]
    block: str = ""


@dataclass(frozen=True)
class Table:
    """A table before it is set."""

    name: str
    title: str
    head: Sequence[str]
    """Of the label's column and of every cell's."""
    rows: Sequence[TableRow]
    ranked: bool = True
    """Whether the highest of each column is marked."""
    note: str = ""


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
        tables.append(_complexity(costs))
    tables += [_settings(plan), _provenance(plan, rows), _machines(rows, costs)]
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
    for block in BLOCKS:
        for line in (n for n in lines if METHODS[n.method].supervision == block):
            cells = [evidence.summary(d, line, m) for d in sets for m in metrics]
            label = line.label + _unseparated(evidence, sets, line)
            rows.append(TableRow(label, cells, BLOCKS[block]))
    head = ["Method", *(f"{d} {NAMES[m]}" for d in sets for m in metrics)]
    return Table(f"table_{number}-main", title, head, rows, note=_scored(evidence.plan))


def _scored(plan: Plan) -> str:
    size = "the network's input size" if plan.metric_size == "input" else "each picture's own size"
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
            [evidence.summary(d, line, m) for d in sets for m in PIXEL],
        )
        for line in lines
    ]
    head = [heading, *(f"{d} {NAMES[m]}" for d in sets for m in PIXEL)]
    note = _scored(evidence.plan)
    return Table(f"table_{number}-{experiment}", title, head, rows, note=note)


def _held_out(evidence: Evidence) -> Table:
    """Not in the paper: what calibrating on pictures that the Dual GP has seen costs."""
    sets, metrics = evidence.sets("held_out"), (*NAMES, "image_ece")
    rows = [
        TableRow(line.label, [evidence.summary(d, line, m) for d in sets for m in metrics])
        for line in EXPERIMENTS["held_out"]
    ]
    head = ["Calibration pictures", *(f"{d} {NAMES.get(m, 'ECE')}" for d in sets for m in metrics)]
    note = "ECE: expected calibration error of the image score. " + _scored(evidence.plan)
    title = "Calibration pictures seen by the Dual GP, or not"
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
                interval = (
                    "–" if c.low is None or c.high is None
                    else f"[{100 * c.low:+.2f}, {100 * c.high:+.2f}]"
                )  # fmt: skip
                told = [f"{100 * c.difference:+.2f}", interval, f"{adjusted[id(c)]:.3f}",
                        str(c.categories)]  # fmt: skip
                rows.append(TableRow(f"{title} / {NAMES[metric]}", told, group))
    note = (
        f"Percentage points, first minus second, after averaging over seeds. Intervals: "
        f"{CONFIDENCE:.0%} percentile bootstrap over categories, {RESAMPLES:,} resamples. p: exact "
        "two-sided sign-flip test, Holm-adjusted within the three metrics of a contrast. n "
        "categories cannot give a p below 2 / 2^n."
    )
    head = ["Contrast / metric", "Difference", "Interval", "p", "Categories"]
    return Table("table_S1-paired", "Paired analysis over categories", head, rows, False, note)


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
    head = ["Defective pictures a category", "AUROC-I", "AUPRO@.3 spatial", "AUPRO@.3 final",
            "AUPRO@.05 spatial", "AUPRO@.05 final"]  # fmt: skip
    note = (
        "All good training pictures, k defective ones. Spatial leaves the image term out. "
        + _scored(evidence.plan)
    )
    return Table("table_S11-label_budget", "Label budget", head, rows, False, note)


def _budget_name(evidence: Evidence, dataset: str, budget: int | None) -> str:
    """The budget, and how many there were where some category has fewer defective pictures."""
    if budget is None:
        return "Full"
    rows = evidence.rows_of(dataset, FULL, budget)
    least = min((r["effective_budget"] for r in rows), default=budget)
    return str(budget) if least == budget else f"{budget} (only {least} in some)"


def _complexity(costs: Sequence[Row]) -> Table:
    rows = []
    for cost in costs:
        latency = cost["latency_ms"]
        memory = cost["peak_memory_mib"]
        height, width = cost["input_size"]
        rows.append(TableRow(
            METHODS[cost["method"]].title,
            [f"{height}×{width}", f"{cost['parameters'] / 1e6:.2f}",
             f"{latency['mean']:.1f} ± {latency['std']:.1f}", f"{latency['median']:.1f}",
             f"{latency['p95']:.1f}", "–" if memory is None else f"{memory:.0f}",
             cost["memory_of"]],
            f"{cost['dataset']} on {cost['machine'].get('device', cost['machine']['processor'])}",
        ))  # fmt: skip
    head = ["Model", "Input", "Params. (M)", "Latency (ms)", "median", "p95", "Peak MiB", "of"]
    note = "Batch one, after 10 warm-ups, over 50 runs, from the network's input to map and score."
    return Table("table_S12-complexity", "Inference complexity", head, rows, False, note)


def _settings(plan: Plan) -> Table:
    rows = []
    for name, dataset in plan.datasets.items():
        chosen = settings(
            plan.preset,
            input_size=dataset.input_size,
            **merged(plan.settings, dataset.settings),
        ).model_dump(mode="json")
        for section, values in chosen.items():
            if not isinstance(values, dict):
                values = {section: values}
            told = "; ".join(f"{k} = {json.dumps(v)}" for k, v in values.items() if k != "seed")
            if told:
                rows.append(TableRow(section, [told], name))
    head = ["Component", "Setting"]
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
    note = f"Good + defective pictures of seed {plan.seeds[0]}; audits over all seeds and budgets."
    return Table("table_S14-provenance", "Parts and overlaps", head, found, False, note)


def _machines(rows: Sequence[Row], costs: Sequence[Row]) -> Table:
    told: dict[str, int] = {}
    for row in (*rows, *costs):
        if "machine" in row:
            text = json.dumps(row["machine"], sort_keys=True)
            told[text] = told.get(text, 0) + 1
    found = [TableRow(f"{count} rows", [text]) for text, count in told.items()]
    head = ["Rows", "Machine and versions"]
    return Table("machines", "Machines and versions", head, found, False)


def marks(table: Table) -> list[list[str]]:
    """``best``, ``second`` or nothing for each cell; values that print alike share a mark."""
    found = [["" for _ in row.cells] for row in table.rows]
    if not table.ranked:
        return found
    for column in range(len(table.head) - 1):
        values = {
            index: round(100 * row.cells[column].mean, 1)  # type: ignore[union-attr]
            for index, row in enumerate(table.rows)
            if isinstance(row.cells[column], Summary)
        }
        ordered = sorted(set(values.values()), reverse=True)[:2]
        if len(values) < 2:
            continue
        for index, value in values.items():
            if value in ordered:
                found[index][column] = ("best", "second")[ordered.index(value)]
    return found


def cell_text(cell: Summary | str | None, seeds: int) -> str:
    """A cell as plain text; a summary of fewer seeds than planned says so."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    spread = "" if cell.std is None else f" ± {100 * cell.std:.1f}"
    fewer = f" ({cell.seeds} of {seeds} seeds)" if cell.seeds < seeds else ""
    return f"{100 * cell.mean:.1f}{spread}{fewer}"


def markdown(table: Table, seeds: int) -> str:
    """The table for Markdown."""
    lines = ["| " + " | ".join(table.head) + " |", "|" + "---|" * len(table.head)]
    block = ""
    for row, row_marks in zip(table.rows, marks(table), strict=True):
        if row.block != block:
            block = row.block
            lines.append(f"| *{block}* |" + " |" * (len(table.head) - 1))
        cells = [
            {"best": "**{}**", "second": "<u>{}</u>"}.get(mark, "{}").format(cell_text(cell, seeds))
            for cell, mark in zip(row.cells, row_marks, strict=True)
        ]
        lines.append("| " + " | ".join([row.label, *(c.replace("|", "\\|") for c in cells)]) + " |")
    return "\n".join(lines) + "\n"


def latex(table: Table, seeds: int) -> str:
    """The table for LaTeX with booktabs."""
    columns = "l" + "c" * (len(table.head) - 1)
    lines = [f"\\begin{{tabular}}{{{columns}}}", "\\toprule",
             " & ".join(map(_tex, table.head)) + r" \\", "\\midrule"]  # fmt: skip
    block = ""
    for row, row_marks in zip(table.rows, marks(table), strict=True):
        if row.block != block:
            block = row.block
            lines.append(rf"\multicolumn{{{len(table.head)}}}{{l}}{{\textit{{{_tex(block)}}}}} \\")
        cells = []
        for cell, mark in zip(row.cells, row_marks, strict=True):
            if isinstance(cell, Summary):
                mean = f"{100 * cell.mean:.1f}"
                mean = {"best": rf"\mathbf{{{mean}}}", "second": rf"\underline{{{mean}}}"}.get(
                    mark, mean
                )
                spread = "" if cell.std is None else rf"_{{\pm{100 * cell.std:.1f}}}"
                cells.append(f"${mean}{spread}$")
                if cell.seeds < seeds:
                    cells[-1] += f" ({cell.seeds} of {seeds} seeds)"
            else:
                cells.append(_tex(cell_text(cell, seeds)))
        lines.append(" & ".join([_tex(row.label), *cells]) + r" \\")
    lines += ["\\bottomrule", "\\end{tabular}", f"% {table.title}. {table.note}"]
    return "\n".join(lines) + "\n"


_TEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
        "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}",
        "–": "--", "−": "$-$", "±": r"$\pm$", "×": r"$\times$", "λ": r"$\lambda$",
        "σ": r"$\sigma$"}  # fmt: skip


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in text)


def comma_separated(table: Table) -> str:
    """The table for other programs: means and standard deviations in columns of their own."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    measured = [any(isinstance(r.cells[i], Summary) for r in table.rows)
                for i in range(len(table.head) - 1)]  # fmt: skip
    head = [table.head[0], "block"]
    for name, is_measured in zip(table.head[1:], measured, strict=True):
        head += [name, f"{name} std", f"{name} seeds"] if is_measured else [name]
    writer.writerow(head)
    for row in table.rows:
        cells: list[Any] = [row.label, row.block]
        for cell, is_measured in zip(row.cells, measured, strict=True):
            if isinstance(cell, Summary):
                cells += [cell.mean, "" if cell.std is None else cell.std, cell.seeds]
            else:
                cells += [cell or ""] + (["", ""] if is_measured else [])
        writer.writerow(cells)
    return text.getvalue()


def render(plan: Plan, rows: Sequence[Row], costs: Sequence[Row], out: Path) -> Path:
    """All tables, figures and the page that shows them; returns the page."""
    seeds = len(plan.seeds)
    tables = all_tables(plan, rows, costs)
    page = [f"# {plan.title}\n"]
    formats: dict[str, Callable[[Table], str]] = {
        "md": lambda t: f"{markdown(t, seeds)}\n{t.note}\n",
        "tex": lambda t: latex(t, seeds),
        "csv": comma_separated,
    }
    for table in tables:
        for ending, form in formats.items():
            write_text(out / "tables" / f"{table.name}.{ending}", form(table))
        number = table.name.split("-")[0].replace("_", " ").replace("table", "Table")
        title = f"{number}: {table.title}" if number.startswith("Table") else table.title
        page.append(f"## {title}\n\n{markdown(table, seeds)}\n{table.note}\n")
    evidence = Evidence(plan, rows)
    drawn: list[tuple[str, str]] = []
    for name in evidence.sets("label_budget"):
        stem = f"label_budget-{name}"
        figures.label_budget(evidence, name, out / "figures" / stem)
        drawn.append((stem, f"Label budget, {name}"))
    places = [
        example_path(out, name, category)
        for name in evidence.sets("qualitative") for category in evidence.categories[name]
    ]  # fmt: skip
    examples = [path for path in places if path.is_file()]
    if examples:
        figures.qualitative(examples, out / "figures" / "qualitative.png")
        drawn.append(("qualitative", f"Qualitative grid (S8–S10): {RULE}"))
    page += [f"## {title}\n\n![{title}](figures/{name}.png)\n" for name, title in drawn]
    failed = [r for r in rows if r["status"] != "ok"]
    if failed:
        page.append("## Failed cells\n")
        page += [f"- {r['dataset']}/{r['category']} {r['method']} {r['setting']} seed {r['seed']}: "
                 f"{r['reason']}" for r in failed]  # fmt: skip
    odd = _odd_pictures(rows)
    if odd:
        note = "Defective pictures listed here take no part in the pixel metrics."
        page.append(f"## Odd pictures\n\n{note}\n\n{odd}\n")
    write_text(out / "published.md", published(plan, rows))
    page.append("The paper's printed numbers beside these: [published.md](published.md)\n")
    write_text(out / "evidence.md", "\n".join(page))
    return out / "evidence.md"


def _odd_pictures(rows: Sequence[Row]) -> str:
    found: dict[tuple[str, str, str], set[str]] = {}
    for row in rows:
        for note, names in row.get("notes", {}).items():
            found.setdefault((row["dataset"], row["category"], note), set()).update(names)
    return "\n".join(
        f"- {dataset}/{category}: {len(names)} × {note.replace('_', ' ')}"
        + (" (counted as good)" if note == "good_with_marked_mask" else "")
        for (dataset, category, note), names in sorted(found.items())
        if names
    )


def published(plan: Plan, rows: Sequence[Row]) -> str:
    """The paper's numbers beside ours, where the same protocol was run."""
    text = (files("cdgp.bench") / "published.toml").read_text(encoding="utf-8")
    paper = tomllib.loads(text)
    evidence = Evidence(plan, rows)
    ours = {
        d.layout: name
        for name, d in plan.datasets.items()
        if same_protocol(plan, name) and whole(evidence, name)
    }
    tables = []
    for key, block in paper["main"].items():
        metrics = block["metrics"]
        name = ours.get(key)
        lines = []
        for method, values in block.items():
            if method in ("source", "metrics"):
                continue
            title = METHODS[method].title if method in METHODS else paper["titles"][method]
            line = Line(title, method)
            own = [_own(evidence, name, line, m, method in plan.methods) for m in metrics]
            lines.append(_beside(title, values, own))
        tables.append(_published_table(f"{block['source']}: {key}", metrics, lines))
    name = ours.get("mvtec_ad2")
    for experiment, block in paper["experiments"].items():
        run = name in plan.experiments.get(experiment, ())
        by_label = {line.label: line for line in EXPERIMENTS[experiment]}
        lines = [
            _beside(label, values, [_own(evidence, name, by_label[label], m, run) for m in PIXEL])
            for label, values in block.items() if label != "source"
        ]  # fmt: skip
        tables.append(_published_table(f"{block['source']}: {experiment}", PIXEL, lines))
    columns = ((FULL, "image_auroc"), (SPATIAL, "pixel_aupro_30"), (FULL, "pixel_aupro_30"),
               (SPATIAL, "pixel_aupro_05"), (FULL, "pixel_aupro_05"))  # fmt: skip
    run = name in plan.experiments.get("label_budget", ())
    lines = []
    for key, values in paper["label_budget"].items():
        if key != "source":
            budget = None if key == "full" else int(key)
            own = [_own(evidence, name, line, m, run, budget=budget) for line, m in columns]
            lines.append(_beside(key, values, own))
    heads = [f"{NAMES[m]} {'spatial' if line is SPATIAL else 'final'}" for line, m in columns]
    source = paper["label_budget"]["source"]
    tables.append(_published_table(f"{source}: label_budget", heads, lines))
    for key, block in paper["per_category"].items():
        if key != "source":
            metrics = tuple(NAMES)[: 4 if key == "mvtec_ad2" else 3]
            lines = [
                _beside(category, values, [
                    _own(evidence, ours.get(key), Line("CDGP"), m, "cdgp" in plan.methods, category)
                    for m in metrics
                ])
                for category, values in block.items()
            ]  # fmt: skip
            tables.append(_published_table(f"Table S7: {key}", metrics, lines))
    tables.append(_published_pairs(paper["paired"]))
    cost = paper["complexity"]
    notes = "\n".join(f"- {note}" for note in paper["disagreements"]["notes"])
    return (
        "# The paper's printed numbers beside ours\n\n"
        "Each cell: printed → ours. Ours stand only where this plan ran the paper's protocol: the "
        "whole data set, its split and input size, preset `paper`, seeds 0–2, scored at that size; "
        f"elsewhere “{NOT_RUN}”.\n\n" + "\n".join(tables) + f"\n## {cost['source']}: complexity\n\n"
        f"Printed: {cost['parameters_m']} M parameters, {cost['latency_ms'][0]} ± "
        f"{cost['latency_ms'][1]} ms, {cost['peak_mib']} MiB on {cost['device']}. Another "
        "machine's latency is no comparison; ours are in table_S12.\n\n"
        f"## Where the paper's tables disagree\n\n{notes}\n"
    )


def same_protocol(plan: Plan, name: str) -> bool:
    """Whether a data set was run as the paper ran it."""
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
        and not plan.settings
        and dataset.settings == batch
    )


def whole(evidence: Evidence, name: str) -> bool:
    """Whether all published categories were found, with the published numbers of pictures."""
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
    if dataset is None or not planned or line.method not in METHODS:
        return NOT_RUN
    if category is not None and category not in evidence.categories[dataset]:
        return NOT_RUN
    found = evidence.summary(dataset, line, metric, budget, category)
    return cell_text(found, len(evidence.plan.seeds)) if found else NOT_RUN


def _beside(label: str, values: Sequence[float], own: Sequence[str]) -> list[str]:
    printed = [f"{m:g} ± {s:g}" for m, s in zip(values[::2], values[1::2], strict=True)]
    return [label, *(f"{p} → {o}" for p, o in zip(printed, own, strict=True))]


def _published_table(title: str, metrics: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = ["", *(NAMES.get(m, m) for m in metrics)]
    told = [f"## {title}\n", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*told, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def _published_pairs(block: Mapping[str, Any]) -> str:
    lines = []
    for label, values in block.items():
        if label != "source":
            parts = [values[i : i + 4] for i in (0, 4, 8)]
            told = [f"{d:+.2f} [{low}, {high}] (p {p})" for d, low, high, p in parts]
            lines.append([label, *told])
    text = _published_table(f"{block['source']}: paired contrasts, as printed", PIXEL, lines)
    return text + "\nOurs: table_S1-paired.\n"
