"""A station that is killed at any moment, that many send to, or whose disk is full."""

import shutil
import signal
import sqlite3
from pathlib import Path

import pytest
from tests.cdgp.station.serving import grey, serving

from cdgp.station.store import DATABASE
from cdgp_bench.studies import station as study

needs_kill = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")


@needs_kill
def test_what_was_acknowledged_outlives_kills(tmp_path: Path) -> None:
    found = study.kills(tmp_path, 2, seed=None)
    assert found["wrong"] == found["refused"] == []
    assert min(found[name] for name in ("uploads", "reviews", "promotions", "scores")) > 0


@needs_kill
def test_many_clients_lose_nothing_while_models_are_swapped(tmp_path: Path) -> None:
    found = study.load(tmp_path, 48, clients=16, swaps=6)
    assert found["wrong"] == []
    assert set(found["answers"]) <= {"200", "202", "429"}
    assert (found["taken"], found["scores"], found["models_live"]) == (48, 48, 7)


@needs_kill
def test_a_full_disk_stops_uploads_alone(tmp_path: Path) -> None:
    try:
        found = study.kept_while_full(tmp_path, 16, 4)
    except PermissionError as error:
        pytest.skip(f"no disk may be mounted here: {error}")
    assert set(found["filling"]) == {"202", "507"}
    assert found["watched_file_stays"] and found["told_on_page"]
    assert set(found["reviews_at_the_reserve"]) == {"200"}
    assert found["uploads_without_any_space"] == {"507": 5}
    assert set(found["reviews_without_any_space"]) <= {"200", "507"}
    assert set(found["reviews_after"]) <= {"200"}
    assert found["uploads_recover"] and found["watched_file_entered"]
    assert found["reviews_lost"] == 0
    assert found["wrong"] == []


def test_what_is_lost_or_never_sent_is_found(tmp_path: Path) -> None:
    """The campaigns' own check of what was acknowledged."""
    with serving(tmp_path / "home") as served:
        operator = served.person("operator")
        seen = [operator.upload(grey(tmp_path, level), part="p") for level in (50, 100)]
        served.wait()
        for image in seen:
            assert operator.review("good", {"id": image["id"], "version": 0}).status_code == 200
    found = study.held(tmp_path / "home")
    assert found.wrong == []
    told = study.Told(tmp_path / "home", 0)
    told.taken, told.promoted = {"q": 1}, ["attempt 1"]
    told.tried = {(1, 1): "good", (3, 1): "good"}
    told.ticked = {(3, 1)}
    assert told.missing(found) == [
        "part q is lost", "part p is there 2 times", "review (3, 1) is lost",
        "review (2, 1) was never sent", "attempt 1 is there 0 times",
    ]  # fmt: skip


HALVES = {
    "UPDATE scores SET score = score + 1e-9": "score 1 is not that of its model",
    "UPDATE scores SET decision = 'reject'": "score 1 is not of its policy",
    "UPDATE scores SET model_id = 1": "score 1 is not of its policy",
    "DELETE FROM scores": "image 1 has 0 scores",
    "UPDATE images SET verdict = 'good'": "another verdict than its newest review",
    "UPDATE images SET digest = 'x'": "image 1 has no file",
    "UPDATE policies SET reason = 'else'": "policies are not those of the trail",
    "UPDATE models SET digest = 'x' WHERE id = 2": "model 2 has no file",
}


def test_what_was_written_by_halves_is_found(tmp_path: Path) -> None:
    """The campaigns' own check of a home."""
    with serving(tmp_path / "home") as served:
        served.model(0.5, 0.0, 1.0)
        served.model(0.0, 0.0, 1.0)
        served.person("operator").upload(grey(tmp_path, 100), wait=20)
    for number, (statement, words) in enumerate(HALVES.items()):
        home = tmp_path / str(number)
        shutil.copytree(tmp_path / "home", home)
        with sqlite3.connect(home / DATABASE) as file:
            file.execute(statement)
        file.close()
        assert words in "; ".join(study.held(home).wrong), statement
