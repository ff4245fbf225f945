"""What people decide: once, never lost, taken back by who did it; and what is kept."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update
from tests.cdgp.station.serving import Served, grey, serving, stub_score

from cdgp.station import retention, service, trail
from cdgp.station.schema import claims, images, reviews

LEVELS = range(80, 176, 8)
"""Of images that the policy of these tests is unsure of."""


def filled(served: Served, folder: Path, count: int = 12) -> list[int]:
    """Images in the queue; their ids."""
    served.model(0.0, 0.2, 0.8)
    operator = served.person("operator")
    ids = [operator.upload(grey(folder, level))["id"] for level in LEVELS[:count]]
    served.wait()
    return ids


def verdicts(served: Served) -> dict[int, str | None]:
    with served.station.store.read() as connection:
        rows = connection.execute(select(images.c.id, images.c.verdict))
        return {row.id: row.verdict for row in rows}


def test_several_reviewers_get_different_images(served: Served, tmp_path: Path) -> None:
    ids = filled(served, tmp_path)
    one, two = served.person("operator"), served.person("operator", "second")
    first, second = one.claim(served.line, 5), two.claim(served.line, 5)
    assert [image["id"] for image in first] == ids[:5]
    assert [image["id"] for image in second] == ids[5:10]
    assert [image["id"] for image in one.claim(served.line, 6)] == [*ids[:5], ids[10]]
    taken = two.review("good", first[0])
    assert (taken.status_code, taken.json()["images"]) == (409, [ids[0]])
    assert "operator is looking" in taken.json()["detail"]
    with served.station.store.write() as connection:  # five minutes later
        connection.execute(update(claims).values(until=time.time() - 1))
    assert two.review("good", first[0]).status_code == 200
    assert ids[0] not in [image["id"] for image in one.claim(served.line)]


def test_the_reject_bin_is_a_queue_of_its_own(served: Served, tmp_path: Path) -> None:
    served.model(0.0, 0.2, 0.8)
    operator = served.person("operator")
    kinds = {"accept": 10, "unsure": 120, "reject": 240}
    ids = {kind: operator.upload(grey(tmp_path, level))["id"] for kind, level in kinds.items()}
    served.wait()
    assert [image["id"] for image in operator.claim(served.line)] == [ids["unsure"]]
    (image,) = operator.claim(served.line, of="rejected")
    assert image["id"] == ids["reject"]
    assert operator.review("good", image).status_code == 200
    assert operator.claim(served.line, of="rejected") == []
    bins = {name: operator.get(f"/bins?bin={name}").text for name in ("overruled", "accepted")}
    assert f"/images/{ids['reject']}" in bins["overruled"]
    assert f"/images/{ids['accept']}" in bins["accepted"]
    assert f"/images/{ids['reject']}" not in bins["accepted"]


def test_of_many_reviewers_at_once_one_wins(served: Served, tmp_path: Path) -> None:
    (image,) = filled(served, tmp_path, 1)
    people = [served.person("operator", f"p{number}") for number in range(6)]
    codes: list[int] = []

    def work(person: Any) -> None:
        codes.append(person.review("good", {"id": image, "version": 0}).status_code)

    threads = [threading.Thread(target=work, args=(person,)) for person in people]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [200] + [409] * 5
    with served.station.store.read() as connection:
        assert connection.scalar(select(func.count()).select_from(reviews)) == 1


def test_a_bulk_verdict_is_for_all_or_for_none(served: Served, tmp_path: Path) -> None:
    ids = filled(served, tmp_path, 4)
    one, two = served.person("operator"), served.person("operator", "second")
    seen = one.claim(served.line)
    assert two.review("defective", {"id": ids[0], "version": 0}).status_code == 409
    with served.station.store.write() as connection:
        connection.execute(claims.delete())
    assert two.review("defective", {"id": ids[0], "version": 0}).status_code == 200
    lost = one.review("good", *seen)
    assert (lost.status_code, lost.json()["images"]) == (409, [ids[0]])
    assert verdicts(served) == {ids[0]: "defective", **dict.fromkeys(ids[1:])}
    assert one.review("good", *seen[1:]).status_code == 200
    assert verdicts(served) == {ids[0]: "defective", **dict.fromkeys(ids[1:], "good")}


def test_undo_takes_back_step_by_step_and_only_ones_own(served: Served, tmp_path: Path) -> None:
    ids = filled(served, tmp_path, 4)
    one, two = served.person("operator"), served.person("operator", "second")
    seen = one.claim(served.line)
    one.review("good", seen[0])
    one.review("defective", *seen[1:3])
    one.review("unsure", seen[3])
    undo = "/api/v1/reviews/undo"
    assert two.post(undo, json={}).status_code == 400
    states = [verdicts(served)]
    for _ in range(3):
        assert one.post(undo, json={}).status_code == 200
        states.append(verdicts(served))
    a, b, c, d = ids
    assert states == [
        {a: "good", b: "defective", c: "defective", d: "unsure"},
        {a: "good", b: "defective", c: "defective", d: None},
        {a: "good", b: None, c: None, d: None},
        dict.fromkeys(ids),
    ]
    assert one.post(undo, json={}).status_code == 400
    assert [image["version"] for image in one.claim(served.line)] == [2, 2, 2, 2]


def test_an_undo_does_not_overrule_somebody_else(served: Served, tmp_path: Path) -> None:
    (image,) = filled(served, tmp_path, 1)
    one, two = served.person("operator"), served.person("operator", "second")
    one.review("good", {"id": image, "version": 0})
    assert two.review("defective", {"id": image, "version": 1}).status_code == 200
    assert one.post("/api/v1/reviews/undo", json={}).status_code == 409
    assert verdicts(served) == {image: "defective"}
    assert two.post("/api/v1/reviews/undo", json={}).status_code == 200
    assert verdicts(served) == {image: "good"}


def test_what_is_no_verdict_is_refused(served: Served, tmp_path: Path) -> None:
    (image,) = filled(served, tmp_path, 1)
    operator = served.person("operator")
    seen = {"id": image, "version": 0}
    assert operator.review("excellent", seen).status_code == 400
    assert operator.review("good", seen, seen).status_code == 400
    assert operator.review("good", {"id": 999, "version": 0}).status_code == 400
    assert operator.review("good").status_code == 422
    assert verdicts(served) == {image: None}


def test_the_trail_tells_every_verdict(served: Served, tmp_path: Path) -> None:
    (image,) = filled(served, tmp_path, 1)
    operator = served.person("operator")
    operator.review("good", {"id": image, "version": 0})
    operator.review("defective", {"id": image, "version": 1})
    operator.post("/api/v1/reviews/undo", json={})
    with served.station.store.read() as connection:
        told = [
            (e["who"], e["action"], e["before"], e["after"])
            for e in trail.entries(connection)
            if e["subject"] == f"image {image}"
        ]
        trail.verify(connection)
    assert told == [
        ("operator", "reviewed", "null", '"good"'),
        ("operator", "reviewed", '"good"', '"defective"'),
        ("operator", "review taken back", '"defective"', '"good"'),
    ]


def test_the_random_share_is_queued_among_the_others_unmarked(tmp_path: Path) -> None:
    with serving(tmp_path / "home", "audit_share = 0.5\n") as served:
        served.model(0.0, 0.5, 0.8)
        operator = served.person("operator")
        levels = [*range(2, 100, 2), *range(140, 196, 4)]
        ids = [operator.upload(grey(tmp_path, level))["id"] for level in levels]
        served.wait()
        rows = [served.row(key) for key in ids]
        drawn = [row.id for row in rows if row.audit]
        assert 15 < len(drawn) < len(ids) - 15  # of 63, with a probability of one in 10,000
        expected = [row.id for row in rows if row.audit or row.decision == "unsure"]
        queue = operator.claim(served.line)
        assert [image["id"] for image in queue] == expected[: len(queue)]
        suspects = {row.id for row in rows if row.decision == "unsure"}
        # Nothing but the image itself tells the two kinds apart.
        shapes = [{(key, type(value)) for key, value in image.items()} for image in queue]
        assert all(shape == shapes[0] for shape in shapes)
        assert {image["id"] for image in queue} - suspects
        accepted = next(row.id for row in rows if row.audit and row.decision == "accept")
        told = operator.get(f"/api/v1/images/{accepted}").json()
        assert (told["decision"], told["score"]) == (None, None)
        assert "Shown once somebody has reviewed" in operator.get(f"/images/{accepted}").text


def test_retention_keeps_what_was_reviewed_or_drawn(tmp_path: Path) -> None:
    with serving(tmp_path / "home", "retention_days = 30\nfree_gib = 0\n") as served:
        served.model(0.0, 0.5, 0.9)
        operator = served.person("operator")
        kinds = ["old", "reviewed", "undone", "audit", "young", "copy"]
        ids = {
            kind: operator.upload(grey(tmp_path, 10 * number), part=kind)["id"]
            for number, kind in enumerate(kinds)
        }
        ids["unsure"] = operator.upload(grey(tmp_path, 150), part="unsure")["id"]
        ids["twin"] = operator.upload(grey(tmp_path, 50), part="twin")["id"]  # of "copy"
        served.wait()
        operator.review("good", {"id": ids["reviewed"], "version": 0})
        operator.review("good", {"id": ids["twin"], "version": 0})
        operator.review("good", {"id": ids["undone"], "version": 0})
        operator.post("/api/v1/reviews/undo", json={})
        long_ago = time.time() - 31 * 86400
        with served.station.store.write() as connection:
            connection.execute(
                update(images).where(images.c.id != ids["young"]).values(received_at=long_ago)
            )
            connection.execute(update(images).where(images.c.id == ids["audit"]).values(audit=True))
        assert retention.clear(served.station.pipeline) == 1
        gone = {kind for kind, key in ids.items() if served.row(key).removed_at is not None}
        assert gone == {"old"}
        for kind, key in ids.items():
            path = served.station.intake.path(served.row(key).digest)
            assert path.exists() == (kind not in gone), kind
        assert "file removed" in operator.get("/bins?bin=accepted").text
        assert "was removed" in operator.get(f"/images/{ids['old']}").text
        assert operator.get(f"/images/{ids['old']}/view.jpg").status_code == 404


def test_the_same_on_postgresql(tmp_path: Path, postgres: str) -> None:
    with serving(tmp_path / "home", "audit_share = 1\nretention_days = 30\n", postgres) as served:
        served.model(0.0, 0.3, 0.6)
        operator, other = served.person("operator"), served.person("operator", "second")
        told = [operator.upload(grey(tmp_path, level), wait=20) for level in (10, 120, 240)]
        assert [one["decision"] for one in told] == ["accept", "unsure", "reject"]
        assert [one["score"]["value"] for one in told] == [
            stub_score(grey(tmp_path, level), 0.0) for level in (10, 120, 240)
        ]
        seen = operator.claim(served.line, 2)
        assert [image["id"] for image in other.claim(served.line)] == [told[2]["id"]]
        assert operator.review("good", *seen).status_code == 200
        assert other.review("defective", seen[0]).status_code == 409
        assert operator.post("/api/v1/reviews/undo", json={}).status_code == 200
        assert operator.review("good", {"id": seen[0]["id"], "version": 2}).status_code == 200
        drawing = f"/api/v1/images/{seen[0]['id']}/drawing"
        shape = {"kind": "rectangle", "points": [[2, 3], [7, 5]]}
        for version in (0, 1):
            body = {"version": version, "shapes": [shape]}
            assert operator.post(drawing, json=body).json() == {"version": version + 1}
        assert operator.get(drawing).json()["version"] == 2
        assert retention.clear(served.station.pipeline, time.time() + 40 * 86400) == 0
        engineer = served.person("engineer")
        for path in ("/", "/bins?bin=good", f"/images/{seen[0]['id']}", "/audit", "/settings"):
            assert engineer.get(path).status_code == 200, path
        assert 'queue_depth{line="a"} 2.0' in operator.get("/metrics").text
        with served.station.store.read() as connection:
            trail.verify(connection)


def test_files_that_may_go_do_so_at_once_where_an_upload_finds_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CLEAR_PAUSE", 0.02)
    looked: list[int] = []
    cleared = threading.Semaphore(0)

    def clear(pipeline: Any) -> int:
        looked.append(1)
        cleared.release()
        return 0

    monkeypatch.setattr(retention, "clear", clear)
    with serving(tmp_path / "home") as served:
        assert cleared.acquire(timeout=60)  # at the start
        time.sleep(0.2)
        assert len(looked) == 1  # not before ten minutes are over
        poor = served.station.config.model_copy(update={"reserve_gib": 1e9})
        monkeypatch.setattr(served.station.intake, "config", poor)
        assert served.person("operator").upload(grey(tmp_path, 20))["status"] == 507
        assert cleared.acquire(timeout=60)


def test_little_free_space_removes_the_oldest_first(served: Served, tmp_path: Path) -> None:
    served.model(0.0, 0.5, 0.9)
    operator = served.person("operator")
    ids = [operator.upload(grey(tmp_path, level))["id"] for level in (10, 20, 30, 150)]
    served.wait()
    free = iter([1, 1, 10**15])
    pipeline = served.station.pipeline
    before, retention.BATCH = retention.BATCH, 1
    kept, retention._free = retention._free, lambda home: next(free)
    try:
        assert retention.clear(pipeline) == 2
    finally:
        retention.BATCH, retention._free = before, kept
    assert [served.row(key).removed_at is None for key in ids] == [False, False, True, True]
