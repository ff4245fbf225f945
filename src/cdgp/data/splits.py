"""Fit, calibration and test, divided by group; and the check that nothing is in two of them.

A group stays in one split: all images of one physical part, and all images with equal pixels
whatever their names. The split depends on the pixels, the labels, the groups and the seed; not on
names, folders or the order of rows.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from sklearn.model_selection import StratifiedGroupKFold

from cdgp.data.groups import ordered_groups, pixels_of
from cdgp.data.manifest import Manifest, Sample, listed
from cdgp.errors import DataError, LeakError, SettingsError
from cdgp.presets import Settings

CLASSES = {False: "good", True: "defective"}


def split(
    manifest: Manifest,
    seed: int,
    test_fraction: float,
    calibration_fraction: float,
    needed: Sequence[str],
    labels: Collection[bool] = (False, True),
) -> Manifest:
    """Divides the samples into fit, calibration and test, by group and with even class ratios.

    First test is held out of everything, then calibration out of what remains. A fraction f is
    rounded to one in round(1 / f). Where a class has few groups, calibration comes first: test
    takes of each class only what leaves two groups, and calibration what leaves one. A single group
    of defective images, for one, is all in fit.

    Splits that the manifest already states are kept: where any row has one, rows without count
    as "train", test is as stated, and rows of "train" are divided into fit and calibration.

    Arguments:
        manifest: Samples with digests, see `scan.digested`.
        seed: Another seed gives another split.
        test_fraction: Within 0..0.5; 0 makes no test split.
        calibration_fraction: The part of what is not test, above 0 up to 0.5.
        needed: Splits that must show the labels.
        labels: Those labels (defective or not).

    Raises:
        DataError: Equal pixels have two labels, or a needed split would lack a label.
        LeakError: Stated splits have an image or a group on two sides.
    """
    if not 0 <= test_fraction <= 0.5:
        raise SettingsError(f"test_fraction is {test_fraction}; give a value within 0..0.5")
    if not 0 < calibration_fraction <= 0.5:
        raise SettingsError(
            f"calibration_fraction is {calibration_fraction}; give a value above 0, up to 0.5"
        )
    _check_labels(manifest)
    samples = manifest.samples
    stated = {s.split for s in samples}
    if stated == {None} and test_fraction > 0:
        groups = _groups(manifest, samples, seed)
        samples = _hold_out(samples, groups, seed, test_fraction, "test", keep=2)
    if not stated & {"fit", "calibration"}:
        rest = tuple(s for s in samples if s.split != "test")
        groups = _groups(manifest, rest, seed)
        rest = _hold_out(rest, groups, seed, calibration_fraction, "calibration", keep=1)
        rest = tuple(s if s.split == "calibration" else replace(s, split="fit") for s in rest)
        samples = tuple(s for s in samples if s.split == "test") + rest
    elif stated & {"train", None}:
        raise DataError(
            f"{manifest.root}: some rows state fit or calibration and others train or nothing; "
            "state fit or calibration for all of them, or write train"
        )
    divided = replace(manifest, samples=samples)
    _check_classes(divided, needed, labels)
    check_leaks(divided)
    return divided


def needed_labels(settings: Settings) -> tuple[bool, ...]:
    """Labels (defective or not) that fit and calibration must show: where the image score weighs
    all evidence, good images alone are enough."""
    return (False,) if settings.calibration.image_evidence == "all" else (False, True)


def needed_splits(manifest: Manifest, settings: Settings) -> tuple[str, ...]:
    """Splits that must show the labels of ``needed_labels``; what `split` takes.

    Where the calibration images are held out of training, they must. Otherwise a label of a single
    group leaves only the training images to calibrate on; so does a single good group where good
    images alone are enough, unless there is no defective image: a p-value of training images would
    mean nothing, nor would a bound on false rejects.
    """
    own = settings.calibration.pictures == "held_out" and (
        len(needed_labels(settings)) == 2
        or settings.decision.max_false_rejects is not None
        or not any(s.defective for s in manifest.samples)
    )
    return ("fit", "calibration") if own else ("fit",)


def has_splits(samples: Iterable[Sample]) -> bool:
    """Whether any sample states a split."""
    return any(sample.split is not None for sample in samples)


def side(sample: Sample, stated: bool) -> str | None:
    """The split that a sample belongs to: "train" where others state one and it states none."""
    return "train" if stated and sample.split is None else sample.split


def check_leaks(manifest: Manifest) -> None:
    """Checks that nothing is in two splits; LeakError lists the pairs that are."""
    stated = has_splits(manifest.samples)
    pairs: dict[tuple[str, str], str] = {}
    for what, field in (
        ("same file", "image"),
        ("same bytes", "sha256"),
        ("same pixels", "pixel_sha256"),
        ("same group", "group"),
    ):
        holders: dict[object, list[Sample]] = defaultdict(list)
        for sample in manifest.samples:
            value = getattr(sample, field)
            if stated and value is not None:
                holders[value].append(sample)
        for held in holders.values():
            for sample in held[1:]:
                if side(sample, stated) != side(held[0], stated):
                    pair = (_in_split(manifest, held[0]), _in_split(manifest, sample))
                    pairs.setdefault(pair, what)
    if pairs:
        lines = [f"{a} and {b}: {what}" for (a, b), what in pairs.items()]
        raise LeakError(
            f"{manifest.root}: {len(pairs)} pairs are on two sides of the split; "
            f"put each pair into one split:{listed(lines)}"
        )


@dataclass(frozen=True)
class _Group:
    """Samples that stay together, by index, and which classes they show."""

    members: tuple[int, ...]
    classes: frozenset[bool]


def _check_labels(manifest: Manifest) -> None:
    """Checks that equal pixels have equal labels."""
    first: dict[tuple[str, bool], Sample] = {}
    pairs: list[str] = []
    for sample in manifest.samples:
        pixels = pixels_of(manifest, sample)
        other = first.get((pixels, not sample.defective))
        if other is not None:
            good, bad = (other, sample) if sample.defective else (sample, other)
            pairs.append(f"{manifest.name(good.image)} and {manifest.name(bad.image)}")
        first.setdefault((pixels, sample.defective), sample)
    if pairs:
        raise DataError(
            f"{manifest.root}: {len(pairs)} pairs of equal images are labelled good (first) and "
            f"defective (second); keep one of each:{listed(pairs)}"
        )


def _groups(manifest: Manifest, samples: tuple[Sample, ...], seed: int) -> list[_Group]:
    """``ordered_groups`` with the classes that each shows."""
    return [
        _Group(tuple(members), frozenset(samples[i].defective for i in members))
        for members in ordered_groups(manifest, samples, seed)
    ]


def _hold_out(
    samples: tuple[Sample, ...],
    groups: list[_Group],
    seed: int,
    fraction: float,
    name: str,
    keep: int,
) -> tuple[Sample, ...]:
    """Puts about `fraction` of the samples into the split `name`, whole groups at a time.

    One fold of scikit-learn's StratifiedGroupKFold, drawn by the seed, since its first fold
    always holds the largest group. Then groups move, in their hashed order, until every class
    keeps `keep` groups outside (as far as it has them) and, above that, has one inside.
    """
    held = _fold(samples, groups, seed, fraction)
    for label in CLASSES:
        having = [g for g, group in enumerate(groups) if label in group.classes]
        for g in [g for g in having if g in held]:
            if len(having) - len(held.intersection(having)) < keep:
                held.remove(g)
    for label in CLASSES:
        having = [g for g, group in enumerate(groups) if label in group.classes]
        if not held.intersection(having):
            held.update([g for g in having if _may_leave(g, held, groups, keep)][:1])
    inside = {i for g in held for i in groups[g].members}
    return tuple(replace(s, split=name) if i in inside else s for i, s in enumerate(samples))


def _may_leave(g: int, held: set[int], groups: list[_Group], keep: int) -> bool:
    """Whether each class of group `g` keeps `keep` groups outside when `g` is held out as well."""
    outside = [group for i, group in enumerate(groups) if i != g and i not in held]
    return all(
        sum(label in group.classes for group in outside) >= keep for label in groups[g].classes
    )


def _fold(
    samples: tuple[Sample, ...], groups: list[_Group], seed: int, fraction: float
) -> set[int]:
    """The groups of one fold of about `fraction` of the samples; none where they are too few."""
    dealt = deal([group.members for group in groups], samples, round(1 / fraction), seed)
    if len(dealt) < 2:
        return set()
    drawn = int(hashlib.sha256(f"fold:{seed}".encode()).hexdigest(), 16) % len(dealt)
    return dealt[drawn]


def deal(
    groups: Sequence[Sequence[int]], samples: Sequence[Sample], folds: int, seed: int
) -> list[set[int]]:
    """The groups of samples (by index) that each fold gets, with even class ratios.

    Scikit-learn's StratifiedGroupKFold; fewer folds than asked for where there are too few groups
    or images, down to a single one.
    """
    # In the groups' own order, since the dealer breaks ties by the order of rows.
    rows = [(g, samples[i].defective) for g, members in enumerate(groups) for i in members]
    number = np.array([g for g, _ in rows])
    label = np.array([defective for _, defective in rows], np.bool_)
    folds = min(folds, len(groups), max(int(label.sum()), int((~label).sum())))
    if folds < 2:
        return [set(range(len(groups)))]
    dealer = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class with fewer images than folds
        return [set(number[held].tolist()) for _, held in dealer.split(label, label, number)]


def _check_classes(manifest: Manifest, needed: Sequence[str], labels: Collection[bool]) -> None:
    """Checks that the needed splits show the labels."""
    least = {1: "1 is the least", 2: "2 are the least, one for fit and one for calibration"}
    for name in needed:
        for label, word in CLASSES.items():
            if label not in labels or any(s.defective == label for s in manifest.of(name)):
                continue
            train = tuple(s for s in manifest.samples if s.split != "test")
            groups = _groups(manifest, train, seed=0)
            having = sum(label in group.classes for group in groups)
            count = "is 1 group" if having == 1 else f"are {having} groups"
            without = "; preset lite needs no defective image" if label else ""
            raise DataError(
                f"{manifest.root}: {name} has no {word} image: outside test there {count} "
                f"of {word} images (images of one part or with equal pixels are one group), and "
                f"{least[len(needed)]}; add images of other parts, or state other splits{without}"
            )


def _in_split(manifest: Manifest, sample: Sample) -> str:
    return f"{manifest.name(sample.image)} ({side(sample, stated=True)})"
