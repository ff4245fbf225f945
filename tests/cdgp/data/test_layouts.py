"""Folders: bins, stated splits, masks paired by name, and what is ignored."""

import logging
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.helpers import (
    SHARED,
    load_folder,
    noise_image,
    raised,
    save_image,
    surface,
    two_bins,
)

from cdgp.data import images, layouts
from cdgp.data.manifest import read_csv
from cdgp.errors import DataError, OutputError


def test_folders_with_masks_paired_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i, name in enumerate(["good/a.png", "good/sub/b.JPG", "defective/scratch/000.png"]):
        noise_image(tmp_path / name, seed=i)
    for i, name in enumerate(["001.PNG", "002.tif", "x/003.bmp", "ü.png"]):
        noise_image(tmp_path / "defective" / unicodedata.normalize("NFD", name), seed=i)
    for name in ["scratch/000_mask.png", "002_GT.bmp", "x/003.png", "010_mask.png", "ü.png"]:
        noise_image(tmp_path / "masks" / name)
    with caplog.at_level(logging.WARNING):
        found = load_folder(tmp_path)
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
        noise_image(tmp_path / name)
    noise_image(tmp_path / "defective/1.jpg")
    raised(lambda: load_folder(tmp_path), "is the mask of", "1.jpg", "different names")


