"""Folders of good and defective images, or a CSV file -> manifest."""

from __future__ import annotations

import logging
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cdgp.data.manifest import Manifest, Sample, read_csv
from cdgp.errors import DataError, OutputError
from cdgp.files import absolute, is_same, lies_in

EXTENSIONS = (".png", ".jpg", ".jpeg", ".jfif", ".jpe", ".bmp", ".tif", ".tiff", ".webp")
MASK_ENDING = re.compile(r"_(mask|GT)(_?\d+)?$")
SHOWN = 10

log = logging.getLogger(__name__)


def load(data: Path, good: str, defective: str) -> Manifest:
    """Reads which images there are, with their labels and masks.

    ```
    data.csv                     a table, see `manifest.read_csv`
    data/manifest.csv            the same; where there is one, the sub-folders are not read
    data/good/**                 images without a defect
    data/defective/**            images with one
    data/masks/**                optional; paired by name, defective/a/7.png has masks/a/7.*,
                                 a/7_mask.*, a/7_GT.*, numbered ones (a/7_mask_2.*) and all in
                                 a/7/; several masks of one image are joined
    data/{train,test}/...        the same two bins in each: a split of the user's own
    data/{train,test}/good/**    beside data/ground_truth, as in MVTec AD: all other folders of
                                 train and test hold defective images
    ```

    Sub-folders are searched. Hidden files, thumbnails, folders that start with `.` or `@` and
    everything that has no image's extension (in any case) are ignored; linked folders are not
    entered.

    Arguments:
        data: A folder or a CSV file.
        good: Name of the sub-folder of good images.
        defective: Name of the sub-folder of defective images.

    Raises:
        DataError: The images are not there; the message says what was expected and found.
    """
    root = absolute(data)
    if root.is_file():
        if root.suffix.lower() != ".csv":
            raise DataError(f"{data}: is a file but not a .csv; give a folder or a CSV manifest")
        return read_csv(root)
    if not root.is_dir():
        raise DataError(f"{data}: there is no such folder or file; check the path")
    if (root / "manifest.csv").is_file():
        if (root / good).is_dir() or (root / defective).is_dir():
            log.warning("%s: is used; the folders beside it are not read", root / "manifest.csv")
        return read_csv(root / "manifest.csv")
    if absolute(root / good) == absolute(root / defective):
        raise DataError(f"{data}: good and defective name the same folder {good!r}; give two names")
    parted = all((root / name).is_dir() for name in ("train", "test"))
    if parted and not any((root / name).is_dir() for name in (good, defective)):
        if (root / "ground_truth").is_dir():
            return mvtec_category(root, good)
        return _two_bins(root, ("train", "test"), good, defective)
    return _two_bins(root, ("",), good, defective)


def mvtec_category(base: Path, good: str) -> Manifest:
    """One category laid out like MVTec AD: ``{train,test}/good`` and ``{train,test}/DEFECT``.

    Masks of the test part lie under ``ground_truth/DEFECT``; the parts are the stated split.
    """
    samples: list[Sample] = []
    for part in ("train", "test"):
        for folder in sorted((base / part).iterdir()):
            if not folder.is_dir() or folder.is_symlink() or _is_junk_folder(folder.name):
                continue
            images = images_in(folder)
            truth = base / "ground_truth" / folder.name
            masks = pair_masks([{folder: images}], truth) if part == "test" else {}
            defective = folder.name != good
            samples += [Sample(p, defective, masks.get(p, ()), split=part) for p in images]
    return Manifest(base, tuple(samples))


def _two_bins(root: Path, parts: Sequence[str], good: str, defective: str) -> Manifest:
    """The images of both bins of each part, with their masks; the part "" is the root itself."""
    found: dict[tuple[str, str], list[Path]] = {}
    for part in parts:
        place = root / part
        for name, option in ((good, "good"), (defective, "defective")):
            if not (place / name).is_dir():
                raise DataError(_missing_folder(place, name, option))
            found[part, name] = images_in(place / name)
            if not found[part, name]:
                raise DataError(
                    f"{place / name}: holds no images; put files ending in "
                    f"{', '.join(EXTENSIONS)} there"
                )
    # Where a good and a defective image have one name, the mask belongs to the defective one.
    places = [root, *(root / part for part in parts if part)]
    masks: dict[Path, tuple[Path, ...]] = {}
    for place in places:
        within = parts if place == root else [place.name]
        bins = [{root / p / name: found[p, name] for p in within} for name in (defective, good)]
        masks |= pair_masks(bins, place / "masks")
    return Manifest(root, tuple(
        Sample(image, name == defective, masks.get(image, ()), split=part or None)
        for (part, name), images in found.items()
        for image in images
    ))  # fmt: skip


