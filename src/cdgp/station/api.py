"""The JSON interface, version 1: uploads, the queue, verdicts."""

import asyncio
import json
from typing import Annotated, Any, Literal

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, select
from starlette.exceptions import HTTPException

from cdgp.station import drawing, messages, review
from cdgp.station.accounts import User
from cdgp.station.drawing import Drawing, Shape
from cdgp.station.intake import Facts, clean, line_named
from cdgp.station.pipeline import heat_name
from cdgp.station.review import Seen
from cdgp.station.schema import images, lines, models, scores
from cdgp.station.security import UPLOAD, Uploader, needs, uploader
from cdgp.station.service import Station

MOST_CLAIMED = 60
MOST_REVIEWED = 500
LONGEST_WAIT = 30.0
BOXES = 20
ENTERING = 8
"""Threads that enter images at the same time. They wait for one another where an image takes long,
and all other requests need threads too."""

router = APIRouter()
_entering: RunVar[CapacityLimiter] = RunVar("entering")


def station_of(request: Request) -> Station:
    """The station that a request is for."""
    found: Station = request.app.state.station
    return found


class ClaimRequest(BaseModel):
    """Asks for images to review."""

    model_config = ConfigDict(extra="forbid")
    line: int
    count: Annotated[int, Field(ge=1, le=MOST_CLAIMED)] = 12
    of: Literal["doubtful", "rejected"] = "doubtful"


class SeenImage(BaseModel):
    """An image as the reviewer saw it."""

    model_config = ConfigDict(extra="forbid")
    id: int
    version: int


class ReviewRequest(BaseModel):
    """Gives images one verdict."""

    model_config = ConfigDict(extra="forbid")
    verdict: str
    images: Annotated[list[SeenImage], Field(min_length=1, max_length=MOST_REVIEWED)]
    reason: Annotated[str, Field(max_length=500)] = ""


class DrawingRequest(BaseModel):
    """All that is drawn on an image, and the version that it was drawn on."""

    model_config = ConfigDict(extra="forbid")
    version: Annotated[int, Field(ge=0)]
    shapes: Annotated[list[Shape], Field(max_length=drawing.MOST_SHAPES)]


@router.post(UPLOAD)
async def upload(
    request: Request,
    who: Annotated[Uploader, uploader],
    line: str = "",
    part: str = "",
    lot: str = "",
    group: str = "",
    camera: str = "",
    name: str = "",
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT)] = 0,
) -> JSONResponse:
    """Take in an image, which is the body of the request; the same one again changes nothing."""
    station = station_of(request)
    intake, pipeline = station.intake, station.pipeline
    facts = Facts(part, lot, group, camera, clean(name))
    line_id = await run_in_threadpool(_line_id, station, who[1], line)
    await run_in_threadpool(intake.check_backlog)
    with intake.receiving() as file:
        async for chunk in request.stream():
            file.add(chunk)
        entered = await to_thread.run_sync(
            intake.enter, file, line_id, facts, limiter=_entering_limiter()
        )
    pipeline.wake()
    decision = entered.decision
    if wait and decision is None:
        future = await run_in_threadpool(pipeline.expect, entered.id)
        try:
            decision = await asyncio.wait_for(asyncio.wrap_future(future), wait)
        except TimeoutError:
            decision = None
    told = await run_in_threadpool(_told, station, entered.id)
    return JSONResponse({**told, "new": entered.new}, 200 if decision else 202)


@router.post("/api/v1/queue/claim")
def claim(
    request: Request, asked: ClaimRequest, user: Annotated[User, needs("operator")]
) -> dict[str, Any]:
    """Images to review, which are this user's for five minutes."""
    with station_of(request).store.write() as connection:
        rows = review.claim(connection, user, asked.line, asked.count, asked.of)
        ids = [row.id for row in rows]
        maps, drawn = _maps(connection, ids), drawing.newest(connection, ids)
        depth, _ = review.depth(connection, asked.line, asked.of)
    found = [
        {
            "id": row.id, "version": row.version, "width": row.width, "height": row.height,
            "part": row.part, "lot": row.lot, "label": row.label, **maps.get(row.id, NO_MAP),
            "drawing": drawn.get(row.id, Drawing(0)).plain(),
        }
        for row in rows
    ]  # fmt: skip
    return {"images": found, "depth": depth}


