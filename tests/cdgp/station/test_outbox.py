"""Messages reach a local web server and a broker in order, over restarts and lost answers."""

import json
import socket
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from tests.cdgp.station.serving import Served, grey, serving
from tests.cdgp.station.test_alarms import produce
from tests.helpers import raised

from cdgp.errors import SettingsError
from cdgp.station import messages, outbox, retraining, schema, trail
from cdgp.station.alarms import REFERENCE
from cdgp.station.config import Config
from cdgp.station.outbox import DeliveryError, Message, Outbox, senders
from cdgp.station.store import Store


class Server(ThreadingHTTPServer):
    """Keeps what it is sent; answers with the codes of ``answers`` first, then 204."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.answers: list[int] = []
        self.headers: list[dict[str, str]] = []
        self.arrived = threading.Condition()
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/events"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def wait_for(self, count: int) -> None:
        with self.arrived:
            self.arrived.wait_for(lambda: len(self.events) >= count)

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Idempotency-Key"] == event["id"]
        code = self.server.answers.pop(0) if self.server.answers else 204
        if code == 204 or code == 0:
            with self.server.arrived:
                self.server.headers.append(dict(self.headers))
                self.server.events.append(event)
                self.server.arrived.notify_all()
        if code == 0:  # taken, and the answer is lost
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.send_response(code)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.stop()


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A fresh store: on SQLite, but where a test asks for both kinds."""
    url = request.getfixturevalue("postgres") if getattr(request, "param", None) else None
    made = Store(tmp_path / "home", url)
    yield made
    made.close()


both = pytest.mark.parametrize(
    "store", [pytest.param(None, id="sqlite"), pytest.param("x", id="postgresql")], indirect=True
)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "LOOK", 0.01)
    monkeypatch.setattr(outbox, "FIRST_PAUSE", 0.01)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def box_for(store: Store, most: int = 1000, **send: outbox.Send) -> Outbox:
    return Outbox(store, send, most)


def web(url: str) -> outbox.Send:
    return senders(Config(webhook=url), {})["webhook"]


def kept_by(got: list[Message]) -> outbox.Send:
    def send(some: Iterable[Message]) -> Generator[None]:
        for message in some:
            got.append(message)
            yield

    return send


def refused(some: Iterable[Message]) -> Generator[None]:
    yield from ()
    raise DeliveryError("broker: no")


def append(store: Store, *numbers: int, kind: str = "decision") -> None:
    for number in numbers:
        with store.write() as connection:
            messages.append(connection, kind, {"number": number})


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["data"]["number"] for event in events]


def rows(store: Store) -> int:
    with store.read() as connection:
        return connection.scalar(select(func.count()).select_from(schema.outbox)) or 0


def test_messages_arrive_in_order_over_refusals_and_lost_answers(
    server: Server, store: Store, soon: None
) -> None:
    server.answers += [204, 500, 302, 429, 0]
    box, stop = box_for(store, plant=web(server.url)), threading.Event()
    running = threading.Thread(target=box.run, args=("plant", stop))
    running.start()
    append(store, *range(20))
    server.wait_for(21)
    stop.set()
    running.join()
    assert numbers(server.events) == [0, 1, *range(1, 20)], "the one without an answer twice"
    ids = [event["id"] for event in server.events]
    assert ids[1] == ids[2]
    assert len(set(ids)) == 20
    assert box.backlog() == [outbox.Backlog("plant", 0, None, 0, "")]
    assert rows(store) == 0


@both
def test_a_receiver_out_of_reach_gets_all_after_restarts(store: Store) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/events"
    for start in (0, 3):
        box = box_for(store, plant=web(url))
        append(store, *range(start, start + 3))
        raised(partial(box.deliver, "plant"), url, "cannot be reached", error=DeliveryError)
        (backlog,) = box.backlog()
        assert backlog.waiting == start + 3
        assert backlog.oldest
    server = Server(port)
    box_for(store, plant=web(url)).deliver("plant")
    assert numbers(server.events) == [0, 1, 2, 3, 4, 5]
    assert rows(store) == 0
    append(store, 6)  # after all were removed, numbers still grow
    again = box_for(store, plant=web(url))
    again.deliver("plant")
    append(store, 7)
    again.deliver("plant")
    assert numbers(server.events) == list(range(8))
    server.stop()


def test_one_receiver_does_not_wait_for_another(server: Server, store: Store) -> None:
    box = box_for(store, web=web(server.url), broker=refused)
    append(store, 0, 1, 2)
    box.deliver("web")
    raised(partial(box.deliver, "broker"), "broker: no", error=DeliveryError)
    assert [it.waiting for it in box.backlog()] == [3, 0]
    got: list[Message] = []
    later = box_for(store, web=web(server.url), broker=kept_by(got))
    later.deliver("broker")
    assert rows(store) == 0
    without = box_for(store, web=web(server.url))
    append(store, 3)
    without.deliver("web")
    assert rows(store) == 0
    back = box_for(store, web=web(server.url), broker=kept_by(got))
    append(store, 4)
    back.deliver("broker")
    assert [message.data["number"] for message in got] == [0, 1, 2, 4], "3 was for the others"
    assert numbers(server.events) == [0, 1, 2, 3]


