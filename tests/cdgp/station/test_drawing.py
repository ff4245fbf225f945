"""Regions that people draw: which pixels, in versions, for metrics and never for training."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sqlalchemy import select, update
from tests.cdgp.station.serving import Person, Served, grey, serving
from tests.helpers import raised

from cdgp.data.images import read_mask_with_facts
from cdgp.data.manifest import Manifest, WeakSample, read_csv
from cdgp.errors import StationError
from cdgp.station import drawing, jobs, retention, retraining, schema, trail
from cdgp.station.drawing import Shape
from cdgp.station.schema import claims, drawings, images

SIZE = (16, 20)
"""(height, width) of the images of ``grey``."""
BOX = {"kind": "rectangle", "points": [[2, 3], [7, 5]]}
STROKE = {"kind": "brush", "radius": 2, "points": [[4, 12], [15, 12]]}


def rectangle(*points: tuple[int, int], erase: bool = False) -> Shape:
    return Shape(kind="rectangle", points=points, erase=erase)


def brush(radius: int, *points: tuple[int, int], erase: bool = False) -> Shape:
    return Shape(kind="brush", radius=radius, points=points, erase=erase)


def distances(points: list[tuple[int, int]], size: tuple[int, int]) -> NDArray[np.float64]:
    """From the middle of each pixel to the nearest place on a line through the points."""
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    found = np.full(size, np.inf)
    for (x0, y0), (x1, y1) in zip(points, points[1:] or points, strict=False):
        long = (x1 - x0) ** 2 + (y1 - y0) ** 2
        along = np.clip(((x - x0) * (x1 - x0) + (y - y0) * (y1 - y0)) / max(long, 1), 0, 1)
        found = np.minimum(found, np.hypot(x - x0 - along * (x1 - x0), y - y0 - along * (y1 - y0)))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_a_brush_marks_the_pixels_within_its_radius(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, radius = (90, 120), int(rng.integers(1, 20))
    count = int(rng.integers(1, 6))
    points = [(int(x), int(y)) for x, y in rng.integers((0, 0), (121, 91), (count, 2))]
    marked, away = drawing.mask([brush(radius, *points)], size), distances(points, size)
    assert marked[away < radius - 2].all()
    assert not marked[away > radius + 2].any()
    assert all(marked[min(y, 89), min(x, 119)] for x, y in points)


def test_rectangles_are_exact_and_later_shapes_lie_above() -> None:
    expected = np.zeros(SIZE, np.bool_)
    expected[3:9, 2:12] = True
    expected[5:7, 4:6] = False
    expected[6:8, 5:7] = True
    shapes = [
        rectangle((12, 9), (2, 3)),
        rectangle((4, 7), (6, 5), erase=True),
        rectangle((5, 6), (7, 8)),
    ]  # fmt: skip
    np.testing.assert_array_equal(drawing.mask(shapes, SIZE), expected)
    whole = rectangle((0, 0), (20, 16))
    assert drawing.mask([whole], SIZE).all()
    assert drawing.checked([whole, rectangle((0, 0), (20, 16), erase=True)], SIZE) == ()


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([rectangle((0, 0), (21, 5))], "leaves the image"),
        ([rectangle((3, 4), (9, 4))], "an area"),
        ([rectangle((3, 4), (9, 5), (9, 9))], "two corners"),
        ([brush(0, (3, 4))], "radius"),
        ([brush(1, (1, 1))] * 201, "at most 200 shapes"),
        ([brush(1, *[(1, 1)] * 2001)] * 2, "4000 points"),
    ],
)
def test_what_does_not_fit_is_refused(shapes: list[Shape], words: str) -> None:
    raised(lambda: drawing.checked(shapes, SIZE), words, error=StationError)


def draw(person: Person, image: int, version: int, *shapes: Any) -> Any:
    asked = {"version": version, "shapes": shapes}
    return person.post(f"/api/v1/images/{image}/drawing", json=asked)


def uploaded(served: Served, folder: Path, *levels: int) -> list[int]:
    served.model(0.0, 0.0, 1.0)  # everything goes to a person
    operator = served.person("operator")
    ids = [operator.upload(grey(folder, level), part=f"part {level}")["id"] for level in levels]
    served.wait()
    return ids


def test_a_drawing_is_kept_in_versions_and_shown_to_the_next_reviewer(
    served: Served, tmp_path: Path
) -> None:
    (image,) = uploaded(served, tmp_path, 100)
    one, two = served.person("operator"), served.person("operator", "second")
    place = f"/api/v1/images/{image}/drawing"
    assert one.get(place).json() == {"version": 0, "who": "", "shapes": []}
    assert draw(one, image, 0, BOX).json() == {"version": 1}
    assert draw(one, image, 1, BOX, STROKE).json() == {"version": 2}
    (shown,) = two.claim(served.line)
    assert shown["version"] == 0  # of reviews, which are counted apart
    assert shown["drawing"]["version"] == 2
    assert [shape["points"] for shape in shown["drawing"]["shapes"]] == [
        BOX["points"], STROKE["points"],
    ]  # fmt: skip
    held = draw(one, image, 2)
    assert (held.status_code, held.json()["images"]) == (409, [image])
    assert "second is looking" in held.json()["detail"]
    assert two.review("defective", shown).status_code == 200
    assert draw(two, image, 2, BOX).json() == {"version": 3}
    lost = draw(one, image, 2, STROKE)
    assert (lost.status_code, lost.json()["images"]) == (409, [image])
    assert "second has drawn" in lost.json()["detail"]
    assert "1 shapes, version 3 by second" in one.get(f"/images/{image}").text
    with served.station.store.read() as connection:
        kept = connection.execute(select(drawings).order_by(drawings.c.version)).fetchall()
        told = [e for e in trail.entries(connection) if e["action"] == "drawn"]
        trail.verify(connection)
    assert [len(json.loads(row.shapes)) for row in kept] == [1, 2, 1]
    assert [e["who"] for e in told] == ["operator", "operator", "second"]
    assert {e["subject"] for e in told} == {f"image {image}"}
    assert json.loads(told[1]["before"]) == {"version": 1, "shapes": 1}


def test_limits_and_roles_hold_on_the_server(served: Served, tmp_path: Path) -> None:
    (image,) = uploaded(served, tmp_path, 100)
    operator = served.person("operator")
    assert draw(served.person("viewer"), image, 0, BOX).status_code == 403
    assert draw(operator, 999, 0, BOX).status_code == 404
    for wrong in (
        {**BOX, "points": [[0, 0], [21, 3]]}, {**STROKE, "radius": 201}, {**BOX, "kind": "star"},
        {**STROKE, "points": []}, {**STROKE, "points": [[-1, 0]]}, {**STROKE, "points": [[0.5, 0]]},
        {**STROKE, "points": [[1, 1]] * 4001}, {**BOX, "name": "<script>"},
    ):  # fmt: skip
        assert draw(operator, image, 0, wrong).status_code in (400, 422), wrong
    assert draw(operator, image, 0, *[BOX] * 201).status_code == 422
    large = {**STROKE, "points": [[1, 1]] * 60_000}
    assert draw(operator, image, 0, large).status_code == 413
    assert operator.get(f"/api/v1/images/{image}/drawing").json()["version"] == 0


def test_retention_keeps_what_was_drawn_on(tmp_path: Path) -> None:
    with serving(tmp_path / "home", "retention_days = 30\nfree_gib = 0\n") as served:
        first, second = uploaded(served, tmp_path, 10, 20)
        served.model(0.0, 0.9, 1.0)
        with served.station.store.write() as connection:
            connection.execute(update(images).values(decision="accept"))
        assert draw(served.person("operator"), first, 0, BOX).status_code == 200
        with served.station.store.read() as connection:
            received = connection.scalars(select(images.c.received_at)).all()
        assert retention.clear(served.station.pipeline, max(received) + 40 * 86400) == 1
        assert (served.row(first).removed_at is None, served.row(second).removed_at is None) == (
            True, False,
        )  # fmt: skip
        assert draw(served.person("operator"), second, 0, BOX).status_code == 400


def digested(manifest: Manifest) -> Manifest:
    """With digests of the pixels, as training takes it; here those of the files do."""
    samples = (replace(sample, pixel_sha256=sample.sha256) for sample in manifest.samples)
    return replace(manifest, samples=tuple(samples))


def test_drawings_become_masks_of_test_images_and_reach_no_training(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = ["fit", "fit", "calibration", "test", "test", "test", "test"]
    ids = uploaded(served, tmp_path, *range(20, 20 * len(splits) + 20, 20))
    operator = served.person("operator")
    for number, seen in enumerate(operator.claim(served.line)):
        assert seen["id"] == ids[number]
        operator.review("good" if number in (0, 6) else "defective", seen)
    with served.station.store.write() as connection:
        for image, split in zip(ids, splits, strict=True):
            connection.execute(
                update(images).where(images.c.id == image).values(split=split, audit=True)
            )
        connection.execute(claims.delete())
    intake = served.station.intake

    def snapshot() -> retraining.Snapshot:
        with served.station.store.read() as connection:
            return retraining.snapshot(connection, intake, served.line, tmp_path)

    bare = snapshot().manifest
    for image in ids:
        assert draw(operator, image, 0, BOX, STROKE).status_code == 200
    assert draw(operator, ids[5], 1).status_code == 200  # erased again
    drawn = snapshot().manifest
    digests = {served.row(image).digest: image for image in ids}
    masks = {digests[s.image.name]: s.masks for s in drawn.samples if s.masks}
    assert set(masks) == {ids[3], ids[4]}
    # What training receives is the same, and has no place for a mask.
    assert digested(drawn).weak_split() == digested(bare).weak_split()
    assert {field.name for field in fields(WeakSample)} == {"image", "defective"}

    assert "2 drawings on defective test images" in operator.get("/jobs").text
    made: list[Path] = []
    monkeypatch.setattr(jobs, "create", lambda folder, table, options: made.append(table))
    monkeypatch.setattr(jobs, "start", lambda folder: None)
    served.station.retraining.create((1, "first"), served.line)
    written = read_csv(made[0])
    expected = np.zeros(SIZE, np.bool_)
    expected[3:5, 2:7] = True
    for sample in written.samples:
        assert len(sample.masks) == (digests[sample.image.name] in masks)
        for path in sample.masks:
            marked, facts = read_mask_with_facts(path, SIZE)
            assert facts.told == ""
            np.testing.assert_array_equal(marked[:8], expected[:8])
            assert marked[11:13, 4:15].all() and not marked[15].any()
    with served.station.store.read() as connection:
        assert connection.scalar(select(schema.jobs.c.id)) == 1
