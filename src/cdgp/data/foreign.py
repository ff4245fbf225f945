"""Layouts that we know and do not take as they are: what a folder looks like, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from cdgp.data.labels import tell_labels
from cdgp.data.manifest import DEFECTIVE_WORDS, GOOD_WORDS
from cdgp.data.walk import HOLDERS, IMAGES, is_junk_folder

SHOWN = 6
_TABLE = "write a manifest.csv with the columns image, label, mask"


def _pattern(words: Sequence[str]) -> re.Pattern[str]:
    listed = "|".join(word for word in words if word.isalpha() and word not in ("true", "false"))
    return re.compile(rf"(?:{listed}|no[-_ ]?defect)s?(?:[-_ ]?(?:images?|parts?|samples?))?")


_GOOD = _pattern((*GOOD_WORDS, "io", "fine", "perfect", "intact", "nondefective"))
_DEFECTIVE = re.compile(
    _pattern((*DEFECTIVE_WORDS, "ko", "nio", "fault", "faulty", "reject", "damaged", "broken"))
    .pattern.replace("|no[-_ ]?defect", "")
)  # fmt: skip


def sounds_good(name: str) -> bool:
    """Whether a folder's name says that its images are good: Good, OK, normal_images."""
    return bool(_GOOD.fullmatch(name.casefold()))


def sounds_defective(name: str) -> bool:
    """The same of defective: NG, Defects, bad_parts."""
    return bool(_DEFECTIVE.fullmatch(name.casefold()))


def missing_folder(place: Path, name: str, option: str) -> str:
    """The message where a bin is missing: what is there, what that looks like, what to do.

    Arguments:
        place: The folder that lacks it.
        name: The name of the missing folder.
        option: "good" or "defective": the option that names it.
    """
    folders = _folders(place)
    found = f"it holds the folders {', '.join(f.name for f in folders)}" if folders else ""
    guess = next((text for look in _LOOKS if (text := look(place, folders))), "")
    alone = ""
    if option == "defective":
        alone = f" An empty folder {name!r} says that there are good images alone."
    return (
        f"{place}: there is no folder {name!r} in it, and no manifest.csv; "
        f"{found or 'it holds no folders'}. {guess}"
        f"Put images into {name!r} or name another folder with --{option} NAME.{alone}"
    )


def _folders(place: Path) -> list[Path]:
    if not place.is_dir():
        return []
    return sorted(p for p in place.iterdir() if p.is_dir() and not is_junk_folder(p.name))


def _images(place: Path) -> list[Path]:
    return sorted(p for p in place.iterdir() if p.suffix.lower() in IMAGES and p.is_file())


def _names(folders: Sequence[Path]) -> str:
    return ", ".join(f.name for f in folders[:SHOWN]) + (", …" if len(folders) > SHOWN else "")


def _bins(folders: Sequence[Path]) -> tuple[Path, Path] | None:
    """The two folders that sound like the bins, where there is one of each."""
    good = [folder for folder in folders if sounds_good(folder.name)]
    defective = [folder for folder in folders if sounds_defective(folder.name)]
    return (good[0], defective[0]) if len(good) == len(defective) == 1 else None


def _two_bins(place: Path, folders: Sequence[Path]) -> str | None:
    if found := _bins(folders):
        good, defective = found
        return (
            f"{good.name!r} and {defective.name!r} sound like the two: give --good {good.name} "
            f"--defective {defective.name}. "
        )
    return None


def _bins_further_down(place: Path, folders: Sequence[Path]) -> str | None:
    inside = [(folder, found) for folder in folders if (found := _bins(_folders(folder)))]
    if not inside or any(folder.name.lower() in ("train", "test") for folder, _ in inside):
        return None
    folder, (good, defective) = inside[0]
    kind = "a set of several categories, such as Real-IAD: give one of them, for example "
    return (
        f"It looks like {kind if len(inside) > 1 else 'a folder too high: give '}{folder} with "
        f"--good {good.name} --defective {defective.name}. "
    )


def _bin_itself(place: Path, folders: Sequence[Path]) -> str | None:
    own = sounds_good(place.name) or sounds_defective(place.name)
    if own and _bins(_folders(place.parent)):
        return f"It looks like one of the two: give the folder above, {place.parent}. "
    return None


def _visa(place: Path, folders: Sequence[Path]) -> str | None:
    found = [p for p in (place, *folders) if (p / "Data" / "Images" / "Normal").is_dir()]
    if not found:
        return None
    return (
        f"It looks like VisA: give {found[0]} with --good Data/Images/Normal "
        f"--defective Data/Images/Anomaly; for its masks and its split {_TABLE} and split. "
    )


def _mvtec_ad2(place: Path, folders: Sequence[Path]) -> str | None:
    found = [p for p in (place, *folders) if (p / "test_public").is_dir()]
    if not found:
        return None
    return (
        f"It looks like MVTec AD 2: {_TABLE}, of the good images of {found[0] / 'train'}, and of "
        "test_public/good and test_public/bad. "
    )


