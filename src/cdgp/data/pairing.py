"""Pairs masks with images by name, never by position."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from cdgp.data.labels import LABEL_ENDING
from cdgp.data.walk import Notice, add_notices, first_names, images_in
from cdgp.errors import DataError


def _stem(path: Path, folder: Path) -> str:
    """Name relative to `folder`, without extension, accents composed."""
    return unicodedata.normalize("NFC", path.relative_to(folder).with_suffix("").as_posix())


def pair_masks(
    bins: Sequence[Mapping[Path, Sequence[Path]]],
    mask_folder: Path,
    notices: list[Notice] | None = None,
) -> dict[Path, tuple[Path, ...]]:
    """The masks of each image, matched by name and never by position.

    A mask belongs to the image of the same name; else to the image of its name without a label's
    ending (`_mask`, `_GT`, see `labels`) and a number; else to the image of its folder's name, if
    no mask is named after that one.

    Arguments:
        bins: Images by the folder that their names are relative to. Where images of two bins
            match a mask, it belongs to the first bin's.
        mask_folder: Where the masks are; it need not exist.
        notices: Masks that belong to no image are added; without any, they are a log warning.

    Raises:
        DataError: Two images of one bin match a mask.
    """
    if not mask_folder.is_dir():
        return {}
    by_name = [_by_name(folders) for folders in bins]
    pairs: dict[Path, list[Path]] = defaultdict(list)
    unnamed: list[Path] = []
    for mask in images_in(mask_folder, notices):
        stem = _stem(mask, mask_folder)
        found = _owner(by_name, mask, stem) or _owner(by_name, mask, LABEL_ENDING.sub("", stem))
        if found:
            pairs[found].append(mask)
        else:
            unnamed.append(mask)
    named = set(pairs)
    orphans: list[Path] = []
    for mask in unnamed:
        found = _owner(by_name, mask, _stem(mask, mask_folder).rpartition("/")[0])
        if found and found not in named:
            pairs[found].append(mask)
        else:
            orphans.append(mask)
    if orphans:
        text = f"{mask_folder}: {len(orphans)} masks belong to no image and are not used: "
        add_notices([Notice("orphan_masks", "warning", text + first_names(orphans))], notices)
    return {image: tuple(masks) for image, masks in pairs.items()}


def _by_name(folders: Mapping[Path, Sequence[Path]]) -> dict[str, list[Path]]:
    """The images of one bin by the name that a mask of theirs would have."""
    found: dict[str, list[Path]] = defaultdict(list)
    for folder, images in folders.items():
        for image in images:
            found[_stem(image, folder)].append(image)
    return found


def _owner(by_name: Sequence[Mapping[str, list[Path]]], mask: Path, name: str) -> Path | None:
    """The image of this name in the first bin that has one."""
    owners = next((images[name] for images in by_name if name in images), [])
    return only(mask, owners) if owners else None


def only(mask: Path, owners: Sequence[Path]) -> Path:
    """The one owner of a mask; DataError where there are two."""
    if len(owners) > 1:
        raise DataError(
            f"{mask}: is the mask of {owners[0]} and of {owners[1]}; "
            "give the two images different names"
        )
    return owners[0]
