"""Tells label files, which mark a defect and show no part, from images. There are four kinds.

- Its name ends with one of `LABEL_WORDS`, and the rest of it is the name of an image in the same
  folder: `7_label.bmp` and `7-mask_2.png` beside `7.jpg`. Where a folder has such files, so named
  files without an image are label files too. With the word elsewhere, `mask_7.png` beside
  `image_7.png`, it has to look like one as well.
- Its name is that of an image in the same folder with any other word before or after it, it shows
  2 to `FEW_COLOURS` colours, and that image shows more: `7_scratch.png` beside `7.png`. One of a
  single colour, which may be a black frame, has to share its word with such a file.
- It has the name of an image in the same folder, is no JPEG, and shows at most `FEW_COLOURS`
  colours, while that image shows more: `7.png` beside `7.jpg`.
- It lies in a sub-folder that is named by one of `LABEL_WORDS`, or whose files all end with one,
  and the first of its files look like label files (`walk`).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cdgp.data.decode import EXTENSIONS
from cdgp.data.images import read_image
from cdgp.errors import ImageError

LABEL_WORDS = (
    "label", "labels", "lbl", "mask", "masks", "gt", "ground_truth", "ground-truth", "groundtruth",
    "truth", "seg", "segmentation", "segmentations", "ann", "anno", "annotation", "annotations",
)  # fmt: skip
"""Words, in any case, that label files and their folders are named after."""
_WORD = "(?:" + "|".join(sorted(LABEL_WORDS, key=len, reverse=True)) + ")"
LABEL_ENDING = re.compile(rf"[-_. ]{_WORD}([-_. ]?\d+)?$", re.IGNORECASE)
LABEL_ANYWHERE = re.compile(rf"(^|[-_. ]){_WORD}(?=[-_. ]|$)", re.IGNORECASE)
IMAGE_ANYWHERE = re.compile(r"(^|[-_. ])(image|img|photo|rgb|raw|input)(?=[-_. ]|$)", re.IGNORECASE)
LABEL_FOLDER = re.compile(_WORD, re.IGNORECASE)

FEW_COLOURS = 8
"""A label file shows a colour for each class, and a camera's image shows many more."""
SAMPLED, MOST_LOOKED = 5, 100
"""So many photographs are looked at of one further word, and of all, before the rest are images."""
TWO_TONES = 0.95
"""A mask that was saved as JPEG is darkest or brightest, within 5 %, in this share of its area."""
SAMPLED_PIXELS = 100_000
"""So many pixels of a file are enough to tell how many colours it shows."""


class Told(NamedTuple):
    """Image files of one folder, told apart."""

    images: list[Path]
    labels: dict[Path, list[Path]]
    """Label files, with the images that each may belong to."""
    orphans: list[Path]
    """Files that look like the label files beside them, and belong to no image."""
    named: list[Path]
    """Images that are named like label files, in a folder that has no label file."""


def tell_labels(files: Sequence[Path]) -> Told:
    """Parts the image files of one folder into images and label files."""
    stems = [stem_of(path) for path in files]
    twins, by_name = _twins(files, stems), _labels_by_name(files, stems)
    by_word = _labels_by_word(files, stems)
    owners = {**by_word, **twins, **by_name}
    owned = [path for path in files if path not in owners] if owners else list(files)
    named = [path for path in owned if named_like_label(path)]
    suffixes = {path.suffix for path in twins}
    orphans = {path for path in owned if path.suffix in suffixes and _shows_few_colours(path)}
    if by_name:
        orphans |= set(named)
    images = [path for path in owned if path not in orphans] if orphans else owned
    kept = set(images) if owners else set()
    labels = {label: [p for p in paths if p in kept] for label, paths in owners.items()}
    orphans |= {label for label, paths in labels.items() if not paths}
    labels = {label: paths for label, paths in labels.items() if paths}
    # Where every file is named so, that is how this set names its images.
    odd = named if not by_name and len(named) < len(owned) else []
    return Told(images, labels, sorted(orphans), odd)


def named_like_label(path: Path) -> bool:
    """Whether a file's name ends as those of label files do."""
    return bool(LABEL_ENDING.search(stem_of(path)))


def looks_like_label(path: Path) -> bool:
    """Whether an image file shows few colours, or hardly anything but the darkest and brightest."""
    colours, tones = _colours(path)
    return 0 < colours <= FEW_COLOURS or tones >= TWO_TONES


def _colours(path: Path) -> tuple[int, float]:
    """The number of colours (0: unreadable), and the share of the darkest and brightest pixels."""
    try:
        pixels = read_image(path, 65535)
    except ImageError:
        return 0, 0.0
    step = max(1, int((pixels.shape[0] * pixels.shape[1] / SAMPLED_PIXELS) ** 0.5))
    pixels = pixels[::step, ::step]
    bright = pixels.max(axis=2)
    near = (bright <= bright.min() + 0.05) | (bright >= bright.max() - 0.05)
    return len(np.unique(pixels.reshape(-1, 3), axis=0)), float(near.mean())


