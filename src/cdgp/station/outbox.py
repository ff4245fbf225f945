"""Messages to other systems: kept until they are delivered, in order, at least once.

What was committed is told over crashes, restarts and receivers that cannot be reached for days; it
is removed once all receivers have it. A message may arrive twice, for example where the receiver's
answer was lost: its ``id`` says so. Where a receiver refuses a message, those behind it wait, for
that receiver alone. Where too many wait the oldest are dropped, and the loss is told.
"""

import json
import logging
import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from sqlalchemy import Connection, delete, func, insert, select, true, update

from cdgp.errors import CdgpError, SettingsError
from cdgp.station import messages, trail
from cdgp.station.config import CONFIG, Config
from cdgp.station.schema import outbox, receivers
from cdgp.station.store import Store

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Seconds until a delivery that failed is tried again: doubled from the first to the longest."""
TIMEOUT = 10.0
"""Seconds that a receiver may take to answer."""
LOOK = 0.5
"""Seconds between two looks for new messages."""
AT_ONCE, MARK_EVERY = 100, 1.0
"""So many messages, or what is delivered in so many seconds, may come twice after a crash."""
KEPT = 0.9
"""Share of the most messages that stays when the oldest are dropped."""
WEBHOOK, MQTT = "webhook", "mqtt"
TOKEN = "CDGP_STATION_WEBHOOK_TOKEN"
MQTT_USER, MQTT_PASSWORD = "CDGP_STATION_MQTT_USER", "CDGP_STATION_MQTT_PASSWORD"
"""Variables of the environment: secrets stand in no file and on no page."""

log = logging.getLogger(__name__)


class DeliveryError(CdgpError):
    """A receiver cannot be reached or refuses a message; the message is kept."""


class Message(NamedTuple):
    """Something that happened at the station."""

    id: str
    """The same at each delivery."""
    at: float
    kind: str
    data: Mapping[str, Any]
    """Values that JSON can hold."""

    def body(self) -> str:
        """The message as JSON."""
        return json.dumps(
            {
                "id": self.id, "kind": self.kind, "creationTime": messages.iso(self.at),
                "data": self.data,
            }
        )  # fmt: skip


Send = Callable[[Iterable[Message]], Generator[None]]
"""Delivers messages one after the other, and yields after each, or raises DeliveryError."""


class Backlog(NamedTuple):
    """What a receiver has not got yet."""

    name: str
    waiting: int
    oldest: float | None
    """When the oldest of them was written, in seconds since 1970."""
    lost: int
    """Messages that were dropped, ever."""
    error: str
    """Of the last try; empty where it succeeded."""


class Outbox:
    """Delivers the messages of a store. Safe in threads.

    Args:
        store: of the station.
        send: how messages reach each receiver, by a name that stays the same over restarts. A new
            one gets what is still there for others and all that follows; of one that is gone, what
            waited is dropped.
        most: so many messages are kept.
    """

    def __init__(self, store: Store, send: Mapping[str, Send], most: int) -> None:
        self.store, self.send, self.most = store, dict(send), most
        self._errors = dict.fromkeys(send, "")
        with store.write() as connection:
            known = {row.name: row.delivered for row in connection.execute(select(receivers))}
            for name in sorted(send.keys() - known.keys()):
                connection.execute(insert(receivers).values(name=name, delivered=0, lost=0))
                trail.append(connection, trail.STATION, "receiver added", name)
            for name in sorted(known.keys() - send.keys()):
                dropped = connection.scalar(select(func.count()).where(outbox.c.id > known[name]))
                connection.execute(delete(receivers).where(receivers.c.name == name))
                before = {"messages waiting": dropped}
                trail.append(connection, trail.STATION, "receiver removed", name, before=before)
            _remove_delivered(connection)

    @property
    def problem(self) -> str:
        """Why messages wait; empty where none does for long."""
        if not any(self._errors.values()):
            return ""
        return "; ".join(
            f"the {it.name} takes no messages, {it.waiting} waiting: {it.error}"
            for it in self.backlog()
            if it.error
        )

    def run(self, name: str, stop: threading.Event) -> None:
        """Deliver to one receiver until ``stop`` is set; what waits then stays."""
        pause = LOOK
        while not stop.wait(pause):
            try:
                self.drop()
                self.deliver(name, stop)
                self._errors[name], pause = "", LOOK
            except Exception as error:  # out of reach, a full disk, a database that is away
                if not isinstance(error, CdgpError):
                    log.exception("messages to %s wait", name)
                elif not self._errors[name]:
                    log.warning("messages to %s wait: %s", name, error)
                pause = min(max(2 * pause, FIRST_PAUSE), LONGEST_PAUSE)
                self._errors[name] = str(error) or type(error).__name__

    def deliver(self, name: str, stop: threading.Event | None = None) -> None:
        """Send a receiver all that waits for it, in order; DeliveryError where that fails."""
        stop = stop or threading.Event()
        while not stop.is_set():
            with self.store.read() as connection:
                done = connection.scalar(
                    select(receivers.c.delivered).where(receivers.c.name == name)
                )
                rows = connection.execute(
                    select(outbox).where(outbox.c.id > done).order_by(outbox.c.id).limit(AT_ONCE)
                ).fetchall()
            if not rows:
                return
            some = [Message(row.key, row.at, row.kind, json.loads(row.data)) for row in rows]
            delivered, begun = 0, time.monotonic()
            try:
                with closing(self.send[name](some)) as sending:
                    for row, _ in zip(rows, sending, strict=False):
                        delivered = row.id
                        if stop.is_set() or time.monotonic() - begun > MARK_EVERY:
                            break
            finally:
                if delivered:
                    self._mark(name, delivered)

    def drop(self) -> None:
        """Drop the oldest messages where more than ``most`` wait, and tell who loses how many."""
        with self.store.read() as connection:
            count = connection.scalar(select(func.count()).select_from(outbox)) or 0
        if count <= self.most:
            return
        with self.store.write() as connection:
            kept = select(outbox.c.id).order_by(outbox.c.id.desc()).limit(int(KEPT * self.most))
            first = connection.scalar(select(func.min(kept.subquery().c.id)))
            behind = connection.execute(select(receivers).where(receivers.c.delivered < first - 1))
            for row in behind.fetchall():
                lost = outbox.c.id > row.delivered, outbox.c.id < first
                number, since, until = connection.execute(
                    select(func.count(), func.min(outbox.c.at), func.max(outbox.c.at)).where(*lost)
                ).one()
                connection.execute(
                    update(receivers)
                    .where(receivers.c.name == row.name)
                    .values(delivered=first - 1, lost=row.lost + number)
                )
                if not number:
                    continue
                told = {"receiver": row.name, "messages": number,
                        "first": messages.iso(since), "last": messages.iso(until)}  # fmt: skip
                trail.append(connection, trail.STATION, "messages lost", row.name, after=told)
                messages.append(connection, "loss", told)
            connection.execute(delete(outbox).where(outbox.c.id < first))

    def backlog(self) -> list[Backlog]:
        """What each receiver has not got yet, and why."""
        found = []
        with self.store.read() as connection:
            for row in connection.execute(select(receivers).order_by(receivers.c.name)).fetchall():
                number, oldest = connection.execute(
                    select(func.count(), func.min(outbox.c.at)).where(outbox.c.id > row.delivered)
                ).one()
                error = self._errors.get(row.name, "")
                found.append(Backlog(row.name, number, oldest, row.lost, error))
        return found

    def _mark(self, name: str, delivered: int) -> None:
        with self.store.write() as connection:
            connection.execute(
                update(receivers)
                .where(receivers.c.name == name, receivers.c.delivered < delivered)
                .values(delivered=delivered)
            )
            _remove_delivered(connection)


def _remove_delivered(connection: Connection) -> None:
    """Remove what all receivers have, and everything where there is none."""
    done = connection.scalar(select(func.min(receivers.c.delivered)))
    which = true() if done is None else outbox.c.id <= done
    connection.execute(delete(outbox).where(which))


def senders(config: Config, environment: Mapping[str, str]) -> dict[str, Send]:
    """How messages reach the receivers of a configuration, by name.

    Args:
        config: of the station.
        environment: variables that hold the secrets.

    Raises:
        SettingsError: an address of another kind, or one with a secret in it.
    """
    found: dict[str, Send] = {}
    if config.webhook is not None:
        _check_address("webhook", config.webhook, ("http", "https"))
        token = environment.get(TOKEN)
        found[WEBHOOK] = to_webhook(
            config.webhook, {"Authorization": f"Bearer {token}"} if token else {}
        )
    if config.mqtt is not None:
        _check_address("mqtt", config.mqtt, ("mqtt", "mqtts"))
        parts = urlsplit(config.mqtt)
        topic, tls = parts.path.strip("/"), parts.scheme == "mqtts"
        if not topic or any(c in config.mqtt for c in "#+?"):
            raise SettingsError(
                f"{CONFIG}: mqtt {config.mqtt!r}: give a topic without #, + and ?, as in "
                "mqtt://broker/plant/line-4"
            )
        assert parts.hostname is not None
        found[MQTT] = to_mqtt(
            parts.hostname, topic, parts.port or (8883 if tls else 1883),
            environment.get(MQTT_USER), environment.get(MQTT_PASSWORD), tls,
        )  # fmt: skip
    return found


def _check_address(key: str, address: str, schemes: tuple[str, str]) -> None:
    where = f"{CONFIG}: {key} {address!r}"
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from error
    if parts.scheme not in schemes or not host:
        raise SettingsError(f"{where}: expected {schemes[0]}:// or {schemes[1]}:// and a host")
    if "@" in parts.netloc:
        names = TOKEN if key == "webhook" else f"{MQTT_USER} and {MQTT_PASSWORD}"
        raise SettingsError(
            f"{CONFIG}: {key}: holds a user or password, which the Settings page would show; set "
            f"{names} in the environment"
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without the message."""

    def redirect_request(self, *_: Any) -> None:
        return None


