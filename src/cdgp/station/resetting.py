"""A new one-time password from the station's machine, for somebody who has lost theirs.

One process alone writes to the database. So where a station runs it is asked to, by a file in its
home: who can write there holds the station's data in their hands anyway. The file holds the hash
of the password and never the password.
"""

import getpass
import json
import logging
import os
import secrets
import threading
import time
from pathlib import Path

from sqlalchemy import Connection, select

from cdgp.errors import OutputError, StationError
from cdgp.files import write_text
from cdgp.station import accounts, trail
from cdgp.station.schema import AnyRow, users
from cdgp.station.store import Store, reading

REQUEST = "reset-password.json"
LOOK = 1.0
"""Seconds between two looks of a station for the file."""
PATIENCE = 20.0
"""Seconds that a station may take to do what the file asks for."""

log = logging.getLogger(__name__)


def reset(home: Path, url: str | None, name: str) -> str:
    """Give a user a new one-time password, with a station that runs or without; returns it.

    Their sessions end, and the trail tells of it.

    Args:
        home: of the station.
        url: of its PostgreSQL database; None for SQLite in the home.
        name: of the user.

    Raises:
        StationError: no such station or user, or the station that runs does not answer.
        OutputError: the home cannot be written.
    """
    with reading(home, url) as connection:
        _user(connection, name)
    password = secrets.token_urlsafe(12)
    password_hash, why = accounts.HASHER.hash(password), f"cdgp station reset-password, by {_who()}"
    try:
        store = Store(home, url)
    except OutputError:  # a station runs, or the home cannot be written, which comes out now
        _ask(home, name, password_hash, why)
    else:
        try:
            _apply(store, name, password_hash, why)
        finally:
            store.close()
    with reading(home, url) as connection:
        if _user(connection, name).password_hash != password_hash:
            raise StationError(f"user {name}: was not reset; the station's log says why")
    return password


def answer(store: Store, stop: threading.Event) -> None:
    """Do what the file asks for, until ``stop`` is set."""
    file = store.home / REQUEST
    while not stop.wait(LOOK):
        if not file.exists():
            continue
        try:
            asked = json.loads(file.read_text(encoding="utf-8"))
            _apply(store, asked["name"], asked["hash"], asked["why"])
        except Exception:  # of the file, or the database is away: who asks is told by the silence
            log.exception("%s is not done", file)
        file.unlink(missing_ok=True)


def _apply(store: Store, name: str, password_hash: str, why: str) -> None:
    with store.write() as connection:
        user = _user(connection, name)
        accounts.set_one_time(connection, trail.STATION, user.id, password_hash, why)


def _ask(home: Path, name: str, password_hash: str, why: str) -> None:
    file = home / REQUEST
    write_text(file, json.dumps({"name": name, "hash": password_hash, "why": why}))
    until = time.monotonic() + PATIENCE
    try:
        while file.exists():
            if time.monotonic() > until:
                raise StationError(
                    f"{home}: a station holds it and does not answer; stop that one, and try again"
                )
            time.sleep(0.05)
    finally:
        file.unlink(missing_ok=True)


def _user(connection: Connection, name: str) -> AnyRow:
    row = connection.execute(select(users).where(users.c.name == name)).first()
    if row is None:
        known = ", ".join(connection.scalars(select(users.c.name).order_by(users.c.name)))
        raise StationError(f"user {name}: there is none; there are {known or 'no users yet'}")
    return row


def _who() -> str:
    """The user of this machine."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without names
        return f"user {os.getuid()}" if hasattr(os, "getuid") else "somebody"
