"""The page "What is refused and why" is rendered from the tables that tests run."""

from tests.helpers import ROOT

from cdgp_bench.studies.refused import ORDER, PAGE, TABLES, page


def test_page_is_rendered_from_the_tables() -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == page(ROOT / TABLES)
    assert {path.stem for path in (ROOT / TABLES).glob("*.toml")} <= set(ORDER)
