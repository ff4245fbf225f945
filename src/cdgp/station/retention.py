"""Old image files go; those that a person reviewed or drew on, or of the random share, stay."""

import shutil
import time
from pathlib import Path

from sqlalchemy import ColumnElement, and_, exists, or_, select, update

from cdgp.station import trail
from cdgp.station.intake import GIB
from cdgp.station.pipeline import Pipeline
from cdgp.station.schema import drawings, images

BATCH = 200


def clear(pipeline: Pipeline, now: float | None = None) -> int:
    """Remove what is older than the configuration keeps, and the oldest while space is short.

    Rows stay, so that all counts do. Returns how many images lost their file. ``now`` is in seconds
    since 1970.
    """
    config, removed = pipeline.config, 0
    if config.retention_days is not None:
        limit = (time.time() if now is None else now) - 86400 * config.retention_days
        while count := _remove(pipeline, images.c.received_at < limit, "too old"):
            removed += count
    while _free(pipeline.store.home) < config.free_gib * GIB:
        count = _remove(pipeline, images.c.id > 0, "little free space")
        if not count:
            break
        removed += count
    return removed


def _remove(pipeline: Pipeline, which: ColumnElement[bool], why: str) -> int:
    """Remove the oldest of these, at most ``BATCH``; their number."""
    other = images.alias()
    kept = exists().where(  # of all images with this file, whichever line or part
        other.c.digest == images.c.digest,
        or_(other.c.version > 0, other.c.audit, other.c.decision.is_(None),
            other.c.decision == "unsure"),
    )  # fmt: skip
    drawn = exists().where(
        other.c.digest == images.c.digest, drawings.c.image_id == other.c.id
    )  # fmt: skip
    query = (
        select(images.c.id, images.c.digest)
        .where(and_(which, images.c.removed_at.is_(None), ~kept, ~drawn))
        .order_by(images.c.received_at)
        .limit(BATCH)
    )
    with pipeline.store.write() as connection:
        rows = connection.execute(query).fetchall()
        digests = {row.digest for row in rows}
        if not rows:
            return 0
        # First the rows, then the files: what is left of a crash is a file too many.
        ids = connection.scalars(
            select(images.c.id).where(images.c.digest.in_(digests), images.c.removed_at.is_(None))
        ).all()
        connection.execute(
            update(images).where(images.c.id.in_(ids)).values(removed_at=time.time())
        )
        after = {"images": len(ids), "first": min(ids), "last": max(ids)}
        trail.append(connection, trail.STATION, "files removed", "images", after=after, why=why)
        for digest in digests:
            pipeline.intake.path(digest).unlink(missing_ok=True)
            shutil.rmtree(pipeline.views(digest), ignore_errors=True)
    return len(ids)


def _free(home: Path) -> int:
    return shutil.disk_usage(home).free
