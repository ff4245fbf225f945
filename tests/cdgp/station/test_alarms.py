"""A line whose light changes raises an alarm with the images that show it, once."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import func, insert, select
from tests.cdgp.station.serving import Served, grey

from cdgp.data.images import read_image
from cdgp.station import schema
from cdgp.station.alarms import REFERENCE, Drift
from cdgp.station.drift import image_statistics
from cdgp.station.pipeline import live_policy


def produce(served: Served, count: int, exposure: float = 1.0, **facts: Any) -> None:
    """Rows of as many scored images, whose brightness varies by 3 %."""
    with served.station.store.write() as connection:
        live = live_policy(connection, served.line)
        assert live
        first = 1 + (connection.scalar(select(func.max(schema.images.c.id))) or 0)
        rng, now = np.random.default_rng(first), time.time()
        keys = range(first, first + count)
        common = {
            "line_id": served.line, "part": "", "lot": "", "camera": "top", "label": "", "size": 1,
            "width": 32, "height": 32, "split": "fit", "audit": False, "received_at": now,
            "attempts": 1, "decision": "accept", "decided_at": now, "problem": "", "version": 0,
        }  # fmt: skip
        connection.execute(
            insert(schema.images),
            [{**common, "id": k, "digest": str(k), "group_name": str(k), **facts} for k in keys],
        )
        told = {"model_id": live.model_id, "policy_id": live.id, "decision": "accept",
                "regions": "[]", "warnings": "[]", "at": now}  # fmt: skip
        connection.execute(insert(schema.scores), [
            {**told, "image_id": k, "score": float(rng.uniform(0.1, 0.3)),
             "brightness": float(exposure * rng.normal(0.5, 0.015)),
             "contrast": float(rng.normal(0.3, 0.01)), "sharpness": float(rng.normal(0.2, 0.01))}
            for k in keys
        ])  # fmt: skip


def alarms_of(served: Served) -> list[Any]:
    with served.station.store.read() as connection:
        return list(connection.execute(select(schema.alarms).order_by(schema.alarms.c.id)))


@pytest.fixture
def watched(served: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A station with a live model, whose drift is watched by the test alone."""
    monkeypatch.setattr(served.station.drift, "step", lambda: 0)
    served.model(0.0)
    return served


def watch(served: Served) -> Drift:
    """Watch from the first image on, as after a start."""
    drift = Drift(served.station.store)
    while drift.step():
        pass
    return drift


def test_what_light_did_to_an_image_is_stored_with_its_score(
    served: Served, tmp_path: Path
) -> None:
    served.model(0.0)
    path = grey(tmp_path, 90)
    served.person("operator").upload(path, wait=20)
    with served.station.store.read() as connection:
        row = connection.execute(select(schema.scores)).one()
    own = image_statistics(read_image(path, 65535))
    assert (row.brightness, row.contrast, row.sharpness) == pytest.approx(own)


def test_a_darker_exposure_alarms_once_and_shows_its_images(watched: Served) -> None:
    produce(watched, REFERENCE + 400)
    drift = watch(watched)
    assert alarms_of(watched) == []
    assert drift.problem == ""
    assert drift.cameras(watched.line, 1) == [("top", REFERENCE + 400, None)]
    produce(watched, 100, exposure=0.85)
    while drift.step():
        pass
    (alarm,) = alarms_of(watched)
    assert alarm.kind == "light"
    assert "brightness lower" in alarm.text
    shown = np.array(json.loads(alarm.images))
    assert shown[0] == shown.max()
    assert np.mean(shown > REFERENCE + 400) >= 0.8
    assert "open alarms: 1" in drift.problem
    watch(watched)  # after a restart
    assert alarms_of(watched) == [alarm]


def test_cameras_are_watched_apart(watched: Served) -> None:
    produce(watched, REFERENCE)
    produce(watched, REFERENCE // 2, exposure=0.5, camera="side")
    produce(watched, 60)
    assert watch(watched).cameras(watched.line, 1) == [
        ("side", REFERENCE // 2, REFERENCE), ("top", REFERENCE + 60, None),
    ]  # fmt: skip
    assert alarms_of(watched) == []


def test_a_reference_of_few_lots_grows(watched: Served) -> None:
    for number in range(19):
        produce(watched, 16, lot=f"lot {number}")
    drift = watch(watched)
    assert drift.cameras(watched.line, 1) == [("top", 304, 450)]
    for number in range(19, 40):
        produce(watched, 16, lot=f"lot {number}")
    while drift.step():
        pass
    assert drift.cameras(watched.line, 1) == [("top", 640, None)]


def test_an_alarm_is_acknowledged_once_with_a_note(watched: Served) -> None:
    produce(watched, REFERENCE)
    produce(watched, 100, exposure=0.7)
    drift = watch(watched)
    (alarm,) = alarms_of(watched)
    operator = watched.person("operator")
    page = operator.get("/drift").text
    assert alarm.text in page
    assert f'href="/images/{json.loads(alarm.images)[0]}"' in page
    place, form = f"/alarms/{alarm.id}/acknowledge", {"line": watched.line, "note": "a lamp"}
    assert watched.person("viewer").post(place, data=form).status_code == 403
    assert operator.post(place, data={**form, "note": " "}).status_code == 400
    assert operator.post(place, data=form).status_code == 303
    assert "already" in operator.post(place, data=form).text
    with watched.station.store.read() as connection:
        last = connection.execute(select(schema.trail).order_by(schema.trail.c.id.desc())).first()
    assert last
    assert (last.action, last.why) == ("alarm acknowledged", "a lamp")
    assert "a lamp" in operator.get("/drift").text
    drift.step()
    assert drift.problem == ""
