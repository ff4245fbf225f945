"""What a prediction keeps on disk while it runs."""

import csv
import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from cdgp.errors import OutputError
from cdgp.evaluation import ScoredImage
from cdgp.inference import Region
from cdgp.ledger import Ledger
from cdgp.run_folder import LEDGER, WORKING

CACHE_KEY = {"model": "12", "--save-maps": "False"}


def row(name: str, score: float = 0.25) -> ScoredImage:
    regions = (Region(1, 2, 3, 4, 5, 6.5), Region(7, 8, 9, 10, 11, 0.125))
    return ScoredImage(name, Path("/pics") / name, None, None, score, score > 0.5, regions)


def test_rows_come_back_by_name_as_often_as_wanted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, CACHE_KEY)
    odd = os.fsdecode(b"old_\xff.png")
    doubtful = replace(row("ü.png"), warnings=("CMYK without an Adobe marker", 'says "; "'))
    rows = [row("b.png", 0.1 + 0.2), row("a/1.png"), row(odd, 0.75), doubtful]
    for one in rows:
        ledger.add(one)
    expected = sorted(rows, key=lambda r: os.fsencode(r.name))
    assert list(ledger) == expected and list(ledger) == expected
    assert len(ledger) == 4 and ledger.rejected == 1 and ledger.unreadable == 0
    assert ledger.warned == 1
    assert rows[0] in ledger and row("c.png") not in ledger and "b.png" not in ledger
    ledger.add(row("b.png", 0.5))  # scored again after a kill
    assert len(ledger) == 4


def test_what_was_not_saved_is_done_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, CACHE_KEY)
    ledger.add(row("a.png"))
    ledger.save()
    ledger.add(row("b.png"))
    ledger._rows.close()  # as a kill does: nothing is written any more
    again = Ledger(tmp_path, CACHE_KEY)
    assert again.has("a.png") and not again.has("b.png")
    again.add(row("b.png"))
    again.close()
    assert len(Ledger(tmp_path, CACHE_KEY)) == 2


def test_another_model_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path, CACHE_KEY).close()
    with pytest.raises(OutputError, match="another model"):
        Ledger(tmp_path, CACHE_KEY | {"model": "13"})
    (tmp_path / LEDGER).write_bytes(b"this is no database, and long enough to look like one" * 9)
    with pytest.raises(OutputError, match=f"{LEDGER}: cannot be used"):
        Ledger(tmp_path, CACHE_KEY)


def test_an_unfinished_file_of_another_version_is_refused(tmp_path: Path) -> None:
    """The layout before there was a version number: a table of marks in place of the key."""
    with sqlite3.connect(tmp_path / LEDGER) as old:
        old.execute("CREATE TABLE marks (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        old.execute("CREATE TABLE images (name BLOB PRIMARY KEY, path BLOB NOT NULL, score REAL)")
    old.close()
    with pytest.raises(OutputError, match="another version"):
        Ledger(tmp_path, CACHE_KEY)


def test_a_kill_while_the_file_is_made_leaves_a_file_that_can_be_used(tmp_path: Path) -> None:
    (tmp_path / LEDGER).touch()
    Ledger(tmp_path, CACHE_KEY).close()
    assert len(Ledger(tmp_path, CACHE_KEY)) == 0


def test_unreadable_images_are_listed_and_tried_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, CACHE_KEY)
    ledger.add(row("a.png"))
    ledger.add_unreadable("z\udcff.png", Path("z"), "z\udcff.png: is empty")
    assert list(ledger.problems()) == [("z\udcff.png", "z\\udcff.png: is empty")]
    ledger.write_unreadable(tmp_path / "unreadable.csv", "12ab")
    with (tmp_path / "unreadable.csv").open() as file:
        assert list(csv.reader(file)) == [
            ["image", "problem", "run_id"],
            ["z\\udcff.png", "z\\udcff.png: is empty", "12ab"],
        ]
    assert ledger.unreadable == 1 and len(ledger) == 1 and ledger.has("z\udcff.png")
    ledger.forget_unreadable()
    assert not ledger.has("z\udcff.png") and ledger.has("a.png")


def test_a_full_disk_is_an_error_with_the_files_name(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, CACHE_KEY)
    ledger._rows.execute("PRAGMA max_page_count = 8")  # SQLite's own "database or disk is full"
    with pytest.raises(OutputError, match=rf"{LEDGER}: cannot be used: .*full"):
        for i in range(10_000):
            ledger.add(row(f"{i}.png"))


def killed(ledger: Ledger) -> None:
    """What is left when the process ends in the middle: nothing is saved or removed any more."""
    ledger._rows.close()


def test_an_image_that_ends_the_process_is_given_up_at_its_third_start(tmp_path: Path) -> None:
    for _ in range(2):
        ledger = Ledger(tmp_path, CACHE_KEY)
        ledger.forget_unreadable()
        assert ledger.begin("a long name/before.png")
        ledger.add(row("a long name/before.png"))  # lost with the process, and begun again
        assert ledger.begin("bad.png")
        killed(ledger)
    ledger = Ledger(tmp_path, CACHE_KEY)
    assert ledger.begin("a long name/before.png") and not ledger.begin("bad.png")
    ledger.add_unreadable("bad.png", Path("bad.png"), "the process ended twice")
    ledger.close()
    assert not (tmp_path / WORKING).exists()
    again = Ledger(tmp_path, CACHE_KEY)
    again.forget_unreadable()
    assert not again.begin("bad.png"), "a later --resume does not die of it either"


def test_one_end_and_any_number_of_stops_condemn_no_image(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, CACHE_KEY)
    ledger.begin("a.png")
    killed(ledger)
    for _ in range(5):
        ledger = Ledger(tmp_path, CACHE_KEY)
        assert ledger.begin("a.png")
        ledger.close()  # Ctrl-C, a full disk
    ledger = Ledger(tmp_path, CACHE_KEY)
    for name in ("a.png", "b.png"):  # two ends in two images
        assert ledger.begin(name)
        killed(ledger)
        ledger = Ledger(tmp_path, CACHE_KEY)
    assert not ledger.begin("a.png") and ledger.begin("b.png")


def test_of_several_in_work_the_one_that_ends_the_process_alone_is_given_up(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, CACHE_KEY)
    for name in ("done.png", "a.png", "bad.png", "b.png"):
        assert ledger.begin(name)
    ledger.add(row("done.png"))
    ledger.save()
    killed(ledger)
    ledger = Ledger(tmp_path, CACHE_KEY)
    assert ledger.suspected == {"a.png", "bad.png", "b.png"}
    assert ledger.begin("a.png")
    ledger.add(row("a.png"))
    ledger.save()
    assert ledger.begin("bad.png")
    killed(ledger)
    ledger = Ledger(tmp_path, CACHE_KEY)
    assert ledger.suspected == {"bad.png", "b.png"}
    assert ledger.begin("b.png") and not ledger.begin("bad.png")


def test_an_image_that_was_finished_and_saved_ended_nothing(tmp_path: Path) -> None:
    for _ in range(3):
        ledger = Ledger(tmp_path, CACHE_KEY)
        assert ledger.begin("a.png")
        ledger.add(row("a.png"))
        ledger.save()
        killed(ledger)


@pytest.mark.parametrize("mask", [0o077, 0o002], ids=oct)
def test_the_umask_alone_sets_permissions(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        ledger = Ledger(tmp_path, CACHE_KEY)
        ledger.begin("a.png")
        for name in (LEDGER, WORKING):
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o666 & ~mask
        ledger.close()
    finally:
        os.umask(before)
