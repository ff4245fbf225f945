"""Render docs/refused.md, "What is refused and why", from the tables that the tests run.

    python -m cdgp_bench.studies.refused

Each file of docs/refused is a table of one kind of input; ``tests/refused.py`` makes every input
and compares what the product does with what its row states.
"""

import tomllib
from pathlib import Path
from typing import NamedTuple

TABLES = Path("docs/refused")
PAGE = Path("docs/refused.md")
ORDER = ("decoding", "colours", "folders", "masks", "places", "models", "python", "numbers")
"""The tables, as the page shows them."""
RESULTS = ("refused", "warned", "read")
HEAD = """# What is refused and why

A refusal costs a minute, a wrong number costs a part. Each row below is a test: the input is made,
and the message is compared. **Refused** means that the input is not used and the exit code says so,
**warned** that it is used and named, **read** that it is used, since only its looks are odd.

"""


class Row(NamedTuple):
    """One input, and what happens to it."""

    id: str
    input: str
    result: str
    """One of ``RESULTS``."""
    says: str
    """A part of the message; empty where the input is read."""
    do: str
    """What the user does about it; empty where there is nothing to do."""


class Table(NamedTuple):
    """One kind of input."""

    title: str
    about: str
    rows: list[Row]


def read_table(name: str, folder: Path = TABLES) -> Table:
    """A table by its file name without the suffix; ValueError where a row is incomplete."""
    content = tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
    rows = [Row(**row) for row in content["row"]]
    for row in rows:
        if row.result not in RESULTS or (row.result == "read") == bool(row.says):
            raise ValueError(f"{name}: {row.id}: a row says something unless it is read")
    if len({row.id for row in rows}) < len(rows):
        raise ValueError(f"{name}: two rows have one id")
    return Table(content["title"], content["about"], rows)


def page(folder: Path = TABLES) -> str:
    """The page, in Markdown."""
    parts = [HEAD]
    for name in ORDER:
        if not (folder / f"{name}.toml").is_file():
            continue
        table = read_table(name, folder)
        parts.append(f"## {table.title}\n\n{table.about}\n\n")
        parts.append("| input | | message | what to do |\n|---|---|---|---|\n")
        parts += [
            f"| {_cell(row.input)} | {row.result} | {_cell(row.says)} | {_cell(row.do)} |\n"
            for row in table.rows
        ]
        parts.append("\n")
    return "".join(parts).rstrip() + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
