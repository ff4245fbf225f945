"""Generated images in the folder layouts of public data sets, for the smoke plan and tests."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdgp_bench.synthetic import make_surface, plant_defect

Size = tuple[int, int]


def mvtec_ad2_tree(
    root: Path, categories: tuple[str, ...] = ("can", "vial"), good: int = 18, bad: int = 12,
    size: Size = (80, 64), seed: int = 0,
) -> None:  # fmt: skip
    """MVTec AD 2: good images over three parts, bad ones and masks in the public test part."""
    for number, category in enumerate(categories):
        base = root / category
        for i in range(good):
            part = ("train", "train", "validation", "test_public")[i % 4]
            image, _ = drawn(size, [seed, 1, number, i], False)
            save(base / part / "good" / f"{i:03d}_regular.png", image)
        for i in range(bad):
            image, mask = drawn(size, [seed, 2, number, i], True)
            test = base / "test_public"
            save(test / "bad" / f"{i:03d}_regular.png", image)
            save(test / "ground_truth" / "bad" / f"{i:03d}_regular_mask.png", mask)


def ksdd2_tree(
    root: Path, good: int = 20, bad: int = 12, size: Size = (80, 64), seed: int = 0
) -> None:
    """KolektorSDD2: image and ``_GT`` mask side by side in train and test, all masks present."""
    for i in range(good + bad):
        part = "test" if i % 3 == 2 else "train"
        image, mask = drawn(size, [seed, 3, i], i >= good)
        save(root / part / f"{10000 + i}.png", image)
        save(root / part / f"{10000 + i}_GT.png", mask)


def visa_tree(
    root: Path, categories: tuple[str, ...] = ("candle", "pcb1"), good: int = 18, bad: int = 12,
    size: Size = (64, 80), seed: int = 0,
) -> None:  # fmt: skip
    """VisA: JPEG images, masks that hold class numbers, and the 2cls_highshot table."""
    rows = []
    for number, category in enumerate(categories):
        for i in range(good + bad):
            kind = "Anomaly" if i >= good else "Normal"
            pixels, mask = drawn(size, [seed, 4, number, i], i >= good)
            image = f"{category}/Data/Images/{kind}/{i:04d}.JPG"
            truth = f"{category}/Data/Masks/{kind}/{i:04d}.png" if i >= good else ""
            save(root / image, pixels)
            if truth:
                save(root / truth, mask.astype(np.uint8) * (1 + i % 3))
            part = "test" if i % 3 == 2 else "train"
            rows.append([category, part, "anomaly" if i >= good else "normal", image, truth])
    table = root / "split_csv" / "2cls_highshot.csv"
    table.parent.mkdir(parents=True, exist_ok=True)
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["object", "split", "label", "image", "mask"], *rows])


def mvtec_ad_tree(
    root: Path, categories: tuple[str, ...] = ("tile",), good: int = 18, bad: int = 12,
    size: Size = (64, 64), seed: int = 0,
) -> None:  # fmt: skip
    """MVTec AD: its normal-only layout, with ``train/scratch`` added for weak labels."""
    for number, category in enumerate(categories):
        base = root / category
        for i in range(good + bad):
            part = "test" if i % 3 == 2 else "train"
            kind = "scratch" if i >= good else "good"
            image, mask = drawn(size, [seed, 5, number, i], i >= good)
            save(base / part / kind / f"{i:03d}.png", image)
            if part == "test" and i >= good:
                save(base / "ground_truth" / kind / f"{i:03d}_mask.png", mask)


def generate(layout: str, root: Path) -> None:
    """The tree of a layout, named as in ``datasets.LAYOUTS``, with its default images."""
    trees: dict[str, Callable[[Path], None]] = {
        "mvtec_ad": mvtec_ad_tree,
        "mvtec_ad2": mvtec_ad2_tree,
        "ksdd2": ksdd2_tree,
        "visa": visa_tree,
    }
    trees[layout](root)


def drawn(
    size: Size, key: list[int], defective: bool
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """A surface, HWC float32 RGB in [0, 1], and its mask (H, W) bool; the key decides both."""
    rng = np.random.default_rng(key)
    surface = make_surface(size, rng)
    return plant_defect(surface, rng) if defective else (surface, np.zeros(size, dtype=np.bool_))


def save(path: Path, values: NDArray[np.generic]) -> None:
    """Write an image in [0, 1], a mask, or bytes as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if values.dtype == np.float32:
        values = np.rint(values * 255).astype(np.uint8)
    image = Image.fromarray(values)
    if path.suffix == ".JPG":
        image.save(path, quality=95)
    else:
        image.save(path)
