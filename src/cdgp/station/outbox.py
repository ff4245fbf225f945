"""Events for other systems: kept on disk until they are delivered, in order, at least once.

Each event is a file, so what was appended survives a crash, a restart and a receiver that cannot be
reached for days; it is removed once all receivers have it. An event may arrive twice, for example
where the receiver's answer was lost: its ``id`` says so. Where a receiver refuses an event, those
behind it wait.
"""

import json
import math
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from cdgp.errors import CdgpError, OutputError, SettingsError
from cdgp.files import write_text

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Seconds until a delivery that failed is tried again: doubled from the first to the longest."""
TIMEOUT = 10.0
"""Seconds that a receiver may take to answer."""


class DeliveryError(CdgpError):
    """A receiver cannot be reached or refuses an event; the event is kept."""


class Event(NamedTuple):
    """Something that happened at the station."""

    id: str
    """The same at each delivery."""
    time: str
    """ISO 8601 with the offset from UTC."""
    kind: str
    data: Mapping[str, Any]
    """Values that JSON can hold."""


Send = Callable[[Event], None]
"""Delivers one event, or raises DeliveryError."""


@dataclass(frozen=True)
class Backlog:
    """What a receiver has not got yet."""

    waiting: int
    error: str
    """Of the last try; empty where it succeeded."""


class Outbox:
    """The events of a folder, for receivers by name; for the threads of one process.

    Args:
        folder: of the events; made where it is missing.
        receivers: how each event reaches them, by a name that stays the same over restarts. A new
            one gets what is still there for others and all that follows.

    Raises:
        OutputError: the folder cannot be written.
    """

    def __init__(self, folder: Path, receivers: Mapping[str, Send]) -> None:
        self._folder, self._receivers = folder, dict(receivers)
        self._lock, self._appended = threading.Lock(), threading.Condition()
        self._stop = threading.Event()
        self._errors = dict.fromkeys(receivers, "")
        self._threads: list[threading.Thread] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{folder}: cannot be written: {error.strerror}") from error
        self._delivered = {name: self._read_delivered(name) for name in receivers}
        # Of receivers of earlier days too: one that comes back goes on from its own number.
        marks = [self._read_delivered(p.stem) for p in folder.glob("*.delivered")]
        self._last = max([*self._numbers(), *marks], default=0)

    def append(self, kind: str, data: Mapping[str, Any]) -> str:
        """Keep an event for all receivers; its id. It is on the disk when this returns."""
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        event = Event(uuid.uuid4().hex, now, kind, data)
        with self._lock:
            write_text(self._place(self._last + 1), json.dumps(event._asdict()) + "\n")
            self._last += 1
        with self._appended:
            self._appended.notify_all()
        return event.id

    def start(self) -> None:
        """Deliver in the background, a thread for each receiver, until `close`."""
        for name in self._receivers:
            thread = threading.Thread(target=self._deliver_for_ever, args=(name,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Stop delivering; what is waiting stays for the next start."""
        self._stop.set()
        with self._appended:
            self._appended.notify_all()
        for thread in self._threads:
            thread.join()

    def backlog(self) -> dict[str, Backlog]:
        """What each receiver has not got yet, and why."""
        numbers = self._numbers()
        return {
            name: Backlog(sum(number > done for number in numbers), self._errors[name])
            for name, done in self._delivered.items()
        }

    def deliver(self, name: str) -> None:
        """Send a receiver all that is waiting for it, in order; DeliveryError where it fails."""
        for number in self._numbers():
            if self._stop.is_set():
                return
            if number <= self._delivered[name]:
                continue
            event = Event(**json.loads(self._place(number).read_text(encoding="utf-8")))
            self._receivers[name](event)
            write_text(self._mark(name), str(number))
            self._delivered[name] = number
            self._remove_delivered()

    def _deliver_for_ever(self, name: str) -> None:
        pause = FIRST_PAUSE
        while not self._stop.is_set():
            before = self._delivered[name]
            try:
                self.deliver(name)
                self._errors[name], pause = "", FIRST_PAUSE
            except (CdgpError, OSError, ValueError) as error:
                self._errors[name] = str(error)
                if self._delivered[name] > before:
                    pause = FIRST_PAUSE
                self._stop.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            with self._appended:
                self._appended.wait_for(
                    lambda: self._stop.is_set() or self._last > self._delivered[name]
                )

    def _remove_delivered(self) -> None:
        with self._lock:
            done = min(self._delivered.values(), default=0)
            for number in self._numbers():
                if number <= done:
                    self._place(number).unlink(missing_ok=True)

    def _numbers(self) -> list[int]:
        return sorted(int(p.stem) for p in self._folder.glob("*.json") if p.stem.isdecimal())

    def _place(self, number: int) -> Path:
        return self._folder / f"{number:012d}.json"

    def _mark(self, name: str) -> Path:
        return self._folder / f"{name}.delivered"

    def _read_delivered(self, name: str) -> int:
        place = self._mark(name)
        return int(place.read_text(encoding="utf-8")) if place.is_file() else 0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without the event."""

    def redirect_request(self, *_: Any) -> None:
        return None


def to_webhook(url: str, headers: Mapping[str, str] | None = None) -> Send:
    """Delivers by POST as JSON, with the id as ``Idempotency-Key``; any 2xx takes an event.

    Raises:
        SettingsError: the URL is no ``http://`` or ``https://`` one.
    """
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"webhook {url!r}: expected an address with http:// or https://")
    opener = urllib.request.build_opener(_NoRedirect)

    def send(event: Event) -> None:
        own = {"Content-Type": "application/json", "Idempotency-Key": event.id}
        body = json.dumps(event._asdict()).encode()
        request = urllib.request.Request(url, body, {**(headers or {}), **own}, method="POST")
        try:
            with opener.open(request, timeout=TIMEOUT):
                pass
        except urllib.error.HTTPError as error:
            raise DeliveryError(f"{url}: answers {error.code} {error.reason}") from error
        except (OSError, ValueError) as error:
            raise DeliveryError(f"{url}: cannot be reached: {error}") from error

    return send


def to_mqtt(
    host: str, topic: str, port: int = 1883, user: str | None = None, password: str | None = None,
    tls: bool = False,
) -> Send:  # fmt: skip
    """Delivers as JSON to a topic of an MQTT broker, below it the event's kind, with QoS 1.

    Needs paho-mqtt, which the extra ``station`` installs.
    """

    def send(event: Event) -> None:
        from paho.mqtt import MQTTException
        from paho.mqtt.client import Client
        from paho.mqtt.enums import CallbackAPIVersion

        client = Client(CallbackAPIVersion.VERSION2)
        client.connect_timeout = TIMEOUT
        if user is not None:
            client.username_pw_set(user, password)
        if tls:
            client.tls_set()
        try:
            client.connect(host, port, keepalive=math.ceil(2 * TIMEOUT))
            client.loop_start()
            try:
                sent = client.publish(f"{topic}/{event.kind}", json.dumps(event._asdict()), qos=1)
                sent.wait_for_publish(TIMEOUT)
                if not sent.is_published():
                    raise DeliveryError(f"{host}:{port}: does not acknowledge the event")
            finally:
                client.disconnect()
                client.loop_stop()
        except (OSError, ValueError, RuntimeError, MQTTException) as error:
            raise DeliveryError(f"{host}:{port}: cannot be reached: {error}") from error

    return send
