"""Manifest, folders, splits, synthetic images, and the reported faults that concern them."""

import dataclasses
import logging
import os
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.helpers import ROOT

from cdgp.data import images, layouts, manifest, splits
from cdgp.data.manifest import Manifest, Sample, WeakSample, read_csv
from cdgp.errors import DataError, ImageError, LeakError, OutputError, SettingsError
from cdgp.files import digest
from cdgp_bench import synthetic

SHARED = ROOT.parent / "shared"


def put(path: Path, seed: int = 0, size: tuple[int, int] = (12, 10)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    Image.fromarray(values).save(path)
    return path


def table(folder: Path, text: str, name: str = "manifest.csv", encoding: str = "utf-8") -> Path:
    """A CSV beside two good and one defective image: a.png, b.png, d.png."""
    for seed, image in enumerate(("a.png", "b.png", "d.png")):
        put(folder / image, seed)
    (folder / name).write_bytes(text.encode(encoding))
    return folder / name


def rejected(call: Callable[[], object], *words: str, error: type = DataError) -> str:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words), message
    return message


# ---------------------------------------------------------------------------------------- manifest


def test_reads_every_column(tmp_path: Path) -> None:
    put(tmp_path / "m.png")
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
    rejected(lambda: read_csv(path), str(path), *words)


def test_broken_quotes_and_absent_file(tmp_path: Path) -> None:
    long = table(tmp_path, 'image,label\n"' + "x" * 200_000 + '",good\n')
    rejected(lambda: read_csv(long), "line 2 is not CSV")
    rejected(lambda: read_csv(tmp_path / "no.csv"), "no.csv", "cannot be read")


def test_missing_files_are_counted_and_listed(tmp_path: Path) -> None:
    rows = "".join(f"{i}.png,good\n" for i in range(13))
    path = table(tmp_path, "image,label\n" + rows)
    message = rejected(lambda: read_csv(path), "13 listed files", "line 2: 0.png", "and 3 more")
    assert "line 12" not in message
    rejected(lambda: read_csv(table(tmp_path, "image,label\né.png,good\n")), "NFC", "NFD")
    latin = table(tmp_path, "image,label\né.png,good\n", encoding="latin-1")
    rejected(lambda: read_csv(latin), "save it as UTF-8")


@pytest.mark.parametrize("on_disk", ["NFC", "NFD"])
@pytest.mark.parametrize("written", ["NFC", "NFD"])
def test_accents_find_each_other(tmp_path: Path, on_disk: str, written: str) -> None:
    put(tmp_path / unicodedata.normalize(on_disk, "pièce.png"))  # type: ignore[arg-type]
    name = unicodedata.normalize(written, "pièce.png")  # type: ignore[arg-type]
    found = read_csv(table(tmp_path, f"image,label\n{name},good\n"))
    assert found.samples[0].image.is_file()


def full_manifest(folder: Path) -> Manifest:
    a, d, mask = put(folder / "a.png", 1), put(folder / 'd,"ü".png', 2), put(folder / "m.png", 3)
    outside = put(folder.parent / "outside.png", 4)
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
    rejected(lambda: made.write_csv(tmp_path / "run.csv"), "run.csv", "No space", error=OutputError)
    assert (tmp_path / "run.csv").read_text() == "old"
    assert len(list(tmp_path.glob(".*"))) == 0
    monkeypatch.undo()
    below = tmp_path / "run.csv/run.csv"
    rejected(lambda: made.write_csv(below), "run.csv/run.csv", error=OutputError)


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
        other = dataclasses.replace(made.samples[1], **change)  # type: ignore[arg-type]
        assert Manifest(made.root, (made.samples[0], other, made.samples[2])).sha256 != made.sha256


