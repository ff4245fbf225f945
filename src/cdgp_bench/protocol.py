"""Which images a method may use: splits by seed or fold, label budgets, the overlap audit, the
record.

A method gets a ``WeakSplit`` and, once trained, the paths of the test images. Masks stay in
``Prepared.manifest``; only the metrics read them.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from cdgp.data import scan
from cdgp.data.groups import group_numbers
from cdgp.data.manifest import Manifest, Sample, WeakSplit
from cdgp.data.splits import check_leaks, split
from cdgp.errors import DataError, LeakError
from cdgp.files import digest, write_text
from cdgp.presets import DataSettings
from cdgp.progress import Progress

BUDGETS = (1, 2, 4, 8, 16)
"""The paper's numbers of defective training images, besides all of them."""


REPORTED_SEEDS = (0, 1, 2)
"""The seeds of all ready plans, so of every test part that a seed draws for a result."""


class Repeat(NamedTuple):
    """One measurement of a method among several that differ by chance alone."""

    seed: int
    """Draws what is divided at random, and the training."""
    fold: int | None
    """The test part; None where the seed draws it."""


class SplitKey(NamedTuple):
    """Names one prepared split."""

    dataset: str
    category: str
    seed: int
    budget: int | None
    fold: int | None = None


@dataclass(frozen=True)
class Prepared:
    """One category under one seed, fold and label budget, split and audited."""

    dataset: str
    category: str
    seed: int
    budget: int | None
    """Defective training images allowed; None is all of them."""
    fold: int | None
    """The fold that is the test part; None where the seed draws it."""
    manifest: Manifest
    selected: tuple[str, ...]
    """Names of the defective training images, in the order of the budget's permutation."""

    @property
    def weak(self) -> WeakSplit:
        """What a method may train on."""
        return self.manifest.weak_split()

    @cached_property
    def masks_sha256(self) -> str:
        """Digest of the test part's masks; only the pixel metrics depend on them."""
        masks: list[list[str | None]] = [
            [self.manifest.name(s.image), *(map(digest, s.masks) if s.masks else (None,))]
            for s in self.manifest.of("test")
        ]
        return hashlib.sha256(json.dumps(masks).encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """Counts and audit, for rows and records."""
        return {
            "parts": {part: list(counts) for part, counts in self.manifest.counts().items()},
            "audit": overlaps(self.manifest),
            "effective_budget": len(self.selected),
        }

    def record(self, folder: Path) -> None:
        """Write each image's part, path and digests as JSON; no mask is named."""
        fold = [] if self.fold is None else [f"fold{self.fold}"]
        budget = "full" if self.budget is None else f"k{self.budget}"
        name = "-".join([self.dataset, self.category, f"seed{self.seed}", *fold, budget])
        record = {
            "dataset": self.dataset, "category": self.category, "seed": self.seed,
            "budget": self.budget, "fold": self.fold,
            "selected": list(self.selected), "manifest_sha256": self.manifest.sha256,
            **self.facts(),
            "pictures": [
                {"path": str(s.image.resolve()), "label": "defective" if s.defective else "good",
                 "split": s.split, "group": s.group, "sha256": s.sha256,
                 "pixel_sha256": s.pixel_sha256}
                for s in self.manifest.samples
            ],
        }  # fmt: skip
        write_text(folder / f"{name}.json", json.dumps(record, indent=1) + "\n")


def prepare(
    dataset: str,
    category: str,
    images: Manifest,
    data: DataSettings,
    seed: int,
    budget: int | None = None,
    fold: int | None = None,
) -> Prepared:
    """Split digested images by seed, limit the labels, and audit the result.

    A split in the manifest is kept; otherwise a stratified ``data.test_fraction`` is held out for
    test. A stratified ``data.calibration_fraction`` of the training part calibrates.

    Args:
        dataset: its name.
        category: its name.
        images: with digests; for a fold, what ``folds.cross_test`` gives.
        data: the fractions.
        seed: of what is drawn.
        budget: of defective training images; 0 leaves none, None all.
        fold: the name of the test part that ``images`` state.

    Raises:
        DataError: a part would lack a class.
        LeakError: an image (by path, bytes or pixels) or a group is in two parts.
    """
    manifest = split(
        images, seed, data.test_fraction, data.calibration_fraction, ("fit", "calibration")
    )
    if not any(s.defective for s in manifest.of("test")):
        raise DataError(f"{manifest.root}: the test part of {dataset}/{category} has no defective "
                        "image, so nothing can be measured")  # fmt: skip
    order = permuted(manifest, f"{seed}:{dataset}:{category}")
    chosen = order if budget is None else order[:budget]
    if budget is not None:
        manifest = limited(manifest, chosen)
        check_leaks(manifest)
    check_overlaps(manifest)
    names = tuple(manifest.name(s.image) for s in chosen)
    return Prepared(dataset, category, seed, budget, fold, manifest, names)


def ranking_split(
    images: Manifest, data: DataSettings, seed: int, reported: Sequence[int] = REPORTED_SEEDS
) -> Manifest:
    """Fit and calibration images to rank settings on, outside the test part of every reported seed.

    Test parts of several seeds overlap with each other's training parts, so a choice made on one
    seed's calibration images has seen images that another seed reports on. All of them, and whole
    groups with them, are left out here. Folds test every image, so nothing stays out of theirs.

    Args:
        images: digested; a stated test part is that of every seed.
        data: the fractions of the reported splits.
        seed: of the division into fit and calibration.
        reported: seeds of the test parts to stay out of.

    Raises:
        DataError: what remains lacks a class.
    """
    fractions = (data.test_fraction, data.calibration_fraction)
    tested = {s.image for r in reported for s in split(images, r, *fractions, ()).of("test")}
    rest = tuple(s for s in images.samples if s.image not in tested)
    needed = ("fit", "calibration")
    return split(replace(images, samples=rest), seed, 0, data.calibration_fraction, needed)


def permuted(manifest: Manifest, key: str) -> tuple[Sample, ...]:
    """The defective training images, ordered by the SHA-256 of key and name."""

    def position(sample: Sample) -> str:
        return hashlib.sha256(f"{key}:{manifest.name(sample.image)}".encode()).hexdigest()

    return tuple(sorted((s for s in manifest.of("train") if s.defective), key=position))


def limited(manifest: Manifest, chosen: Sequence[Sample]) -> Manifest:
    """All good images, the test part, and of the defective training images the chosen ones, if any.

    They keep their parts. If none of them is a calibration image, the first one and its group
    become calibration images. The Dual GP trains on those too, so a single image serves both
    purposes, as in the paper.
    """
    kept = {s.image for s in chosen}
    samples = [
        s for s in manifest.samples if s.split == "test" or not s.defective or s.image in kept
    ]
    if chosen and not any(s.defective and s.split == "calibration" for s in samples):
        groups = group_numbers(manifest, samples)
        moved = groups[samples.index(chosen[0])]
        samples = [
            replace(s, split="calibration") if group == moved and s.split == "fit" else s
            for s, group in zip(samples, groups, strict=True)
        ]
    return replace(manifest, samples=tuple(samples))


def overlaps(manifest: Manifest) -> dict[str, dict[str, int]]:
    """How many images of one part are in another: by resolved path and by pixels."""
    parts = {name: manifest.of(name) for name in ("train", "calibration", "test")}
    paths = {name: {s.image.resolve() for s in part} for name, part in parts.items()}
    pixels = {name: {s.pixel_sha256 for s in part} for name, part in parts.items()}
    return {
        f"{name}_test": {
            "path": len(paths[name] & paths["test"]),
            "pixel": len(pixels[name] & pixels["test"]),
        }
        for name in ("calibration", "train")
    }


def check_overlaps(manifest: Manifest) -> None:
    """Check that no training image is in the test part."""
    found = overlaps(manifest)
    bad = [f"{pair.replace('_', '–')}: {count} by {how}"
           for pair, counts in found.items() for how, count in counts.items() if count]  # fmt: skip
    if bad:
        raise LeakError(f"{manifest.root}: images are in two parts: {'; '.join(bad)}")


def cached_digests(
    manifest: Manifest, data: DataSettings, cache: Path, progress: Progress
) -> Manifest:
    """``scan.digested``, but files unchanged since the last call are not decoded again."""
    known: dict[str, list[Any]] = json.loads(cache.read_text()) if cache.is_file() else {}

    def stamp(sample: Sample) -> list[Any]:
        facts = [path.stat() for path in (sample.image, *sample.masks)]
        stated = [sample.sha256, sample.pixel_sha256]  # a table's digests are checked once, too
        return [data.white_level, data.pages, stated, *[[f.st_size, f.st_mtime_ns] for f in facts]]

    stamps = {str(s.image): stamp(s) for s in manifest.samples}
    new = [s for s in manifest.samples
           if known.get(str(s.image), [None])[0] != stamps[str(s.image)]]  # fmt: skip
    if new:
        with progress.phase(f"Reading {manifest.root.name}", len(new)) as advance:
            unread = replace(manifest, samples=tuple(new))
            read = scan.digested(unread, data.white_level, advance, data.first_page)
        for s in read.samples:
            known[str(s.image)] = [stamps[str(s.image)], s.sha256, s.pixel_sha256]
        write_text(cache, json.dumps(known))
    samples = []
    for s in manifest.samples:
        _, sha256, pixel_sha256 = known[str(s.image)]
        samples.append(replace(s, sha256=sha256, pixel_sha256=pixel_sha256))
    return replace(manifest, samples=tuple(samples))
