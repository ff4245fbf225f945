"""The tables of the documentation, from the committed results."""

from pathlib import Path

import pytest
from tests.cdgp_bench.helpers import row
from tests.helpers import ROOT

from cdgp_bench.studies.render import blocks, fill, headline


def test_committed_results_give_every_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name, table in blocks().items():
        columns = {line.count(" |") for line in table.splitlines() if line.startswith("| ")}
        assert table.count("\n") > 2 and min(columns) > 1, name


def test_the_headline_marks_what_was_trained_too_little() -> None:
    shares = {"draem": 0.011, "rd4ad": 0.25, "cdgp": None}
    rows = [
        row(method, "can", seed, 0.5, seconds=9, facts={"budget_share": share} if share else {})
        for method, share in shares.items() for seed in (0, 1)
    ]  # fmt: skip
    names = [line.split(" | ")[1] for line in headline(rows).splitlines()[2:]]
    assert names == ["RD4AD", "DRAEM (1.1 % of the published training)", "CDGP"]


def test_tables_replace_the_text_of_their_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- other -->\nkept\n<!-- end -->\n")
    fill([page], {"one": "| new \\1 |"})
    assert page.read_text() == (
        "a\n<!-- one -->\n| new \\1 |\n<!-- end -->\nb\n<!-- other -->\nkept\n<!-- end -->\n"
    )
    with pytest.raises(SystemExit, match="two"):
        fill([page], {"two": ""})