def test_of_a_split() -> None:
    names = ("fit", "calibration", "test", "train", None)
    made = Manifest(Path("/r"), tuple(Sample(Path(f"/r/{s}"), False, split=s) for s in names))
    assert [s.split for s in made.of("fit")] == ["fit"]
    assert {s.split for s in made.of("train")} == {"fit", "calibration", "train"}
    assert len(made.of(None)) == 5
    rejected(lambda: made.of("val"), "'val'", "calibration")


# ----------------------------------------------------------------------------------------- layouts


def test_folders_with_masks_paired_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i, name in enumerate(["good/a.png", "good/sub/b.JPG", "defective/scratch/000.png"]):
        put(tmp_path / name, i)
    for i, name in enumerate(["001.PNG", "002.tif", "x/003.bmp", "ü.png"]):
        put(tmp_path / "defective" / unicodedata.normalize("NFD", name), i)
    for name in ["scratch/000_mask.png", "002_GT.bmp", "x/003.png", "010_mask.png", "ü.png"]:
        put(tmp_path / "masks" / name)
    with caplog.at_level(logging.WARNING):
        found = layouts.load(tmp_path)
    assert found.counts() == {"unsplit": (2, 5)}
    masks = {
        s.image.name: s.masks[0].relative_to(tmp_path / "masks").as_posix() if s.masks else None
        for s in found.of(None)
        if s.defective
    }
    assert masks == {
        "000.png": "scratch/000_mask.png",
        "001.PNG": None,
        "002.tif": "002_GT.bmp",
        "003.bmp": "x/003.png",
        unicodedata.normalize("NFD", "ü.png"): "ü.png",
    }
    assert "1 masks" in caplog.text and "010_mask.png" in caplog.text
    assert all(not s.masks for s in found.samples if not s.defective)


def test_ambiguous_masks(tmp_path: Path) -> None:
    for name in ("good/a.png", "defective/1.png", "masks/1.png"):
        put(tmp_path / name)
    put(tmp_path / "defective/1.jpg")
    rejected(lambda: layouts.load(tmp_path), "is the mask of", "1.jpg", "different names")


