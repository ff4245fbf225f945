"""Public benchmark data sets as they unpack: one manifest a category, compared with print.

Labels follow each set's own convention. A published split is kept; where a set has no usable one
(MVTec AD 2's training part has no defect) the images are pooled for ``splits.split``.
"""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cdgp.data.images import image_size, read_mask
from cdgp.data.layouts import load as load_folder
from cdgp.data.layouts import mvtec_category
from cdgp.data.manifest import Manifest, Sample
from cdgp.data.pairing import pair_masks
from cdgp.data.walk import images_in
from cdgp.errors import DataError
from cdgp.files import absolute

Counts = Mapping[str, tuple[int, int]]
"""(good, defective) by split, as ``Manifest.counts`` gives them."""

MVTEC_AD2_CATEGORIES = (
    "can", "fabric", "fruit_jelly", "rice", "sheet_metal", "vial", "wallplugs", "walnuts",
)  # fmt: skip
VISA_PUBLISHED: Mapping[str, Counts] = {
    name: {"train": (train, 60), "test": (test, 40)}
    for name, train, test in (
        ("candle", 600, 400), ("capsules", 361, 241), ("cashew", 300, 200),
        ("chewinggum", 302, 201), ("fryum", 300, 200), ("macaroni1", 600, 400),
        ("macaroni2", 600, 400), ("pcb1", 602, 402), ("pcb2", 601, 400), ("pcb3", 604, 402),
        ("pcb4", 603, 402), ("pipe_fryum", 300, 200),
    )
}  # fmt: skip
MVTEC_AD_PUBLISHED: Mapping[str, Counts] = {
    name: {"train": (train, 0), "test": (good, defective)}
    for name, train, good, defective in (
        ("bottle", 209, 20, 63), ("cable", 224, 58, 92), ("capsule", 219, 23, 109),
        ("carpet", 280, 28, 89), ("grid", 264, 21, 57), ("hazelnut", 391, 40, 70),
        ("leather", 245, 32, 92), ("metal_nut", 220, 22, 93), ("pill", 267, 26, 141),
        ("screw", 320, 41, 119), ("tile", 230, 33, 84), ("toothbrush", 60, 12, 30),
        ("transistor", 213, 60, 40), ("wood", 247, 19, 60), ("zipper", 240, 32, 119),
    )
}  # fmt: skip
"""Bergmann et al., IJCV 2021; its training part has no defective image."""
VISA_SPLITS = ("split_csv/2cls_highshot.csv", "2cls_highshot.csv")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """How one data set is stored on disk."""

    load: Callable[[Path], dict[str, Manifest]]
    """The set's folder to its categories; raises DataError for any other folder."""
    published: Mapping[str, Counts | None]
    """Counts by category; None where its categories are published but no counts we could check."""


def _folder(root: Path) -> dict[str, Manifest]:
    return {absolute(root).name.removesuffix(".csv"): load_folder(root, "good", "defective")}


def mvtec_ad2(root: Path) -> dict[str, Manifest]:
    """All public labelled images of MVTec AD 2, pooled by category, without a split.

    ``CATEGORY/{train,validation,test_public}/good``, ``CATEGORY/test_public/bad`` and its masks
    under ``CATEGORY/test_public/ground_truth/bad``; the private test parts have no labels.
    """
    found = {}
    for category in _categories(root, MVTEC_AD2_CATEGORIES, "test_public"):
        base = absolute(root) / category
        bad = base / "test_public" / "bad"
        samples = [
            Sample(image, False)
            for part in ("train", "validation", "test_public")
            for image in _images(base / part / "good")
        ]
        images = _images(bad)
        masks = pair_masks([{bad: images}], base / "test_public" / "ground_truth" / "bad")
        samples += [Sample(image, True, masks.get(image, ())) for image in images]
        found[category] = Manifest(base, tuple(samples))
    return found


def mvtec_ad(root: Path) -> dict[str, Manifest]:
    """MVTec AD and sets laid out like it, with defective training images beside the good ones.

    ``CATEGORY/{train,test}/good`` and ``CATEGORY/{train,test}/DEFECT``; masks of the test part
    under ``CATEGORY/ground_truth/DEFECT``. As published, ``train`` holds good images alone: add
    some defective ones as ``train/DEFECT``.
    """
    found = {}
    for category in _categories(root, (), "train"):
        base = absolute(root) / category
        manifest = mvtec_category(base, "good")
        if not any(s.defective for s in manifest.of("train")):
            raise DataError(
                f"{base / 'train'}: holds good images alone; put some defective ones into "
                f"{base / 'train' / 'DEFECT'}, or pool the parts in a CSV manifest"
            )
        found[category] = manifest
    return found


