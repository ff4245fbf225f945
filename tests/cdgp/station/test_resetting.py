"""A lost password is reset from the machine, beside a running station and without one."""

from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import select
from tests.cdgp.station.serving import PASSWORD, serving
from tests.helpers import raised
from typer.testing import CliRunner

from cdgp.cli.main import app
from cdgp.errors import StationError
from cdgp.station import accounts, resetting, trail
from cdgp.station.schema import login_failures
from cdgp.station.store import DATABASE, Store, reading


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resetting, "LOOK", 0.01)


def reset(home: Path, name: str) -> str:
    result = CliRunner().invoke(app, ["station", "reset-password", name, "--home", str(home)])
    assert result.exit_code == 0, result.output
    begin, password = result.stdout.strip().split(": ")
    assert begin == f"user {name}, one-time password"
    return password


def last_entry(home: Path) -> dict[str, str]:
    with reading(home) as connection:
        trail.verify(connection)
        return list(trail.entries(connection))[-1]


@pytest.mark.parametrize("runs", [True, False])
def test_the_old_password_and_sessions_are_over(tmp_path: Path, runs: bool) -> None:
    home = tmp_path / "home"
    with serving(home) as served:
        lost, other = served.person("administrator", "boss"), served.person("viewer")
        for _ in range(accounts.FAILURES_A_NAME):
            served.client().post("/login", data={"name": "boss", "password": "guess"})
        if runs:
            password = reset(home, "boss")
            assert lost.get("/").headers["location"] == "/login"
            assert other.get("/").status_code == 200
    if not runs:
        password = reset(home, "boss")
    assert not (home / resetting.REQUEST).exists()
    entry = last_entry(home)
    assert (entry["action"], entry["subject"]) == ("password reset", "user boss")
    assert entry["why"].startswith("cdgp station reset-password, by ")
    with closing(Store(home)) as store:
        with store.read() as connection:
            assert not connection.execute(select(login_failures)).fetchall()
        assert accounts.sign_in(store, "boss", PASSWORD, "here") is None
        secret = accounts.sign_in(store, "boss", password, "here")
        assert secret
        with store.read() as connection:
            found = accounts.session_user(connection, secret)
        assert found
        assert (found[0].must_change, found[0].role) == (True, "administrator")


def test_what_is_refused_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = tmp_path / "nothing"
    raised(lambda: resetting.reset(nothing, None, "admin"), DATABASE, error=StationError)
    assert not nothing.exists()
    monkeypatch.setattr(resetting, "PATIENCE", 0.1)
    with closing(Store(tmp_path / "home")) as store:  # it holds the home, and nobody answers
        with store.write() as connection:
            accounts.add_user(connection, "test", "admin", "administrator")
        before = last_entry(store.home)
        raised(lambda: resetting.reset(store.home, None, "nobody"), "admin", error=StationError)
        raised(lambda: resetting.reset(store.home, None, "admin"), "answer", error=StationError)
        assert not (store.home / resetting.REQUEST).exists()
        assert last_entry(store.home) == before


def test_a_damaged_request_is_put_away(tmp_path: Path) -> None:
    with serving(tmp_path / "home") as served:
        for text in ("{", '{"name": "first"}', '{"name": "x", "hash": "y", "why": ""}'):
            file = served.station.store.home / resetting.REQUEST
            file.write_text(text)
            while file.exists():
                pass
        assert served.person("viewer").get("/").status_code == 200