def test_junk_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["A.PNG", "b.JPG", "c.Jpeg", "d.TIF", "e.BMP", "f.png", "g.tiff", "h.webp"]
    for i, name in enumerate(
        [*names, ".nb/f.png", "@eaDir/f.png/t.jpg", "__MACOSX/f.png", "._f.png"]
    ):
        put(tmp_path / "good" / name, i)
    for name in ("Thumbs.db", "desktop.ini", ".DS_Store", "f.png.bak", "notes.txt"):
        (tmp_path / "good" / name).write_bytes(b"junk")
    put(tmp_path / "elsewhere/g.png")
    (tmp_path / "good/linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    put(tmp_path / "defective/d.png")
    with caplog.at_level(logging.WARNING):
        found = layouts.load(tmp_path)
    assert sorted(s.image.name for s in found.samples if not s.defective) == names
    assert "5 entries are not used" in caplog.text, "4 files and a linked folder; not the hidden"


def test_linked_folders_are_not_entered(tmp_path: Path) -> None:
    put(tmp_path / "good/a.png")
    put(tmp_path / "defective/d.png")
    try:
        (tmp_path / "good/loop").symlink_to(tmp_path / "good", target_is_directory=True)
    except OSError:
        pytest.skip("no symbolic links here")
    assert layouts.load(tmp_path).counts() == {"unsplit": (1, 1)}


def test_other_folder_names(tmp_path: Path) -> None:
    put(tmp_path / "train/ok/a.png")
    put(tmp_path / "NG/d.png")
    assert layouts.load(tmp_path, "train/ok", "NG").counts() == {"unsplit": (1, 1)}
    rejected(lambda: layouts.load(tmp_path), "'good'", "NG, train", "--good NAME", "manifest.csv")
    rejected(lambda: layouts.load(tmp_path, "NG"), "'defective'", "--defective NAME")
    rejected(lambda: layouts.load(tmp_path, "NG", "NG"), "same folder")


def test_folders_without_images(tmp_path: Path) -> None:
    rejected(lambda: layouts.load(tmp_path / "gone"), "gone", "no such folder")
    rejected(lambda: layouts.load(tmp_path), "it holds no folders")
    put(tmp_path / "good/a.png")
    (tmp_path / "defective").mkdir()
    rejected(lambda: layouts.load(tmp_path), "defective: holds no images", ".png")
    (tmp_path / "x.txt").write_text("x")
    rejected(lambda: layouts.load(tmp_path / "x.txt"), "not a .csv")


def test_a_manifest_in_the_folder_wins(tmp_path: Path) -> None:
    put(tmp_path / "good/a.png")
    put(tmp_path / "defective/d.png")
    path = table(tmp_path, "image,label,group\na.png,good,g\n")
    assert layouts.load(tmp_path) == layouts.load(path) == read_csv(path)
    assert len(layouts.load(tmp_path).samples) == 1


# ----------------------------------------------------------------------------------------- hashing


def test_hashing_is_the_scan_before_training(tmp_path: Path) -> None:
    made = synthetic.make_dataset(tmp_path, 3, 2, (16, 12))
    steps: list[int] = []
    done = splits.hashed(made, progress=lambda: steps.append(1))
    assert len(steps) == 5
    for sample in done.samples:
        assert sample.sha256 == digest(sample.image)
        assert sample.pixel_sha256 == images.pixel_digest(images.read_image(sample.image))
    assert splits.hashed(done) == done
    put(done.samples[0].image, 99, (16, 12))
    rejected(lambda: splits.hashed(done), "1 of 5", "SHA-256 differs")


def test_all_bad_files_are_listed(tmp_path: Path) -> None:
    made = synthetic.make_dataset(tmp_path, 24, 2, (16, 12))
    for sample in made.samples[2:]:
        sample.image.write_bytes(b"")
    Image.new("1", (16, 12)).save(tmp_path / "masks/000.png")  # width and height swapped
    message = rejected(lambda: splits.hashed(made), "25 of 26", "is empty", "and 5 more")
    assert message.count("\n") == 21 and "mask is 16 × 12" in message


def test_white_level_reaches_the_decoder(tmp_path: Path) -> None:
    Image.fromarray(np.full((9, 9), 3000, np.uint16)).save(tmp_path / "a.png")
    made = Manifest(tmp_path, (Sample(tmp_path / "a.png", False),))
    assert splits.hashed(made) != splits.hashed(made, white_level=4095)
    rejected(lambda: splits.hashed(made, white_level=2000), "white_level to 4095")


# ----------------------------------------------------------------------------------------- splits


def fake(
    good: int, defective: int, per_group: int = 1, root: str = "/data", grouped: bool = True
) -> Manifest:
    """A manifest without files; every image has pixels of its own."""
    rows = []
    for i in range(good + defective):
        bad = i >= good
        group = f"{bad}{i // per_group}" if grouped else None
        image = Path(root, f"{i:04d}.png")
        rows.append(Sample(image, bad, group=group, sha256=f"f{i}", pixel_sha256=f"p{i}"))
    return Manifest(Path(root), tuple(rows))


def sides(made: Manifest) -> dict[str | None, str | None]:
    return {s.pixel_sha256: s.split for s in made.samples}


def test_shares_and_class_ratio() -> None:
    for seed in range(5):
        done = splits.split(fake(400, 100, 3), seed)
        counts = done.counts()
        for name, share in (("fit", 0.64), ("calibration", 0.16), ("test", 0.2)):
            good, defective = counts[name]
            assert abs(good + defective - 500 * share) <= 6
            assert abs(defective - 100 * share) <= 3


def test_seed_decides() -> None:
    made = fake(60, 20)
    assert splits.split(made, 1) == splits.split(made, 1)
    assert sides(splits.split(made, 1)) != sides(splits.split(made, 2))


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(order=st.permutations(range(40)), seed=st.integers(0, 10))
def test_order_names_and_folder_do_not_matter(order: list[int], seed: int) -> None:
    made = fake(30, 10, 2)
    renamed = tuple(
        dataclasses.replace(made.samples[i], image=Path(f"/other/{place}.bmp"), group=f"n{i // 2}")
        for place, i in enumerate(order)
    )
    shuffled = Manifest(Path("/other"), renamed)
    assert sides(splits.split(shuffled, seed)) == sides(splits.split(made, seed))


def test_same_images_in_another_folder(tmp_path: Path) -> None:
    first = splits.split(splits.hashed(synthetic.make_dataset(tmp_path / "a", 12, 6)), 0)
    second = splits.split(splits.hashed(synthetic.make_dataset(tmp_path / "b", 12, 6)), 0)
    assert first.sha256 == second.sha256 and sides(first) == sides(second)


@settings(deadline=None, max_examples=40)
@given(
    groups=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 5)).filter(any), min_size=1, max_size=14
    ),
    twins=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=6),
    seed=st.integers(0, 99),
)
def test_no_group_on_two_sides(
    groups: list[tuple[int, int]], twins: list[tuple[int, int]], seed: int
) -> None:
    rows = [
        (bad, f"g{g}")
        for g, (good, defective) in enumerate(groups)
        for bad in [False] * good + [True] * defective
    ]
    pixels = list(range(len(rows)))
    for a, b in twins:  # equal pixels in two groups join them, where the labels agree
        a, b = a % len(rows), b % len(rows)
        if all(rows[i][0] == rows[b][0] for i in range(len(rows)) if pixels[i] == pixels[a]):
            pixels = [pixels[b] if p == pixels[a] else p for p in pixels]
    made = Manifest(
        Path("/r"),
        tuple(
            Sample(Path(f"/r/{i:03d}"), bad, group=g, sha256=f"{i}", pixel_sha256=f"p{pixels[i]}")
            for i, (bad, g) in enumerate(rows)
        ),
    )
    joined = splits._groups(made, made.samples, 0)
    enough = all(sum(label in g.classes for g in joined) >= 2 for label in (False, True))
    try:
        done = splits.split(made, seed)
    except DataError as error:
        assert "2 are the least" in str(error)
        assert not enough
        return
    assert enough
    splits.check_leaks(done)
    for name in ("fit", "calibration"):
        assert {s.defective for s in done.of(name)} == {False, True}


