"""A station that is killed at any moment: what it acknowledged is there, exactly once."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select
from tests.cdgp.station.serving import PASSWORD, grey

from cdgp.station import accounts, trail
from cdgp.station.intake import add_line
from cdgp.station.schema import images, reviews, users
from cdgp.station.store import Store

KILLS = int(os.environ.get("CDGP_STATION_KILLS", "2"))


class Client(threading.Thread):
    """Uploads and reviews until it is told to stop, whatever happens to the station."""

    def __init__(self, address: str, content: list[bytes]) -> None:
        super().__init__()
        self.address, self.content = address, content
        self.stop = threading.Event()
        self.sent = 0
        self.taken: dict[str, int] = {}
        """The id that an acknowledged part was given."""
        self.ticked: Counter[int] = Counter()
        """Acknowledged verdicts by image."""
        self.odd: list[str] = []

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                with httpx.Client(base_url=self.address, timeout=20) as http:
                    self._work(http)
            except httpx.HTTPError:
                time.sleep(0.02)

    def _work(self, http: httpx.Client) -> None:
        http.post("/login", data={"name": "a", "password": PASSWORD})
        found = re.search(r'name="csrf" content="([^"]+)"', http.get("/password").text)
        if not found:
            return
        http.headers["X-CSRF-Token"] = found[1]
        while not self.stop.is_set():
            part = str(self.sent)
            content = self.content[self.sent % len(self.content)]
            for _ in range(2):  # again, as a sender does that was not answered
                query = {"line": "a", "part": part}
                told = self._told(http.post("/api/v1/images", params=query, content=content))
                if told and self.taken.setdefault(part, told["id"]) != told["id"]:
                    self.odd.append(f"part {part} has two ids")
            self.sent += 1
            asked = {"line": 1, "count": 2}
            claimed = self._told(http.post("/api/v1/queue/claim", json=asked))
            for image in claimed["images"] if claimed else []:
                seen = {"id": image["id"], "version": image["version"]}
                body = {"verdict": "good", "images": [seen]}
                if self._told(http.post("/api/v1/reviews", json=body)):
                    self.ticked[image["id"]] += 1

    def _told(self, answer: httpx.Response) -> Any:
        if answer.status_code in (200, 202):
            return answer.json()
        self.odd.append(f"{answer.status_code} {answer.text[:200]}")
        return None


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_what_was_acknowledged_outlives_kills(tmp_path: Path) -> None:
    home = tmp_path / "home"
    store = Store(home)
    with store.write() as connection:
        accounts.add_user(connection, "test", "a", "operator")
        hashed = accounts.HASHER.hash(PASSWORD)
        connection.execute(users.update().values(must_change=False, password_hash=hashed))
        add_line(connection, "test", "a")
    store.close()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (home / "station.toml").write_text("reserve_gib = 0\n")
    command = [sys.executable, "-m", "cdgp.cli.main", "station", "serve", "--home", str(home),
               "--port", str(port)]  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    client = Client(address, [grey(tmp_path, level).read_bytes() for level in range(20, 220)])
    client.start()
    rng = random.Random(os.getpid())
    try:
        for _ in range(KILLS):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            before = client.sent
            while client.sent < before + 2:
                assert process.poll() is None
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.5))
            process.kill()
            process.wait()
    finally:
        client.stop.set()
        client.join()
    assert client.odd == []
    assert len(client.taken) > KILLS
    assert client.ticked
    store = Store(home)
    with store.read() as connection:
        rows = connection.execute(select(images)).fetchall()
        by_part = Counter(row.part for row in rows)
        assert set(client.taken) <= set(by_part)
        assert set(by_part.values()) == {1}
        counted = connection.execute(
            select(reviews.c.image_id, func.count()).group_by(reviews.c.image_id)
        )
        kept = {row[0]: row[1] for row in counted}
        assert set(client.ticked) <= set(kept)
        assert set(kept.values()) == set(client.ticked.values()) == {1}
        for row in rows:
            assert (home / "images" / row.digest[:2] / row.digest).stat().st_size == row.size
        trail.verify(connection)
    store.close()
