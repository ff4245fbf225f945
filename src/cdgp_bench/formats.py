"""A table before it is set, and how it is set: Markdown, LaTeX, CSV.

The best of a column is bold, the second underlined, among the values of all planned seeds or folds.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cdgp.files import text_cell
from cdgp_bench.statistics import Repeats, Summary


class TableRow(NamedTuple):
    """A line of a table; cells are measured, plain text, or missing."""

    label: str
    cells: Sequence[Summary | str | None]
    block: str = ""
    ranked: bool = True
    """Whether it may be the best or the second of a column."""


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


def marks(table: Table, planned: Repeats) -> list[list[str]]:
    """``best``, ``second`` or nothing for each cell; values that print alike share a mark.

    A mean over fewer seeds or folds than planned is not ranked: it is no result yet.
    """
    found = [["" for _ in row.cells] for row in table.rows]
    if not table.ranked:
        return found
    for column in range(len(table.head) - 1):
        values = {
            index: round(100 * row.cells[column].mean, 1)  # type: ignore[union-attr]
            for index, row in enumerate(table.rows)
            if row.ranked
            and isinstance(cell := row.cells[column], Summary)
            and cell.repeats == planned.number
        }
        ordered = sorted(set(values.values()), reverse=True)[:2]
        if len(values) < 2:
            continue
        for index, value in values.items():
            if value in ordered:
                found[index][column] = ("best", "second")[ordered.index(value)]
    return found


def cell_text(cell: Summary | str | None, planned: Repeats) -> str:
    """A cell as plain text; a summary of fewer seeds or folds than planned says so."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    spread = "" if cell.std is None else f" ± {100 * cell.std:.1f}"
    return f"{100 * cell.mean:.1f}{spread}{_fewer(cell, planned)}"


def _fewer(cell: Summary, planned: Repeats) -> str:
    lacks = cell.repeats < planned.number
    return f" ({cell.repeats} of {planned.number} {planned.word})" if lacks else ""


def markdown(table: Table, planned: Repeats) -> str:
    """The table for Markdown."""
    lines = ["| " + " | ".join(table.head) + " |", "|" + "---|" * len(table.head)]
    block = ""
    for row, row_marks in zip(table.rows, marks(table, planned), strict=True):
        if row.block != block:
            block = row.block
            lines.append(f"| *{block}* |" + " |" * (len(table.head) - 1))
        cells = [
            {"best": "**{}**", "second": "<u>{}</u>"}.get(mark, "{}").format(
                cell_text(cell, planned)
            )
            for cell, mark in zip(row.cells, row_marks, strict=True)
        ]
        lines.append("| " + " | ".join([row.label, *(c.replace("|", "\\|") for c in cells)]) + " |")
    return "\n".join(lines) + "\n"


def latex(table: Table, planned: Repeats) -> str:
    """The table for LaTeX with booktabs."""
    columns = "l" + "c" * (len(table.head) - 1)
    lines = [f"\\begin{{tabular}}{{{columns}}}", "\\toprule",
             " & ".join(map(_tex, table.head)) + r" \\", "\\midrule"]  # fmt: skip
    block = ""
    for row, row_marks in zip(table.rows, marks(table, planned), strict=True):
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
                cells.append(f"${mean}{spread}${_fewer(cell, planned)}")
            else:
                cells.append(_tex(cell_text(cell, planned)))
        lines.append(" & ".join([_tex(row.label), *cells]) + r" \\")
    lines += ["\\bottomrule", "\\end{tabular}", f"% {table.title}. {table.note}"]
    return "\n".join(lines) + "\n"


_TEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
        "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}",
        "–": "--", "−": "$-$", "±": r"$\pm$", "×": r"$\times$", "λ": r"$\lambda$",
        "σ": r"$\sigma$"}  # fmt: skip


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in text)


def comma_separated(table: Table, planned: Repeats) -> str:
    """The table for other programs: mean (x 100), standard deviation and number of seeds or folds
    in columns of their own.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    measured = [any(isinstance(r.cells[i], Summary) for r in table.rows)
                for i in range(len(table.head) - 1)]  # fmt: skip
    head = [table.head[0], "block"]
    for name, is_measured in zip(table.head[1:], measured, strict=True):
        head += [name, f"{name} std", f"{name} {planned.word}"] if is_measured else [name]
    writer.writerow([text_cell(name) for name in head])
    for row in table.rows:
        cells: list[Any] = [row.label, row.block]
        for cell, is_measured in zip(row.cells, measured, strict=True):
            if isinstance(cell, Summary):
                spread = "" if cell.std is None else 100 * cell.std
                cells += [100 * cell.mean, spread, cell.repeats]
            else:
                cells += [cell or ""] + (["", ""] if is_measured else [])
        writer.writerow([text_cell(cell) if isinstance(cell, str) else cell for cell in cells])
    return text.getvalue()
