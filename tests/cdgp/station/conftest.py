"""What tests of the station share: a PostgreSQL server, cheap passwords, a station with a stub."""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from argon2 import PasswordHasher
from sqlalchemy import create_engine, text
from tests.cdgp.station.serving import Served, serving

from cdgp.station import accounts, intake
from cdgp.station.decoding import Decoder
from cdgp.station.store import postgresql


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a PostgreSQL server of its own, on a socket; skipped where there is no program."""
    if sys.platform == "win32" or not (shutil.which("initdb") and shutil.which("pg_ctl")):
        pytest.skip("PostgreSQL's initdb and pg_ctl are not installed")
    folder = tmp_path_factory.mktemp("postgres")
    user: dict[str, str] = {}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        try:
            shutil.chown(folder, "nobody")
        except LookupError:
            pytest.skip("PostgreSQL does not run as root, and there is no user nobody")
        user = {"user": "nobody"}
        for above in folder.parents:
            if not above.stat().st_mode & 0o001 and above.is_relative_to("/tmp"):
                above.chmod(above.stat().st_mode | 0o011)
    data = folder / "data"
    steps = [
        ["initdb", "--no-sync", "--auth=trust", "--username=cdgp", f"--pgdata={data}"],
        ["pg_ctl", "start", "--wait", f"--pgdata={data}", f"--log={folder / 'log'}",
         f"--options=-c listen_addresses= -c fsync=off -k {folder}"],
    ]  # fmt: skip
    for step in steps:
        done = subprocess.run(step, cwd=folder, capture_output=True, text=True, **user)  # type: ignore[call-overload]
        if done.returncode:
            pytest.skip(f"PostgreSQL does not start here: {done.stdout}{done.stderr}")
    yield f"postgresql://cdgp@/{{name}}?host={folder}"
    stop = ["pg_ctl", "stop", "--mode=immediate", f"--pgdata={data}"]
    subprocess.run(stop, cwd=folder, capture_output=True, **user)  # type: ignore[call-overload]


@pytest.fixture
def postgres(postgres_server: str) -> str:
    """URL of a new, empty database."""
    name = f"station_{uuid.uuid4().hex}"
    url = postgresql(postgres_server.format(name="postgres"))
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return postgres_server.format(name=name)


@pytest.fixture(autouse=True)
def cheap_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes that take no time: how slow they are is argon2's matter."""
    cheap = PasswordHasher(1, 8, 1)
    monkeypatch.setattr(accounts, "HASHER", cheap)
    monkeypatch.setattr(accounts, "NOBODY", cheap.hash("nobody"))


@pytest.fixture(scope="session")
def decoder() -> Iterator[Decoder]:
    """One for all stations: what it costs to start one is paid once."""
    shared = Decoder()
    close, shared.close = shared.close, lambda: None  # type: ignore[method-assign]
    yield shared
    close()


@pytest.fixture(autouse=True)
def one_decoder(monkeypatch: pytest.MonkeyPatch, decoder: Decoder) -> None:
    monkeypatch.setattr(intake, "Decoder", lambda: decoder)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A station with the line "a", no model, and a person of each role."""
    with serving(tmp_path / "home") as found:
        yield found
