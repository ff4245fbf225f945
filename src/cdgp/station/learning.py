"""The pages of the learning loop: models and candidates, retraining, thresholds, drift."""

import json
import time
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import APIRouter, Form, Query, Request
from fastapi.responses import Response
from sqlalchemy import func, select
from starlette.exceptions import HTTPException

from cdgp.station import compare, jobs
from cdgp.station.accounts import User
from cdgp.station.alarms import acknowledge
from cdgp.station.api import station_of
from cdgp.station.candidates import (
    Compared,
    Labelled,
    add_candidate,
    compared,
    labelled,
    of_line,
    proposed,
)
from cdgp.station.pages import DAY, PAGE, back, environment, page
from cdgp.station.pipeline import Policy, heat_name, live_policy, policy_history
from cdgp.station.retraining import snapshot
from cdgp.station.schema import (
    AnyRow,
    alarms,
    candidates,
    images,
    lines,
    models,
    scores,
    users,
)
from cdgp.station.schema import jobs as job_table
from cdgp.station.security import needs
from cdgp.station.service import Station

router = APIRouter()
SHOWN = 60
"""Most changed decisions on a page."""


def percent(value: float | None) -> str:
    """A share in percent, with one decimal."""
    return "–" if value is None else f"{100 * value:.1f} %"


environment.filters["percent"] = percent
environment.filters["heat"] = heat_name


def _line(request: Request, line: int | None) -> tuple[list[AnyRow], AnyRow | None]:
    """All lines, and the one that a page shows: the first where none is named."""
    with station_of(request).store.read() as connection:
        known = connection.execute(select(lines).order_by(lines.c.name)).fetchall()
    if line is None:
        return list(known), known[0] if known else None
    for row in known:
        if row.id == line:
            return list(known), row
    raise HTTPException(404, f"line {line}: there is none")


@router.get("/models")
def models_page(
    request: Request, user: Annotated[User, needs("viewer")], line: int | None = None
) -> Response:
    """Live model, candidates, and what was live."""
    station = station_of(request)
    known, shown = _line(request, line)
    live, found, history = None, [], []
    if shown is not None:
        with station.store.read() as connection:
            live = live_policy(connection, shown.id)
            found = of_line(connection, shown.id)
            history = policy_history(connection, PAGE, shown.id)
    return page(
        request, "models.html", user, lines=known, line=shown, live=live, candidates=found,
        history=history, files=station.models_to_choose() + station.runs_to_choose(),
        folder=station.candidates,
    )  # fmt: skip


@router.post("/lines/{line_id}/candidates")
def new_candidate(
    request: Request,
    line_id: int,
    user: Annotated[User, needs("engineer")],
    file: Annotated[str, Form()],
) -> Response:
    """Import a model file or run folder, from the station's folder of candidates."""
    station = station_of(request)
    if file not in station.models_to_choose() + station.runs_to_choose():
        raise HTTPException(404, f"{file!r}: lies not in {station.candidates}")
    add_candidate(station.pipeline, user.name, line_id, station.candidates / file, file)
    station.trials.wake.set()
    return back(f"/models?line={line_id}")


class _Candidate:
    """A candidate, the line's live policy, and the policy that it is looked at under."""

    def __init__(
        self, request: Request, key: int, accept_below: float | None, reject_above: float | None
    ) -> None:
        with station_of(request).store.read() as connection:
            row = connection.execute(
                select(candidates, lines.c.name.label("line"))
                .join(lines, lines.c.id == candidates.c.line_id)
                .where(candidates.c.id == key)
            ).first()
            if row is None:
                raise HTTPException(404, f"candidate {key}: there is none")
            self.row = row
            self.model = connection.execute(select(models).where(models.c.id == row.model_id)).one()
            self.live = live_policy(connection, row.line_id)
            self.proposed, self.unproposed = proposed(connection, row.line_id, row.model_id)
            own = self.model.threshold
            start = self.proposed or self.live
            low = start.accept_below if start else own
            high = start.reject_above if start else own
            self.policy = Policy(
                low if accept_below is None else accept_below,
                high if reject_above is None else reject_above,
            )
            self.found: Compared | None = None
            if self.live:
                self.found = compared(connection, self.live, row.model_id, self.policy)


@router.get("/candidates/{candidate_id}")
def candidate_page(
    request: Request,
    candidate_id: int,
    user: Annotated[User, needs("viewer")],
    accept_below: float | None = None,
    reject_above: float | None = None,
) -> Response:
    """A candidate beside the live model, on the same held-out images."""
    it = _Candidate(request, candidate_id, accept_below, reject_above)
    return page(request, "candidate.html", user, it=it, shown=SHOWN)


