"""What comes in: once, whole, counted, named by its digest; watched folders."""

import errno
import hashlib
import random
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sqlalchemy import func, select
from tests.cdgp.station.serving import Served, grey, serving, stub_score
from tests.helpers import raised

from cdgp.errors import SettingsError
from cdgp.station import config, intake
from cdgp.station.schema import groups, images, scores


def test_an_upload_is_scored_and_decided_by_the_policy(served: Served, tmp_path: Path) -> None:
    served.model(0.0, 0.3, 0.7)
    operator = served.person("operator")
    for level, decision in [(20, "accept"), (128, "unsure"), (240, "reject")]:
        path = grey(tmp_path, level)
        told = operator.upload(path, part=f"p{level}", lot="l", wait=20)
        assert told["status"] == 200
        assert told["decision"] == decision
        assert told["digest"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert told["score"]["value"] == stub_score(path, 0.0)
        kept = served.station.intake.path(told["digest"])
        assert kept.read_bytes() == path.read_bytes()


def test_without_waiting_it_is_202_and_the_same_again_changes_nothing(
    served: Served, tmp_path: Path
) -> None:
    operator = served.person("operator")
    path = grey(tmp_path, 50)
    first = operator.upload(path, part="p")
    assert (first["status"], first["new"], first["decision"]) == (202, True, None)
    served.wait()
    again = operator.upload(path, part="p", lot="another")
    assert (again["status"], again["new"], again["id"]) == (200, False, first["id"])
    other = operator.upload(path, part="q")
    assert other["new"]
    assert other["id"] != first["id"]


def test_a_line_without_a_model_asks_a_person(served: Served, tmp_path: Path) -> None:
    told = served.person("operator").upload(grey(tmp_path, 50), wait=20)
    assert (told["decision"], told["problem"], told["score"]) == (
        "unsure", "the line has no model", None,
    )  # fmt: skip


def test_the_same_image_at_the_same_time_is_there_once(served: Served, tmp_path: Path) -> None:
    operator, path = served.person("operator"), grey(tmp_path, 60)
    told: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda: told.append(operator.upload(path))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(one["new"] for one in told) == 1
    assert len({one["id"] for one in told}) == 1


def test_what_is_no_image_is_refused_and_leaves_nothing(served: Served, tmp_path: Path) -> None:
    operator = served.person("operator")
    cut = tmp_path / "cut.png"
    cut.write_bytes(grey(tmp_path, 10).read_bytes()[:20])
    small = tmp_path / "small.png"
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(small)
    script = tmp_path / "x.png"
    script.write_bytes(b"<svg onload=alert(1)>")
    empty = tmp_path / "empty.png"
    empty.touch()
    for path in (cut, small, script, empty):
        told = operator.upload(path)
        assert told["status"] == 422, path
        assert str(served.station.store.home) not in told["detail"]
    assert not list(served.station.intake.incoming.iterdir())
    assert not served.station.intake.images.exists()


def test_too_many_bytes_or_pixels_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "home", "image_mib = 0.01\nmegapixels = 0.001\n") as served:
        operator = served.person("operator")
        big = tmp_path / "big.bmp"
        Image.fromarray(np.zeros((200, 200), np.uint8)).save(big)
        assert operator.upload(big)["status"] == 413

        def chunks() -> Any:  # no Content-Length
            for _ in range(20):
                yield bytes(1000)

        answer = operator.post("/api/v1/images", params={"line": "a"}, content=chunks())
        assert answer.status_code == 413
        bomb = tmp_path / "bomb.png"
        Image.fromarray(np.zeros((100, 100), np.uint8)).save(bomb)
        assert "pixels" in operator.upload(bomb)["detail"]
        assert not list(served.station.intake.incoming.iterdir())
        form = operator.post("/lines", data={"name": "x" * 300_000})
        assert form.status_code == 413