@both
def test_without_receivers_nothing_is_kept(store: Store) -> None:
    append(store, 0)
    box_for(store, broker=refused)
    append(store, 1)
    assert rows(store) == 1
    box_for(store)
    assert rows(store) == 0
    with store.read() as connection:
        told = [(e["action"], e["subject"], e["before"]) for e in trail.entries(connection)]
    assert told == [
        ("receiver added", "broker", "null"),
        ("receiver removed", "broker", '{"messages waiting": 1}'),
    ]


def test_a_message_is_there_exactly_where_its_event_is(store: Store) -> None:
    got: list[Message] = []
    box = box_for(store, plant=kept_by(got))
    with pytest.raises(ZeroDivisionError), store.write() as connection:
        messages.append(connection, "decision", {"number": 0})
        1 / 0  # noqa: B018
    append(store, 1)
    box.deliver("plant")
    assert [message.data for message in got] == [{"number": 1}]


@both
def test_the_oldest_are_dropped_and_the_loss_is_told(store: Store) -> None:
    got: list[Message] = []
    box = box_for(store, 100, broker=refused, web=kept_by(got))
    append(store, *range(100))
    box.drop()
    assert rows(store) == 100
    box.deliver("web")
    append(store, 100)
    box.drop()
    broker, plant = box.backlog()
    assert (broker.lost, plant.lost) == (11, 0), "90 of 101 are kept"
    later: list[Message] = []
    again = box_for(store, 100, broker=kept_by(later), web=kept_by(got))
    again.deliver("broker")
    again.deliver("web")
    assert [m.data["number"] for m in later if m.kind == "decision"] == list(range(11, 101))
    assert [m.data["number"] for m in got if m.kind == "decision"] == list(range(101))
    for loss in (later[-1], got[-1]):
        assert loss.kind == "loss"
        assert (loss.data["receiver"], loss.data["messages"]) == ("broker", 11)
        assert loss.data["first"] <= loss.data["last"]
    with store.read() as connection:
        assert [e["action"] for e in trail.entries(connection)][-1] == "messages lost"
    assert again.backlog()[0].lost == 11, "it stays to be seen"


def broker(listening: socket.socket, got: list[tuple[str, dict[str, Any]]], answers: bool) -> None:
    """The least of an MQTT 3.1.1 broker: CONNECT, PUBLISH of QoS 1, its acknowledgement."""
    connection, _ = listening.accept()
    with connection, connection.makefile("rb") as stream:
        while head := stream.read(1):
            length, shift = 0, 0
            while True:
                byte = stream.read(1)[0]
                length, shift = length | (byte & 127) << shift, shift + 7
                if byte < 128:
                    break
            body = stream.read(length)
            if head[0] >> 4 == 1:
                assert b"secret word" in body
                connection.sendall(bytes([0x20, 2, 0, 0]))
            elif head[0] >> 4 == 3 and answers:
                size = int.from_bytes(body[:2])
                topic, rest = body[2 : 2 + size].decode(), body[2 + size :]
                got.append((topic, json.loads(rest[2:])))
                connection.sendall(bytes([0x40, 2, *rest[:2]]))


