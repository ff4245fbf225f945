"""The pages: lines, queue, image, bins, audit trail, settings, and signing in."""

import csv
import io
import json
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Form, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, RedirectResponse, Response, StreamingResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import BeforeValidator
from sqlalchemy import ColumnElement, and_, func, select
from starlette.exceptions import HTTPException

from cdgp.data.images import read_image
from cdgp.files import text_cell
from cdgp.station import accounts, drawing, review, schema, trail
from cdgp.station.accounts import ROLES, User
from cdgp.station.api import BOXES, station_of
from cdgp.station.intake import GIB, add_line, waiting
from cdgp.station.metrics import exposed
from cdgp.station.pipeline import (
    FULL_NAME,
    THUMBNAIL_NAME,
    VIEW_NAME,
    Policy,
    heat_name,
    live_policy,
    policy_history,
    promote,
    write_full,
)
from cdgp.station.schema import (
    AnyRow,
    images,
    lines,
    models,
    policies,
    reviews,
    scores,
    tokens,
    users,
    watched,
)
from cdgp.station.security import COOKIE, check_origin, needs, signed_in
from cdgp.station.service import Station

router = APIRouter()
PAGE = 60
REFUSED = 20
"""Refused files of watched folders that the settings show."""
DAY = 86400.0
LOOPBACK = ("127.0.0.1", "::1")

BINS: dict[str, ColumnElement[bool]] = {
    "waiting": images.c.decision.is_(None),
    "accepted": images.c.decision == "accept",
    "rejected": images.c.decision == "reject",
    "unsure": images.c.decision == "unsure",
    "without a score": images.c.problem != "",
    "good": images.c.verdict == "good",
    "defective": images.c.verdict == "defective",
    "left unsure": images.c.verdict == "unsure",
    "overruled": (
        ((images.c.decision == "accept") & (images.c.verdict == "defective"))
        | ((images.c.decision == "reject") & (images.c.verdict == "good"))
    ),
}
"""By machine: accepted, rejected, unsure. By people: good, defective, left unsure."""

