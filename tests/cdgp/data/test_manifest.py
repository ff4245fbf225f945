"""The table: what it may look like, what is refused, and that it round-trips."""

import csv
import dataclasses
import os
import tempfile
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import noise_image, raised

from cdgp.data import manifest
from cdgp.data.manifest import Manifest, Sample, WeakSample, read_csv
from cdgp.errors import OutputError


def table(folder: Path, text: str, name: str = "manifest.csv", encoding: str = "utf-8") -> Path:
    """A CSV beside two good and one defective image: a.png, b.png, d.png."""
    for seed, image in enumerate(("a.png", "b.png", "d.png")):
        noise_image(folder / image, seed=seed)
    (folder / name).write_bytes(text.encode(encoding))
    return folder / name


def test_reads_every_column(tmp_path: Path) -> None:
    noise_image(tmp_path / "m.png")
    path = table(
        tmp_path,
        "image,label,mask,group,split,sha256,pixel_sha256,remark\n"
        "d.png,defective,m.png,part 1,test,12,34,hello\n\na.png,good,,,,,,\n,,,\nb.png,good\n",
    )
    found = read_csv(path)
    a, b, d = (tmp_path / name for name in ("a.png", "b.png", "d.png"))
    assert found.root == tmp_path
    assert found.samples == (
        Sample(a, False),
        Sample(b, False),
        Sample(d, True, (tmp_path / "m.png",), "part 1", "test", "12", "34"),
    )
    assert found.weak("test") == (WeakSample(d, True),)
    assert not hasattr(found.weak("test")[0], "mask")
    assert found.counts() == {"test": (0, 1), "unsplit": (2, 0)}


@pytest.mark.parametrize("word", ["good", "Normal", "OK", "0", "false", "FALSE"])
def test_good_words(tmp_path: Path, word: str) -> None:
    found = read_csv(table(tmp_path, f"image,label\na.png, {word} \n"))
    assert not found.samples[0].defective