@router.post("/api/v1/reviews")
def give_verdict(
    request: Request, asked: ReviewRequest, user: Annotated[User, needs("operator")]
) -> dict[str, Any]:
    """A verdict for one or several images: for all of them, or 409 and for none."""
    seen = [Seen(image.id, image.version) for image in asked.images]
    with station_of(request).store.write() as connection:
        versions = review.review(connection, user, asked.verdict, seen, asked.reason)
        messages.reviewed(connection, versions, user.name)
    return {"versions": versions}


@router.post("/api/v1/reviews/undo")
def undo(request: Request, user: Annotated[User, needs("operator")]) -> dict[str, Any]:
    """Take back this user's newest verdict."""
    with station_of(request).store.write() as connection:
        versions = review.undo(connection, user)
        messages.reviewed(connection, versions, user.name)
    return {"versions": versions}


@router.get("/api/v1/images/{image_id}")
def image(
    request: Request, image_id: int, user: Annotated[User, needs("viewer")]
) -> dict[str, Any]:
    """What is known of an image; without decision and score while it waits for a person."""
    station = station_of(request)
    with station.store.read() as connection:
        hidden = connection.scalar(
            select(images.c.id).where(images.c.id == image_id, review.queued())
        )
    told = _told(station, image_id)
    return {**told, "decision": None, "score": None, "queued": True} if hidden else told


@router.get("/api/v1/images/{image_id}/drawing")
def drawn(
    request: Request, image_id: int, user: Annotated[User, needs("viewer")]
) -> dict[str, Any]:
    """What is drawn on an image."""
    with station_of(request).store.read() as connection:
        found = drawing.newest(connection, [image_id]).get(image_id, Drawing(0))
    return found.plain()


@router.post("/api/v1/images/{image_id}/drawing")
def draw(
    request: Request, image_id: int, asked: DrawingRequest, user: Annotated[User, needs("operator")]
) -> dict[str, Any]:
    """Keep a drawing as the next version of an image's, or 409."""
    store = station_of(request).store
    with store.read() as connection:
        size = connection.execute(
            select(images.c.height, images.c.width).where(images.c.id == image_id)
        ).first()
    if size is None:
        raise HTTPException(404, f"image {image_id}: there is none")
    shapes = drawing.checked(asked.shapes, (size.height, size.width))
    with store.write() as connection:
        return {"version": drawing.save(connection, user, image_id, asked.version, shapes)}


NO_MAP: dict[str, Any] = {"heat": None, "boxes": []}


def _maps(connection: Connection, ids: list[int]) -> dict[int, dict[str, Any]]:
    """The newest map and boxes of images."""
    rows = connection.execute(
        select(scores.c.image_id, scores.c.model_id, scores.c.regions)
        .where(scores.c.image_id.in_(ids))
        .order_by(scores.c.id)
    )
    return {
        row.image_id: {
            "heat": heat_name(row.model_id),
            "boxes": [region[:4] for region in json.loads(row.regions)[:BOXES]],
        }
        for row in rows
    }


def _entering_limiter() -> CapacityLimiter:
    """That of this event loop."""
    try:
        return _entering.get()
    except LookupError:
        limiter = CapacityLimiter(ENTERING)
        _entering.set(limiter)
        return limiter


def _line_id(station: Station, allowed: int | None, name: str) -> int:
    with station.store.read() as connection:
        found = line_named(connection, name) if name else allowed
    if name and allowed is not None and found != allowed:
        raise HTTPException(403, "the token is of another line")
    if found is None:
        raise HTTPException(404, f"line {name!r}: there is none; give ?line=NAME")
    return found


def _told(station: Station, image_id: int) -> dict[str, Any]:
    """An image with its newest score."""
    with station.store.read() as connection:
        row = connection.execute(
            select(images, lines.c.name.label("line"))
            .join(lines, lines.c.id == images.c.line_id)
            .where(images.c.id == image_id)
        ).first()
        if row is None:
            raise HTTPException(404, f"image {image_id}: there is none")
        score = connection.execute(
            select(scores, models.c.digest.label("model"))
            .join(models, models.c.id == scores.c.model_id)
            .where(scores.c.image_id == image_id)
            .order_by(scores.c.id.desc())
            .limit(1)
        ).first()
    told = {
        "id": row.id, "line": row.line, "digest": row.digest, "part": row.part, "lot": row.lot,
        "decision": row.decision, "problem": row.problem, "score": None,
    }  # fmt: skip
    if score is not None:
        told["score"] = {
            "value": score.score, "model": score.model, "policy": score.policy_id,
            "warnings": json.loads(score.warnings),
        }  # fmt: skip
    return told
