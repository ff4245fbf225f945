"""Folders of good and defective pictures, or a CSV file -> manifest."""

from __future__ import annotations

import logging
import os
import unicodedata
from collections import defaultdict
from pathlib import Path

from cdgp.data.manifest import Manifest, Sample, absolute, read_csv
from cdgp.errors import DataError, OutputError

EXTENSIONS = (".png", ".jpg", ".jpeg", ".jfif", ".jpe", ".bmp", ".tif", ".tiff", ".webp")
MASK_ENDINGS = ("", "_mask", "_GT")
SHOWN = 10

log = logging.getLogger(__name__)


def load(data: Path, good: str = "good", defective: str = "defective") -> Manifest:
    """Reads the pictures and labels that lie in `data`.

    ```
    data.csv                     a table, see `manifest.read_csv`
    data/manifest.csv            the same; it wins over sub-folders, since it holds more
    data/good/**                 pictures without a defect
    data/defective/**            pictures with one
    data/masks/**                optional; paired by name with the defective pictures:
                                 defective/a/7.png has masks/a/7.*, a/7_mask.* or a/7_GT.*
    ```

    Sub-folders are searched. Hidden files, thumbnails, folders that start with `.` or `@` and
    everything that has no picture's extension (in any case) are ignored; linked folders are not
    entered.

    Arguments:
        data: A folder or a CSV file.
        good: Name of the sub-folder of good pictures.
        defective: Name of the sub-folder of defective pictures.

    Raises:
        DataError: The pictures are not there; the message says what was expected and found.
    """
    root = absolute(data)
    if root.is_file():
        if root.suffix.lower() != ".csv":
            raise DataError(f"{data}: is a file, but not a .csv; give a folder or a manifest")
        return read_csv(root)
    if not root.is_dir():
        raise DataError(f"{data}: there is no such folder or file")
    if (root / "manifest.csv").is_file():
        if (root / good).is_dir() or (root / defective).is_dir():
            log.warning("%s: is used; the folders beside it are not read", root / "manifest.csv")
        return read_csv(root / "manifest.csv")
    if absolute(root / good) == absolute(root / defective):
        raise DataError(f"{data}: good and defective name the same folder {good!r}; give two names")
    samples: list[Sample] = []
    for name, option, label in ((good, "good", False), (defective, "defective", True)):
        if not (root / name).is_dir():
            raise DataError(_missing_folder(data, root, name, option))
        pictures = pictures_in(root / name)
        if not pictures:
            raise DataError(
                f"{root / name}: holds no pictures; put files ending in "
                f"{', '.join(EXTENSIONS)} there"
            )
        masks = pair_masks(root / name, pictures, root / "masks") if label else {}
        samples += [Sample(picture, label, masks.get(picture)) for picture in pictures]
    return Manifest(root, tuple(samples))


def refuse_inside(folder: Path, data: Path, good: str, defective: str) -> None:
    """What is written must not become a picture, nor replace the manifest that is read.

    Raises:
        OutputError: the output folder is the data's, or lies in one of its two bins.
    """
    source, target = absolute(data), absolute(folder)
    home = source.parent if source.suffix.lower() == ".csv" else source
    if target == home or any(target.is_relative_to(home / name) for name in (good, defective)):
        raise OutputError(f"{folder}: lies in the data that is read; choose another --out")


def _missing_folder(data: Path, root: Path, name: str, option: str) -> str:
    found = sorted(p.name for p in root.iterdir() if p.is_dir() and not _is_junk_folder(p.name))
    here = f"it holds the folders {', '.join(found)}" if found else "it holds no folders"
    return (
        f"{data}: there is no folder {name!r} in it, and no manifest.csv; {here}. "
        f"Put pictures into {name!r} or name another folder with --{option} NAME."
    )


def _is_junk_folder(name: str) -> bool:
    return name.startswith((".", "@")) or name == "__MACOSX"


def pictures_in(folder: Path) -> list[Path]:
    """All pictures under `folder`, sorted."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error

    found: list[Path] = []
    ignored = 0
    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not _is_junk_folder(name)]
        ignored += sum(Path(place, name).is_symlink() for name in folders)
        pictures = [
            Path(place, name)
            for name in files
            if not name.startswith(".") and Path(name).suffix.lower() in EXTENSIONS
        ]
        found += pictures
        ignored += sum(not name.startswith(".") for name in files) - len(pictures)
    if ignored:
        log.warning(
            "%s: %d entries are not used: files without a picture's extension, or linked folders",
            folder, ignored,
        )  # fmt: skip
    return sorted(found)


def _stem(path: Path, folder: Path) -> str:
    """Name relative to `folder`, without extension, accents composed."""
    return unicodedata.normalize("NFC", path.relative_to(folder).with_suffix("").as_posix())


def pair_masks(folder: Path, pictures: list[Path], mask_folder: Path) -> dict[Path, Path]:
    """Masks by picture, matched by name and never by position; a mask of its own for each."""
    if not mask_folder.is_dir():
        return {}
    by_stem: dict[str, list[Path]] = defaultdict(list)
    for mask in pictures_in(mask_folder):
        by_stem[_stem(mask, mask_folder)].append(mask)
    pairs: dict[Path, Path] = {}
    owners: dict[Path, Path] = {}
    for picture in pictures:
        stem = _stem(picture, folder)
        masks = [mask for ending in MASK_ENDINGS for mask in by_stem.get(stem + ending, [])]
        if len(masks) > 1:
            raise DataError(
                f"{picture}: has {len(masks)} masks, {', '.join(map(str, masks))}; keep one"
            )
        for mask in masks:
            if mask in owners:
                raise DataError(
                    f"{mask}: is the mask of {owners[mask]} and of {picture}; "
                    "give the two pictures different names"
                )
            owners[mask] = picture
            pairs[picture] = mask
    orphans = sorted(m.name for masks in by_stem.values() for m in masks if m not in owners)
    if orphans:
        log.warning(
            "%s: %d masks belong to no defective picture and are not used: %s%s",
            mask_folder, len(orphans), ", ".join(orphans[:SHOWN]),
            ", ..." if len(orphans) > SHOWN else "",
        )  # fmt: skip
    return pairs
