"""The Grafana dashboard asks for what ``/metrics`` exports, and for all of it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.cdgp.station.serving import grey, serving
from typer.testing import CliRunner

from cdgp.cli.main import app
from cdgp.station.outbox import Outbox

METRIC = re.compile(r"cdgp_station_\w+")
SELECTED = re.compile(r"(cdgp_station_\w+)\{([^}]*)\}")
GROUPED = re.compile(r"by \(([^)]*)\)")
SHOWN = re.compile(r"{{(\w+)}}")


@pytest.fixture(scope="module")
def board() -> Any:
    result = CliRunner().invoke(app, ["station", "dashboard"])
    assert result.exit_code == 0
    return json.loads(result.stdout)


@pytest.fixture
def exported(tmp_path: Path) -> dict[str, set[str]]:
    """The samples of a station in use, with the names of their labels."""
    with serving(tmp_path / "home") as served:
        Outbox(served.station.store, {"webhook": None}, 1000)  # type: ignore[dict-item]
        served.model(0.0)
        operator = served.person("operator")
        operator.upload(grey(tmp_path, 20), wait=20)
        text = operator.get("/metrics").text
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_each_query_names_what_is_exported(board: Any, exported: dict[str, set[str]]) -> None:
    queried = set()
    for panel in board["panels"]:
        assert panel["targets"]
        for target in panel["targets"]:
            query = target["expr"]
            names = set(METRIC.findall(query))
            assert names and names <= exported.keys(), query
            queried |= names
            for name, selector in SELECTED.findall(query):
                for term in selector.split(","):
                    label, wanted = re.fullmatch(r'\s*(\w+)=~?"(.*)"', term).groups()  # type: ignore[union-attr]
                    assert label in exported[name], query
                    assert label != "decision" or wanted in ("accept", "reject", "unsure")
            kept = {part.strip() for found in GROUPED.findall(query) for part in found.split(",")}
            possible = set.union(*(exported[name] for name in names))
            assert kept <= possible, query
            aggregated = kept if "sum" in query else possible
            assert set(SHOWN.findall(target["legendFormat"])) <= aggregated, target
            for left, right in ("()", "[]", "{}"):
                assert query.count(left) == query.count(right), query
    assert queried == exported.keys()
    (variable,) = (v for v in board["templating"]["list"] if v["type"] == "query")
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
    assert label in exported[name]


def test_panels_have_their_own_place_and_no_data_source_of_somebody(board: Any) -> None:
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