def to_webhook(url: str, headers: Mapping[str, str]) -> Send:
    """Delivers by POST as JSON, with the id as ``Idempotency-Key``; any 2xx takes a message."""
    opener = urllib.request.build_opener(_NoRedirect)

    def send(some: Iterable[Message]) -> Generator[None]:
        for message in some:
            own = {"Content-Type": "application/json", "Idempotency-Key": message.id}
            body = message.body().encode()
            request = urllib.request.Request(url, body, {**headers, **own}, method="POST")
            try:
                with opener.open(request, timeout=TIMEOUT):
                    pass
            except urllib.error.HTTPError as error:
                raise DeliveryError(f"{url}: answers {error.code} {error.reason}") from error
            except (OSError, ValueError) as error:
                reason = getattr(error, "reason", error)
                raise DeliveryError(f"{url}: cannot be reached: {reason}") from error
            yield

    return send


def to_mqtt(
    host: str, topic: str, port: int, user: str | None, password: str | None, tls: bool
) -> Send:
    """Delivers as JSON to a topic of an MQTT broker, below it the message's kind, with QoS 1."""

    def send(some: Iterable[Message]) -> Generator[None]:
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
                for message in some:
                    sent = client.publish(f"{topic}/{message.kind}", message.body(), qos=1)
                    sent.wait_for_publish(TIMEOUT)
                    if not sent.is_published():
                        raise DeliveryError(
                            f"{host}:{port}: does not acknowledge the message; check user, "
                            "password and topic"
                        )
                    yield
            finally:
                client.disconnect()
                client.loop_stop()
        except (OSError, ValueError, RuntimeError, MQTTException) as error:
            raise DeliveryError(f"{host}:{port}: cannot be reached: {error}") from error

    return send
