"""Whole files, their permissions, cells of tables, names on a terminal, places by any name."""

import csv
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdgp import files
from cdgp.errors import OutputError
from cdgp.files import atomic_write, is_same, lies_in, visible, write_csv, write_text


@pytest.fixture(params=[0o077, 0o002, 0o022], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    mask: int = request.param
    before = os.umask(mask)
    yield mask
    os.umask(before)


def test_the_umask_alone_sets_permissions(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some shares refuse every chmod; temporary files are private nowhere else."""

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError

    for name in ("chmod", "fchmod", "lchmod"):
        monkeypatch.setattr(os, name, refuse, raising=False)
    new = tmp_path / "new/deeper"
    write_text(new / "a.txt", "a")
    write_csv(new / "a.csv", ["a"], [["b"]])
    files.save_tensors(new / "a.safetensors", {"a": torch.zeros(3)}, {})
    (new / "old.txt").touch(0o600)
    write_text(new / "old.txt", "new")  # as a colleague in the group replaces it
    for path in new.iterdir():
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask, path
    for folder in (new, new.parent):
        assert folder.stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_write_that_fails_leaves_the_earlier_file_alone(tmp_path: Path) -> None:
    place = tmp_path / "a.txt"
    place.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_write(place) as temporary:
        temporary.write_text("half")
        assert temporary.parent == tmp_path and temporary.suffix == ".txt"
        raise ZeroDivisionError
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]
    with pytest.raises(OutputError, match="cannot be written"):
        write_text(place / "below", "a")


STARTS = st.sampled_from(["=", "+", "-", "@", "\t", "\r", "\n", "'", "''=", "'=", "a", ""])
TEXTS = st.builds(
    lambda start, rest: start + rest, STARTS, st.text(st.characters(exclude_categories=["Cs"]))
)


@given(TEXTS)
def test_no_text_cell_is_a_formula_and_each_gives_its_text_back(text: str) -> None:
    cell = files.text_cell(text)
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    assert files.cell_text(cell) == text
    assert cell == text or text.lstrip("'")[:1] in "=+-@\t\r\n"


@given(TEXTS.map(lambda text: text.replace("\0", "")))
def test_no_path_cell_is_a_formula_and_each_means_the_same_path(text: str) -> None:
    cell = files.path_cell(text)
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    assert os.path.normpath(cell) == os.path.normpath(text)


def test_tables_hold_numbers_as_numbers(tmp_path: Path) -> None:
    row = [-0.1, 1e-9, -3, True, "-0.1", "=HYPERLINK(0)", "plain", 0.1 + 0.2]
    write_csv(tmp_path / "a.csv", ["a"], [row])
    with (tmp_path / "a.csv").open(newline="") as file:
        found = list(csv.reader(file))[1]
    assert found == ["-0.1", "1e-09", "-3", "True", "'-0.1", "'=HYPERLINK(0)", "plain",
                     "0.30000000000000004"]  # fmt: skip


@given(st.text())
def test_what_is_shown_steers_no_terminal(text: str) -> None:
    shown = visible(text)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    assert "\n" not in shown.replace("\n  ", "")
    plain = [c for c in text if c.isprintable()]
    assert [c for c in shown if c in plain][: len(plain)] or not plain


def test_names_are_shown_as_what_they_are() -> None:
    assert visible("a\x1b[31mb\r\x9b\u202egnp.exe") == r"a\x1b[31mb\r\x9b\u202egnp.exe"
    assert visible("größe 部品 ёж.png") == "größe 部品 ёж.png"
    assert visible("2 of 3:\n  a.png\n  b.png") == "2 of 3:\n  a.png\n  b.png"
    assert visible("a\nerror: b") == r"a\nerror: b"


def test_places_are_compared_by_what_they_are(tmp_path: Path) -> None:
    real, other = tmp_path / "real/deeper", tmp_path / "other"
    real.mkdir(parents=True)
    other.mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    (real / "back").symlink_to(other)
    assert is_same(tmp_path / "alias/deeper", real) and not is_same(real, other)
    for inside in (real, real / "new/file", tmp_path / "alias/deeper/x", other / "../real/x"):
        assert lies_in(inside, tmp_path / "real") and lies_in(inside, tmp_path / "alias")
    for outside in (other, tmp_path, real / "back/x", tmp_path / "alias/.." / "other"):
        assert not lies_in(outside, tmp_path / "real")
    assert lies_in(tmp_path / "none/a", tmp_path / "none")
    assert not lies_in(tmp_path / "nonesuch", tmp_path / "none")
