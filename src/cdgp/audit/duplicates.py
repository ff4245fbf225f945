"""Exact and near duplicates: which images show the same, and where that matters.

Exact duplicates have equal bytes or equal pixels. Near duplicates have similar perceptual hashes
and strongly correlated thumbnails: the same part again, resized, recompressed or slightly moved.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cdgp.audit.types import Audit, Finding, Severity, count
from cdgp.data.groups import connected
from cdgp.data.manifest import Manifest, Sample
from cdgp.data.scan import ImageStats
from cdgp.data.splits import has_splits, side

HASH_BITS = 12
"""Images whose 64-bit perceptual hashes differ in more bits are not compared further."""
NEAR = 0.98
"""Two images are near duplicates where the correlation of their thumbnails is above this."""
ALIKE = 0.3
"""A cluster with more than this share of all images shows parts in a fixture, not duplicates."""
LEAST_ALIKE = 20
"""With fewer images than this, the share is not tested."""
BLOCK = 512
"""So many images at a time are compared with all others."""

DUPLICATES: dict[str, tuple[Severity, str]] = {
    "label_conflict": ("error", "equal images in both bins; keep one of each"),
    "byte_leak": ("error", "files with equal bytes on two sides of the stated split; put each "
                  "pair into one split"),
    "pixel_leak": ("error", "images with equal pixels on two sides of the stated split; put each "
                   "pair into one split"),
    "byte_copy": ("note", "files with equal bytes; cdgp keeps them on one side of its split"),
    "pixel_copy": ("note", "images with equal pixels; cdgp keeps them on one side of its split"),
    "group_leak": ("error", "images of one group on two sides of the stated split; put each group "
                   "into one split"),
}  # fmt: skip

NEAR_DUPLICATES: dict[str, tuple[Severity, str]] = {
    "near_leak": ("warning", "on two sides of the stated split: the same part, or one that looks "
                  "the same, is in training and in test"),
    "near_duplicates": ("warning", "({images} images) without a group of their own: a split may "
                        "separate them. Name the part of each image in a column 'group', or let "
                        "cdgp check --groups write one"),
    "near_label_conflict": ("note", "with both labels: a small defect, or a wrong label"),
}  # fmt: skip


def exact_duplicates(manifest: Manifest) -> Iterable[Finding]:
    """Pairs with equal bytes or pixels, and pairs of one group on two sides of a stated split."""
    stated = has_splits(manifest.samples)
    by_pixels: dict[str, list[Sample]] = defaultdict(list)
    by_group: dict[str, list[Sample]] = defaultdict(list)
    for sample in manifest.samples:
        by_pixels[sample.pixel_sha256 or ""].append(sample)
        if sample.group is not None:
            by_group[sample.group].append(sample)
    found: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for first, *others in by_pixels.values():
        for sample in others:
            kind = _kind_of_pair(first, sample, stated)
            found[kind].append((manifest.name(first.image), manifest.name(sample.image)))
    for first, *others in by_group.values():
        for sample in others:
            if side(sample, stated) != side(first, stated):
                pair = (manifest.name(first.image), manifest.name(sample.image))
                found["group_leak"].append(pair)
    for kind, pairs in found.items():
        severity, text = DUPLICATES[kind]
        yield Finding(kind, severity, f"{count(len(pairs), 'pair')}: {text}", tuple(pairs))


def _kind_of_pair(first: Sample, second: Sample, stated: bool) -> str:
    if first.defective != second.defective:
        return "label_conflict"
    equal = "byte" if first.sha256 == second.sha256 else "pixel"
    return f"{equal}_copy" if side(first, stated) == side(second, stated) else f"{equal}_leak"


def near_duplicates(stats: Sequence[ImageStats]) -> tuple[list[list[int]], list[int]]:
    """Clusters of near duplicates, and the images that all look alike, as positions.

    The perceptual hash proposes pairs, the correlation of the thumbnails decides. Pairs with equal
    pixels are not compared, and a flat image is near to none. Where one cluster holds a large share
    of all images, the parts lie in a fixture and duplicates cannot be distinguished from them: that
    cluster is returned apart.
    """
    if not stats:
        return [], []
    clusters = [c for c in connected(len(stats), _near_pairs(stats)) if len(c) > 1]
    largest = max(clusters, key=len, default=[])
    if len(stats) >= LEAST_ALIKE and len(largest) > ALIKE * len(stats):
        return [c for c in clusters if c is not largest], largest
    return clusters, []


def _near_pairs(stats: Sequence[ImageStats]) -> list[tuple[int, int]]:
    """Pairs that connect all near duplicates, compared in blocks of rows to bound the memory."""
    hashes = np.array([s.perceptual_hash for s in stats], np.uint64)
    thumbnails = np.stack([s.thumbnail for s in stats])
    pixels = np.unique([s.sample.pixel_sha256 or "" for s in stats], return_inverse=True)[1]
    pairs: list[tuple[int, int]] = []
    for start in range(0, len(hashes), BLOCK):
        rows = np.arange(start, min(start + BLOCK, len(hashes)))
        close = _bit_count(hashes[rows, None] ^ hashes[None, start:]) <= HASH_BITS
        close &= pixels[rows, None] != pixels[None, start:]
        close &= rows[:, None] < np.arange(start, len(hashes))
        columns = np.flatnonzero(close.any(axis=0)) + start
        correlation = thumbnails[rows].astype(np.float32) @ thumbnails[columns].astype(np.float32).T
        left, right = np.nonzero(close[:, columns - start] & (correlation > NEAR))
        if not len(left):
            continue
        found = connected(len(hashes), zip(rows[left], columns[right], strict=True))
        # In a fixture all pairs are near: of each cluster only the pairs that connect it are kept.
        pairs += [(first, other) for first, *others in found for other in others]
    return pairs


def _bit_count(values: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Set bits of each value; NumPy has a function for this from version 2 on."""
    bitwise_count = getattr(np, "bitwise_count", None)
    if bitwise_count is not None:
        return np.asarray(bitwise_count(values))
    table = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)
    found: NDArray[np.uint8] = table[values[..., None].view(np.uint8)].sum(-1, dtype=np.uint8)
    return found


