"""A station that is killed at any moment, that many send to, or whose disk is full."""

import signal
from pathlib import Path

import pytest

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


def test_what_is_lost_or_there_twice_is_found(tmp_path: Path) -> None:
    """The campaigns' own check: each kind of damage is told."""
    home = tmp_path / "home"
    study.new_home(home)
    told = study.Told(home, 0)
    told.taken, told.promoted = {"1": 1}, ["attempt 1"]
    told.tried = {(1, 1): "good"}
    told.ticked.add((1, 1))
    sound = study.held(home)
    assert sound.wrong == []
    assert told.missing(sound) == [
        "part 1 is lost", "review (1, 1) is lost", "attempt 1 is there 0 times",
    ]  # fmt: skip