NAMES = [
    "../../etc/passwd",
    "..\\..\\x",
    "/etc/passwd",
    "a\0b",
    "<script>",
    "%2e%2e%2f",
    "名前.png",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_labels_and_never_paths(served: Served, tmp_path: Path, name: str) -> None:
    operator = served.person("operator")
    told = operator.upload(grey(tmp_path, 70), name=name)
    assert told["status"] == 202
    home = served.station.store.home
    outside = [p for p in tmp_path.rglob("*") if p.is_file() and not p.is_relative_to(home)]
    assert [p.name for p in outside] == ["70-0.png"]
    assert served.station.intake.path(told["digest"]).is_file()
    page = operator.get(f"/images/{told['id']}").text
    assert "<script>" not in page.replace("<script src=", "")


def test_fields_that_cannot_be_kept_are_refused(served: Served, tmp_path: Path) -> None:
    operator = served.person("operator")
    path = grey(tmp_path, 70)
    assert operator.upload(path, lot="x" * 201)["status"] == 400
    assert operator.upload(path, part="a\x1b[2J")["status"] == 400
    assert operator.upload(path, line="nobody")["status"] == 404


def test_a_full_backlog_asks_to_come_later(tmp_path: Path) -> None:
    with serving(tmp_path / "home", "backlog = 2\n") as served:
        served.station.pipeline.step = lambda pool: 0  # type: ignore[method-assign]
        operator = served.person("operator")
        for level in (10, 20):
            assert operator.upload(grey(tmp_path, level))["status"] == 202
        answer = operator.post(
            "/api/v1/images", params={"line": "a"}, content=grey(tmp_path, 30).read_bytes()
        )
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "5")


