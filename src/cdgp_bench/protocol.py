"""Who sees what: seeded splits, label budgets, the overlap audit, and the record of it all.

Adapters receive a ``WeakSplit`` and, once trained, the paths of the test images; masks stay with
``Prepared.manifest``, which only the metrics open.
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


class Key(NamedTuple):
    """What a prepared split is found by."""

    dataset: str
    category: str
    seed: int
    budget: int | None


@dataclass(frozen=True)
class Prepared:
    """One category under one seed and label budget, split and audited."""

    dataset: str
    category: str
    seed: int
    budget: int | None
    """Defective training images allowed; None is all of them."""
    manifest: Manifest
    selected: tuple[str, ...]
    """Names of the defective training images, in the order of the budget's permutation."""

    @property
    def weak(self) -> WeakSplit:
        """What an adapter may train on."""
        return self.manifest.weak_split()

    @cached_property
    def masks_sha256(self) -> str:
        """Digest of the test part's masks, which decide the pixel metrics and nothing else."""
        masks: list[list[str | None]] = [
            [self.manifest.name(s.image), *(map(digest, s.masks) if s.masks else (None,))]
            for s in self.manifest.of("test")
        ]
        return hashlib.sha256(json.dumps(masks).encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """Counts and audit, as rows and records carry them."""
        return {
            "parts": {part: list(counts) for part, counts in self.manifest.counts().items()},
            "audit": overlaps(self.manifest),
            "effective_budget": len(self.selected),
        }

    def record(self, folder: Path) -> None:
        """Write who was where, with resolved paths and digests, as JSON; no mask is named."""
        name = "-".join(
            str(part) for part in (self.dataset, self.category, f"seed{self.seed}",
                                   "full" if self.budget is None else f"k{self.budget}")
        )  # fmt: skip
        told = {
            "dataset": self.dataset, "category": self.category, "seed": self.seed,
            "budget": self.budget,
            "selected": list(self.selected), "manifest_sha256": self.manifest.sha256,
            **self.facts(),
            "pictures": [
                {"path": str(s.image.resolve()), "label": "defective" if s.defective else "good",
                 "split": s.split, "group": s.group, "sha256": s.sha256,
                 "pixel_sha256": s.pixel_sha256}
                for s in self.manifest.samples
            ],
        }  # fmt: skip
        write_text(folder / f"{name}.json", json.dumps(told, indent=1) + "\n")


def prepare(
    dataset: str,
    category: str,
    images: Manifest,
    data: DataSettings,
    seed: int,
    budget: int | None = None,
) -> Prepared:
    """Split hashed images by seed, limit the labels, and audit the result.

    Stated splits are kept; otherwise a stratified ``data.test_fraction`` is held out for test. Of
    the training part a stratified ``data.calibration_fraction`` calibrates.

    Raises:
        DataError: a part would lack a class.
        LeakError: an image, by path, bytes or pixels, or a group stands in two parts.
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
    audited(manifest)
    names = tuple(manifest.name(s.image) for s in chosen)
    return Prepared(dataset, category, seed, budget, manifest, names)


def permuted(manifest: Manifest, key: str) -> tuple[Sample, ...]:
    """The defective training images in an order that SHA-256 draws from key and name."""

    def drawn(sample: Sample) -> str:
        return hashlib.sha256(f"{key}:{manifest.name(sample.image)}".encode()).hexdigest()

    return tuple(sorted((s for s in manifest.of("train") if s.defective), key=drawn))


def limited(manifest: Manifest, chosen: Sequence[Sample]) -> Manifest:
    """All good images, the test part, and the chosen defective training images alone.

    They keep their parts. Where none of them calibrates, the first one's group does; the Dual GP
    trains on calibration images too, so with one image that image serves both, as the paper
    has it.
    """
    kept = {s.image for s in chosen}
    samples = [
        s for s in manifest.samples if s.split == "test" or not s.defective or s.image in kept
    ]
    if not any(s.defective and s.split == "calibration" for s in samples):
        groups = group_numbers(manifest, samples)
        moved = groups[samples.index(chosen[0])]
        samples = [
            replace(s, split="calibration") if group == moved and s.split == "fit" else s
            for s, group in zip(samples, groups, strict=True)
        ]
    return replace(manifest, samples=tuple(samples))


def overlaps(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Images of one part that stand in another: by resolved path and by pixels."""
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


def audited(manifest: Manifest) -> None:
    """Refuse overlaps with the test part.

    Raises:
        LeakError: there is one; the message counts them.
    """
    found = overlaps(manifest)
    bad = [f"{pair.replace('_', '–')}: {count} by {how}"
           for pair, counts in found.items() for how, count in counts.items() if count]  # fmt: skip
    if bad:
        raise LeakError(f"{manifest.root}: images stand on two sides: {'; '.join(bad)}")


def digested(manifest: Manifest, data: DataSettings, cache: Path, progress: Progress) -> Manifest:
    """``scan.digested``, remembering by size and time of change what has been decoded before.

    Raises:
        DataError: files that cannot be used, all of them listed.
    """
    known: dict[str, list[Any]] = json.loads(cache.read_text()) if cache.is_file() else {}

    def stamp(sample: Sample) -> list[Any]:
        facts = [path.stat() for path in (sample.image, *sample.masks)]
        stated = [sample.sha256, sample.pixel_sha256]  # what a table states is checked once, too
        return [data.white_level, stated, *[[f.st_size, f.st_mtime_ns] for f in facts]]

    stamps = [stamp(s) for s in manifest.samples]
    new = tuple(
        s for s, mark in zip(manifest.samples, stamps, strict=True)
        if known.get(str(s.image), [None])[0] != mark
    )  # fmt: skip
    if new:
        with progress.phase(f"Reading {manifest.root.name}", len(new)) as advance:
            read = scan.digested(replace(manifest, samples=new), data.white_level, advance)
        found = {s.image: s for s in read.samples}
        for s, mark in zip(manifest.samples, stamps, strict=True):
            if s.image in found:
                known[str(s.image)] = [mark, found[s.image].sha256, found[s.image].pixel_sha256]
        write_text(cache, json.dumps(known))
    entries = [known[str(s.image)] for s in manifest.samples]
    samples = [
        replace(s, sha256=entry[1], pixel_sha256=entry[2])
        for s, entry in zip(manifest.samples, entries, strict=True)
    ]
    return replace(manifest, samples=tuple(samples))
