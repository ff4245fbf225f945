"""Generated images in the folder layouts of public data sets, for the smoke plan and tests."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdgp_bench.synthetic import make_surface, plant_defect, save

Drawn = tuple[int, bool, str, NDArray[np.float32], NDArray[np.bool_]]
"""Number, whether it is defective, train or test (every third), image (HWC RGB in [0, 1]), mask."""


def drawn(key: list[int], good: int, bad: int, size: tuple[int, int]) -> Iterator[Drawn]:
    """Good surfaces, then defective ones; key and number decide each of them."""
    for i in range(good + bad):
        rng = np.random.default_rng([0, *key, i])
        image, mask = make_surface(size, rng), np.zeros(size, dtype=np.bool_)
        if i >= good:
            image, mask = plant_defect(image, rng)
        yield i, i >= good, "test" if i % 3 == 2 else "train", image, mask


def mvtec_ad2_tree(
    root: Path, categories: tuple[str, ...] = ("can", "vial"), good: int = 18, bad: int = 12
) -> None:
    """MVTec AD 2: good images over three parts, bad ones and masks in the public test part."""
    for number, category in enumerate(categories):
        test = root / category / "test_public"
        for i, _, _, image, _ in drawn([1, number], good, 0, (80, 64)):
            part = ("train", "train", "validation", "test_public")[i % 4]
            save(root / category / part / "good" / f"{i:03d}_regular.png", image)
        for i, _, _, image, mask in drawn([2, number], 0, bad, (80, 64)):
            save(test / "bad" / f"{i:03d}_regular.png", image)
            save(test / "ground_truth" / "bad" / f"{i:03d}_regular_mask.png", mask)


def ksdd2_tree(root: Path, good: int = 20, bad: int = 12) -> None:
    """KolektorSDD2: image and ``_GT`` mask side by side in train and test, all masks present."""
    for i, _, part, image, mask in drawn([3], good, bad, (80, 64)):
        save(root / part / f"{10000 + i}.png", image)
        save(root / part / f"{10000 + i}_GT.png", mask)


def visa_tree(
    root: Path, categories: tuple[str, ...] = ("candle", "pcb1"), good: int = 18, bad: int = 12
) -> None:
    """VisA: JPEG images, masks that hold class numbers, and the 2cls_highshot table."""
    rows = [["object", "split", "label", "image", "mask"]]
    for number, category in enumerate(categories):
        for i, defective, part, image, mask in drawn([4, number], good, bad, (64, 80)):
            kind = "Anomaly" if defective else "Normal"
            name = f"{category}/Data/Images/{kind}/{i:04d}.JPG"
            truth = f"{category}/Data/Masks/{kind}/{i:04d}.png" if defective else ""
            save(root / name, image)
            if truth:
                save(root / truth, mask.astype(np.uint8) * (1 + i % 3))
            rows.append([category, part, kind.lower(), name, truth])
    table = root / "split_csv" / "2cls_highshot.csv"
    table.parent.mkdir(parents=True, exist_ok=True)
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def mvtec_ad_tree(
    root: Path, categories: tuple[str, ...] = ("tile",), good: int = 18, bad: int = 12
) -> None:
    """MVTec AD: its normal-only layout, with ``train/scratch`` added for weak labels."""
    for number, category in enumerate(categories):
        base = root / category
        for i, defective, part, image, mask in drawn([5, number], good, bad, (64, 64)):
            kind = "scratch" if defective else "good"
            save(base / part / kind / f"{i:03d}.png", image)
            if part == "test" and defective:
                save(base / "ground_truth" / kind / f"{i:03d}_mask.png", mask)


TREES: Mapping[str, Callable[[Path], None]] = {
    "mvtec_ad": mvtec_ad_tree,
    "mvtec_ad2": mvtec_ad2_tree,
    "ksdd2": ksdd2_tree,
    "visa": visa_tree,
}


def generate(layout: str, root: Path) -> None:
    """The tree of a layout, named as in ``datasets.LAYOUTS``, with its default images."""
    TREES[layout](root)