def check_outside(folder: Path, data: Path, good: str, defective: str) -> None:
    """Checks that results do not land among the images, the masks or beside the manifest.

    Raises:
        OutputError: The output folder is the data's, or lies where images or masks are read.
    """
    source = absolute(data)
    home = source.parent if source.suffix.lower() == ".csv" else source
    layout = ("masks", "train", "test", "ground_truth")
    taken = [good, defective, *(name for name in layout if (home / name).is_dir())]
    if is_same(folder, home) or any(lies_in(folder, home / name) for name in taken):
        raise OutputError(f"{folder}: lies in the data that is read; choose another --out")


def _missing_folder(place: Path, name: str, option: str) -> str:
    found = sorted(p.name for p in place.iterdir() if p.is_dir() and not _is_junk_folder(p.name))
    here = f"it holds the folders {', '.join(found)}" if found else "it holds no folders"
    return (
        f"{place}: there is no folder {name!r} in it, and no manifest.csv; {here}. "
        f"Put images into {name!r} or name another folder with --{option} NAME."
    )


def _is_junk_folder(name: str) -> bool:
    return name.startswith((".", "@")) or name == "__MACOSX"


def images_in(folder: Path) -> list[Path]:
    """All images under `folder`, sorted."""
    return sorted(walk_images(folder, warn=True))


def walk_images(place: Path, warn: bool = False) -> Iterator[Path]:
    """All images under a folder, one sub-folder after another; at most one folder is held.

    Of a file, that file alone, whatever it is. With `warn`, a warning counts the entries that are
    not used. DataError where a folder cannot be read.
    """

    def unreadable(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error

    if place.is_file():
        yield place
        return
    ignored = 0
    for here, folders, files in os.walk(place, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not _is_junk_folder(name))
        ignored += sum(Path(here, name).is_symlink() for name in folders)
        shown = [name for name in files if not name.startswith(".")]
        images = [name for name in shown if Path(name).suffix.lower() in EXTENSIONS]
        ignored += len(shown) - len(images)
        yield from (Path(here, name) for name in sorted(images))
    if ignored and warn:
        log.warning(
            "%s: %d entries are not used: files without an image's extension, or linked folders",
            place, ignored,
        )  # fmt: skip


def _stem(path: Path, folder: Path) -> str:
    """Name relative to `folder`, without extension, accents composed."""
    return unicodedata.normalize("NFC", path.relative_to(folder).with_suffix("").as_posix())


def pair_masks(
    bins: Sequence[Mapping[Path, Sequence[Path]]], mask_folder: Path
) -> dict[Path, tuple[Path, ...]]:
    """The masks of each image, matched by name and never by position.

    A mask belongs to the image of the same name; else to the image of its name without `_mask`,
    `_GT` and a number; else to the image of its folder's name, if no mask is named after that one.

    Arguments:
        bins: Images by the folder that their names are relative to. Where images of two bins
            match a mask, it belongs to the first bin's.
        mask_folder: Where the masks are; it need not exist.

    Raises:
        DataError: Two images of one bin match a mask.
    """
    if not mask_folder.is_dir():
        return {}
    by_name = [_by_name(folders) for folders in bins]
    pairs: dict[Path, list[Path]] = defaultdict(list)
    unnamed: list[Path] = []
    for mask in images_in(mask_folder):
        stem = _stem(mask, mask_folder)
        found = _owner(by_name, mask, stem) or _owner(by_name, mask, MASK_ENDING.sub("", stem))
        if found:
            pairs[found].append(mask)
        else:
            unnamed.append(mask)
    named = set(pairs)
    orphans: list[str] = []
    for mask in unnamed:
        found = _owner(by_name, mask, _stem(mask, mask_folder).rpartition("/")[0])
        if found and found not in named:
            pairs[found].append(mask)
        else:
            orphans.append(mask.name)
    if orphans:
        log.warning(
            "%s: %d masks belong to no image and are not used: %s%s",
            mask_folder, len(orphans), ", ".join(orphans[:SHOWN]),
            ", ..." if len(orphans) > SHOWN else "",
        )  # fmt: skip
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
    if len(owners) > 1:
        raise DataError(
            f"{mask}: is the mask of {owners[0]} and of {owners[1]}; "
            "give the two images different names"
        )
    return owners[0] if owners else None
