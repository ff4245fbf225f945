"""What a prediction keeps on disk while it runs."""

import os
from pathlib import Path

import pytest

from cdgp.errors import ImageError, OutputError
from cdgp.evaluation import ScoredImage
from cdgp.inference import Region
from cdgp.ledger import LEDGER, Ledger

MARKS = {"model": "12", "--save-maps": "False"}


def row(name: str, score: float = 0.25) -> ScoredImage:
    regions = (Region(1, 2, 3, 4, 5, 6.5), Region(7, 8, 9, 10, 11, 0.125))
    return ScoredImage(name, Path("/pics") / name, None, None, score, score > 0.5, regions)


def test_rows_come_back_by_name_as_often_as_wanted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, MARKS)
    odd = os.fsdecode(b"old_\xff.png")
    rows = [row("b.png", 0.1 + 0.2), row("a/1.png"), row(odd, 0.75), row("ü.png")]
    for one in rows:
        ledger.add(one)
    expected = sorted(rows, key=lambda r: os.fsencode(r.name))
    assert list(ledger) == expected and list(ledger) == expected
    assert len(ledger) == 4 and ledger.rejected == 1 and ledger.unreadable == 0
    assert rows[0] in ledger and row("c.png") not in ledger and "b.png" not in ledger
    ledger.add(row("b.png", 0.5))  # scored again after a kill
    assert len(ledger) == 4


def test_what_was_not_saved_is_done_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, MARKS)
    ledger.add(row("a.png"))
    ledger.save()
    ledger.add(row("b.png"))
    ledger._rows.close()  # as a kill does: nothing is written any more
    again = Ledger(tmp_path, MARKS)
    assert again.has("a.png") and not again.has("b.png")
    again.add(row("b.png"))
    again.close()
    assert len(Ledger(tmp_path, MARKS)) == 2


def test_another_model_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path, MARKS).close()
    with pytest.raises(OutputError, match="another model"):
        Ledger(tmp_path, MARKS | {"model": "13"})
    (tmp_path / LEDGER).write_bytes(b"this is no database, and long enough to look like one" * 9)
    with pytest.raises(OutputError, match=f"{LEDGER}: cannot be used"):
        Ledger(tmp_path, MARKS)


def test_unreadable_images_are_listed_and_tried_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, MARKS)
    ledger.add(row("a.png"))
    ledger.refuse("z\udcff.png", Path("z"), ImageError("z\udcff.png: is empty"))
    assert list(ledger.problems()) == [("z\udcff.png", "z\\udcff.png: is empty")]
    assert ledger.unreadable == 1 and len(ledger) == 1 and ledger.has("z\udcff.png")
    ledger.forget_unreadable()
    assert not ledger.has("z\udcff.png") and ledger.has("a.png")


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, MARKS)
    ledger._rows.execute("PRAGMA max_page_count = 8")  # SQLite's own "database or disk is full"
    with pytest.raises(OutputError, match=rf"{LEDGER}: cannot be used: .*full"):
        for i in range(10_000):
            ledger.add(row(f"{i}.png"))
