"""Tables as Markdown, LaTeX and CSV."""

import csv
import io

import pytest

from cdgp_bench.formats import Table, TableRow, comma_separated, latex, markdown, marks
from cdgp_bench.statistics import Repeats, Summary

SEEDS = Repeats(3, "seeds")


def test_best_and_second_are_marked_as_they_print() -> None:
    """100.0 and 99.96 print alike, so both are best; the next is second."""
    values = (1.0, 0.9996, 0.98, 0.5, None)
    cells = [None if v is None else Summary(v, 0.01, 3) for v in values]
    table = Table("t", "T", ["m", "x"], [TableRow(f"r{i}", [c]) for i, c in enumerate(cells)])
    assert marks(table, SEEDS) == [["best"], ["best"], ["second"], [""], [""]]
    text = markdown(table, SEEDS)
    assert "| r0 | **100.0 ± 1.0** |" in text
    assert "| r2 | <u>98.0 ± 1.0</u> |" in text
    assert "| r4 | – |" in text
    assert r"r2 & $\underline{98.0}_{\pm1.0}$ \\" in latex(table, SEEDS)
    assert "(3 of 4 seeds)" in markdown(table, Repeats(4, "seeds"))
    rows = list(csv.DictReader(io.StringIO(comma_separated(table, SEEDS))))
    assert float(rows[1]["x"]) == pytest.approx(99.96) and float(rows[1]["x std"]) == 1
    assert rows[4]["x"] == ""


def test_latex_escapes_what_it_must() -> None:
    table = Table("t", "T", ["a_b & 5 %"], [TableRow("{x}_$1", [])])
    assert r"a\_b \& 5 \%" in latex(table, SEEDS)
    assert r"\{x\}\_\$1" in latex(table, SEEDS)


def test_methods_with_too_little_training_are_not_ranked() -> None:
    one = Summary(0.9, 0.0, 3)
    other = Summary(0.8, 0.0, 3)
    rows = [TableRow("a", [one], ranked=False), TableRow("b", [other]), TableRow("c", [other])]
    assert marks(Table("t", "t", ["", "x"], rows), SEEDS) == [[""], ["best"], ["best"]]
