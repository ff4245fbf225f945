"""What is wrong with a data set: broken files, copies, leaks, odd masks, shortcuts, balance.

`Looks` collects a little of every image while it is decoded for its digest, so that training and
`cdgp check` decode each image once; `audit` draws the findings from it. Nothing is ever changed.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import imagehash
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.stats import mannwhitneyu
from sklearn.metrics import roc_auc_score

from cdgp.data import images
from cdgp.data.images import FileFacts, MaskFacts
from cdgp.data.manifest import Manifest, Sample
from cdgp.data.splits import CLASSES, has_splits, side, split, usable
from cdgp.errors import DataError, ImageError
from cdgp.files import printable
from cdgp.presets import DataSettings

SMALL = 48
"""Side of the grey copy that near duplicates are compared by."""
HASH_BITS = 12
"""Images whose 64-bit perceptual hashes differ in more bits are not compared further."""
NEAR = 0.98
"""Correlation of two grey copies, each less its mean, above which they count as near duplicates."""
SHORTCUT = 0.9
"""AUROC above which a trivial fact is told to predict the label."""
CHANCE = 0.01
"""The Mann-Whitney p-value that a shortcut must stay below: few images separate by luck."""
COPIED_TOGETHER = 3600.0
"""Seconds. Times of change that lie closer tell when a folder was copied, not when it was taken."""
INVERTED = 0.9
"""Share of an image that is marked above which its mask seems to be inverted."""
GREY_LEVELS = 16
"""Masks with more levels are told: they were blurred or compressed, and are cut at half."""
ALIKE = 0.3
"""A cluster with a larger share of all images than this says that they are taken alike."""
MANY = 20
"""Images from which on such a share means anything."""
FEW = {False: 20, True: 10}
"""Fewer groups of a class than this make probabilities and thresholds coarse."""
SHOWN = 5
TIME = "time of change"
BLOCK = 512

Severity = Literal["error", "warning", "note"]


class Finding(NamedTuple):
    """One thing that a person should know of a data set."""

    kind: str
    """A stable name, for programs."""
    severity: Severity
    """An error makes the data unusable, a warning deserves a look, a note is for information."""
    text: str
    images: tuple[tuple[str, ...], ...] = ()
    """Names as the manifest writes them; what belongs together stands together."""


class Shortcut(NamedTuple):
    """How well one trivial fact tells the two classes apart."""

    fact: str
    auroc: float
    """In [0.5, 1]: of the fact or of its opposite."""
    p_value: float
    """Two-sided, of the Mann-Whitney test."""
    good: float
    """Median over good images."""
    defective: float


@dataclass(frozen=True)
class Audit:
    """Everything that was found."""

    root: str
    counts: dict[str, tuple[int, int]]
    """(good, defective) by split, as `Manifest.counts` gives them, of usable images."""
    sizes: dict[str, int]
    """Images by "WIDTH × HEIGHT", the most frequent first."""
    findings: tuple[Finding, ...]
    shortcuts: tuple[Shortcut, ...]
    near: tuple[tuple[str, ...], ...]
    """Clusters of near duplicates, by name."""

    def of(self, severity: Severity) -> list[Finding]:
        """The findings of one severity."""
        return [f for f in self.findings if f.severity == severity]

    def record(self) -> dict[str, Any]:
        """The audit as `check.json` holds it; names of odd bytes are escaped."""
        return {
            "root": printable(self.root),
            "counts": {name: list(counts) for name, counts in self.counts.items()},
            "sizes": self.sizes,
            "findings": [
                {
                    "kind": f.kind,
                    "severity": f.severity,
                    "text": printable(f.text),
                    "pictures": [[printable(name) for name in group] for group in f.images],
                }
                for f in self.findings
            ],
            "shortcuts": [
                {k: None if isinstance(v, float) and not math.isfinite(v) else v
                 for k, v in s._asdict().items()}
                for s in self.shortcuts
            ],
            "near_duplicates": [[printable(name) for name in group] for group in self.near],
            "rules": {
                "near_correlation": NEAR,
                "hash_bits": HASH_BITS,
                "shortcut_auroc": SHORTCUT,
                "shortcut_p_value": CHANCE,
            },
        }  # fmt: skip


@dataclass(frozen=True)
class _Look:
    """What is kept of one image."""

    sample: Sample
    height: int
    width: int
    file: FileFacts
    bytes: int
    modified: float
    brightness: float
    contrast: float
    saturation: float
    hash: np.uint64
    small: NDArray[np.float16]
    marked: float
    """Share of the image that its masks mark together; 0 without a mask."""
    masks: tuple[MaskFacts, ...]


class Looks:
    """Collects what the audit needs while `splits.hashed` decodes the images."""

    def __init__(self) -> None:
        self._looks: list[_Look] = []

    def add(
        self,
        sample: Sample,
        image: NDArray[np.float32],
        facts: FileFacts,
        masks: Sequence[tuple[NDArray[np.bool_], MaskFacts]],
    ) -> None:
        """Takes one image, as `splits.Look` says."""
        stat = sample.image.stat()
        grey = image.mean(axis=2)
        copy = Image.fromarray(np.rint(grey * 255).astype(np.uint8))
        reduced = Image.fromarray(grey).resize((SMALL, SMALL), Image.Resampling.BILINEAR)
        small = np.asarray(reduced, np.float64).ravel()
        small = small - small.mean()
        length = float(np.linalg.norm(small))
        bits = imagehash.phash(copy).hash.ravel()
        union = np.any([np.zeros(grey.shape, np.bool_), *(mask for mask, _ in masks)], axis=0)
        self._looks.append(_Look(
            sample=sample,
            height=image.shape[0],
            width=image.shape[1],
            file=facts,
            bytes=stat.st_size,
            modified=stat.st_mtime,
            brightness=float(grey.mean()),
            contrast=float(grey.std()),
            saturation=float((image.max(axis=2) - image.min(axis=2)).mean()),
            hash=np.packbits(bits).view(">u8")[0].astype(np.uint64),
            small=(small / length if length > 1e-6 else small * 0).astype(np.float16),
            marked=float(union.mean()),
            masks=tuple(facts for _, facts in masks),
        ))  # fmt: skip

    def __iter__(self) -> Iterator[_Look]:
        return iter(self._looks)

    def __len__(self) -> int:
        return len(self._looks)


def check(
    manifest: Manifest,
    white_level: int = images.WHITE_LEVEL,
    progress: Callable[[], object] | None = None,
    notes: Sequence[str] = (),
) -> Audit:
    """Reads every image and mask of a manifest and tells what is wrong with them.

    Arguments:
        manifest: The samples, with splits and groups where these are stated.
        white_level: The value that means white in 16-bit files.
        progress: Called once per image.
        notes: What was noticed while the manifest was put together.
    """
    looks = Looks()
    found, bad = usable(manifest, progress, white_level, looks.add)
    return audit(found, looks, white_level, bad, notes)


def audit(
    manifest: Manifest,
    looks: Looks,
    white_level: int = images.WHITE_LEVEL,
    bad: Sequence[tuple[Sample, ImageError]] = (),
    notes: Sequence[str] = (),
) -> Audit:
    """The findings of images that have been looked at.

    Arguments:
        manifest: The usable samples, with their digests.
        looks: What was collected of them.
        white_level: That they were read with.
        bad: The samples that cannot be used, with the reason.
        notes: What was noticed while the manifest was put together.
    """
    name = manifest.name
    every = sorted(looks, key=lambda look: name(look.sample.image))
    findings: list[Finding] = []
    if bad:
        findings.append(Finding(
            "broken", "error",
            f"{_count(len(bad), 'image')} cannot be used: "
            + "; ".join(str(error) for _, error in bad),
            tuple((name(sample.image),) for sample, _ in bad),
        ))  # fmt: skip
    findings += [Finding("reading", "note", note) for note in notes]
    findings += _copies(manifest)
    near, alike = _near_duplicates(every)
    findings += _near_findings(manifest, every, near)
    if alike:
        findings.append(Finding(
            "taken_alike", "note",
            f"{len(alike)} of {len(every)} images resemble one another as near duplicates do: "
            "where parts lie in a fixture this is so, and copies cannot be told from them",
            (tuple(name(every[i].sample.image) for i in alike),),
        ))  # fmt: skip
    findings += _files(manifest, every, white_level)
    findings += _masks(manifest, every)
    shortcuts = _shortcuts(every)
    findings += [
        Finding(
            "shortcut", "warning",
            f"{s.fact} alone tells good from defective (AUROC {s.auroc:.3f}; median "
            f"{told(s, s.good)} of good, {told(s, s.defective)} of defective images): learning "
            "from image labels would learn that instead of the defect; take both bins alike, or "
            "make them alike",
        )
        for s in shortcuts if s.auroc > SHORTCUT and s.p_value < CHANCE
    ]  # fmt: skip
    findings += _balance(manifest)
    if not any(f.severity == "error" for f in findings):
        findings += _unusable_split(manifest)
    sizes = Counter(f"{look.width} × {look.height}" for look in every)
    order = {"error": 0, "warning": 1, "note": 2}
    return Audit(
        str(manifest.root),
        manifest.counts(),
        dict(sizes.most_common()),
        tuple(sorted(findings, key=lambda f: order[f.severity])),
        tuple(shortcuts),
        tuple(tuple(name(every[i].sample.image) for i in cluster) for cluster in near),
    )


def told(shortcut: Shortcut, value: float) -> str:
    """A median as it is shown: times as dates."""
    if shortcut.fact == TIME:
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M} UTC"
    return f"{value:.4g}"


def grouped(manifest: Manifest, found: Audit) -> Manifest:
    """The manifest with every cluster of near duplicates as one group, joined with its own."""
    names = {manifest.name(s.image): i for i, s in enumerate(manifest.samples)}
    pairs = [(names[c[0]], names[other]) for c in found.near for other in c[1:]]
    first: dict[str, int] = {}
    for i, sample in enumerate(manifest.samples):
        if sample.group is not None:
            pairs.append((first.setdefault(sample.group, i), i))
    clusters = {i: c for c in _joined(len(manifest.samples), pairs) for i in c}
    samples = [
        replace(sample, group=manifest.name(manifest.samples[clusters[i][0]].image))
        if i in clusters
        else sample
        for i, sample in enumerate(manifest.samples)
    ]
    return replace(manifest, samples=tuple(samples))


def _unusable_split(manifest: Manifest) -> Iterable[Finding]:
    """What training would refuse of the labels and splits."""
    try:
        split(manifest, seed=0, needed=("fit",))
    except DataError as error:
        yield Finding("no_split", "error", str(error).removeprefix(f"{manifest.root}: "))


def _copies(manifest: Manifest) -> Iterable[Finding]:
    """Images with equal bytes, equal pixels or one group, where that matters."""
    name, stated = manifest.name, has_splits(manifest.samples)
    by_pixels: dict[str, list[Sample]] = defaultdict(list)
    by_group: dict[str, list[Sample]] = defaultdict(list)
    for sample in manifest.samples:
        by_pixels[sample.pixel_sha256 or ""].append(sample)
        if sample.group is not None:
            by_group[sample.group].append(sample)
    found: dict[tuple[str, Severity, str], list[tuple[str, ...]]] = defaultdict(list)
    for alike in by_pixels.values():
        for sample in alike[1:]:
            pair = (name(alike[0].image), name(sample.image))
            what = "byte" if sample.sha256 == alike[0].sha256 else "pixel"
            if sample.defective != alike[0].defective:
                found["label_conflict", "error", "equal images in both bins; keep one of each"
                      ].append(pair)  # fmt: skip
            elif side(sample, stated) != side(alike[0], stated):
                found[f"{what}_leak", "error", f"{what}-wise copies on two sides of the stated "
                      "split; put each on one side"].append(pair)  # fmt: skip
            else:
                found[f"{what}_copy", "note", f"{what}-wise copies; cdgp keeps them on one side of "
                      "its split"].append(pair)  # fmt: skip
    for members in by_group.values():
        for sample in members[1:]:
            if side(sample, stated) != side(members[0], stated):
                found["group_leak", "error", "images of one group on two sides of the stated "
                      "split; put each group on one side"
                      ].append((name(members[0].image), name(sample.image)))  # fmt: skip
    for (kind, severity, text), pairs in found.items():
        yield Finding(kind, severity, f"{_count(len(pairs), 'pair')}: {text}", tuple(pairs))


def _near_duplicates(every: Sequence[_Look]) -> tuple[list[list[int]], list[int]]:
    """Clusters of positions: near duplicates, with their exact copies; and what is taken alike.

    The perceptual hash proposes pairs, the correlation of the grey copies decides. Flat images
    have nothing to correlate, and are never near anything. A cluster that holds most of a set tells
    of a fixture, not of copies.
    """
    if not every:
        return [], []
    hashes = np.array([look.hash for look in every], np.uint64)
    small = np.stack([look.small for look in every])
    pixels = np.unique([look.sample.pixel_sha256 or "" for look in every], return_inverse=True)[1]
    pairs: list[tuple[int, int]] = []
    for start in range(0, len(hashes), BLOCK):
        rows = np.arange(start, min(start + BLOCK, len(hashes)))
        close = _bit_count(hashes[rows, None] ^ hashes[None, start:]) <= HASH_BITS
        close &= pixels[rows, None] != pixels[None, start:]
        close &= rows[:, None] < np.arange(start, len(hashes))
        columns = np.flatnonzero(close.any(axis=0)) + start
        alike = small[rows].astype(np.float32) @ small[columns].astype(np.float32).T
        left, right = np.nonzero(close[:, columns - start] & (alike > NEAR))
        found = _joined(len(hashes), list(zip(rows[left], columns[right], strict=True)))
        # Of each cluster of a block only as many pairs as hold it together are kept.
        pairs += [(cluster[0], other) for cluster in found for other in cluster[1:]]
    clusters = _joined(len(hashes), pairs)
    largest = max(clusters, key=len, default=[])
    if len(every) >= MANY and len(largest) > ALIKE * len(every):
        return [c for c in clusters if c is not largest], largest
    return clusters, []


def _bit_count(values: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Set bits of each value; NumPy counts them itself from version 2 on."""
    count = getattr(np, "bitwise_count", None)
    if count is not None:
        return np.asarray(count(values))
    table = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)
    found: NDArray[np.uint8] = table[values[..., None].view(np.uint8)].sum(-1, dtype=np.uint8)
    return found