@pytest.mark.parametrize(("good", "defective"), [(2, 2), (3, 2), (40, 2), (2, 40), (5, 3), (40, 4)])
def test_few_groups(good: int, defective: int) -> None:
    for seed in range(8):
        counts = splits.split(fake(good, defective), seed).counts()
        for part in (0, 1):
            assert counts["fit"][part] >= 1 and counts["calibration"][part] >= 1
            test = counts.get("test", (0, 0))[part]
            assert (test > 0) == ((good, defective)[part] > 2)


@pytest.mark.parametrize(("good", "defective"), [(1, 1), (20, 1), (1, 20), (20, 0), (0, 20)])
def test_too_few_groups(good: int, defective: int) -> None:
    for seed in range(4):
        word = "good" if good < 2 else "defective"
        having = min(good, defective)
        rejected(
            lambda seed=seed: splits.split(fake(good, defective), seed),
            f"no {word} image",
            f"there are {having} groups",
            "2 are the least",
        )


def test_one_group_of_each_class_says_groups() -> None:
    rejected(lambda: splits.split(fake(9, 9, per_group=9), 0), "there are 1 groups of")


def test_the_largest_group_is_not_always_in_test() -> None:
    made = fake(60, 20)
    big = tuple(
        dataclasses.replace(s, group="big") if i < 8 else s for i, s in enumerate(made.samples)
    )
    found = {splits.split(Manifest(made.root, big), seed).samples[0].split for seed in range(20)}
    assert {"test", "fit"} <= found