def near_findings(
    manifest: Manifest, stats: Sequence[ImageStats], near: Sequence[Sequence[int]]
) -> Iterable[Finding]:
    """Clusters across splits, across labels, and across groups where no split is stated."""
    stated = has_splits(manifest.samples)
    found: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for cluster in near:
        samples = [stats[i].sample for i in cluster]
        names = tuple(manifest.name(s.image) for s in samples)
        sides = {side(s, stated) for s in samples}
        if sides == {"test"}:
            continue
        if len(sides) > 1:
            found["near_leak"].append(names)
        elif len({s.group for s in samples}) > 1 or samples[0].group is None:
            found["near_duplicates"].append(names)
        if len({s.defective for s in samples}) > 1:
            found["near_label_conflict"].append(names)
    for kind, (severity, text) in NEAR_DUPLICATES.items():
        if clusters := found[kind]:
            counted = f"{count(len(clusters), 'cluster')} of near duplicates"
            words = text.format(images=sum(map(len, clusters)))
            yield Finding(kind, severity, f"{counted} {words}", tuple(clusters))


def alike_finding(
    manifest: Manifest, stats: Sequence[ImageStats], alike: Sequence[int]
) -> Iterable[Finding]:
    """A note where so many images look alike that duplicates cannot be found among them."""
    if alike:
        yield Finding(
            "taken_alike", "note",
            f"{len(alike)} of {len(stats)} images look as similar as near duplicates do: parts in "
            "a fixture look like this, and duplicates cannot be distinguished from them",
            (tuple(manifest.name(stats[i].sample.image) for i in alike),),
        )  # fmt: skip


def grouped(manifest: Manifest, audit: Audit) -> Manifest:
    """``joined`` with the near duplicates of an audit."""
    return joined(manifest, audit.near)


def joined(manifest: Manifest, near: Sequence[Sequence[str]]) -> Manifest:
    """The manifest with each cluster of near duplicates as one group, joined with its own groups.

    ``near`` holds the clusters, by name. A joined group is named after its first image.
    """
    position = {manifest.name(s.image): i for i, s in enumerate(manifest.samples)}
    pairs = [(position[first], position[other]) for first, *others in near for other in others]
    first_of: dict[str, int] = {}
    for i, sample in enumerate(manifest.samples):
        if sample.group is not None:
            pairs.append((first_of.setdefault(sample.group, i), i))
    samples = list(manifest.samples)
    for members in connected(len(samples), pairs):
        if len(members) > 1:
            name = manifest.name(samples[members[0]].image)
            for i in members:
                samples[i] = replace(samples[i], group=name)
    return replace(manifest, samples=tuple(samples))
