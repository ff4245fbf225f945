"""Runs the tables of docs/refused: every row is an input that a test makes."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.helpers import ROOT

from cdgp_bench.studies.refused import TABLES, Row, read_table


def rows(name: str, makers: Mapping[str, Callable[..., Any]]) -> pytest.MarkDecorator:
    """Parametrises a test by the rows of a table; each row must have a maker, and each maker a row.

    The test receives ``row``, a ``Row``; it makes the input with ``makers[row.id]``, gives it to
    the product, and compares with ``row.result`` and ``row.says``.
    """
    found: list[Row] = read_table(name, ROOT / TABLES).rows
    assert {row.id for row in found} == set(makers), f"docs/refused/{name}.toml and its makers"
    return pytest.mark.parametrize("row", found, ids=[row.id for row in found])