def stem_of(path: Path) -> str:
    """The name without suffixes, accents composed, in lower case: 7_mask.png.bmp gives 7_mask."""
    return _bare(unicodedata.normalize("NFC", path.stem).casefold())


def _bare(name: str) -> str:
    """A name without the suffixes of images that it ends with."""
    while (inner := Path(name)).suffix in EXTENSIONS:
        name = inner.stem
    return name


def _by_stem(files: Sequence[Path], stems: Sequence[str]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = defaultdict(list)
    for path, stem in zip(files, stems, strict=True):
        found[stem].append(path)
    return found


def _labels_by_name(files: Sequence[Path], stems: Sequence[str]) -> dict[Path, list[Path]]:
    """The files that are named after another one and a label's word, with those others."""
    worded = dict.fromkeys(s for s in stems if LABEL_ANYWHERE.search(s) or LABEL_ENDING.search(s))
    if not worded:
        return {}
    by_stem = _by_stem(files, stems)
    by_key: dict[str, list[Path]] = defaultdict(list)
    for stem, paths in by_stem.items():
        if stem not in worded:
            by_key[_without(IMAGE_ANYWHERE, stem)] += paths
    found = {}
    for stem in worded:
        paths = by_stem[stem]
        owner = next((base for base in _bases(stem) if base in by_stem), None)
        if owner is not None:
            found.update(dict.fromkeys(paths, by_stem[owner]))
            continue
        key = _without(LABEL_ANYWHERE, stem)
        if key in by_key:
            labels = [path for path in paths if looks_like_label(path)]
            found.update(dict.fromkeys(labels, by_key[key]))
    return found


def _labels_by_word(files: Sequence[Path], stems: Sequence[str]) -> dict[Path, list[Path]]:
    """Files of few colours, named after one of many and any further word, with those others."""
    by_stem, photographs = _by_stem(files, stems), Counter[str]()
    found: dict[str, dict[Path, list[Path]]] = defaultdict(dict)
    plain: dict[str, dict[Path, list[Path]]] = defaultdict(dict)
    for stem, paths in by_stem.items():
        base = next((name for name in _inside(stem) if name in by_stem), None)
        if base is None:
            continue
        word = re.sub(r"\d+", "0", stem.replace(base, "", 1))
        for path in paths:
            if photographs[word] >= SAMPLED or photographs.total() >= MOST_LOOKED:
                break
            colours, _ = _colours(path)
            if not 0 < colours <= FEW_COLOURS or any(map(_shows_few_colours, by_stem[base])):
                photographs[word] += 1
            else:
                (found if colours > 1 else plain)[word][path] = by_stem[base]
    return {path: owners for word in found
            for path, owners in (found[word] | plain[word]).items()}  # fmt: skip


def _inside(stem: str) -> Iterator[str]:
    """The names that a name begins or ends with, the longest first; the rest holds a letter."""
    for length in range(len(stem) - 1, 0, -1):
        for name, rest, joint in (
            (stem[:length], stem[length:], stem[length - 1 : length + 1]),
            (stem[-length:], stem[:-length], stem[-length - 1 : len(stem) - length + 1]),
        ):
            # 10 is not named after 1, and no name is cut within a number or a word.
            whole = not (joint.isdecimal() or joint.isalpha())
            if whole and any(map(str.isalpha, rest)):
                yield name


def _bases(stem: str) -> list[str]:
    """The name without its label endings, the shortest first: 7_mask_gt gives 7 and 7_mask."""
    found: list[str] = []
    while (shorter := _bare(LABEL_ENDING.sub("", stem))) not in ("", stem):
        found.insert(0, shorter)
        stem = shorter
    return found


def _without(word: re.Pattern[str], stem: str) -> str:
    return word.sub("", stem).strip("-_. ")


def _twins(files: Sequence[Path], stems: Sequence[str]) -> dict[Path, list[Path]]:
    """Files of few colours beside one of the same name with many, with those others."""
    if len(set(stems)) == len(stems):
        return {}
    found = {}
    for paths in _by_stem(files, stems).values():
        plain = [p for p in paths if len(paths) > 1 and not _is_jpeg(p) and _shows_few_colours(p)]
        rest = [path for path in paths if path not in plain]
        if plain and rest:
            found.update(dict.fromkeys(plain, rest))
    return found


def _is_jpeg(path: Path) -> bool:
    return path.suffix.lower() in (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo")


def _shows_few_colours(path: Path) -> bool:
    return 0 < _colours(path)[0] <= FEW_COLOURS