environment = Environment(
    loader=PackageLoader("cdgp.station", "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def moment(seconds: float | None) -> str:
    """A time in words, in UTC."""
    if seconds is None:
        return "–"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def age(since: float | None) -> str:
    """How long ago a time was, in the largest fitting unit."""
    if since is None:
        return "–"
    seconds = max(0.0, time.time() - since)
    for unit, length in (("d", DAY), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def short(value: float) -> float:
    """A threshold with four digits that count."""
    return float(f"{value:.4g}")


environment.filters["short"] = short
environment.filters["moment"] = moment
environment.filters["age"] = age


def page(
    request: Request, template: str, user: User | None, status: int = 200, **values: Any
) -> Response:
    """A page from its template; all values are escaped."""
    text = environment.get_template(template).render(user=user, path=request.url.path, **values)
    return Response(text, status, media_type="text/html")


def message(
    request: Request, status: int, text: str, headers: dict[str, str] | None = None
) -> Response:
    """A page that says what is wrong."""
    answer = page(request, "message.html", None, status, text=text, code=status)
    answer.headers.update(headers or {})
    return answer


def back(place: str) -> Response:
    """Where a form leads to."""
    return RedirectResponse(place, 303)


# --- signing in ---------------------------------------------------------------------------------


@router.get("/login")
def login_page(request: Request) -> Response:
    return page(request, "login.html", None, problem="")


@router.post("/login")
def login(
    request: Request, name: Annotated[str, Form()], password: Annotated[str, Form()]
) -> Response:
    check_origin(request)
    address = request.client.host if request.client else ""
    secret = accounts.sign_in(station_of(request).store, name, password, address)
    if secret is None:
        return page(request, "login.html", None, 401, problem="Name or password is wrong.")
    answer = back("/")
    answer.set_cookie(
        COOKIE, secret, httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )
    return answer


@router.post("/logout")
def logout(request: Request, user: Annotated[User, needs("viewer")]) -> Response:
    with station_of(request).store.write() as connection:
        accounts.sign_out(connection, user)
    answer = back("/login")
    answer.delete_cookie(COOKIE)
    return answer


@router.get("/password")
def password_page(request: Request, user: Annotated[User, needs("viewer")]) -> Response:
    return page(request, "password.html", user)


@router.post("/password")
def password(
    request: Request,
    user: Annotated[User, needs("viewer")],
    old: Annotated[str, Form()],
    new: Annotated[str, Form()],
) -> Response:
    with station_of(request).store.write() as connection:
        accounts.set_password(connection, user, old, new)
    return back("/")


# --- lines --------------------------------------------------------------------------------------


class LineState(NamedTuple):
    """A line as its page shows it."""

    line: AnyRow
    policy: AnyRow | None
    day: dict[str, int]
    """Images decided in the last 24 hours, by decision."""
    depth: int
    oldest: float | None


def _line_states(station: Station) -> list[LineState]:
    states = []
    with station.store.read() as connection:
        for line in connection.execute(select(lines).order_by(lines.c.name)).fetchall():
            counted = connection.execute(
                select(images.c.decision, func.count())
                .where(images.c.line_id == line.id, images.c.decided_at > time.time() - DAY)
                .group_by(images.c.decision)
            )
            day: dict[str, int] = {row[0]: row[1] for row in counted}
            depth, oldest = review.depth(connection, line.id)
            states.append(LineState(line, live_policy(connection, line.id), day, depth, oldest))
    return states


def _status(request: Request) -> dict[str, Any]:
    station = station_of(request)
    with station.store.read() as connection:
        backlog = waiting(connection)
    free = shutil.disk_usage(station.store.home).free / GIB
    return {
        "states": _line_states(station), "backlog": backlog, "free": free,
        "problems": station.problems(),
    }  # fmt: skip


@router.get("/")
def home(request: Request, user: Annotated[User, needs("viewer")]) -> Response:
    return page(request, "lines.html", user, **_status(request))


@router.get("/lines/status")
def line_status(request: Request, user: Annotated[User, needs("viewer")]) -> Response:
    return page(request, "line_status.html", user, **_status(request))


# --- images -------------------------------------------------------------------------------------


@router.get("/queue")
def queue(
    request: Request,
    line: int,
    user: Annotated[User, needs("operator")],
    of: Literal["doubtful", "rejected"] = "doubtful",
) -> Response:
    with station_of(request).store.read() as connection:
        name = connection.scalar(select(lines.c.name).where(lines.c.id == line))
    if name is None:
        raise HTTPException(404, f"line {line}: there is none")
    return page(request, "queue.html", user, line=line, name=name, of=of)


@router.get("/images/{image_id}")
def image_page(request: Request, image_id: int, user: Annotated[User, needs("viewer")]) -> Response:
    with station_of(request).store.read() as connection:
        row = connection.execute(
            select(images, lines.c.name.label("line"), review.queued().label("queued"))
            .join(lines, lines.c.id == images.c.line_id)
            .where(images.c.id == image_id)
        ).first()
        if row is None:
            raise HTTPException(404, f"image {image_id}: there is none")
        told = connection.execute(
            select(scores, models.c.name, models.c.digest, policies.c.accept_below,
                   policies.c.reject_above)
            .join(models, models.c.id == scores.c.model_id)
            .join(policies, policies.c.id == scores.c.policy_id)
            .where(scores.c.image_id == image_id)
            .order_by(scores.c.id)
        ).fetchall()  # fmt: skip
        history = connection.execute(
            select(reviews, users.c.name)
            .join(users, users.c.id == reviews.c.user_id)
            .where(reviews.c.image_id == image_id)
            .order_by(reviews.c.version)
        ).fetchall()
        drawn = drawing.newest(connection, [image_id]).get(image_id, drawing.Drawing(0))
    last = told[-1] if told else None
    return page(
        request, "image.html", user, image=row, scores=told, history=history, drawn=drawn,
        drawing=json.dumps(drawn.plain()),
        heat=heat_name(last.model_id) if last else None,
        boxes=json.dumps([r[:4] for r in json.loads(last.regions)[:BOXES]] if last else []),
        warnings=json.loads(last.warnings) if last else [],
    )  # fmt: skip


@router.get("/images/{image_id}/{name}")
def image_file(
    request: Request, image_id: int, name: str, user: Annotated[User, needs("viewer")]
) -> Response:
    """The thumbnail, the view, the image at full size, or the map of a model."""
    station = station_of(request)
    with station.store.read() as connection:
        row = connection.execute(
            select(images.c.digest, images.c.removed_at).where(images.c.id == image_id)
        ).first()
        known = [THUMBNAIL_NAME, VIEW_NAME, FULL_NAME]
        known += map(heat_name, connection.scalars(select(models.c.id)))
    if row is None or name not in known or row.removed_at is not None:
        raise HTTPException(404, f"image {image_id}, {name}: there is none")
    folder = station.pipeline.draw(row.digest)
    path = folder / name
    if name == FULL_NAME and not path.exists():
        write_full(path, read_image(station.intake.path(row.digest), 65535, first_page=True))
    if not path.exists():
        raise HTTPException(404, f"image {image_id}, {name}: there is none")
    return FileResponse(path, headers={"Cache-Control": "private, max-age=86400"})


@router.get("/bins")
def bins(
    request: Request,
    user: Annotated[User, needs("viewer")],
    line: Annotated[int | None, BeforeValidator(lambda value: value or None)] = None,
    bin: str = "rejected",
    lot: str = "",
    before: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """Images by what machine and people said of them, newest first."""
    if bin not in BINS:
        raise HTTPException(404, f"bin {bin!r}: give one of {', '.join(BINS)}")
    with station_of(request).store.read() as connection:
        known = connection.execute(select(lines).order_by(lines.c.name)).fetchall()
        which = [images.c.line_id == line] if line is not None else []
        if lot:
            which.append(images.c.lot == lot)
        counts = {
            name: connection.scalar(select(func.count()).where(condition, *which)) or 0
            for name, condition in BINS.items()
        }
        if before is not None:
            which.append(images.c.id < before)
        shown = connection.execute(
            select(images).where(and_(BINS[bin], *which)).order_by(images.c.id.desc()).limit(PAGE)
        ).fetchall()
    return page(
        request, "bins.html", user, lines=known, line=line, bin=bin, lot=lot, counts=counts,
        shown=shown, more=len(shown) == PAGE,
    )  # fmt: skip


# --- audit trail --------------------------------------------------------------------------------


@router.get("/audit")
def audit(
    request: Request,
    user: Annotated[User, needs("viewer")],
    before: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    query = select(schema.trail).order_by(schema.trail.c.id.desc()).limit(PAGE)
    if before is not None:
        query = query.where(schema.trail.c.id < before)
    with station_of(request).store.read() as connection:
        entries = connection.execute(query).fetchall()
    more = len(entries) == PAGE and entries[-1].id > 1
    return page(request, "audit.html", user, entries=entries, more=more)


@router.get("/audit.csv")
def audit_csv(request: Request, user: Annotated[User, needs("engineer")]) -> Response:
    store = station_of(request).store

    def rows() -> Iterator[str]:
        yield _csv_lines([trail.COLUMNS])
        with store.read() as connection:
            entries = trail.entries(connection)
            while some := list(islice(entries, 500)):
                yield _csv_lines([tuple(entry.values()) for entry in some])

    headers = {"Content-Disposition": 'attachment; filename="audit.csv"'}
    return StreamingResponse(rows(), media_type="text/csv", headers=headers)


def _csv_lines(rows: list[tuple[Any, ...]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(
        [[text_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    )
    return text.getvalue()


# --- settings -----------------------------------------------------------------------------------


def _settings(request: Request, user: User, secret: str = "", what: str = "") -> Response:
    station = station_of(request)
    with station.store.read() as connection:
        known = connection.execute(select(lines).order_by(lines.c.name)).fetchall()
        live = {line.id: live_policy(connection, line.id) for line in known}
        history = policy_history(connection, PAGE)
        issued = connection.execute(
            select(tokens, lines.c.name.label("line"))
            .join(lines, lines.c.id == tokens.c.line_id)
            .where(tokens.c.revoked_at.is_(None))
            .order_by(tokens.c.id)
        ).fetchall()
        people = connection.execute(select(users).order_by(users.c.name)).fetchall()
        kept = connection.execute(select(models).order_by(models.c.id.desc())).fetchall()
        refused = connection.execute(
            select(watched)
            .where(watched.c.problem != "")
            .order_by(watched.c.mtime_ns.desc())
            .limit(REFUSED)
        ).fetchall()
    return page(
        request, "settings.html", user, lines=known, live=live, history=history, tokens=issued,
        people=people if user.may("administrator") else [], models=kept,
        candidates=station.models_to_choose(), folder=station.candidates, roles=ROLES,
        config=station.config.model_dump(), backlog=station.outbox.backlog(), secret=secret,
        what=what, refused=refused,
    )  # fmt: skip


@router.get("/settings")
def settings(request: Request, user: Annotated[User, needs("engineer")]) -> Response:
    return _settings(request, user)


@router.post("/lines")
def new_line(
    request: Request, user: Annotated[User, needs("engineer")], name: Annotated[str, Form()]
) -> Response:
    with station_of(request).store.write() as connection:
        add_line(connection, user.name, name)
    return back("/settings")


@router.post("/models")
def new_model(
    request: Request, user: Annotated[User, needs("engineer")], file: Annotated[str, Form()]
) -> Response:
    station = station_of(request)
    if file not in station.models_to_choose():
        raise HTTPException(404, f"{file!r}: lies not in {station.candidates}")
    station.pipeline.adopt(station.candidates / file, user.name)
    return back("/settings")


@router.post("/lines/{line_id}/policy")
def new_policy(
    request: Request,
    line_id: int,
    user: Annotated[User, needs("engineer")],
    model: Annotated[int, Form()],
    accept_below: Annotated[float, Form()],
    reject_above: Annotated[float, Form()],
    reason: Annotated[str, Form(max_length=500)],
    then: Annotated[Literal["settings", "models", "threshold"], Form()] = "settings",
) -> Response:
    """Make a model and two thresholds live; a rollback is the same with earlier ones."""
    station = station_of(request)
    policy = Policy(accept_below, reject_above)
    # Before the change, so that a model that cannot be loaded changes nothing.
    station.pipeline.ready_to_serve(model)
    with station.store.write() as connection:
        promote(connection, (user.id, user.name), line_id, model, policy, reason)
    station.pipeline.keep_live()
    return back("/settings" if then == "settings" else f"/{then}?line={line_id}")


@router.post("/tokens")
def new_token(
    request: Request,
    user: Annotated[User, needs("administrator")],
    line: Annotated[int, Form()],
    label: Annotated[str, Form()],
) -> Response:
    with station_of(request).store.write() as connection:
        secret = accounts.add_token(connection, user.name, line, label)
    return _settings(request, user, secret, f"The token {label}")


@router.post("/tokens/{token_id}/revoke")
def revoke_token(
    request: Request, token_id: int, user: Annotated[User, needs("administrator")]
) -> Response:
    with station_of(request).store.write() as connection:
        accounts.revoke_token(connection, user.name, token_id)
    return back("/settings")


@router.post("/users")
def new_user(
    request: Request,
    user: Annotated[User, needs("administrator")],
    name: Annotated[str, Form()],
    role: Annotated[str, Form()],
) -> Response:
    with station_of(request).store.write() as connection:
        secret = accounts.add_user(connection, user.name, name, role)
    return _settings(request, user, secret, f"The one-time password of {name}")


@router.post("/users/{user_id}")
def change_user(
    request: Request,
    user_id: int,
    user: Annotated[User, needs("administrator")],
    role: Annotated[str, Form()],
    reason: Annotated[str, Form(max_length=500)] = "",
    disabled: Annotated[bool, Form()] = False,
) -> Response:
    with station_of(request).store.write() as connection:
        accounts.change_user(connection, user.name, user_id, role, disabled, reason)
    return back("/settings")


@router.post("/users/{user_id}/password")
def reset_password(
    request: Request, user_id: int, user: Annotated[User, needs("administrator")]
) -> Response:
    with station_of(request).store.write() as connection:
        secret = accounts.reset_password(connection, user.name, user_id)
        name = accounts.user_row(connection, user_id).name
    return _settings(request, user, secret, f"The one-time password of {name}")


# --- for machines -------------------------------------------------------------------------------


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus: from this machine without signing in."""
    local = request.client is not None and request.client.host in LOOPBACK
    if not local and await signed_in(request) is None:
        raise HTTPException(401, "sign in first, or ask from this machine")
    text = await run_in_threadpool(exposed, station_of(request))
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