@router.get("/api/v1/candidates/{candidate_id}")
def candidate_json(
    request: Request,
    candidate_id: int,
    user: Annotated[User, needs("viewer")],
    accept_below: float | None = None,
    reject_above: float | None = None,
) -> dict[str, Any]:
    """The same for programs."""
    it = _Candidate(request, candidate_id, accept_below, reject_above)
    told: dict[str, Any] = {
        "id": candidate_id, "line": it.row.line, "model": it.model.digest,
        "live": it.live.digest if it.live else None,
        "policy": {"accept_below": it.policy.accept_below, "reject_above": it.policy.reject_above},
        "scored": 0, "of": 0, "comparison": None,
    }  # fmt: skip
    if it.found:
        told |= {"scored": it.found.scored, "of": it.found.of}
        if it.found.result:
            told["comparison"] = _plain(it.found.result)
    return told


def _plain(value: Any) -> Any:
    """Named tuples as dictionaries, all the way down."""
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


# --- retraining ---------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """A time to wait, in minutes."""
    return "less than a minute" if seconds < 60 else f"{seconds / 60:.0f} min"


environment.filters["duration"] = duration
environment.filters["from_json"] = json.loads


@router.get("/jobs")
def jobs_page(
    request: Request, user: Annotated[User, needs("viewer")], line: int | None = None
) -> Response:
    """What a line's bins would train on now, and its jobs."""
    station = station_of(request)
    known, shown = _line(request, line)
    found, bins = [], None
    if shown is not None:
        with station.store.read() as connection:
            bins = snapshot(connection, station.intake, shown.id, station.store.home)
            found = list(
                connection.execute(
                    select(job_table, users.c.name.label("user"))
                    .join(users, users.c.id == job_table.c.user_id)
                    .where(job_table.c.line_id == shown.id)
                    .order_by(job_table.c.id.desc())
                    .limit(PAGE)
                )
            )
    states = {row.id: station.retraining.status(row) for row in found}
    return page(
        request, "jobs.html", user, lines=known, line=shown, jobs=found, states=states, bins=bins,
        options=" ".join(station.config.train),
    )  # fmt: skip


@router.post("/lines/{line_id}/jobs")
def new_job(request: Request, line_id: int, user: Annotated[User, needs("engineer")]) -> Response:
    """Retrain on the bins as they are now."""
    job = station_of(request).retraining.create((user.id, user.name), line_id)
    return back(f"/jobs/{job}")


def _job(request: Request, job_id: int) -> dict[str, Any]:
    station = station_of(request)
    with station.store.read() as connection:
        row = connection.execute(
            select(job_table, lines.c.name.label("line"))
            .join(lines, lines.c.id == job_table.c.line_id)
            .where(job_table.c.id == job_id)
        ).first()
        if row is None:
            raise HTTPException(404, f"job {job_id}: there is none")
        left = connection.scalar(
            select(candidates.c.id).where(
                candidates.c.line_id == row.line_id, candidates.c.model_id == row.model_id
            )
        )
    log = jobs.tail(station.retraining.folder(row))
    return {
        "job": row, "state": station.retraining.status(row), "log": log, "candidate": left,
        "ended": jobs.ENDED,
    }  # fmt: skip


@router.get("/jobs/{job_id}")
def job_page(request: Request, job_id: int, user: Annotated[User, needs("viewer")]) -> Response:
    return page(request, "job.html", user, **_job(request, job_id))


@router.get("/jobs/{job_id}/status")
def job_status(request: Request, job_id: int, user: Annotated[User, needs("viewer")]) -> Response:
    return page(request, "job_status.html", user, **_job(request, job_id))


@router.post("/jobs/{job_id}/cancel")
def cancel_job(request: Request, job_id: int, user: Annotated[User, needs("engineer")]) -> Response:
    """End a job; what it has done stays."""
    station_of(request).retraining.cancel(user.name, job_id)
    return back(f"/jobs/{job_id}")


@router.post("/jobs/{job_id}/retry")
def retry_job(request: Request, job_id: int, user: Annotated[User, needs("engineer")]) -> Response:
    """Go on with a job that failed or was cancelled."""
    station_of(request).retraining.retry(user.name, job_id)
    return back(f"/jobs/{job_id}")


# --- thresholds ---------------------------------------------------------------------------------

BARS = 50
"""Of a histogram."""
TALLEST = 100
"""Height of its highest bar, in units of the drawing."""


class Bar(NamedTuple):
    """Images of one range of scores, in units of the drawing."""

    x: float
    good: float
    defective: float


def histogram(found: Labelled) -> list[Bar]:
    """How many good and defective images have a score in each of ``BARS`` equal ranges."""
    values, bad = np.array(found.scores), np.array(found.defective, dtype=np.bool_)
    edges = np.linspace(0, 1, BARS + 1)
    good, defective = (np.histogram(values[which], edges)[0] for which in (~bad, bad))
    unit = TALLEST / max(1, int(good.max()), int(defective.max()))
    return [
        Bar(10.0 * i, unit * int(a), unit * int(b))
        for i, (a, b) in enumerate(zip(good, defective, strict=True))
    ]