def test_duplicates_are_one_group() -> None:
    made = fake(40, 20, grouped=False)
    rows = [
        dataclasses.replace(s, pixel_sha256=f"p{i % 10 + (40 if s.defective else 0)}")
        for i, s in enumerate(made.samples)
    ]
    for seed in range(5):
        done = splits.split(Manifest(made.root, tuple(rows)), seed)
        where: dict[str | None, set[str | None]] = {}
        for sample in done.samples:
            where.setdefault(sample.pixel_sha256, set()).add(sample.split)
        assert all(len(found) == 1 for found in where.values())


def test_equal_images_with_two_labels() -> None:
    made = fake(10, 10)
    rows = [dataclasses.replace(s, pixel_sha256=f"p{i % 10}") for i, s in enumerate(made.samples)]
    rejected(
        lambda: splits.split(Manifest(made.root, tuple(rows)), 0),
        "10 pairs",
        "0003.png and 0013.png",
        "keep one of each",
    )


def test_no_test_part() -> None:
    counts = splits.split(fake(40, 20), 0, test_fraction=0).counts()
    assert set(counts) == {"fit", "calibration"} and counts["calibration"] == (8, 4)


@pytest.mark.parametrize("fractions", [(-0.1, 0.2), (0.6, 0.2), (0.2, 0), (0.2, 0.51)])
def test_refused_fractions(fractions: tuple[float, float]) -> None:
    rejected(lambda: splits.split(fake(9, 9), 0, *fractions), "fraction is", error=SettingsError)


def test_digests_are_needed() -> None:
    made = Manifest(Path("/r"), (Sample(Path("/r/a.png"), False),))
    rejected(lambda: splits.split(made, 0), "a.png", "hashed()")


def stated(made: Manifest, *cycle: str | None) -> Manifest:
    return Manifest(
        made.root,
        tuple(
            dataclasses.replace(s, split=cycle[i % len(cycle)]) for i, s in enumerate(made.samples)
        ),
    )


def test_stated_test_is_kept() -> None:
    for word in ("train", None):
        before = stated(fake(40, 20), "test", word, word, word)
        after = splits.split(before, 3)
        assert after.counts()["test"] == (10, 5)
        assert {s.image for s in after.of("test")} == {s.image for s in before.of("test")}
        assert "train" not in after.counts() and "unsplit" not in after.counts()
    whole = splits.split(stated(fake(40, 20), "train"), 3)
    assert set(whole.counts()) == {"fit", "calibration"}


def test_stated_fit_and_calibration_are_kept() -> None:
    before = stated(fake(40, 20), "fit", "calibration", "test")
    assert splits.split(before, 3) == before
    for word in ("train", None):
        mixed = stated(fake(40, 20), "fit", "calibration", word)
        rejected(lambda mixed=mixed: splits.split(mixed, 3), "for all of them")
    rejected(
        lambda: splits.split(stated(fake(40, 20), "fit", "test"), 3), "calibration has no good"
    )


def test_stated_splits_that_leak() -> None:
    rejected(
        lambda: splits.split(stated(fake(40, 20, per_group=2), "test", "train"), 0),
        "same group",
        "0000.png (test)",
        error=LeakError,
    )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"image": Path("/data/0000.png")}, "same file"),
        ({"sha256": "f0"}, "same bytes"),
        ({"pixel_sha256": "p0"}, "same pixels"),
        ({"group": "False0"}, "same group"),
    ],
)
def test_audit_names_each_pair(change: dict[str, object], what: str) -> None:
    made = stated(fake(3, 0), "fit", "calibration", "test")
    splits.check_leaks(made)
    rows = list(made.samples)
    rows[2] = dataclasses.replace(rows[2], **change)  # type: ignore[arg-type]
    name = "0000.png" if what == "same file" else "0002.png"
    rejected(
        lambda: splits.check_leaks(Manifest(made.root, tuple(rows))),
        "1 pairs",
        f"0000.png (fit) and {name} (test): {what}",
        error=LeakError,
    )


