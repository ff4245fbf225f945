"""All that a plan's rows show, on disk: tables, figures, and the pages that hold them together."""

from collections.abc import Callable, Sequence
from pathlib import Path

from cdgp.files import write_text
from cdgp_bench import figures
from cdgp_bench.formats import Table, comma_separated, latex, markdown
from cdgp_bench.grid import variants_of
from cdgp_bench.plan import Plan
from cdgp_bench.published import published
from cdgp_bench.qualitative import RULE, example_path
from cdgp_bench.reliability import pooled_scores
from cdgp_bench.results import Results, Row
from cdgp_bench.rows import run_name
from cdgp_bench.statistics import Repeats
from cdgp_bench.tables import all_tables

LEGEND = (
    "AUROC-I: image AUROC. AUROC-P: pixel AUROC over all pixels of all test images. AUPRO@.3 and "
    "AUPRO@.05: area under the per-region overlap curve up to that false-positive rate, divided by "
    "it. Best in bold, second underlined, among results over all {repeats}. “n of m did not "
    "separate”: in n of the m trainings of a variant (data sets × categories × {repeats}) the "
    "evidence did not separate good from defective training images; `cdgp train` would have "
    "stopped there, a benchmark goes on and says so."
)

CURVE = "Bars: one standard deviation. A method that uses good images alone is level."
RELIABILITY = (
    "All folds together, each image by the model that has not seen it: ten bins with equal numbers "
    "of images, 95 % intervals that know groups. Scores in rows, and their ECE, refer to equal "
    "numbers of good and defective parts; here both are brought to each set's own share of "
    "defective images."
)


def render(
    plan: Plan, rows: Sequence[Row], costs: Sequence[Row], out: Path, failed: Sequence[Row] = ()
) -> Path:
    """Write everything and return the page to read first."""
    results = Results(plan, rows)
    page = [f"# {plan.title}\n\n{LEGEND.format(repeats=plan.planned.word)}\n"]
    page += _write_tables(all_tables(plan, rows, costs), plan.planned, out)
    page += _draw_figures(results, out)
    if failed:
        reasons = [f"- {run_name(row)}: {row['reason']}" for row in failed]
        page.append("## Failed\n\n" + "\n".join(reasons) + "\n")
    odd = _odd_images(rows)
    if odd:
        note = "Defective images listed here take no part in the pixel metrics."
        page.append(f"## Odd images\n\n{note}\n\n{odd}\n")
    write_text(out / "published.md", published(results))
    page.append("The paper's printed numbers beside these: [published.md](published.md)\n")
    write_text(out / "evidence.md", "\n".join(page))
    return out / "evidence.md"


def _write_tables(tables: Sequence[Table], planned: Repeats, out: Path) -> list[str]:
    formats: dict[str, Callable[[Table], str]] = {
        "md": lambda t: f"{markdown(t, planned)}\n{t.note}\n",
        "tex": lambda t: latex(t, planned),
        "csv": lambda t: comma_separated(t, planned),
    }
    sections = []
    for table in tables:
        for ending, form in formats.items():
            write_text(out / "tables" / f"{table.name}.{ending}", form(table))
        number = table.name.split("-")[0].replace("_", " ").replace("table", "Table")
        title = f"{number}: {table.title}" if number.startswith("Table") else table.title
        sections.append(f"## {title}\n\n{markdown(table, planned)}\n{table.note}\n")
    return sections


def _draw_figures(results: Results, out: Path) -> list[str]:
    sections = []
    for name in results.sets("main"):
        curves = {
            variant.label: found[0]["facts"]["learning_curve"]
            for variant in variants_of("main", results.plan.methods)
            if results.is_short(variant)
            and (found := results.rows_of(name, variant))
            and "learning_curve" in found[0]["facts"]
        }
        if curves:
            stem = f"learning_curves-{name}"
            title = f"{name}, first {results.plan.planned.word[:-1]}"
            figures.learning_curves(curves, title, out / "figures" / stem)
            sections.append(_figure(stem, f"Learning curves of what is not ranked, {name}", ""))
    for name in results.sets("label_budget"):
        stem = f"label_budget-{name}"
        figures.label_budget(results, name, out / "figures" / stem)
        sections.append(_figure(stem, f"Label budget, {name}", "Bars: one standard deviation."))
    for name in results.sets("budget_curve"):
        stem = f"budget_curve-{name}"
        figures.budget_curve(results, name, out / "figures" / stem)
        sections.append(_figure(stem, f"Label budgets by method, {name}", CURVE))
    if results.plan.folds is not None:
        sections += _reliability(results, out)
    examples = [
        path
        for name in results.sets("qualitative")
        for category in results.categories[name]
        if (path := example_path(out, name, category)).is_file()
    ]
    if examples:
        figures.qualitative(examples, out / "figures" / "qualitative.png")
        caption = f"Shown is {RULE}. {figures.QUALITATIVE_SCALES}"
        sections.append(_figure("qualitative", "Qualitative grid (S8–S10)", caption))
    return sections


def _reliability(results: Results, out: Path) -> list[str]:
    """A figure for each method whose image score is a probability."""
    sections = []
    for variant in variants_of("main", results.plan.methods):
        pooled = {name: found for name in results.sets("main")
                  if (found := pooled_scores(results, name, variant))}  # fmt: skip
        if pooled:
            stem = f"reliability-{variant.method}"
            figures.reliability(pooled, out / "figures" / stem)
            sections.append(_figure(stem, f"Reliability of {variant.label}", RELIABILITY))
    return sections


def _figure(stem: str, title: str, caption: str) -> str:
    return f"## {title}\n\n![{title}](figures/{stem}.png)\n\n{caption}\n"


def _odd_images(rows: Sequence[Row]) -> str:
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