def _joined(count: int, pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Connected positions, each cluster and all of them in order."""
    if not pairs:
        return []
    rows, columns = np.array(pairs).T
    graph = coo_array((np.ones(len(rows)), (rows, columns)), shape=(count, count))
    _, label = connected_components(graph, directed=False)
    clusters: dict[int, list[int]] = defaultdict(list)
    for position in sorted({*rows.tolist(), *columns.tolist()}):
        clusters[int(label[position])].append(position)
    return sorted(c for c in clusters.values() if len(c) > 1)


def _near_findings(
    manifest: Manifest, every: Sequence[_Look], near: Sequence[Sequence[int]]
) -> Iterable[Finding]:
    """Clusters across splits, across labels, and across groups where no split is stated."""
    name, stated = manifest.name, has_splits(manifest.samples)
    leaks, loose, labels = [], [], []
    for cluster in near:
        samples = [every[i].sample for i in cluster]
        names = tuple(name(s.image) for s in samples)
        if {side(s, stated) for s in samples} == {"test"}:
            continue
        if len({side(s, stated) for s in samples}) > 1:
            leaks.append(names)
        elif len({s.group for s in samples}) > 1 or samples[0].group is None:
            loose.append(names)
        if len({s.defective for s in samples}) > 1:
            labels.append(names)
    if leaks:
        yield Finding(
            "near_leak", "warning",
            f"{_count(len(leaks), 'cluster')} of near duplicates on two sides of the stated split: "
            "the same part, or one that looks the same, is trained and tested on",
            tuple(leaks),
        )  # fmt: skip
    if loose:
        images = sum(map(len, loose))
        yield Finding(
            "near_duplicates", "warning",
            f"{_count(len(loose), 'cluster')} of near duplicates ({images} images) without a "
            "group of their own: a split may part them. Name the part of each image in a column "
            "'group', or let cdgp check --groups write one",
            tuple(loose),
        )  # fmt: skip
    if labels:
        yield Finding(
            "near_label_conflict", "note",
            f"{_count(len(labels), 'cluster')} of near duplicates with both labels: a small "
            "defect, or a wrong label",
            tuple(labels),
        )  # fmt: skip


def _files(manifest: Manifest, every: Sequence[_Look], white_level: int) -> Iterable[Finding]:
    """How the files are stored: transparency, and the scale of 16-bit values."""
    name = manifest.name
    clear = tuple((name(e.sample.image),) for e in every if e.file.transparent)
    if clear:
        yield Finding(
            "transparent", "warning",
            f"{_count(len(clear), 'image')} with transparent pixels, which are shown over black",
            clear,
        )  # fmt: skip
    deep = [e for e in every if e.file.bits == 16]
    largest = max((e.file.largest for e in deep), default=white_level)
    scale = images.fitting_white_level(largest)
    if scale < white_level:
        yield Finding(
            "dark_16_bit", "warning",
            f"none of the {_count(len(deep), '16-bit image')} exceeds {largest}, so they are "
            f"read as nearly black if {white_level} means white; if the camera has fewer bits, set "
            f"data.white_level={scale}",
            tuple((name(e.sample.image),) for e in deep),
        )  # fmt: skip


def _masks(manifest: Manifest, every: Sequence[_Look]) -> Iterable[Finding]:
    """Masks that contradict the label, mark too much, or are stored in an odd way."""
    found: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    details: dict[str, list[str]] = defaultdict(list)
    any_mask = any(look.sample.masks for look in every)
    for look in every:
        sample, share = look.sample, look.marked
        names = tuple(manifest.name(path) for path in (sample.image, *sample.masks))
        if not sample.masks:
            if any_mask and sample.defective:
                found["mask_missing"].append(names)
            continue
        for name, facts in zip(names[1:], look.masks, strict=True):
            if facts.cut and facts.levels > GREY_LEVELS:
                found["mask_grey"].append(names)
                details["mask_grey"].append(f"{name}: {facts.levels} levels")
        if sample.defective and not share:
            found["mask_empty"].append(names)
        if not sample.defective and share:
            found["mask_on_good"].append(names)
        if share >= INVERTED:
            found["mask_inverted"].append(names)
            details["mask_inverted"].append(
                f"{names[1]}: {100 * share:.0f} % of the image is marked, inverted?"
            )
        if len(sample.masks) > 1:
            found["mask_union"].append(names)
    told: dict[str, tuple[Severity, str]] = {
        "mask_missing": ("note", "defective without a mask: counted in the image metrics alone"),
        "mask_empty": ("warning", "defective with an empty mask: counted in the image metrics "
                       "alone"),
        "mask_on_good": ("warning", "good with a mask that marks something; the label is believed"),
        "mask_inverted": ("warning", "mostly marked; masks are never turned over unasked"),
        "mask_grey": ("warning", "with a mask of many grey levels, cut at half of the largest"),
        "mask_union": ("note", "with several masks, which are joined"),
    }  # fmt: skip
    for kind, (severity, text) in told.items():
        if found[kind]:
            listed = details[kind][:SHOWN] + ["…"] * (len(details[kind]) > SHOWN)
            more = f" ({'; '.join(listed)})" if listed else ""
            counted = _count(len(found[kind]), "image")
            yield Finding(kind, severity, f"{counted} {text}{more}", tuple(found[kind]))


def _shortcuts(every: Sequence[_Look]) -> list[Shortcut]:
    """AUROC of trivial facts, the strongest first; facts that do not vary are left out.

    Exact copies count once, since they would make any difference look sure.
    """
    every = list({look.sample.pixel_sha256: look for look in every}.values())
    label = np.array([look.sample.defective for look in every], np.bool_)
    if not 0 < label.sum() < len(label):
        return []
    facts: dict[str, list[float]] = {
        "brightness": [look.brightness for look in every],
        "contrast": [look.contrast for look in every],
        "saturation": [look.saturation for look in every],
        "width": [look.width for look in every],
        "height": [look.height for look in every],
        "aspect ratio": [look.width / look.height for look in every],
        "file size": [look.bytes for look in every],
        "bits a channel": [look.file.bits for look in every],
    }
    for kind in sorted({look.file.format for look in every}):
        facts[f"file type {kind}"] = [float(look.file.format == kind) for look in every]
    modified = [look.modified for look in every]
    if max(modified) - min(modified) > COPIED_TOGETHER:
        facts[TIME] = modified
    found = []
    for fact, listed in facts.items():
        values = np.array(listed, np.float64)
        if values.min() == values.max():
            continue
        auroc = float(roc_auc_score(label, values))
        good, defective = values[~label], values[label]
        found.append(Shortcut(
            fact,
            max(auroc, 1 - auroc),
            float(mannwhitneyu(good, defective).pvalue),
            float(np.median(good)),
            float(np.median(defective)),
        ))  # fmt: skip
    return sorted(found, key=lambda s: -s.auroc)


def _balance(manifest: Manifest) -> Iterable[Finding]:
    """Whether there are enough groups of each class to train, calibrate and test on."""
    for label, word in CLASSES.items():
        samples = [s for s in manifest.samples if s.defective == label and s.split != "test"]
        groups = len({s.group or s.pixel_sha256 for s in samples})
        if not samples:
            continue
        if groups < 3:
            yield Finding(
                "too_few", "warning",
                f"{_count(groups, 'group')} of {word} images outside test: too few to set some "
                "aside for calibration and test, so probabilities rest on the training images "
                "and there is no measure of them",
            )  # fmt: skip
        elif groups < FEW[label]:
            yield Finding(
                "few", "note",
                f"{_count(groups, 'group')} of {word} images outside test: below {FEW[label]} "
                "probabilities and thresholds are coarse",
            )  # fmt: skip
        if not label and groups >= 3 and "calibration" not in manifest.counts():
            data = DataSettings()
            kept = 1 if manifest.of("test") else 1 - data.test_fraction
            held = max(1, round(len(samples) * kept * data.calibration_fraction))
            yield Finding(
                "false_reject_budget", "note",
                f"with the default fractions about {held} good images are kept to calibrate "
                f"with: --max-false-rejects can then be {1 / (held + 1):.2g} at the least",
            )  # fmt: skip


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