def test_audit_lists_twenty_and_allows_what_is_unsplit() -> None:
    made = fake(60, 0, per_group=60)
    splits.check_leaks(made)
    rejected(
        lambda: splits.check_leaks(stated(made, "fit", "test")),
        "30 pairs",
        "and 10 more",
        error=LeakError,
    )


# -------------------------------------------------------------------------------------- synthetic


def test_synthetic_set_is_what_it_says(tmp_path: Path) -> None:
    made = synthetic.make_dataset(tmp_path, 5, 4, (48, 40), seed=3)
    assert made.counts() == {"unsplit": (5, 4)}
    assert layouts.load(tmp_path) == made
    (tmp_path / "manifest.csv").unlink()
    assert layouts.load(tmp_path) == made
    pixels = {s.pixel_sha256 for s in splits.hashed(made).samples}
    assert len(pixels) == 9
    for sample in made.samples:
        assert images.image_size(sample.image) == (48, 40)
        if sample.masks:
            assert images.read_masks(sample.masks, (48, 40)).any()
    other = synthetic.make_dataset(tmp_path / "other", 5, 4, (48, 40), seed=4)
    assert not pixels & {s.pixel_sha256 for s in splits.hashed(other).samples}


@pytest.mark.parametrize("seed", range(40))
def test_planted_defects(seed: int) -> None:
    rng = np.random.default_rng(seed)
    image = synthetic.make_surface((80, 64), rng)
    before = image.copy()
    planted, mask = synthetic.plant_defect(image, rng)
    np.testing.assert_array_equal(image, before)
    assert planted.dtype == np.float32 and planted.shape == (80, 64, 3)
    assert planted.min() >= 0 and planted.max() <= 1
    assert 0.0005 * mask.size <= mask.sum() <= 0.03 * mask.size
    change = np.abs(planted - image).max(axis=2)
    assert change[mask].min() > synthetic.VISIBLE >= change[~mask].max()
    again = synthetic.plant_defect(image, np.random.default_rng(seed + 1000))
    same = synthetic.plant_defect(image, np.random.default_rng(seed + 1000))
    np.testing.assert_array_equal(again[0], same[0])


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_defects_show_on_flat_images_and_stay_grey(level: float) -> None:
    flat = np.full((64, 64, 3), level, np.float32)
    for seed in range(10):
        planted, mask = synthetic.plant_defect(flat, np.random.default_rng(seed))
        assert mask.any() and np.ptp(planted, axis=2).max() == 0


def test_no_defect_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "VISIBLE", 2.0)
    with pytest.raises(ImageError, match="no visible defect"):
        synthetic.plant_defect(np.zeros((16, 16, 3), np.float32), np.random.default_rng(0))


# ---------------------------------------------------------------------------------- real images


@pytest.mark.shared
@pytest.mark.parametrize(("name", "counts"), [("ksdd", (347, 52)), ("magnetic_tile", (952, 392))])
def test_real_manifests(name: str, counts: tuple[int, int]) -> None:
    if not (SHARED / "data" / name / "manifest.csv").is_file():
        pytest.skip(f"{SHARED / 'data' / name} is missing")
    found = layouts.load(SHARED / "data" / name)
    assert found.counts() == {"unsplit": counts}
    assert all(bool(s.masks) == s.defective for s in found.samples)
    paths = [s for s in found.samples if s.masks][::10]
    areas = [images.read_masks(s.masks, images.image_size(s.image)).mean() for s in paths]
    assert 0.001 < np.median(areas) < 0.2
    per_group = Counter(s.group for s in found.samples)
    assert len(per_group) > 20


def test_words_are_disjoint() -> None:
    assert not set(manifest.GOOD_WORDS) & set(manifest.DEFECTIVE_WORDS)
