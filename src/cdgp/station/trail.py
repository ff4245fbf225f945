"""The audit trail: who did what, before, after and why, each entry sealed with the one before.

The database refuses to change or remove entries. Who gets around that breaks the chain of hashes,
which ``verify`` finds; only the newest entries can be cut off unseen, so the last hash belongs into
a place outside of the station, as every export holds it.
"""

import hashlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, insert, select

from cdgp.errors import StationError
from cdgp.station.schema import trail

COLUMNS = ("id", "at", "who", "action", "subject", "before", "after", "why", "previous", "hash")
STATION = "station"
"""Who did what nobody asked for."""


def append(
    connection: Connection,
    who: str,
    action: str,
    subject: str,
    *,
    before: Any = None,
    after: Any = None,
    why: str = "",
) -> None:
    """Add an entry, in the transaction of what it tells; ``before`` and ``after`` as JSON takes."""
    newest = select(trail.c.id, trail.c.hash).order_by(trail.c.id.desc()).limit(1)
    last = connection.execute(newest).first()
    entry = {
        "id": last.id + 1 if last else 1,
        "at": datetime.now(UTC).isoformat(),
        "who": who,
        "action": action,
        "subject": subject,
        "before": json.dumps(before, sort_keys=True, ensure_ascii=False),
        "after": json.dumps(after, sort_keys=True, ensure_ascii=False),
        "why": why,
        "previous": last.hash if last else "",
    }
    connection.execute(insert(trail).values(**entry, hash=seal(entry)))


def seal(entry: dict[str, Any]) -> str:
    """SHA-256, in hex, of an entry and of the hash before it.

    It is taken of the JSON array of all columns but the last, in their order, in UTF-8, non-ASCII
    characters as they are.
    """
    values = [entry[name] for name in COLUMNS[:-1]]
    return hashlib.sha256(json.dumps(values, ensure_ascii=False).encode()).hexdigest()


def entries(connection: Connection) -> Iterator[dict[str, Any]]:
    """All entries, oldest first."""
    query = select(trail).order_by(trail.c.id).execution_options(yield_per=1000)
    for row in connection.execute(query):
        yield dict(row._mapping)


def verify(connection: Connection) -> tuple[int, str]:
    """How many entries there are, and the last hash.

    Raises:
        StationError: an entry was changed, added, moved or removed; the first one is named.
    """
    count, previous = 0, ""
    for entry in entries(connection):
        count += 1
        wrong = None
        if entry["id"] != count:
            wrong = f"entry {count} is missing"
        elif entry["previous"] != previous:
            wrong = f"entry {count} does not follow the one before it"
        elif entry["hash"] != seal(entry):
            wrong = f"entry {count} was changed"
        if wrong:
            raise StationError(
                f"audit trail: {wrong}; entries up to {count - 1} are sound, compare the others "
                "with an export or a backup"
            )
        previous = entry["hash"]
    return count, previous