def test_junk_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["A.PNG", "b.JPG", "c.Jpeg", "d.TIF", "e.BMP", "f.png", "g.tiff", "h.webp"]
    for i, name in enumerate(
        [*names, ".nb/f.png", "@eaDir/f.png/t.jpg", "__MACOSX/f.png", "._f.png"]
    ):
        noise_image(tmp_path / "good" / name, seed=i)
    for name in ("Thumbs.db", "desktop.ini", ".DS_Store", "f.png.bak", "notes.txt"):
        (tmp_path / "good" / name).write_bytes(b"junk")
    noise_image(tmp_path / "elsewhere/linked.png", seed=99)
    (tmp_path / "good/linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    noise_image(tmp_path / "defective/d.png")
    with caplog.at_level(logging.WARNING):
        found = load_folder(tmp_path)
    used = sorted(s.image.name for s in found.samples if not s.defective)
    assert used == sorted([*names, "linked.png"])
    assert "7 entries are not used" in caplog.text, "4 files, 3 folders; not what a system hides"
    assert (
        "good/Thumbs.db, good/desktop.ini, good/notes.txt" in caplog.text
        and "f.png.bak" in caplog.text
    )


def test_links_to_what_is_read_are_not_entered(tmp_path: Path) -> None:
    noise_image(tmp_path / "good/a.png")
    noise_image(tmp_path / "defective/d.png")
    try:
        (tmp_path / "good/loop").symlink_to(tmp_path / "good", target_is_directory=True)
    except OSError:
        pytest.skip("no symbolic links here")
    assert load_folder(tmp_path).counts() == {"unsplit": (1, 1)}


def test_other_folder_names(tmp_path: Path) -> None:
    noise_image(tmp_path / "train/ok/a.png")
    noise_image(tmp_path / "NG/d.png")
    assert layouts.load(tmp_path, "train/ok", "NG").counts() == {"unsplit": (1, 1)}
    raised(lambda: load_folder(tmp_path), "'good'", "NG, train", "--good NAME", "manifest.csv")
    raised(lambda: layouts.load(tmp_path, "NG", "defective"), "'defective'", "--defective NAME")
    raised(lambda: layouts.load(tmp_path, "NG", "NG"), "same folder")


def test_folders_without_images(tmp_path: Path) -> None:
    raised(lambda: load_folder(tmp_path / "gone"), "gone", "no such folder")
    raised(lambda: load_folder(tmp_path), "it holds no folders")
    noise_image(tmp_path / "good/a.png")
    (tmp_path / "defective").mkdir()
    assert load_folder(tmp_path).counts() == {"unsplit": (1, 0)}
    (tmp_path / "good/a.png").rename(tmp_path / "defective/a.png")
    raised(lambda: load_folder(tmp_path), "good: holds no images", ".png")
    (tmp_path / "x.txt").write_text("x")
    raised(lambda: load_folder(tmp_path / "x.txt"), "not a .csv")


def test_a_manifest_in_the_folder_wins(tmp_path: Path) -> None:
    noise_image(tmp_path / "good/a.png")
    noise_image(tmp_path / "defective/d.png")
    noise_image(tmp_path / "a.png")
    path = tmp_path / "manifest.csv"
    path.write_text("image,label,group\na.png,good,g\n")
    assert load_folder(tmp_path) == load_folder(path) == read_csv(path)
    assert len(load_folder(tmp_path).samples) == 1


@pytest.mark.shared
@pytest.mark.parametrize(("name", "counts"), [("ksdd", (347, 52)), ("magnetic_tile", (952, 392))])
def test_real_manifests(name: str, counts: tuple[int, int]) -> None:
    if not (SHARED / "data" / name / "manifest.csv").is_file():
        pytest.skip(f"{SHARED / 'data' / name} is missing")
    found = load_folder(SHARED / "data" / name)
    assert found.counts() == {"unsplit": counts}
    assert all(bool(s.masks) == s.defective for s in found.samples)
    paths = [s for s in found.samples if s.masks][::10]
    areas = [images.read_masks(s.masks, images.image_size(s.image)).mean() for s in paths]
    assert 0.001 < np.median(areas) < 0.2
    per_group = Counter(s.group for s in found.samples)
    assert len(per_group) > 20


def test_mvtec_folders_without_junk_and_links(tmp_path: Path) -> None:
    for name in ("train/ok/0.png", "train/@eaDir/t.png", "test/.ipynb_checkpoints/c.png",
                 "test/ok/1.png", "test/dent/2.png"):  # fmt: skip
        save_image(tmp_path / name, surface(0))
    (tmp_path / "ground_truth").mkdir()
    (tmp_path / "test/linked").symlink_to(tmp_path / "train/ok")
    found = layouts.load(tmp_path, "ok", "defective")
    assert found.counts() == {"test": (1, 1), "train": (1, 0)}


def test_masks_of_parts(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("good/1.png", "defective/2.png", "defective/3.png"):
            save_image(tmp_path / part / name, surface(0))
    blank = np.zeros((60, 64), np.uint8)
    save_image(tmp_path / "test/masks/2.png", blank)
    found = {load_folder(tmp_path).name(s.image): s.masks for s in load_folder(tmp_path).samples}
    assert {n for n, m in found.items() if m} == {"test/defective/2.png"}
    save_image(tmp_path / "masks/3.png", blank)
    with pytest.raises(DataError, match="give the two images different names"):
        load_folder(tmp_path)


def test_the_nearest_name_has_the_mask(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("good/scratch/5.png", "defective/scratch.png", "defective/a.png"):
        save_image(tmp_path / name, surface(0))
    for name in ("scratch/5.png", "a.png", "a/9.png"):
        save_image(tmp_path / "masks" / name, np.zeros((60, 64), np.uint8))
    manifest = load_folder(tmp_path)
    masks = {manifest.name(s.image): [manifest.name(m) for m in s.masks] for s in manifest.samples}
    assert masks == {"good/scratch/5.png": ["masks/scratch/5.png"], "defective/scratch.png": [],
                     "defective/a.png": ["masks/a.png"]}  # fmt: skip
    assert "9.png" in caplog.text


def test_results_do_not_land_among_images(tmp_path: Path) -> None:
    for part in ("train", "test"):
        two_bins(tmp_path / part)
    for place in ("test/good/run", "test/run", "train", "."):
        with pytest.raises(OutputError, match="lies in the data"):
            layouts.check_outside(tmp_path / place, tmp_path, "good", "defective")
    layouts.check_outside(tmp_path / "runs", tmp_path, "good", "defective")
