"""Measurements of the product, a module each; what their tables share.

Imports nothing heavy: some studies measure the memory of processes that load this module.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table of plain cells, without a newline at its end."""
    first, *others = ("| " + " | ".join(map(str, cells)) + " |" for cells in (head, *rows))
    return "\n".join([first, "|" + "---|" * len(head), *others])


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of some keys, in the order of their first rows."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[key] for key in keys)].append(row)
    return dict(found)
