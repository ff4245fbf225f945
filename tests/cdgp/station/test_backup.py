"""A backup of a station that runs, put back elsewhere; the commands around it."""

import shutil
from pathlib import Path

import pytest
from sqlalchemy import func, select
from tests.cdgp.station.serving import Served, grey, stub_load
from tests.helpers import cdgp, plain, raised

from cdgp.errors import StationError
from cdgp.station.backup import backup, restore
from cdgp.station.schema import images, reviews
from cdgp.station.service import Station


@pytest.fixture
def saved(served: Served, tmp_path: Path) -> Path:
    """A backup of a running station with two images, one of them reviewed, and a model."""
    served.model(0.25)
    operator = served.person("operator")
    for level in (60, 70):
        operator.upload(grey(tmp_path, level), wait=20)
    operator.review("good", {"id": 1, "version": 0})
    assert backup(served.station.store.home, tmp_path / "saved") == 3
    return tmp_path / "saved"


def test_a_backup_put_back_is_the_same_station(saved: Path, served: Served, tmp_path: Path) -> None:
    served.person("operator").upload(grey(tmp_path, 80), wait=20)
    assert backup(served.station.store.home, saved) == 4
    home = tmp_path / "new"
    assert restore(saved, home) == 4
    station = Station(home, load=stub_load)
    with station.store.read() as connection:
        assert connection.scalar(select(func.count()).select_from(images)) == 3
        assert connection.scalar(select(func.count()).select_from(reviews)) == 1
        for digest in connection.scalars(select(images.c.digest)):
            original = served.station.intake.path(digest)
            assert station.intake.path(digest).read_bytes() == original.read_bytes()
    station.pipeline.ready_to_serve(1)
    station.store.close()


def test_a_damaged_backup_is_refused(saved: Path, tmp_path: Path) -> None:
    raised(lambda: restore(tmp_path, tmp_path / "x"), "station.db", error=StationError)
    raised(lambda: restore(saved, saved), "--home", error=StationError)
    some = next(path for path in (saved / "images").rglob("*") if path.is_file())
    some.write_bytes(b"rotten")
    raised(lambda: restore(saved, tmp_path / "y"), "not what its name says", error=StationError)
    assert not (tmp_path / "y" / "station.db").exists()


def test_the_commands(saved: Path, served: Served, tmp_path: Path) -> None:
    home = served.station.store.home
    done = cdgp("station", "backup", tmp_path / "again", "--home", home)
    assert done.exit_code == 0
    assert "3 files" in plain(done)
    assert "all sound; the last hash is" in plain(cdgp("station", "verify-audit", "--home", home))
    done = cdgp("station", "restore", saved, "--home", tmp_path / "new")
    assert done.exit_code == 0
    # Without a station that runs, and its log, too.
    checked = cdgp("station", "verify-audit", "--home", tmp_path / "new")
    assert "all sound" in plain(checked)
    missing = cdgp("station", "verify-audit", "--home", tmp_path / "nothing")
    assert missing.exit_code == 1
    assert "--home" in plain(missing)
    shutil.rmtree(tmp_path / "new")


def test_a_station_is_refused_where_it_cannot_listen(tmp_path: Path) -> None:
    first = cdgp("station", "serve", "--home", tmp_path / "h", "--host", "0.0.0.0", "--port", 18471)
    assert first.exit_code == 1
    assert "this machine alone" in plain(first)
    wrong = cdgp("station", "serve", "--home", tmp_path / "h", "--host", "203.0.113.1")
    assert wrong.exit_code == 1
    assert "another port or address" in plain(wrong)