def ksdd2(root: Path) -> dict[str, Manifest]:
    """KolektorSDD2: ``{train,test}/NNNNN.png`` and ``NNNNN_GT.png``, the official split.

    An image is defective where its mask, at full size, marks any pixel.
    """
    samples = []
    _folder_there(root)
    for part in ("train", "test"):
        folder = absolute(root) / part
        if not folder.is_dir():
            raise DataError(
                f"{root}: there is no folder {part!r} in it; give KolektorSDD2's folder"
            )
        every = images_in(folder)
        # The published archive holds stray copies, such as "10301 (copy).png".
        found = [p for p in every if re.fullmatch(r"\d+(_GT)?", p.stem)]
        if len(found) < len(every):
            strays = ", ".join(p.name for p in every if p not in found)
            log.warning("%s: not named NNNNN or NNNNN_GT, and not used: %s", folder, strays)
        masks = {p.stem.removesuffix("_GT"): p for p in found if p.stem.endswith("_GT")}
        for image in (p for p in found if not p.stem.endswith("_GT")):
            mask = masks.pop(image.stem, None)
            if mask is None:
                raise DataError(f"{image}: has no mask {image.stem}_GT beside it")
            marked = bool(read_mask(mask, image_size(image)).any())
            samples.append(Sample(image, marked, (mask,) if marked else (), split=part))
        if masks:
            orphan = next(iter(masks.values()))
            raise DataError(f"{orphan}: is the mask of no image ({len(masks)} such masks)")
    if not samples:
        raise DataError(f"{root}: its folders train and test hold no images")
    return {"ksdd2": Manifest(absolute(root), tuple(samples))}


def visa(root: Path) -> dict[str, Manifest]:
    """VisA by its ``2cls_highshot`` table, the official split, one manifest an object."""
    base = absolute(root)
    _folder_there(root)
    table = next((base / name for name in VISA_SPLITS if (base / name).is_file()), None)
    if table is None:
        raise DataError(f"{root}: holds neither {VISA_SPLITS[0]} nor {VISA_SPLITS[1]}")
    found: dict[str, list[Sample]] = {}
    missing = []
    for row in visa_rows(table):
        image = base / row["image"]
        masks = (base / row["mask"],) if row["mask"] else ()
        missing += [path for path in (image, *masks) if not path.is_file()]
        sample = Sample(image, row["label"] == "anomaly", masks, split=row["split"])
        found.setdefault(row["object"], []).append(sample)
    if missing:
        raise DataError(f"{table}: {len(missing)} listed files are missing, first {missing[0]}")
    return {name: Manifest(base, tuple(samples)) for name, samples in found.items()}


def visa_rows(table: Path) -> list[dict[str, str]]:
    """The rows of VisA's split table: object, split, label, image, mask."""
    with table.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        expected = ["object", "split", "label", "image", "mask"]
        if reader.fieldnames != expected:
            raise DataError(f"{table}: the header is {reader.fieldnames}, expected {expected}")
        rows = list(reader)
    for line, row in enumerate(rows, start=2):
        if row["split"] not in ("train", "test") or row["label"] not in ("normal", "anomaly"):
            raise DataError(f"{table}: line {line} has split {row['split']!r}, {row['label']!r}")
    return rows


LAYOUTS: Mapping[str, Layout] = {
    "folder": Layout(_folder, {}),
    "mvtec_ad": Layout(mvtec_ad, MVTEC_AD_PUBLISHED),
    "mvtec_ad2": Layout(mvtec_ad2, dict.fromkeys(MVTEC_AD2_CATEGORIES)),
    "ksdd2": Layout(ksdd2, {"ksdd2": {"train": (2085, 246), "test": (894, 110)}}),
    "visa": Layout(visa, VISA_PUBLISHED),
}


def against_published(layout: Layout, found: Mapping[str, Manifest]) -> list[str]:
    """A line a category: what was found, and what was published where that is another number."""
    lines = []
    for name in sorted({*found, *layout.published}):
        if name not in found:
            lines.append(f"{name}: missing")
            continue
        counts = found[name].counts()
        text = ", ".join(f"{part} {good} good + {bad} defective"
                         for part, (good, bad) in counts.items())  # fmt: skip
        published = layout.published.get(name)
        if layout.published and name not in layout.published:
            text += " (no category of the published set)"
        elif published is not None and dict(published) != counts:
            other = ", ".join(f"{part} {good} + {bad}" for part, (good, bad) in published.items())
            text += f" (published: {other})"
        lines.append(f"{name}: {text}")
    return lines


def _categories(root: Path, known: tuple[str, ...], inside: str) -> list[str]:
    """Category folders, which hold a folder named ``inside``; all of them where none is known."""
    base = absolute(root)
    _folder_there(root)
    found = sorted(p.name for p in base.iterdir() if (p / inside).is_dir())
    if known:
        found = [name for name in found if name in known]
    if not found:
        expected = f" such as {known[0]!r}" if known else ""
        raise DataError(f"{root}: holds no category folder{expected} with {inside!r} inside")
    return found


def _folder_there(root: Path) -> None:
    if not absolute(root).is_dir():
        raise DataError(f"{root}: there is no such folder")


def _images(folder: Path) -> list[Path]:
    return images_in(folder) if folder.is_dir() else []
