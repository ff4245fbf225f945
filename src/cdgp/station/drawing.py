"""Regions that people draw on an image: rectangles and brush strokes, kept in versions.

They become masks of test images, for pixel metrics alone. Training receives images and labels and
has no field for a mask (`cdgp.data.manifest.WeakSample`).

Coordinates are integers in the image's own frame: x to the right, y down, from (0, 0), the outer
corner of the first pixel, to (width, height), that of the last one.
"""

import hashlib
import json
import time
from collections.abc import Collection, Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from sqlalchemy import Connection, func, insert, select

from cdgp.errors import StationError
from cdgp.station import trail
from cdgp.station.accounts import User
from cdgp.station.review import LostRaceError, check_free
from cdgp.station.schema import drawings, images, users

MOST_SHAPES, MOST_POINTS, MOST_RADIUS = 200, 4000, 200
"""Of one drawing: shapes, points of all of them together, and a brush's radius in pixels."""
Coordinate = Annotated[int, Field(ge=0, le=65535)]


class Shape(BaseModel):
    """A rectangle between two opposite corners, or a brush's way; later shapes lie above."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["rectangle", "brush"]
    erase: bool = False
    """Takes away what lies below."""
    radius: Annotated[int, Field(ge=0, le=MOST_RADIUS)] = 0
    """Of the brush, in pixels; 0 for a rectangle."""
    points: Annotated[tuple[tuple[Coordinate, Coordinate], ...], Field(min_length=1)]
    """(x, y) each."""


SHAPES = TypeAdapter(tuple[Shape, ...])


class Drawing(NamedTuple):
    """What is drawn on an image now."""

    version: int
    """How often it was drawn on; 0 where never."""
    shapes: tuple[Shape, ...] = ()
    who: str = ""
    """Whose version it is."""
    at: float = 0.0

    def plain(self) -> dict[str, object]:
        """As JSON takes it."""
        return {"version": self.version, "who": self.who, "shapes": plain(self.shapes)}


def plain(shapes: Sequence[Shape]) -> list[dict[str, object]]:
    """Shapes as JSON takes them."""
    return [shape.model_dump(mode="json") for shape in shapes]


def newest(connection: Connection, image_ids: Collection[int]) -> dict[int, Drawing]:
    """The newest drawing of each of these images that was ever drawn on."""
    last = (
        select(func.max(drawings.c.id))
        .where(drawings.c.image_id.in_(image_ids))
        .group_by(drawings.c.image_id)
    )
    rows = connection.execute(
        select(drawings, users.c.name)
        .join(users, users.c.id == drawings.c.user_id)
        .where(drawings.c.id.in_(last))
    )
    return {
        row.image_id: Drawing(row.version, SHAPES.validate_json(row.shapes), row.name, row.at)
        for row in rows
    }


def checked(shapes: Sequence[Shape], size: tuple[int, int]) -> tuple[Shape, ...]:
    """The shapes, where they fit an image of ``size`` (height, width); none if they mark nothing.

    Raises:
        StationError: too many, outside of the image, a rectangle without an area, or a brush
            without a radius.
    """
    height, width = size
    if len(shapes) > MOST_SHAPES or sum(len(shape.points) for shape in shapes) > MOST_POINTS:
        raise StationError(
            f"a drawing has at most {MOST_SHAPES} shapes and {MOST_POINTS} points; use rectangles, "
            "or a larger brush"
        )
    for shape in shapes:
        if any(x > width or y > height for x, y in shape.points):
            raise StationError(f"a shape leaves the image, which has {width} × {height} pixels")
        if shape.kind == "brush" and shape.radius < 1:
            raise StationError("a brush needs a radius of at least one pixel")
        if shape.kind == "rectangle":
            first, last = shape.points[0], shape.points[-1]
            corners = len(shape.points) == 2 and shape.radius == 0
            if not corners or first[0] == last[0] or first[1] == last[1]:
                raise StationError("a rectangle has two corners, and no radius; it needs an area")
    return tuple(shapes) if mask(shapes, size).any() else ()


def save(
    connection: Connection, user: User, image_id: int, version: int, shapes: Sequence[Shape]
) -> int:
    """Keep a drawing as the next version of an image's; returns its number.

    Args:
        connection: of the one transaction.
        user: who drew.
        image_id: of the image.
        version: the newest one that the user saw.
        shapes: all of the drawing, as ``checked`` gives them.

    Raises:
        LostRaceError: somebody drew on it since, or looks at it right now.
        StationError: there is no such image, or its file was removed.
    """
    row = connection.execute(select(images.c.removed_at).where(images.c.id == image_id)).first()
    if row is None or row.removed_at is not None:
        raise StationError(f"image {image_id}: there is none, or its file was removed")
    check_free(connection, user, [image_id])
    before = newest(connection, [image_id]).get(image_id, Drawing(0))
    if before.version != version:
        raise LostRaceError(f"{before.who} has drawn on it since you saw it", [image_id])
    text = json.dumps(plain(shapes), separators=(",", ":"))
    connection.execute(
        insert(drawings).values(
            image_id=image_id, version=version + 1, shapes=text, user_id=user.id, at=time.time()
        )
    )
    trail.append(
        connection, user.name, "drawn", f"image {image_id}",
        before={"version": version, "shapes": len(before.shapes)},
        after={"version": version + 1, "shapes": len(shapes),
               "sha256": hashlib.sha256(text.encode()).hexdigest()},
    )  # fmt: skip
    return version + 1


def mask(shapes: Sequence[Shape], size: tuple[int, int]) -> NDArray[np.bool_]:
    """The pixels, (H, W), that shapes mark in an image of ``size`` (height, width).

    A rectangle marks exactly the pixels inside, a brush those within its radius, give or take
    two.
    """
    drawn = Image.new("L", (size[1], size[0]))
    pen = ImageDraw.Draw(drawn)
    for shape in shapes:
        fill = 0 if shape.erase else 255
        if shape.kind == "rectangle":
            (left, right), (top, bottom) = (
                sorted(axis) for axis in zip(*shape.points, strict=True)
            )
            pen.rectangle((left, top, right - 1, bottom - 1), fill)
            continue
        centres = [(x - 0.5, y - 0.5) for x, y in shape.points]
        pen.line(centres, fill, 2 * shape.radius)
        reach = shape.radius - 0.5
        for x, y in centres:
            pen.ellipse((x - reach, y - reach, x + reach, y + reach), fill)
    return np.asarray(drawn) > 0
