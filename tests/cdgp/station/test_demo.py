"""The station of the demo has something on each page, of images that its model has not seen."""

from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import select
from tests.cdgp.station.serving import grey, stub_load

from cdgp.cli import demo as cli
from cdgp.data.manifest import Sample
from cdgp.station import demo, retraining, review
from cdgp.station.candidates import labelled
from cdgp.station.config import read_config
from cdgp.station.schema import images
from cdgp.station.service import Station


def test_pages_have_something_to_show(tmp_path: Path) -> None:
    home, model = tmp_path / "home", tmp_path / "model.onnx"
    model.write_text("0.0")
    cells = [Sample(grey(tmp_path, 5 * n % 250, n), defective=n % 4 == 0) for n in range(40)]
    demo.configure(home, cli.short_training())
    with closing(Station(home, None, stub_load)) as station:
        demo.fill(station, model, cells)
        with station.store.read() as connection:
            rows = connection.execute(select(images)).fetchall()
            for split in ("calibration", "test"):
                assert labelled(connection, 1, 1, split).images
            bins = retraining.snapshot(connection, station.intake, 1, home).manifest
            depth, _ = review.depth(connection, 1)
    assert bins.of("fit")
    assert 0 < depth < 20
    assert not any(row.verdict for row in rows[30:])
    assert all(row.verdict == ("good", "defective")[n % 4 == 0]
               for n, row in enumerate(rows) if row.verdict)  # fmt: skip
    assert read_config(home).train[:2] == ("--input-size", "160x160")


def test_its_cells_are_none_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("elpv_dataset", reason="elpv-dataset is not installed: extra demo")
    monkeypatch.setattr(cli, "PER_CLASS", 10)
    trained = {sample.image for sample in cli.solar_cells(10).samples}
    cells = cli.new_cells(9, 3)
    assert [sum(cell.defective == kind for cell in cells) for kind in (False, True)] == [9, 3]
    assert not trained & {cell.image for cell in cells}
    assert cells == cli.new_cells(9, 3)
