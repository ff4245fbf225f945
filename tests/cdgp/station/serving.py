"""A station for tests: its models are text files, and its people sign in over HTTP."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi.testclient import TestClient
from PIL import Image
from sqlalchemy import select, update

from cdgp.station import accounts
from cdgp.station.app import make_app
from cdgp.station.intake import add_line
from cdgp.station.pipeline import Policy, promote
from cdgp.station.schema import images, users
from cdgp.station.service import Station
from cdgp_bench.studies.station import stub_load, stub_score

__all__ = ["Person", "Served", "grey", "serving", "stub_load", "stub_score"]

PASSWORD = "correct horse battery"


def grey(folder: Path, level: int, seed: int = 0) -> Path:
    """An image of one brightness, with a little noise that makes it unlike others."""
    rng = np.random.default_rng(1000 * seed + level)
    pixels = np.clip(level + rng.integers(-2, 3, (16, 20)), 0, 255).astype(np.uint8)
    path = folder / f"{level}-{seed}.png"
    folder.mkdir(exist_ok=True, parents=True)
    Image.fromarray(pixels).save(path)
    return path


@dataclass
class Person:
    """Somebody who is signed in."""

    client: TestClient
    csrf: str

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)  # type: ignore[return-value]

    def post(self, path: str, **options: Any) -> httpx.Response:
        """With the CSRF token."""
        headers = {"X-CSRF-Token": self.csrf, **options.pop("headers", {})}
        return self.client.post(path, headers=headers, **options)  # type: ignore[return-value]

    def upload(self, path: Path, **facts: Any) -> dict[str, Any]:
        """Upload to the line "a"; what the station tells, with the status."""
        query = {"line": "a", "name": path.name, **facts}
        answer = self.post("/api/v1/images", params=query, content=path.read_bytes())
        return {**answer.json(), "status": answer.status_code}

    def claim(self, line: int, count: int = 60, of: str = "doubtful") -> list[dict[str, Any]]:
        asked = {"line": line, "count": count, "of": of}
        answer = self.post("/api/v1/queue/claim", json=asked)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["images"])

    def review(self, verdict: str, *seen: dict[str, Any]) -> httpx.Response:
        some = [{"id": image["id"], "version": image["version"]} for image in seen]
        return self.post("/api/v1/reviews", json={"verdict": verdict, "images": some})


@dataclass
class Served:
    """A station, its application, and its people."""

    station: Station
    app: Any
    line: int
    people: dict[str, Person] = field(default_factory=dict)

    def client(self) -> TestClient:
        """Somebody new, who is not signed in."""
        return TestClient(self.app, follow_redirects=False)

    def person(self, role: str, name: str = "") -> Person:
        """A person of a role; the same one for the same name."""
        name = name or role
        if name not in self.people:
            with self.station.store.write() as connection:
                accounts.add_user(connection, "test", name, role)
                connection.execute(
                    update(users)
                    .where(users.c.name == name)
                    .values(must_change=False, password_hash=accounts.HASHER.hash(PASSWORD))
                )
            self.people[name] = self.sign_in(name)
        return self.people[name]

    def sign_in(self, name: str, password: str = PASSWORD) -> Person:
        client = self.client()
        answer = client.post("/login", data={"name": name, "password": password})
        assert answer.status_code == 303, answer.text
        found = re.search(r'name="csrf" (?:content|value)="([^"]+)"', client.get("/password").text)
        assert found
        return Person(client, found[1])

    def model(self, offset: float, low: float = 0.3, high: float = 0.7) -> int:
        """Make a stub live, with a policy; returns the policy's id."""
        path = self.station.candidates / f"plus-{offset}.onnx"
        path.write_text(str(offset))
        model = self.station.pipeline.adopt(path, "test")
        with self.station.store.write() as connection:
            user = connection.execute(select(users.c.id).order_by(users.c.id).limit(1)).scalar_one()
            return promote(
                connection, (user, "test"), self.line, model, Policy(low, high), "a test"
            )

    def row(self, image_id: int) -> Any:
        with self.station.store.read() as connection:
            return connection.execute(select(images).where(images.c.id == image_id)).one()

    def wait(self) -> None:
        """Until nothing waits for its score."""
        for _ in range(1000):
            with self.station.store.read() as connection:
                query = select(images.c.id).where(images.c.decision.is_(None)).limit(1)
                if connection.execute(query).first() is None:
                    return
            time.sleep(0.02)
        raise AssertionError("images still wait")


@contextmanager
def serving(home: Path, config: str = "", url: str | None = None) -> Iterator[Served]:
    """A running station. ``config`` is the text of its station.toml."""
    home.mkdir(parents=True, exist_ok=True)
    defaults = "" if "audit_share" in config else "audit_share = 0.0\n"
    (home / "station.toml").write_text(f"{defaults}reserve_gib = 0.0\n{config}")
    station = Station(home, url, stub_load)
    with station.store.write() as connection:
        accounts.add_user(connection, "test", "first", "administrator")
        line = add_line(connection, "test", "a")
    app = make_app(station)
    with TestClient(app):
        yield Served(station, app, line)


@contextmanager
def over_http(station: Station) -> Iterator[tuple[Served, str, str]]:
    """A station behind a real server, its address, and the administrator's one-time password."""
    with station.store.write() as connection:
        password = accounts.first_password(connection)
    assert password
    app = make_app(station)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Served(station, app, 1), f"http://127.0.0.1:{listener.getsockname()[1]}", password
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
