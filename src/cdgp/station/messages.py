"""What other systems are told: each message is written in the transaction of what it tells.

So there is none without its event, and no event without its message. Names are those of the results
of OPC 40100-1 (machine vision) where it has one, ``resultEvaluation`` of OPC 40001-101; the others
are ours. Where nobody is configured to receive them, nothing is written.
"""

import json
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, insert, select

from cdgp.station.schema import AnyRow, images, lines, models, outbox, receivers

COMPLETED, FAILED = 1, 4
"""Of ``resultState``."""
EVALUATION = {"accept": 1, "reject": 2, "unsure": 3}
"""Of ``resultEvaluation``: in tolerance, out of tolerance, not decidable; 0 where there is none."""


def wanted(connection: Connection) -> bool:
    """Whether anybody receives messages."""
    return connection.execute(select(receivers.c.name).limit(1)).first() is not None


def append(connection: Connection, kind: str, data: Mapping[str, Any]) -> None:
    """Keep a message for all receivers, in the transaction of what it tells.

    Args:
        connection: of the one transaction.
        kind: "decision", "review", "policy", "alarm", "job" or "loss".
        data: values that JSON can hold.
    """
    if wanted(connection):
        connection.execute(
            insert(outbox).values(
                key=secrets.token_hex(16), at=time.time(), kind=kind,
                data=json.dumps(data, ensure_ascii=False),
            )
        )  # fmt: skip


def decided(
    connection: Connection, image_id: int, policy: AnyRow | None, score: float | None
) -> None:
    """Tell an image's decision, as its row says.

    Args:
        connection: of the transaction that decided it.
        image_id: of the image.
        policy: that decided it, as of ``live_policy``.
        score: its image score; None where there is none.
    """
    if not wanted(connection):
        return
    row = _image(connection, image_id)
    failed = score is None
    append(connection, "decision", {
        **_result(row),
        "creationTime": iso(row.decided_at),
        "resultState": FAILED if failed else COMPLETED,
        "resultEvaluation": 0 if failed else EVALUATION[row.decision],
        "internalRecipeId": policy.digest if policy else None,
        "internalConfigurationId": str(policy.id) if policy else None,
        "decision": row.decision, "score": score, "problem": row.problem,
        "camera": row.camera, "group": row.group_name, "label": row.label, "sha256": row.digest,
    })  # fmt: skip


def reviewed(connection: Connection, versions: Mapping[int, int], user: str) -> None:
    """Tell what people say of images now.

    Args:
        connection: of the transaction that wrote it.
        versions: of the reviews, by image.
        user: name of the reviewer.
    """
    if not wanted(connection):
        return
    for image_id, version in versions.items():
        row = _image(connection, image_id)
        told = {"decision": row.decision, "verdict": row.verdict, "version": version, "user": user}
        append(connection, "review", {**_result(row), **told})


def policy_set(
    connection: Connection, line: str, now: AnyRow, before: AnyRow | None, user: str
) -> None:
    """Tell a line's new live model and thresholds: a promotion, a rollback, or a new policy.

    Args:
        connection: of the transaction that wrote them.
        line: its name.
        now: the new row of ``live_policy``.
        before: the one before it; None for the first.
        user: name of who did it.
    """
    append(connection, "policy", {
        "line": line, "internalRecipeId": now.digest, "internalConfigurationId": str(now.id),
        "model": now.name, "accept_below": now.accept_below, "reject_above": now.reject_above,
        "reason": now.reason, "user": user,
        "previousRecipeId": before.digest if before else None,
        "previousConfigurationId": str(before.id) if before else None,
    })  # fmt: skip


def alarm_raised(
    connection: Connection, line_id: int, model_id: int, data: Mapping[str, Any]
) -> None:
    """Tell an alarm of a line under a model."""
    if wanted(connection):
        line = connection.scalar(select(lines.c.name).where(lines.c.id == line_id))
        model = connection.scalar(select(models.c.digest).where(models.c.id == model_id))
        append(connection, "alarm", {"line": line, "internalRecipeId": model, **data})


def job_ended(connection: Connection, job: AnyRow, state: str, model_id: int | None) -> None:
    """Tell how a retraining ended, and the model that it left; None where it left none."""
    if wanted(connection):
        line = connection.scalar(select(lines.c.name).where(lines.c.id == job.line_id))
        model = connection.scalar(select(models.c.digest).where(models.c.id == model_id))
        data = {"line": line, "job": job.id, "state": state, "internalRecipeId": model}
        append(connection, "job", data)


def iso(seconds: float) -> str:
    """A time in seconds since 1970 as ISO 8601, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _image(connection: Connection, image_id: int) -> AnyRow:
    return connection.execute(
        select(images, lines.c.name.label("line"))
        .join(lines, lines.c.id == images.c.line_id)
        .where(images.c.id == image_id)
    ).one()


def _result(row: AnyRow) -> dict[str, Any]:
    """What names an image in every message about it."""
    return {"line": row.line, "resultId": str(row.id), "partId": row.part, "jobId": row.lot}