def _effect(station: Station, live: AnyRow, policy: Policy) -> dict[str, Any]:
    """What two thresholds do to held-out images, and would have done to those of a day."""
    with station.store.read() as connection:
        found = labelled(connection, live.line_id, live.model_id, "calibration")
        newest = (
            select(func.max(scores.c.id))
            .join(images, images.c.id == scores.c.image_id)
            .where(images.c.line_id == live.line_id, scores.c.model_id == live.model_id)
            .where(images.c.decided_at > time.time() - DAY)
            .group_by(scores.c.image_id)
        )
        day = connection.execute(
            select(scores.c.score, images.c.decision, images.c.group_name)
            .join(images, images.c.id == scores.c.image_id)
            .where(scores.c.id.in_(newest))
        ).fetchall()
    held = yesterday = None
    if found.images:
        held = compare.outcome(found.scores, policy, found.defective, found.groups)
    if day:
        yesterday = compare.outcome(
            [row.score for row in day], policy, groups=[row.group_name for row in day]
        )
    did = {
        word: sum(row.decision == word for row in day) for word in ("accept", "unsure", "reject")
    }
    return {
        "policy": policy, "bars": histogram(found), "held": held, "groups": len({*found.groups}),
        "yesterday": yesterday, "did": did, "tallest": TALLEST,
    }  # fmt: skip


@router.get("/threshold")
def threshold_page(
    request: Request,
    user: Annotated[User, needs("viewer")],
    line: int | None = None,
    accept_below: float | None = None,
    reject_above: float | None = None,
    max_false_rejects: Annotated[float, Query(gt=0, lt=100)] = 1.0,
    max_doubts: Annotated[float, Query(gt=0, lt=100)] = 5.0,
) -> Response:
    """The two thresholds of a line's live model; both budgets are in percent."""
    station = station_of(request)
    known, shown = _line(request, line)
    budgets = {"max_false_rejects": max_false_rejects, "max_doubts": max_doubts}
    values: dict[str, Any] = {"lines": known, "line": shown, "live": None, "budgets": budgets}
    if shown is not None:
        with station.store.read() as connection:
            live = live_policy(connection, shown.id)
            if live is not None:
                values["proposed"], values["unproposed"] = proposed(
                    connection, shown.id, live.model_id, max_false_rejects / 100, max_doubts / 100
                )
        if live is not None:
            policy = Policy(
                live.accept_below if accept_below is None else accept_below,
                live.reject_above if reject_above is None else reject_above,
            )
            values |= {"live": live, **_effect(station, live, policy)}
    return page(request, "threshold.html", user, **values)


@router.get("/threshold/effect")
def threshold_effect(
    request: Request,
    line: int,
    accept_below: float,
    reject_above: float,
    user: Annotated[User, needs("viewer")],
) -> Response:
    """The piece of the page that follows the sliders."""
    station = station_of(request)
    with station.store.read() as connection:
        live = live_policy(connection, line)
    if live is None:
        raise HTTPException(404, f"line {line}: there is no live model")
    found = _effect(station, live, Policy(accept_below, reject_above))
    return page(request, "threshold_effect.html", user, **found)


# --- drift --------------------------------------------------------------------------------------


@router.get("/drift")
def drift_page(
    request: Request, user: Annotated[User, needs("viewer")], line: int | None = None
) -> Response:
    """What is watched of a line, and its alarms with the images that caused them."""
    station = station_of(request)
    known, shown = _line(request, line)
    cameras, found = [], []
    if shown is not None:
        with station.store.read() as connection:
            live = live_policy(connection, shown.id)
            found = list(
                connection.execute(
                    select(alarms, users.c.name.label("user"), models.c.name.label("model"))
                    .join(models, models.c.id == alarms.c.model_id)
                    .outerjoin(users, users.c.id == alarms.c.user_id)
                    .where(alarms.c.line_id == shown.id)
                    .order_by(alarms.c.id.desc())
                    .limit(PAGE)
                )
            )
        if live is not None:
            cameras = station.drift.cameras(shown.id, live.model_id)
    return page(request, "drift.html", user, lines=known, line=shown, cameras=cameras, alarms=found)


@router.post("/alarms/{alarm_id}/acknowledge")
def acknowledge_alarm(
    request: Request,
    alarm_id: int,
    user: Annotated[User, needs("operator")],
    line: Annotated[int, Form()],
    note: Annotated[str, Form(max_length=500)],
) -> Response:
    """Say what an alarm was about."""
    acknowledge(station_of(request).store, (user.id, user.name), alarm_id, note)
    return back(f"/drift?line={line}")
