"""Cross-testing: the images of a data set dealt to folds, each of which is the test part once."""

from dataclasses import replace

from cdgp.data.groups import ordered_groups
from cdgp.data.manifest import Manifest
from cdgp.data.splits import CLASSES, deal, has_splits
from cdgp.errors import DataError

FOLD_SEED = 0
"""Deals groups to folds, the same ones in all plans."""


def cross_test(images: Manifest, folds: int) -> list[Manifest]:
    """Digested images, once for each fold, with that fold as the test part and all others as train.

    Whole groups are dealt to the folds, stratified by label, with scikit-learn's
    StratifiedGroupKFold and a seed of its own: every image is tested once. Folds depend on the
    pixels, the labels and the groups; not on names or the order of rows.

    Raises:
        DataError: the images state a split, or a fold would lack a class.
    """
    if has_splits(images.samples):
        raise DataError(
            f"{images.root}: states a split, and folds divide all images anew; leave folds out of "
            "the plan, or the split out of the manifest"
        )
    dealt = _dealt(images, folds)
    for label, word in CLASSES.items():
        holders = {fold for fold, s in zip(dealt, images.samples, strict=True)
                   if s.defective == label}  # fmt: skip
        if len(holders) < folds:
            raise DataError(
                f"{images.root}: of {folds} folds, only {len(holders)} get a {word} image: images "
                "of one part or with equal pixels are one group, and stay together; lower folds in "
                f"the plan, or add {word} parts"
            )
    return [
        replace(images, samples=tuple(
            replace(s, split="test" if held == fold else "train")
            for s, held in zip(images.samples, dealt, strict=True)
        ))
        for fold in range(folds)
    ]  # fmt: skip


def _dealt(images: Manifest, folds: int) -> list[int]:
    """The fold of each sample; fewer folds than asked for where there are too few images."""
    groups = ordered_groups(images, images.samples, FOLD_SEED)
    found = [0] * len(images.samples)
    for fold, held in enumerate(deal(groups, images.samples, folds, FOLD_SEED)):
        for i in (i for g in held for i in groups[g]):
            found[i] = fold
    return found