def test_mqtt_waits_for_the_acknowledgement(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paho.mqtt", reason="paho-mqtt is not installed: extra station")
    monkeypatch.setattr(outbox, "TIMEOUT", 0.5)
    got: list[tuple[str, dict[str, Any]]] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        secrets = {outbox.MQTT_USER: "me", outbox.MQTT_PASSWORD: "secret word"}
        config = Config(mqtt=f"mqtt://127.0.0.1:{port}/line/4")
        box = Outbox(store, senders(config, secrets), 1000)
        append(store, 0, 1, kind="alarm")
        for answers in (False, True):
            thread = threading.Thread(target=broker, args=(listening, got, answers), daemon=True)
            thread.start()
            if answers:
                box.deliver("mqtt")
            else:
                raised(lambda: box.deliver("mqtt"), "acknowledge", error=DeliveryError)
            thread.join()
    assert [topic for topic, _ in got] == ["line/4/alarm"] * 2, "over one connection"
    assert numbers([found for _, found in got]) == [0, 1]
    append(store, 2, kind="alarm")
    raised(lambda: box.deliver("mqtt"), f"127.0.0.1:{port}", "reached", error=DeliveryError)
    assert box.backlog()[0].waiting == 1


@pytest.mark.parametrize(
    ("key", "address", "word"),
    [
        ("webhook", "file:///etc/passwd", "http://"),
        ("webhook", "http://", "a host"),
        ("webhook", "http://host:port/x", "port"),
        ("webhook", "https://me:secret@host/x", outbox.TOKEN),
        ("mqtt", "http://host/x", "mqtt://"),
        ("mqtt", "mqtt://host", "topic"),
        ("mqtt", "mqtt://host/line/#", "topic"),
        ("mqtt", "mqtts://me:secret@host/x", outbox.MQTT_PASSWORD),
    ],
)
def test_addresses_that_are_refused(key: str, address: str, word: str) -> None:
    config = Config(**{key: address})  # type: ignore[arg-type]
    message = raised(lambda: senders(config, {}), "station.toml", key, word, error=SettingsError)
    assert "secret" not in message


# --- through a running station --------------------------------------------------------------------


def work(served: Served, folder: Path) -> None:
    """Three decisions, a verdict and its undo, a promotion, an alarm, and a job that ends."""
    served.model(0.0, 0.3, 0.7)
    operator = served.person("operator")
    facts = {"part": "4711", "lot": "17", "group": "g", "camera": "top"}
    operator.upload(grey(folder, 200), wait=20, **facts)
    seen = operator.upload(grey(folder, 128), part="4712", wait=20)
    (folder / "no image.png").write_text("nothing")
    operator.review("defective", {"id": seen["id"], "version": 0})
    operator.post("/api/v1/reviews/undo")
    served.model(0.01, 0.2, 0.8)
    produce(served, REFERENCE)
    produce(served, 60, exposure=0.5)
    while served.station.drift.step():
        pass
    with served.station.store.write() as connection:
        job = schema.insert_row(
            connection, schema.jobs, line_id=served.line, user_id=1, folder="x", counts="{}",
            created_at=time.time(), problem="",
        )  # fmt: skip
    served.station.retraining.step()  # its folder is gone, so that it failed
    assert job == 1


def test_a_station_tells_what_happens_once_the_receiver_is_there(
    tmp_path: Path, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(outbox.TOKEN, "secret word")
    monkeypatch.setattr(retraining, "LOOK", 60)
    port = free_port()
    config = f'webhook = "http://127.0.0.1:{port}/events"\n'
    with serving(tmp_path / "home", config) as served:  # nobody listens
        work(served, tmp_path)
        while not served.station.problems():
            time.sleep(0.01)
        assert any("webhook takes no messages" in text for text in served.station.problems())
        engineer = served.person("engineer")
        page = engineer.get("/settings").text
        assert "cannot be reached" in page
        assert "secret word" not in page
        lines = engineer.get("/metrics").text.splitlines()
        waits = next(x for x in lines if x.startswith("cdgp_station_messages_waiting{"))
        assert waits.startswith('cdgp_station_messages_waiting{receiver="webhook"}')
        waiting = int(float(waits.split()[-1]))
        assert waiting == rows(served.station.store)
    server = Server(port)
    (tmp_path / "home" / "station.toml").write_text(config)
    store = Store(tmp_path / "home")
    box = Outbox(store, senders(Config(webhook=server.url), {outbox.TOKEN: "secret word"}), 1000)
    box.deliver("webhook")
    store.close()
    server.stop()
    assert {header["Authorization"] for header in server.headers} == {"Bearer secret word"}
    assert len({event["id"] for event in server.events}) == len(server.events) == waiting
    assert [event["kind"] for event in server.events] == [
        "policy", "decision", "decision", "review", "review", "policy", "alarm", "job",
    ]  # fmt: skip
    first, rejected, unsure, said, undone, second, alarm, job = (e["data"] for e in server.events)
    assert (first["previousRecipeId"], first["reason"]) == (None, "a test")
    assert second["previousRecipeId"] == first["internalRecipeId"]
    assert second["previousConfigurationId"] == first["internalConfigurationId"] == "1"
    assert rejected | {"score": 0, "sha256": ""} == {
        "line": "a", "resultId": "1", "partId": "4711", "jobId": "17", "resultState": 1,
        "creationTime": rejected["creationTime"], "resultEvaluation": 2,
        "internalRecipeId": first["internalRecipeId"], "internalConfigurationId": "1",
        "decision": "reject", "score": 0, "problem": "", "camera": "top", "group": "g",
        "label": "200-0.png", "sha256": "",
    }  # fmt: skip
    assert (unsure["decision"], unsure["resultEvaluation"], unsure["partId"]) == (
        "unsure", 3, "4712",
    )  # fmt: skip
    assert (said["verdict"], said["version"], said["user"]) == ("defective", 1, "operator")
    assert (undone["verdict"], undone["version"], undone["resultId"]) == (None, 2, "2")
    assert (alarm["kind"], alarm["camera"], alarm["line"]) == ("light", "top", "a")
    assert alarm["images"]
    assert job == {"line": "a", "job": 1, "state": "failed", "internalRecipeId": None}


def test_a_decision_without_a_score_says_so(tmp_path: Path) -> None:
    got: list[Message] = []
    with serving(tmp_path / "home") as served:
        box = Outbox(served.station.store, {"plant": kept_by(got)}, 1000)
        served.person("operator").upload(grey(tmp_path, 128), wait=20)
        box.deliver("plant")
    data = got[0].data
    assert (data["resultState"], data["resultEvaluation"]) == (4, 0)
    assert (data["decision"], data["problem"], data["score"]) == (
        "unsure", "the line has no model", None,
    )  # fmt: skip