@pytest.mark.parametrize("word", ["defective", "Anomaly", "bad", "NG", "1", "True"])
def test_defective_words(tmp_path: Path, word: str) -> None:
    assert read_csv(table(tmp_path, f"image,label\na.png,{word}\n")).samples[0].defective


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("image;label\r\na.png;good\r\nd.png;bad\r\n", "utf-8-sig"),
        ("image\tlabel\na.png\tgood\nd.png\tbad\n", "utf-8"),
        ('"Image","LABEL"\n"a.png","good"\n".\\d.png","bad"\n', "utf-8"),
        ("path,label\n a.png ,good\nx/../d.png,bad", "utf-8"),
        ("image_path,label,mask_path\na.png,good,\nd.png,bad,", "utf-8"),
    ],
    ids=["excel", "tabs", "quotes and backslash", "path", "image_path"],
)
def test_spellings_of_a_table(tmp_path: Path, text: str, encoding: str) -> None:
    (tmp_path / "x").mkdir()
    found = read_csv(table(tmp_path, text, encoding=encoding))
    assert [(s.image.name, s.defective) for s in found.samples] == [
        ("a.png", False),
        ("d.png", True),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("image,lable\na.png,good\n", ("'label'", "image,lable")),
        ("label\ngood\n", ("'image'",)),
        ("", ("'image'",)),
        ("image,label\n", ("no rows",)),
        ("image,label\na.png,good\nb.png,meh\n", ("line 3", "'meh'", "good", "defective", "ng")),
        ("image,label\na.png\n", ("line 2", "''")),
        ("image,label\n,good\n", ("line 2", "names no image")),
        ("image,label,split\na.png,good,val\n", ("line 2", "'val'", "calibration")),
        ("image,label\na.png,good\nb.png,good,1,2\n", ("line 3", "more cells", "quotes")),
        ("image,label\na.png,good\n\na.png,bad\n", ("good and as defective", "2 and 4")),
        ("image,label\na.png,good\n./a.png,good\n", ("twice", "2 and 3")),
        ("image,label,mask\nd.png,bad,gone.png\n", ("1 listed files", "line 2: gone.png")),
    ],
)
def test_refused_tables(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = table(tmp_path, text)
    raised(lambda: read_csv(path), str(path), *words)


def test_broken_quotes_and_absent_file(tmp_path: Path) -> None:
    long = table(tmp_path, 'image,label\n"' + "x" * 200_000 + '",good\n')
    raised(lambda: read_csv(long), "line 2 is not CSV")
    raised(lambda: read_csv(tmp_path / "no.csv"), "no.csv", "cannot be read")


def test_missing_files_are_counted_and_listed(tmp_path: Path) -> None:
    rows = "".join(f"{i}.png,good\n" for i in range(13))
    path = table(tmp_path, "image,label\n" + rows)
    message = raised(lambda: read_csv(path), "13 listed files", "line 2: 0.png", "and 3 more")
    assert "line 12" not in message
    raised(lambda: read_csv(table(tmp_path, "image,label\né.png,good\n")), "NFC", "NFD")
    latin = table(tmp_path, "image,label\né.png,good\n", encoding="latin-1")
    raised(lambda: read_csv(latin), "save it as UTF-8")


@pytest.mark.parametrize("on_disk", ["NFC", "NFD"])
@pytest.mark.parametrize("written", ["NFC", "NFD"])
def test_accents_find_each_other(tmp_path: Path, on_disk: str, written: str) -> None:
    noise_image(tmp_path / unicodedata.normalize(on_disk, "pièce.png"))  # type: ignore[arg-type]
    name = unicodedata.normalize(written, "pièce.png")  # type: ignore[arg-type]
    found = read_csv(table(tmp_path, f"image,label\n{name},good\n"))
    assert found.samples[0].image.is_file()


def full_manifest(folder: Path) -> Manifest:
    a, d, mask = (
        noise_image(folder / "a.png", seed=1),
        noise_image(folder / 'd,"ü".png', seed=2),
        noise_image(folder / "m.png", seed=3),
    )
    outside = noise_image(folder.parent / "outside.png", seed=4)
    return Manifest(
        folder,
        (
            Sample(d, True, (mask,), "g;1", "fit", "1" * 64, "2" * 64),
            Sample(a, False, split="test"),
            Sample(outside, False),
        ),
    )


def test_written_tables_come_back(tmp_path: Path) -> None:
    made = full_manifest(tmp_path / "data")
    path = tmp_path / "run.csv"
    made.write_csv(path)
    assert read_csv(path, root=made.root) == made
    lines = path.read_text("utf-8").splitlines()
    assert lines[0] == "image,label,mask,group,split,sha256,pixel_sha256"
    assert lines[1] == f"{tmp_path.as_posix()}/outside.png,good,,,,,"
    assert lines[2] == "a.png,good,,,test,,"
    made.write_csv(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "outside.png", "run.csv"]


def test_a_failed_write_leaves_the_old_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = full_manifest(tmp_path / "data")
    (tmp_path / "run.csv").write_text("old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    raised(lambda: made.write_csv(tmp_path / "run.csv"), "run.csv", "No space", error=OutputError)
    assert (tmp_path / "run.csv").read_text() == "old"
    assert len(list(tmp_path.glob(".*"))) == 0
    monkeypatch.undo()
    below = tmp_path / "run.csv/run.csv"
    raised(lambda: made.write_csv(below), "run.csv/run.csv", error=OutputError)


def test_manifest_digest_and_order(tmp_path: Path) -> None:
    made = full_manifest(tmp_path / "data")
    turned = Manifest(made.root, made.samples[::-1])
    assert turned == made and turned.sha256 == made.sha256
    inner = made.samples[1:]
    elsewhere = Manifest(
        Path("/else"),
        tuple(dataclasses.replace(s, image=Path("/else", s.image.name)) for s in inner),
    )
    assert elsewhere.sha256 == Manifest(made.root, inner).sha256
    for change in ({"defective": True}, {"group": "x"}, {"split": "fit"}, {"sha256": "0"}):
        other = dataclasses.replace(made.samples[1], **change)
        assert Manifest(made.root, (made.samples[0], other, made.samples[2])).sha256 != made.sha256


def test_of_a_split() -> None:
    names = ("fit", "calibration", "test", "train", None)
    made = Manifest(Path("/r"), tuple(Sample(Path(f"/r/{s}"), False, split=s) for s in names))
    assert [s.split for s in made.of("fit")] == ["fit"]
    assert {s.split for s in made.of("train")} == {"fit", "calibration", "train"}
    assert len(made.of(None)) == 5
    raised(lambda: made.of("val"), "'val'", "calibration")


def test_words_are_disjoint() -> None:
    assert not set(manifest.GOOD_WORDS) & set(manifest.DEFECTIVE_WORDS)


NAMES = st.builds(
    lambda start, rest: f"{start}{rest}.png",
    st.sampled_from(["=", "+", "-", "@", "\t", "\r", "'", "'=", "", "=cmd|' C calc'!"]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), max_size=20),
)
GROUPS = st.one_of(
    st.none(),
    st.builds(
        lambda start, rest: f"{start}{rest}".strip() or None,
        st.sampled_from(["=", "+", "-", "@", "'", "'=", "''-", ""]),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
    ),
)


@given(st.dictionaries(NAMES, st.tuples(GROUPS, st.booleans()), min_size=1, max_size=5))
def test_paths_and_groups_that_look_like_formulas_come_back(
    rows: dict[str, tuple[str | None, bool]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, samples = Path(folder), []
        for number, (name, (group, masked)) in enumerate(rows.items()):
            place = root / str(number)  # names that differ in case or accents alone stay apart
            place.mkdir()
            (place / name).touch()
            (root / name).touch()
            masks = (root / name,) if masked else ()
            samples.append(Sample(place / name, masked, masks, group))
        samples.append(Sample(root / next(iter(rows)), False))
        written = Manifest(root, tuple(samples))
        written.write_csv(root / "written.csv", "1" * 32)
        assert read_csv(root / "written.csv") == written
        with (root / "written.csv").open(newline="", encoding="utf-8") as file:
            header, *cells = csv.reader(file)
        assert header[-1] == "run_id" and {row[-1] for row in cells} == {"1" * 32}
        for row in cells:
            assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in row)
