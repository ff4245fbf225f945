"""People decide: a queue of doubtful images and an unmarked random share, claims, verdicts, undo.

A verdict is a new version of the image's review; nothing is overwritten. Who reviews names the
version that they saw: where it is not the newest any more, they are told, and nothing is written.
"""

import secrets
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from cdgp.errors import StationError
from cdgp.station import trail
from cdgp.station.accounts import User
from cdgp.station.schema import AnyRow, claims, images, reviews, users

VERDICTS = ("good", "defective", "unsure")
CLAIM_SECONDS = 300.0


class LostRaceError(StationError):
    """Somebody else was faster; nothing was written."""

    def __init__(self, text: str, images: Sequence[int]) -> None:
        super().__init__(text)
        self.images = list(images)
        """Of which images."""


class Seen(NamedTuple):
    """An image as a reviewer saw it."""

    id: int
    version: int


def queued() -> ColumnElement[bool]:
    """What a person should look at: unsure ones and the random share, while nobody did."""
    return and_(
        images.c.decision.is_not(None),
        images.c.verdict.is_(None),
        images.c.removed_at.is_(None),
        or_(images.c.decision == "unsure", images.c.audit),
    )


def rejected() -> ColumnElement[bool]:
    """What was rejected, while nobody has looked at it."""
    return and_(
        images.c.decision == "reject", images.c.verdict.is_(None), images.c.removed_at.is_(None)
    )


QUEUES = {"doubtful": queued, "rejected": rejected}


def claim(
    connection: Connection, user: User, line_id: int, count: int, of: str = "doubtful"
) -> list[AnyRow]:
    """The oldest images of a line's queue that nobody else holds, for five minutes.

    ``of`` is one of ``QUEUES``.

    They come in the order in which they were received, and without what would tell those of the
    random share from the others.
    """
    now = time.time()
    connection.execute(delete(claims).where(claims.c.until < now))
    free = (
        select(images.c.id, images.c.digest, images.c.version, images.c.width, images.c.height,
               images.c.part, images.c.lot, images.c.label)
        .outerjoin(claims, claims.c.image_id == images.c.id)
        .where(images.c.line_id == line_id, QUEUES[of]())
        .where(or_(claims.c.user_id.is_(None), claims.c.user_id == user.id))
        .order_by(images.c.id)
        .limit(count)
    )  # fmt: skip
    found = list(connection.execute(free))
    ids = [row.id for row in found]
    connection.execute(delete(claims).where(claims.c.image_id.in_(ids)))
    if ids:
        held = {"user_id": user.id, "until": now + CLAIM_SECONDS}
        connection.execute(insert(claims), [{"image_id": key, **held} for key in ids])
    return found


def review(
    connection: Connection, user: User, verdict: str, seen: Sequence[Seen], reason: str = ""
) -> dict[int, int]:
    """Give images a verdict, all of them or none; returns the new version of each.

    Raises:
        LostRaceError: one was reviewed by somebody since, or is claimed by somebody else.
        StationError: an unknown verdict or image, none, or one twice.
    """
    if verdict not in VERDICTS:
        raise StationError(f"verdict {verdict!r}: give one of {', '.join(VERDICTS)}")
    rows = _current(connection, seen)
    check_free(connection, user, rows)
    batch = secrets.token_hex(8)
    for row in rows.values():
        _add_version(connection, user, row, verdict, batch, None)
        trail.append(
            connection, user.name, "reviewed", f"image {row.id}",
            before=row.verdict, after=verdict, why=reason,
        )  # fmt: skip
    return {key: row.version + 1 for key, row in rows.items()}


def check_free(connection: Connection, user: User, image_ids: Collection[int]) -> None:
    """Raise LostRaceError where somebody else holds one of these images."""
    held = connection.execute(
        select(claims.c.image_id, users.c.name)
        .join(users, users.c.id == claims.c.user_id)
        .where(claims.c.image_id.in_(image_ids), claims.c.user_id != user.id)
        .where(claims.c.until >= time.time())
    ).fetchall()
    if held:
        raise LostRaceError(
            f"{held[0].name} is looking at it right now", [h.image_id for h in held]
        )


def undo(connection: Connection, user: User) -> dict[int, int]:
    """Take back the user's newest review that is not taken back yet; the versions as they are now.

    Raises:
        LostRaceError: somebody reviewed one of the images since.
        StationError: there is nothing to take back.
    """
    undone = select(reviews.c.undoes).where(reviews.c.undoes.is_not(None))
    batch = connection.scalar(
        select(reviews.c.batch)
        .where(reviews.c.user_id == user.id, reviews.c.undoes.is_(None))
        .where(reviews.c.batch.not_in(undone))
        .order_by(reviews.c.id.desc())
        .limit(1)
    )
    if batch is None:
        raise StationError("there is nothing to take back")
    made = connection.execute(
        select(reviews.c.image_id, reviews.c.version).where(reviews.c.batch == batch)
    ).fetchall()
    rows = _current(connection, [Seen(row.image_id, row.version) for row in made])
    taking = secrets.token_hex(8)
    for row in rows.values():
        earlier = connection.scalar(
            select(reviews.c.verdict).where(
                reviews.c.image_id == row.id, reviews.c.version == row.version - 1
            )
        )
        _add_version(connection, user, row, earlier, taking, batch)
        trail.append(
            connection, user.name, "review taken back", f"image {row.id}",
            before=row.verdict, after=earlier,
        )  # fmt: skip
    return {key: row.version + 1 for key, row in rows.items()}


def depth(connection: Connection, line_id: int, of: str = "doubtful") -> tuple[int, float | None]:
    """How many images are in a line's queue, and when the oldest was received."""
    row = connection.execute(
        select(func.count(), func.min(images.c.received_at)).where(
            images.c.line_id == line_id, QUEUES[of]()
        )
    ).one()
    return int(row[0]), row[1]


def _current(connection: Connection, seen: Sequence[Seen]) -> dict[int, AnyRow]:
    """The images by id, where all of them are as they were seen."""
    wanted = {image.id: image.version for image in seen}
    if not wanted or len(wanted) < len(seen):
        raise StationError("images: give at least one, and none twice")
    found = connection.execute(
        select(images.c.id, images.c.version, images.c.verdict, images.c.decision).where(
            images.c.id.in_(wanted)
        )
    )
    rows = {row.id: row for row in found}
    missing = [key for key in wanted if key not in rows or rows[key].decision is None]
    if missing:
        raise StationError(f"image {missing[0]}: there is none, or it is not scored yet")
    lost = [key for key, version in wanted.items() if rows[key].version != version]
    if lost:
        raise LostRaceError("somebody has reviewed it since you saw it", lost)
    return rows


def _add_version(
    connection: Connection,
    user: User,
    row: AnyRow,
    verdict: str | None,
    batch: str,
    undoes: str | None,
) -> None:
    version = row.version + 1
    changed = connection.execute(
        update(images)
        .where(images.c.id == row.id, images.c.version == row.version)
        .values(verdict=verdict, version=version)
    )
    if changed.rowcount != 1:  # between two stations' transactions
        raise LostRaceError("somebody has reviewed it since you saw it", [row.id])
    connection.execute(
        insert(reviews).values(
            image_id=row.id, version=version, verdict=verdict, user_id=user.id, at=time.time(),
            batch=batch, undoes=undoes,
        )
    )  # fmt: skip
    connection.execute(delete(claims).where(claims.c.image_id == row.id))
