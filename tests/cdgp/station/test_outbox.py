"""Events reach a local web server and a broker in order, over restarts and lost answers."""

import json
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import raised

from cdgp.errors import SettingsError
from cdgp.station import outbox
from cdgp.station.outbox import DeliveryError, Event, Outbox, to_mqtt, to_webhook


class Server(ThreadingHTTPServer):
    """Keeps what it is sent; answers with the codes of ``answers`` first, then 204."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.answers: list[int] = []
        self.arrived = threading.Condition()
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/events"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def wait_for(self, count: int) -> None:
        with self.arrived:
            self.arrived.wait_for(lambda: len(self.events) >= count)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Idempotency-Key"] == event["id"]
        code = self.server.answers.pop(0) if self.server.answers else 204
        if code == 204 or code == 0:
            with self.server.arrived:
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
    found.shutdown()
    found.server_close()


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["data"]["number"] for event in events]


def test_events_arrive_in_order_over_refusals_and_lost_answers(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "FIRST_PAUSE", 0.01)
    server.answers += [204, 500, 302, 429, 0]
    box = Outbox(tmp_path, {"plant": to_webhook(server.url)})
    box.start()
    ids = [box.append("decision", {"number": number}) for number in range(20)]
    server.wait_for(21)
    box.close()
    assert numbers(server.events) == [0, 1, *range(1, 20)], "the one without an answer twice"
    assert list(dict.fromkeys(event["id"] for event in server.events)) == ids
    assert box.backlog() == {"plant": outbox.Backlog(0, "")}
    assert not list(tmp_path.glob("*.json"))


def test_a_receiver_out_of_reach_gets_all_after_restarts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}/events"
    for start in (0, 3):
        box = Outbox(tmp_path, {"plant": to_webhook(url)})
        for number in range(start, start + 3):
            box.append("decision", {"number": number})
        raised(partial(box.deliver, "plant"), url, "cannot be reached", error=DeliveryError)
        assert box.backlog()["plant"].waiting == start + 3
    server = Server(port)
    box = Outbox(tmp_path, {"plant": to_webhook(url)})
    box.deliver("plant")
    assert numbers(server.events) == [0, 1, 2, 3, 4, 5]
    box.append("decision", {"number": 6})
    again = Outbox(tmp_path, {"plant": to_webhook(url)})
    again.deliver("plant")
    again.append("decision", {"number": 7})
    again.deliver("plant")
    assert numbers(server.events) == list(range(8))
    server.shutdown()
    server.server_close()


def test_one_receiver_does_not_wait_for_another(server: Server, tmp_path: Path) -> None:
    def refused(event: Event) -> None:
        raise DeliveryError("broker: no")

    box = Outbox(tmp_path, {"web": to_webhook(server.url), "broker": refused})
    box.start()
    for number in range(3):
        box.append("alarm", {"number": number})
    server.wait_for(3)
    box.close()
    found = box.backlog()
    assert found["broker"] == outbox.Backlog(3, "broker: no")
    assert len(list(tmp_path.glob("*.json"))) == 3
    got: list[Event] = []
    later = Outbox(tmp_path, {"web": to_webhook(server.url), "broker": got.append})
    later.deliver("broker")
    later.deliver("web")
    without = Outbox(tmp_path, {"web": to_webhook(server.url)})
    without.append("alarm", {"number": 3})
    without.deliver("web")
    back = Outbox(tmp_path, {"web": to_webhook(server.url), "broker": got.append})
    back.append("alarm", {"number": 4})
    back.deliver("broker")
    assert [event.data["number"] for event in got] == [0, 1, 2, 4], "3 was for the others"
    assert numbers(server.events) == [0, 1, 2, 3]


def broker(listening: socket.socket, got: list[tuple[str, dict[str, Any]]], answers: bool) -> None:
    """The least of an MQTT 3.1.1 broker: CONNECT, one PUBLISH of QoS 1, its acknowledgement."""
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
                connection.sendall(bytes([0x20, 2, 0, 0]))
            elif head[0] >> 4 == 3 and answers:
                size = int.from_bytes(body[:2])
                topic, rest = body[2 : 2 + size].decode(), body[2 + size :]
                got.append((topic, json.loads(rest[2:])))
                connection.sendall(bytes([0x40, 2, *rest[:2]]))


def test_mqtt_waits_for_the_acknowledgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("paho.mqtt", reason="paho-mqtt is not installed: extra station")
    monkeypatch.setattr(outbox, "TIMEOUT", 0.5)
    got: list[tuple[str, dict[str, Any]]] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        box = Outbox(tmp_path, {"broker": to_mqtt("127.0.0.1", "line/4", port)})
        event = box.append("alarm", {"number": 0})
        for answers in (False, True):
            thread = threading.Thread(target=broker, args=(listening, got, answers), daemon=True)
            thread.start()
            if answers:
                box.deliver("broker")
            else:
                raised(lambda: box.deliver("broker"), "acknowledge", error=DeliveryError)
            thread.join()
    assert [(topic, found["id"]) for topic, found in got] == [("line/4/alarm", event)]
    box.append("alarm", {"number": 1})
    raised(lambda: box.deliver("broker"), f"127.0.0.1:{port}", "reached", error=DeliveryError)
    assert box.backlog()["broker"].waiting == 1


def test_what_is_refused(tmp_path: Path) -> None:
    raised(lambda: to_webhook("file:///etc/passwd"), "http://", error=SettingsError)
