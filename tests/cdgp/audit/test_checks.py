"""The single checks: files, masks, shortcuts, balance, and what training refuses."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from sklearn.metrics import roc_auc_score
from tests.cdgp.data import profiles
from tests.helpers import audited, load_folder, save_image, surface, two_bins

from cdgp.audit.findings import Audit, Finding
from cdgp.data.manifest import Manifest, read_csv

DAY = 86_400


def kinds(found: Audit) -> dict[str, Finding]:
    return {f.kind: f for f in found.findings}


def test_what_training_would_refuse_is_an_error(tmp_path: Path) -> None:
    for i in range(6):
        save_image(tmp_path / f"train/good/{i}.png", surface(i))
        save_image(tmp_path / f"test/{'good' if i < 3 else 'scratch'}/{i}.png", surface(20 + i))
    save_image(tmp_path / "ground_truth/scratch/3_mask.png", np.zeros((60, 64), np.uint8))
    found = audited(load_folder(tmp_path))
    assert found.counts == {"test": (3, 3), "train": (6, 0)}
    assert "no_split" not in kinds(found), "good images alone are enough"
    assert kinds(found)["no_defective"].severity == "warning"
    samples = load_folder(tmp_path).samples
    only = Manifest(tmp_path, tuple(s for s in samples if s.defective))
    assert "fit has no good image" in kinds(audited(only))["no_split"].text
    single = tuple(replace(s, group="one") for s in samples if s.split == "train")
    found = audited(Manifest(tmp_path, single))
    assert "calibration has no good image" in kinds(found)["no_split"].text
    assert kinds(found)["no_split"].severity == "error"


def test_twelve_bits_in_their_own_range_are_not_dark(tmp_path: Path) -> None:
    two_bins(tmp_path)
    deep = surface(0).astype(np.uint16) * 16
    for i in range(2):
        tifffile.imwrite(tmp_path / f"good/deep{i}.tif", deep + i, bitspersample=12)
    assert "dark_16_bit" not in kinds(audited(load_folder(tmp_path)))
    tifffile.imwrite(tmp_path / "good/deep0.tif", deep)
    assert kinds(audited(load_folder(tmp_path)))["dark_16_bit"].images == (("good/deep0.tif",),)


def test_masks_that_contradict_or_are_stored_oddly(tmp_path: Path) -> None:
    two_bins(tmp_path)
    spot = np.zeros((60, 64), np.uint8)
    spot[10:20, 10:30] = 255
    other = np.zeros((60, 64), np.uint8)
    other[30:40, 5:9] = 255
    for name, mask in (
        ("00", spot), ("01_mask", spot), ("01_mask_2", other), ("02/a", spot), ("02/b", other),
        ("03", spot * 0), ("04", 255 - spot * 0), ("11", spot),
    ):  # fmt: skip
        save_image(tmp_path / f"masks/{name}.png", mask)
    manifest = load_folder(tmp_path)
    masks = {manifest.name(s.image): len(s.masks) for s in manifest.samples if s.masks}
    assert masks == {"defective/00.png": 1, "defective/01.png": 2, "defective/02.png": 2,
                     "defective/03.png": 1, "defective/04.png": 1, "good/11.png": 1}  # fmt: skip
    found = kinds(audited(manifest))
    assert [names[0] for names in found["mask_union"].images] == [
        "defective/01.png", "defective/02.png",
    ]  # fmt: skip
    expected = {"mask_missing": "defective/05.png", "mask_empty": "defective/03.png",
                "mask_on_good": "good/11.png", "mask_inverted": "defective/04.png"}  # fmt: skip
    assert {kind: found[kind].images[0][0] for kind in expected} == expected
    manifest.write_csv(tmp_path / "manifest.csv")
    assert read_csv(tmp_path / "manifest.csv") == manifest


def test_a_mask_that_is_turned(tmp_path: Path) -> None:
    two_bins(tmp_path)
    save_image(tmp_path / "masks/00.png", np.zeros((64, 60), np.uint8))
    found = kinds(audited(load_folder(tmp_path)))
    assert "broken" not in found and found["mask_unusable"].severity == "warning"
    assert found["mask_unusable"].images == (("defective/00.png", "masks/00.png"),)
    named = ("defective/00.png", "masks/00.png", "60 × 64", "64 × 60", "turned by 90°")
    assert all(words in found["mask_unusable"].text for words in named)


def test_transparency(tmp_path: Path) -> None:
    grey = surface(50)
    alpha = np.full_like(grey, 255)
    save_image(two_bins(tmp_path) / "good/opaque.png", np.dstack([grey, grey, grey, alpha]))
    assert "transparent" not in kinds(audited(load_folder(tmp_path)))
    alpha[0, 0] = 254
    save_image(tmp_path / "good/clear.png", np.dstack([grey, grey, grey, alpha]))
    assert kinds(audited(load_folder(tmp_path)))["transparent"].images == (("good/clear.png",),)


def test_shortcuts_are_scikit_learns_auroc(tmp_path: Path) -> None:
    """Brighter, larger, newer, of another type: each of these is found, and nothing else."""
    rng = np.random.default_rng(0)
    for i in range(24):
        defective = i >= 14
        grey = surface(i, (60, 64 + (8 if defective or i == 0 else 0)))
        grey = (grey * (0.6 if defective else 1.0)).astype(np.uint8)
        folder, kind = ("defective", "bmp") if defective else ("good", "png")
        path = save_image(tmp_path / f"{folder}/{i}.{kind}", grey)
        then = 1_700_000_000 + (DAY if defective else 0) + float(rng.uniform(0, 3600))
        os.utime(path, (then, then))
    manifest = load_folder(tmp_path)
    found = audited(manifest)
    by_fact = {s.fact: s for s in found.shortcuts}
    label = [s.defective for s in manifest.samples]
    pixels = [np.asarray(Image.open(s.image).convert("RGB"), float) for s in manifest.samples]
    for fact, values in (
        ("brightness", [p.mean() for p in pixels]),
        ("contrast", [p.mean(2).std() for p in pixels]),
        ("width", [p.shape[1] for p in pixels]),
        ("time of change", [s.image.stat().st_mtime for s in manifest.samples]),
        ("file type BMP", [s.image.suffix == ".bmp" for s in manifest.samples]),
    ):
        auroc = roc_auc_score(label, values)
        assert by_fact[fact].auroc == pytest.approx(max(auroc, 1 - auroc)), fact
    assert "height" not in by_fact and "saturation" not in by_fact  # they do not vary
    warned = {f.text.split(" alone")[0] for f in found.findings if f.kind == "shortcut"}
    assert warned >= {"brightness", "width", "time of change", "file type BMP"}


def test_few_images_are_separable_by_luck(tmp_path: Path) -> None:
    for i in range(4):
        save_image(
            tmp_path / f"{'good' if i < 2 else 'defective'}/{i}.png", (surface(i) // (1 + i // 2))
        )
    found = audited(load_folder(tmp_path))
    assert max(s.auroc for s in found.shortcuts) == 1
    assert "shortcut" not in kinds(found) and kinds(found)["too_few"].severity == "warning"


def test_times_of_a_folder_copied_at_once_mean_nothing(tmp_path: Path) -> None:
    two_bins(tmp_path)
    for i, path in enumerate(sorted(tmp_path.rglob("*.png"), key=lambda p: p.parent.name)):
        os.utime(path, (1_700_000_000 + i, 1_700_000_000 + i))
    assert "time of change" not in {s.fact for s in audited(load_folder(tmp_path)).shortcuts}


def test_images_without_content_are_one_finding_with_their_names(tmp_path: Path) -> None:
    two_bins(tmp_path)
    for i in range(3):
        save_image(tmp_path / f"good/black{i}.png", np.full((60, 64), i, np.uint8))
    save_image(tmp_path / "defective/white.png", np.full((60, 64), 255, np.uint8))
    found = kinds(audited(load_folder(tmp_path)))["no_content"]
    names = {"good/black0.png", "good/black1.png", "good/black2.png", "defective/white.png"}
    assert found.severity == "warning" and {name for (name,) in found.images} == names
    assert found.text.startswith("4 images") and all(name in found.text for name in names)


def test_a_set_of_smooth_images_alone_is_one_finding(tmp_path: Path) -> None:
    for i in range(30):
        name = f"good/{i}.png" if i < 20 else f"defective/{i}.png"
        save_image(tmp_path / name, np.full((20, 20), 5 * i, np.uint8))
    found = [f for f in audited(load_folder(tmp_path)).findings if f.kind == "no_content"]
    assert len(found) == 1 and len(found[0].images) == 30
    assert "every image: is the set right?" in found[0].text and "and 10 more" in found[0].text


def test_a_profile_that_some_images_alone_have(tmp_path: Path) -> None:
    two_bins(tmp_path)
    save_image(tmp_path / "good/same.png", surface(50), icc_profile=profiles.SRGB)
    assert "mixed_colours" not in kinds(audited(load_folder(tmp_path)))
    save_image(tmp_path / "good/other.png", surface(51), icc_profile=profiles.GREY_LINEAR)
    found = kinds(audited(load_folder(tmp_path)))["mixed_colours"]
    assert found.severity == "warning" and found.images == (("good/other.png",),)
    assert found.text.startswith("1 image with") and "19 images without" in found.text
    alone = tuple(s for s in load_folder(tmp_path).samples if s.image.name == "other.png")
    assert "mixed_colours" not in kinds(audited(Manifest(tmp_path, alone)))


def test_doubtful_colours_are_named(tmp_path: Path) -> None:
    two_bins(tmp_path)
    profiles.png_with(tmp_path / "good/03.png", gAMA=(100_000).to_bytes(4, "big"))
    found = kinds(audited(load_folder(tmp_path)))["colours"]
    assert found.images == (("good/03.png",),)
    assert "gAMA states a gamma of 1" in found.text and "good/03.png" in found.text


@pytest.mark.parametrize("inverted", [False, True])
def test_both_ways_round_of_inks_are_compared_with_the_set(tmp_path: Path, inverted: bool) -> None:
    """A light part as CMYK without a marker: the set's brightness says which way it was stored."""
    for i in range(6):
        name = f"{'good' if i < 4 else 'defective'}/{i}.png"
        save_image(tmp_path / name, surface(i) // 4 + 190)
    rgb = np.repeat((surface(9) // 4 + 190)[..., None], 3, 2)
    inks = np.dstack([255 - rgb, np.zeros((60, 64), np.uint8)])
    path = tmp_path / "good/inks.jpg"
    # Pillow stores what Adobe's convention asks for; its opposite is what other programs store.
    profiles.cmyk(255 - inks if inverted else inks).save(path, quality=95)
    profiles.jpeg_without(path, 0xEE)
    found = kinds(audited(load_folder(tmp_path)))
    assert found["colours"].images == found["cmyk"].images == (("good/inks.jpg",),)
    way = "the other way round fits" if inverted else "as read fits"
    assert found["cmyk"].severity == "warning" and way in found["cmyk"].text


def test_the_least_budget_counts_parts(tmp_path: Path) -> None:
    """24 good images are 24 parts; of eight parts, or with near duplicates, there are fewer."""
    manifest = load_folder(two_bins(tmp_path, good=24, defective=6))
    budget = kinds(audited(manifest))["false_reject_budget"].text
    assert "about 4 of 24 good parts" in budget and "can be 0.2 or more" in budget
    grouped = tuple(
        replace(s, group=None if s.defective else str(i % 8))
        for i, s in enumerate(sorted(manifest.samples, key=lambda s: s.defective))
    )
    budget = kinds(audited(replace(manifest, samples=grouped)))["false_reject_budget"].text
    assert "about 1 of 8 good parts" in budget and "can be 0.5 or more" in budget
    for i in range(6):
        again = np.clip(surface(i).astype(int) + 3, 0, 255).astype(np.uint8)
        save_image(tmp_path / f"good/again{i}.png", again)
    budget = kinds(audited(load_folder(tmp_path)))["false_reject_budget"].text
    assert "of 24 good parts" in budget, "another exposure of a part is no new part"