def _categories(place: Path, folders: Sequence[Path]) -> str | None:
    inside = [f for f in folders if (f / "train").is_dir() and (f / "test").is_dir()]
    if not inside:
        return None
    good = [f.name for f in _folders(inside[0] / "train") if sounds_good(f.name)]
    option = f" with --good {good[0]}" if good and good[0] != "good" else ""
    return (
        f"It looks like a set of categories ({_names(inside)}), such as MVTec AD, MVTec LOCO or "
        f"BTAD: give one of them, for example {inside[0]}{option}. "
    )


def _kinds_of_defects(place: Path, folders: Sequence[Path]) -> str | None:
    if place.name not in ("train", "test") or len(_folders(place.parent / "test")) < 2:
        return None
    kinds = _folders(place.parent / "test")
    return (
        f"It looks like a category of MVTec AD (test holds {_names(kinds)}) without the folder of "
        f"masks: make the folder {place.parent / 'ground_truth'}, it may be empty. "
    )


def _good_alone(place: Path, folders: Sequence[Path]) -> str | None:
    if len(folders) == 1 and sounds_good(folders[0].name):
        return (
            "It looks like a set of good images alone, which are enough to begin with: give "
            f"--good {folders[0].name}. "
        )
    return None


def _boxes(place: Path, folders: Sequence[Path]) -> str | None:
    names = {p.name.lower() for p in place.iterdir()}
    inside = {p.name.lower() for folder in folders for p in folder.iterdir()}
    yolo = names & {"data.yaml", "data.yml", "classes.txt"} or {"images", "labels"} <= names
    voc = {"annotations", "jpegimages"} <= names
    coco = {"annotations", "_annotations.coco.json"} & (names | inside)
    if not (yolo or voc or coco):
        return None
    return (
        f"It looks like a set with boxes (YOLO, COCO, Pascal VOC): {_TABLE}; an image is defective "
        "where its label file has a box. "
    )


def _label_files(place: Path, folders: Sequence[Path]) -> str | None:
    """KolektorSDD (kos01/Part0.jpg, Part0_label.bmp), KolektorSDD2 (train/1.png, 1_GT.png)."""
    for folder in (place, *folders[:SHOWN]):
        told = tell_labels(_images(folder)[:100])
        if told.labels:
            first = next(iter(told.labels))
            return (
                f"It looks like KolektorSDD or a set like it, with label files beside the images "
                f"({first.relative_to(place)}): {_TABLE}; an image is defective where its label "
                "file marks a pixel. "
            )
    return None


def _parts_in_capitals(place: Path, folders: Sequence[Path]) -> str | None:
    odd = [f.name for f in folders if f.name.lower() in ("train", "test") and not f.name.islower()]
    if not odd:
        return None
    return (
        f"A split is read from folders train and test, in small letters: rename {' and '.join(odd)}"
        f", or {_TABLE} and split. "
    )


def _another_part(place: Path, folders: Sequence[Path]) -> str | None:
    names = {folder.name for folder in folders}
    other = next((n for n in ("val", "valid", "validation", "dev", "eval") if n in names), None)
    if "train" not in names or "test" in names or other is None:
        return None
    return (
        f"A split is read from folders train and test: rename {other!r} to 'test', or {_TABLE} "
        "and split. "
    )


def _classes(place: Path, folders: Sequence[Path]) -> str | None:
    full = [f for f in folders if _images(f) and f.name not in ("train", "test", "masks")]
    if len(full) < 2:
        return None
    good = [f for f in full if sounds_good(f.name)]
    which = f"--good {good[0].name}" if len(good) == 1 else "--good NAME"
    return (
        f"It looks like a folder for each class ({_names(full)}): name the good one with {which}, "
        "and put the others into one folder, or write a manifest.csv with the columns image, "
        "label. "
    )


def _table(place: Path, folders: Sequence[Path]) -> str | None:
    tables = sorted(p.name for p in place.iterdir() if p.suffix.lower() == ".csv")
    if not tables:
        return None
    return (
        f"It holds the table {tables[0]}: give {place / tables[0]} itself, if its columns are "
        "image and label. "
    )


def _loose(place: Path, folders: Sequence[Path]) -> str | None:
    images = _images(place)
    if not images:
        return None
    return (
        f"It holds {len(images)} images in no folder ({images[0].name}, …): sort them into two "
        "folders, or write a manifest.csv with the columns image, label. "
    )


def _packed(place: Path, folders: Sequence[Path]) -> str | None:
    packed = sorted(p.name for p in place.iterdir() if p.suffix.lower() in HOLDERS)
    return f"It holds {packed[0]}: unpack that first. " if packed and not folders else None


_LOOKS: tuple[Callable[[Path, Sequence[Path]], str | None], ...] = (
    _two_bins, _bin_itself, _visa, _mvtec_ad2, _categories, _bins_further_down, _kinds_of_defects,
    _boxes, _label_files, _parts_in_capitals, _another_part, _good_alone, _classes, _table, _loose,
    _packed,
)  # fmt: skip
"""The first that recognises a folder has the word."""