def test_a_full_disk_is_507_and_reviews_go_on(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = served.person("operator")
    operator.upload(grey(tmp_path, 10), wait=20)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert operator.upload(grey(tmp_path, 20))["status"] == 507
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(intake, "GIB", usage.free * 10)
        patch.setattr(served.station.intake, "config", config.Config(reserve_gib=1))
        assert operator.upload(grey(tmp_path, 20))["status"] == 507
        (image,) = operator.claim(served.line)
        assert operator.review("good", image).status_code == 200
    assert operator.upload(grey(tmp_path, 20))["status"] == 202


def test_a_groups_split_is_fixed_and_copies_share_it(tmp_path: Path) -> None:
    toml = "test_share = 0.4\ncalibration_share = 0.3\n"
    with serving(tmp_path / "home", toml) as served:
        operator = served.person("operator")
        split: dict[str, str] = {}
        for group in range(40):
            for image in range(2):
                path = grey(tmp_path, 5 * group, image)
                told = operator.upload(path, part=f"{group} {image}", group=str(group))
                row = served.row(told["id"])
                assert split.setdefault(row.group_name, row.split) == row.split
        copy = operator.upload(grey(tmp_path, 0, 0), part="x", group="39")
        assert served.row(copy["id"]).split == split["0"]
        counts = Counter(split.values())
        assert set(counts) == {"fit", "calibration", "test"}


def test_files_that_come_again_leave_each_group_in_one_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part and group they come under, known ones and new ones, in any order."""
    toml = "test_share = 0.4\ncalibration_share = 0.3\n"
    with serving(tmp_path / "home", toml) as served:
        monkeypatch.setattr(served.station.pipeline, "step", lambda pool: 0)
        monkeypatch.setattr(served.station.intake, "_random", random.Random(0))
        rng = np.random.default_rng(0)
        for number in range(80):
            file = grey(tmp_path, 10 * int(rng.integers(12)))
            facts = intake.Facts(
                part=f"part {number}" if rng.random() < 0.8 else "",
                group=f"group {rng.integers(20)}" if rng.random() < 0.7 else "",
            )
            with served.station.intake.receiving() as incoming:
                incoming.add(file.read_bytes())
                served.station.intake.enter(incoming, served.line, facts)
        with served.station.store.read() as connection:
            rows = connection.execute(select(images)).fetchall()
            known = dict(map(tuple, connection.execute(select(groups.c.name, groups.c.split))))
    assert len(rows) > 50
    assert {row.split for row in rows} == {"fit", "calibration", "test"}
    assert all(known[row.group_name] == row.split for row in rows)
    assert len({(row.digest, row.split) for row in rows}) == len({row.digest for row in rows})


def test_a_group_that_begins_with_a_known_file_follows_it(tmp_path: Path) -> None:
    with serving(tmp_path / "home", "test_share = 1.0\ncalibration_share = 0.0\n") as served:
        operator = served.person("operator")
        file, other = grey(tmp_path, 10), grey(tmp_path, 20)
        first = served.row(operator.upload(file, part="a", group="one")["id"])
        shares = {"test_share": 0.0, "calibration_share": 1.0}
        served.station.intake.config = served.station.config.model_copy(update=shares)
        served.row(operator.upload(grey(tmp_path, 30), part="x", group="three")["id"])
        again = served.row(operator.upload(file, part="b", group="two")["id"])
        follows = served.row(operator.upload(other, part="c", group="two")["id"])
        third = served.row(operator.upload(file, part="d", group="three")["id"])
        stays = served.row(operator.upload(grey(tmp_path, 40), part="e", group="three")["id"])
    assert [(row.group_name, row.split) for row in (first, again, follows, third, stays)] == [
        ("one", "test"), ("one", "test"), ("two", "test"), ("one", "test"),
        ("three", "calibration"),
    ]  # fmt: skip


def test_each_score_names_the_model_that_gave_it(served: Served, tmp_path: Path) -> None:
    """Uploads go on while models are swapped; every score is recomputed."""
    offsets = {served.model(0.0): 0.0}
    operator = served.person("operator")
    paths = [grey(tmp_path, 3 * i) for i in range(80)]

    def swap() -> None:
        for step in range(1, 10):
            offset = step / 10
            offsets[served.model(offset)] = offset

    swapping = threading.Thread(target=swap)
    swapping.start()
    ids = {operator.upload(path, part=path.name)["id"]: path for path in paths}
    swapping.join()
    served.wait()
    last = operator.upload(grey(tmp_path, 255), part="last", wait=20)
    ids[last["id"]] = grey(tmp_path, 255)
    with served.station.store.read() as connection:
        found = connection.execute(select(scores)).fetchall()
    assert len(found) == len(ids)
    for row in found:
        assert row.score == stub_score(ids[row.image_id], offsets[row.policy_id])
    assert last["score"]["policy"] == max(offsets)


def test_a_model_that_cannot_be_loaded_changes_nothing(served: Served, tmp_path: Path) -> None:
    served.model(0.0)
    engineer = served.person("engineer")
    (served.station.candidates / "bad.onnx").write_text("no model")
    assert engineer.post("/models", data={"file": "bad.onnx"}).status_code == 400
    assert engineer.post("/models", data={"file": "../station.db"}).status_code == 404
    outside = tmp_path / "outside.onnx"
    outside.write_text("0.5")
    (served.station.candidates / "link.onnx").symlink_to(outside)
    assert engineer.post("/models", data={"file": "link.onnx"}).status_code == 404
    told = served.person("operator").upload(grey(tmp_path, 10), wait=20)
    assert told["score"]["value"] == stub_score(grey(tmp_path, 10), 0.0)


def test_a_model_that_is_gone_is_told_and_stops_no_other_line(
    served: Served, tmp_path: Path
) -> None:
    served.model(0.0)
    operator, pipeline = served.person("operator"), served.station.pipeline
    served.person("engineer").post("/lines", data={"name": "b"})
    (file,) = pipeline.models.glob("*.onnx")
    kept = file.read_bytes()
    file.write_bytes(b"0.9")
    pipeline._loaded.clear()  # as after a restart
    waiting = [operator.upload(grey(tmp_path, level)) for level in (10, 20)]
    assert operator.upload(grey(tmp_path, 30), line="b", wait=20)["decision"] == "unsure"
    assert served.row(waiting[0]["id"]).decision is None
    assert "was changed" in operator.get("/").text
    file.write_bytes(kept)
    pipeline.ready_to_serve(1)
    served.wait()
    assert served.row(waiting[1]["id"]).decision == "accept"
    assert served.station.problems() == []


def test_an_image_that_ends_the_process_twice_goes_to_a_person(
    served: Served, tmp_path: Path
) -> None:
    served.model(0.0)
    operator = served.person("operator")
    with served.station.store.write() as connection:  # the scorer cannot take it meanwhile
        connection.execute(select(func.count()).select_from(images))
    served.station.pipeline.step, kept = lambda pool: 0, served.station.pipeline.step  # type: ignore[method-assign]
    bad = operator.upload(grey(tmp_path, 10), part="bad")["id"]
    fine = operator.upload(grey(tmp_path, 20), part="fine")["id"]
    with served.station.store.write() as connection:
        connection.execute(images.update().where(images.c.id == bad).values(attempts=2))
        connection.execute(images.update().where(images.c.id == fine).values(attempts=1))
    served.station.pipeline.step = kept  # type: ignore[method-assign]
    served.wait()
    assert "ended twice" in served.row(bad).problem
    assert (served.row(fine).problem, served.row(fine).decision) == ("", "accept")


# --- watched folders ------------------------------------------------------------------------------


def watching(folder: Path) -> str:
    return f'[[watch]]\nfolder = "{folder}"\nline = "b"\ncamera = "c1"\n'


def entered(served: Served) -> list[str]:
    with served.station.store.read() as connection:
        return list(connection.scalars(select(images.c.label).order_by(images.c.label)))


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher looks only when a test says so."""
    monkeypatch.setattr("cdgp.station.watching.Watcher.run", lambda self, stop: None)


def test_watched_files_are_taken_once_whole_and_stay(tmp_path: Path, still: None) -> None:
    folder = tmp_path / "camera"
    grey(folder / "deep", 10)
    with serving(tmp_path / "home", watching(folder)) as served:
        look = served.station.watcher.look
        assert look(0.0) == 0
        growing = folder / "growing.png"
        content = grey(tmp_path, 90).read_bytes()
        growing.write_bytes(content[:50])
        assert look(2.0) == 1  # the first is whole; the other was not seen before
        growing.write_bytes(content)
        assert look(3.5) == 0
        assert look(5.0) == 1
        assert look(9.0) == 0
        assert entered(served) == ["10-0.png", "growing.png"]
        assert growing.read_bytes() == content
        served.wait()
    with serving_again(tmp_path / "home") as again:  # a restart reads nothing anew
        assert again.look(0.0) == again.look(5.0) == 0


def serving_again(home: Path) -> Any:
    from contextlib import contextmanager

    from cdgp.station.service import Station

    @contextmanager
    def opened() -> Any:
        station = Station(home)
        try:
            yield station.watcher
        finally:
            station.store.close()

    return opened()


def test_links_and_what_is_no_image_are_passed_over(tmp_path: Path, still: None) -> None:
    folder, outside = tmp_path / "camera", tmp_path / "outside"
    folder.mkdir()
    secret = grey(outside, 10)
    (folder / "link.png").symlink_to(secret)
    (folder / "there").symlink_to(outside)
    (folder / ".hidden.png").write_bytes(secret.read_bytes())
    (folder / "notes.txt").write_text("no image")
    (folder / "torn.png").write_bytes(secret.read_bytes()[:30])
    with serving(tmp_path / "home", watching(folder)) as served:
        served.station.watcher.look(0.0)
        served.station.watcher.look(2.0)
        served.station.watcher.look(4.0)
        assert entered(served) == []
        grey(tmp_path, 20).replace(folder / "torn.png")  # repaired, it is tried again
        served.station.watcher.look(6.0)
        served.station.watcher.look(8.0)
        assert entered(served) == ["torn.png"]


def test_watched_files_wait_where_they_are_while_the_disk_is_full(
    tmp_path: Path, still: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "camera"
    path = grey(folder, 10)
    with serving(tmp_path / "home", watching(folder)) as served:
        with monkeypatch.context() as patch:
            poor = served.station.config.model_copy(update={"reserve_gib": 1e9})
            patch.setattr(served.station.intake, "config", poor)
            served.station.watcher.look(0.0)
            for now in (2.0, 3.0, 4.0):
                served.station.watcher.look(now)
                assert "free" in served.station.problems()[0]
        assert path.exists()
        served.station.watcher.look(4.0)
        served.station.watcher.look(6.0)
        assert served.station.problems() == []
        assert entered(served) == ["10-0.png"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("imagemib = 3", "imagemib"),
        ("audit_share = 2", "audit_share"),
        ("test_share = 0.6\ncalibration_share = 0.6", "more than 1"),
        ('[[watch]]\nfolder = "relative"\nline = "a"', "absolute"),
        ('[[watch]]\nfolder = "/nowhere/at/all"\nline = "a"', "no folder"),
        ("audit_share =", "no TOML"),
    ],
)
def test_wrong_configurations_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "station.toml").write_text(text)
    raised(lambda: config.read_config(tmp_path), "station.toml", words, error=SettingsError)
