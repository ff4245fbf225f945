"""The drift of each line, watched from what was stored when its images were scored.

A camera under a model has a monitor of its own. Its reference is the first parts that the model
scored. The monitor is a function of these rows in their order: after a restart it reads them again,
and comes to the same alarms, which are entered once.
"""

import json
import logging
import math
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np
from sqlalchemy import func, select, update

from cdgp.errors import DataError, StationError
from cdgp.station import messages, trail
from cdgp.station.drift import Alarm, ImageStatistics, Monitor, Part
from cdgp.station.pipeline import live_policy
from cdgp.station.schema import AnyRow, alarms, images, insert_row, lines, scores
from cdgp.station.store import Store

REFERENCE = 200
"""Parts of the first try of a reference; half as many more each time, where lots are long."""
LOOK = 5.0
"""Seconds between two looks for new scores."""
AT_ONCE = 500

log = logging.getLogger(__name__)


@dataclass
class _Camera:
    """A camera under a model: first its reference, then its monitor."""

    reference: list[Part] = field(default_factory=list)
    next_try: int = REFERENCE
    monitor: Monitor | None = None
    parts: int = 0

    def add(self, part: Part) -> Alarm | None:
        self.parts += 1
        if self.monitor is not None:
            return self.monitor.add(part)
        self.reference.append(part)
        if len(self.reference) == self.next_try:
            try:
                self.monitor = Monitor(self.reference)
                self.reference = []
            except DataError:  # too few lots yet
                self.next_try = self.next_try * 3 // 2
        return None


class CameraState(NamedTuple):
    """How far the watch over a camera is."""

    camera: str
    parts: int
    wanted: int | None
    """Parts of the reference that is being collected; None once the camera is watched."""


class Drift:
    """Watches the live model of each line, in a thread of its own."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.problem = ""
        """That alarms wait for somebody; empty where none does."""
        self._cameras: dict[tuple[int, int], dict[str, _Camera]] = {}
        self._read: dict[tuple[int, int], int] = {}
        """The newest score that was taken in, by line and model."""

    def run(self, stop: threading.Event) -> None:
        """Watch until ``stop`` is set."""
        while not stop.is_set():
            try:
                done = self.step()
            except Exception as error:  # a full disk, a database that is away
                log.exception("drift is not watched for a moment")
                self.problem, done = f"drift: {type(error).__name__}: {error}", 0
            if not done:
                stop.wait(LOOK)

    def step(self) -> int:
        """Take some new scores in; returns how many."""
        done = 0
        with self.store.read() as connection:
            policies = [
                live
                for line in connection.scalars(select(lines.c.id)).all()
                if (live := live_policy(connection, line))
            ]
        for live in policies:
            done += self._take(live.line_id, live.model_id)
        with self.store.read() as connection:
            waiting = connection.scalar(
                select(func.count()).where(alarms.c.acknowledged_at.is_(None))
            )
        self.problem = f"drift: open alarms: {waiting}; see Drift" if waiting else ""
        return done

    def cameras(self, line_id: int, model_id: int) -> list[CameraState]:
        """The cameras of a line under a model."""
        found = self._cameras.get((line_id, model_id), {}).copy()
        return [
            CameraState(name, it.parts, None if it.monitor else it.next_try)
            for name, it in sorted(found.items())
        ]

    def _take(self, line_id: int, model_id: int) -> int:
        key = line_id, model_id
        with self.store.read() as connection:
            rows = connection.execute(
                select(scores, images.c.camera, images.c.lot, images.c.received_at)
                .join(images, images.c.id == scores.c.image_id)
                .where(images.c.line_id == line_id, scores.c.model_id == model_id)
                .where(scores.c.id > self._read.get(key, 0), scores.c.brightness.is_not(None))
                .order_by(scores.c.id)
                .limit(AT_ONCE)
            ).fetchall()
        cameras = self._cameras.setdefault(key, {})
        for row in rows:
            alarm = cameras.setdefault(row.camera, _Camera()).add(part_of(row))
            self._read[key] = row.id
            if alarm is not None:
                self._enter(line_id, model_id, row, alarm)
        return len(rows)

    def _enter(self, line_id: int, model_id: int, row: AnyRow, alarm: Alarm) -> None:
        with self.store.write() as connection:
            known = select(alarms.c.id).where(alarms.c.score_id == row.id)
            if connection.execute(known).first() is not None:
                return
            key = insert_row(
                connection, alarms, line_id=line_id, model_id=model_id, camera=row.camera,
                score_id=row.id, kind=alarm.kind, text=alarm.text,
                images=json.dumps([int(image) for image in alarm.images]), at=time.time(), note="",
            )  # fmt: skip
            after = {"kind": alarm.kind, "camera": row.camera, "text": alarm.text}
            trail.append(connection, trail.STATION, "drift alarm", f"alarm {key}", after=after)
            data = {"alarm": key, **after, "images": [int(image) for image in alarm.images]}
            messages.alarm_raised(connection, line_id, model_id, data)


def part_of(row: AnyRow) -> Part:
    """A stored score as the monitor takes it: in log-odds, without features."""
    share = min(max(row.score, 1e-6), 1 - 1e-6)
    return Part(
        str(row.image_id),
        datetime.fromtimestamp(row.received_at, UTC).date(),
        math.log(share / (1 - share)),
        ImageStatistics(row.brightness, row.contrast, row.sharpness),
        np.zeros(1),
        lot=row.lot or None,
    )


def acknowledge(store: Store, who: tuple[int, str], alarm_id: int, note: str) -> None:
    """Say what an alarm was about.

    Args:
        store: of the station.
        who: id and name of the user.
        alarm_id: of the alarm.
        note: what was found; it stays in the trail.

    Raises:
        StationError: no note, no such alarm, or somebody was faster.
    """
    note = note.strip()
    if not note:
        raise StationError("note: say what was found; it stays in the audit trail")
    with store.write() as connection:
        changed = connection.execute(
            update(alarms)
            .where(alarms.c.id == alarm_id, alarms.c.acknowledged_at.is_(None))
            .values(acknowledged_at=time.time(), user_id=who[0], note=note)
        )
        if changed.rowcount != 1:
            raise StationError(f"alarm {alarm_id}: there is none, or it is acknowledged already")
        trail.append(connection, who[1], "alarm acknowledged", f"alarm {alarm_id}", why=note)
