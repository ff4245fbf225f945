"""The table of a data set: image, label, mask, group, split. Training sees no masks."""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cdgp.data.groups import group_numbers
from cdgp.errors import DataError
from cdgp.files import absolute, cell_text, path_cell, text_cell, write_text

GOOD_WORDS = ("good", "normal", "ok", "pass", "0", "false")
DEFECTIVE_WORDS = (
    "defective", "defect", "anomaly", "anomalous", "abnormal", "bad", "ng", "nok", "fail", "1",
    "true",
)  # fmt: skip
SPLITS = ("fit", "calibration", "test", "train")
COLUMNS = ("image", "label", "mask", "group", "split", "sha256", "pixel_sha256")
ALIASES = {"path": "image", "image_path": "image", "mask_path": "mask"}
MASK_SEPARATOR = "|"
"""Between the names of several masks of one image; Windows allows it in no name."""


@dataclass(frozen=True)
class Sample:
    """One image with everything that the manifest says of it; paths are absolute.

    `split` is "fit", "calibration", "test", "train" (not yet divided into fit and calibration) or
    None. `masks` are for evaluation only; their union counts. The digests are those of
    `files.digest` and `images.pixel_digest`.
    """

    image: Path
    defective: bool
    masks: tuple[Path, ...] = ()
    group: str | None = None
    split: str | None = None
    sha256: str | None = None
    pixel_sha256: str | None = None


@dataclass(frozen=True)
class WeakSample:
    """What training receives: an image and its label, and no mask."""

    image: Path
    defective: bool


@dataclass(frozen=True)
class WeakSplit:
    """All that training may see of a manifest: images and labels; no mask, no test image."""

    fit: tuple[WeakSample, ...]
    calibration: tuple[WeakSample, ...]
    """All of the training images where the calibration split lacks a label that is needed."""
    train: tuple[WeakSample, ...]
    """Both, in the manifest's order."""
    sha256: str
    good_fit_sha256: str
    """Digest of the good fit images: the student's training depends on nothing else."""
    own_calibration: bool
    """Whether the calibration images are set aside, and are not the training images."""
    counts: dict[str, tuple[int, int]]
    """(good, defective) by split, of the whole manifest."""
    fit_groups: tuple[int, ...]
    """Group number of each fit image: images of one part, equal images, near duplicates share
    one."""
    calibration_groups: tuple[int, ...]
    """The same of each calibration image."""

    @property
    def parts(self) -> tuple[int, int]:
        """(good, defective) groups of all training images; one with a defect counts as such."""
        samples = (*zip(self.fit, self.fit_groups, strict=True),
                   *zip(self.calibration, self.calibration_groups, strict=True))  # fmt: skip
        bad = {group for sample, group in samples if sample.defective}
        return len({group for _, group in samples} - bad), len(bad)


@dataclass(frozen=True)
class Manifest:
    """Samples, sorted by path, and the folder that their paths are relative to on disk."""

    root: Path
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        order = sorted(self.samples, key=lambda sample: self.name(sample.image))
        object.__setattr__(self, "samples", tuple(order))

    def name(self, path: Path) -> str:
        """The path as the table has it: relative to the root where it is inside, else absolute."""
        if path.is_relative_to(self.root):
            return path.relative_to(self.root).as_posix()
        return path.as_posix()

    def paths(self) -> list[Path]:
        """Every image and every mask."""
        return [path for s in self.samples for path in (s.image, *s.masks)]

    def of(self, split: str | None) -> tuple[Sample, ...]:
        """The samples of one split; "train" is all of train, fit and calibration; None is all."""
        if split is not None and split not in SPLITS:
            raise DataError(f"split {split!r} is unknown; it is one of {', '.join(SPLITS)}")
        wanted = ("train", "fit", "calibration") if split == "train" else (split,)
        return tuple(s for s in self.samples if split is None or s.split in wanted)

    def weak(self, split: str | None) -> tuple[WeakSample, ...]:
        """The samples of one split as training may see them."""
        return tuple(WeakSample(s.image, s.defective) for s in self.of(split))

    def weak_split(
        self, joined: Manifest | None = None, needed: Collection[bool] = (False, True)
    ) -> WeakSplit:
        """The training part as training may see it.

        Args:
            joined: this manifest with near duplicates in one group; training itself depends on this
                manifest alone.
            needed: labels that the calibration split must show where training images have them;
                where it lacks one, the training images calibrate.
        """
        good_fit = tuple(s for s in self.of("fit") if not s.defective)
        held = {s.defective for s in self.of("calibration")}
        own = bool(held) and set(needed) & {s.defective for s in self.of("train")} <= held
        train = self.of("train")
        numbers = group_numbers(joined or self, (joined or self).of("train")).tolist()
        group = {s.image: number for s, number in zip(train, numbers, strict=True)}
        return WeakSplit(
            self.weak("fit"),
            self.weak("calibration" if own else "train"),
            self.weak("train"),
            self.sha256,
            replace(self, samples=good_fit).sha256,
            own,
            self.counts(),
            tuple(group[s.image] for s in self.of("fit")),
            tuple(group[s.image] for s in (self.of("calibration") if own else train)),
        )

    def counts(self) -> dict[str, tuple[int, int]]:
        """(good, defective) per split that occurs; samples without one count as "unsplit"."""
        found = Counter((s.split or "unsplit", s.defective) for s in self.samples)
        names = [
            name for name in (*SPLITS, "unsplit") if (name, False) in found or (name, True) in found
        ]
        return {name: (found[name, False], found[name, True]) for name in names}

    @property
    def sha256(self) -> str:
        """Digest of names, labels, groups, splits and file digests; the order does not matter."""
        rows = sorted(
            json.dumps([
                unicodedata.normalize("NFC", self.name(s.image)),
                s.defective, s.group, s.split, s.sha256,
            ])
            for s in self.samples
        )  # fmt: skip
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()

    def write_csv(self, path: Path, run_id: str | None = None) -> None:
        """Writes the table atomically: a reader sees the old file or the whole new one.

        With a run id, it is the last column of every row. No cell begins like a formula; `read_csv`
        gives back the same paths and groups.
        """
        own = () if run_id is None else (run_id,)
        text = io.StringIO(newline="")
        table = csv.writer(text)
        table.writerow((*COLUMNS, "run_id")[: len(COLUMNS) + len(own)])
        table.writerows((*self._row(sample), *own) for sample in self.samples)
        write_text(path, text.getvalue(), errors="surrogateescape")

    def _row(self, sample: Sample) -> tuple[str, ...]:
        return (
            path_cell(self.name(sample.image)),
            "defective" if sample.defective else "good",
            MASK_SEPARATOR.join(path_cell(self.name(mask)) for mask in sample.masks),
            text_cell(sample.group or ""),
            sample.split or "",
            sample.sha256 or "",
            sample.pixel_sha256 or "",
        )


def read_csv(path: Path, root: Path | None = None) -> Manifest:
    """Reads a manifest.

    The header must have `image` (or `path`, `image_path`) and `label`; `mask` (or `mask_path`),
    `group`, `split`, `sha256` and `pixel_sha256` are optional, other columns are ignored. Commas,
    semicolons and tabs separate, and a first line `sep=;` says which; UTF-8 with or without a
    byte-order mark, or UTF-16 with one. Names are looked up as written, then with their accents
    composed (NFC), then decomposed (NFD). Several masks of one image share a cell, with `|`
    between their names. An apostrophe in front of a group that begins like a formula is no part
    of it (`files.text_cell`).

    Arguments:
        path: The CSV file.
        root: The folder that relative paths start from; by default the one that holds the file.

    Raises:
        DataError: A row cannot be used; the message names the line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; check the path") from error
    text = _decoded(path, content)
    root = absolute(path.parent if root is None else root)
    samples: list[Sample] = []
    seen: dict[Path, tuple[int, bool]] = {}
    missing: list[str] = []
    for line, row in _rows(path, text):
        defective = _label(path, line, row["label"])
        image = _find(root, row["image"])
        masks = _masks(root, row.get("mask", ""))
        for written, found in ((row["image"], image), *masks.items()):
            if not _is_file(found):
                missing.append(f"line {line}: {written}")
        if image in seen:
            before, other = seen[image]
            wrong = "twice" if other == defective else "as good and as defective"
            raise DataError(
                f"{path}: {row['image']} is listed {wrong}, in lines {before} and {line}; "
                "keep one of them"
            )
        seen[image] = (line, defective)
        split = _split(path, line, row.get("split", ""))
        group, sha256, pixel_sha256 = (
            cell_text(row.get(name, "")) or None for name in ("group", "sha256", "pixel_sha256")
        )
        of_image = tuple(masks.values())
        samples.append(Sample(image, defective, of_image, group, split, sha256, pixel_sha256))
    if missing:
        raise DataError(_missing_message(path, root, missing))
    if not samples:
        raise DataError(f"{path}: has a header but no rows; list one image per row")
    return Manifest(root, tuple(samples))


def _decoded(path: Path, content: bytes) -> str:
    """The text of a table; bytes that are not UTF-8 are kept, since a file's name may hold them."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            return content.decode("utf-16")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: begins as UTF-16 but is not ({error}); save it as UTF-8"
            ) from error
    return content.decode("utf-8-sig", errors="surrogateescape")


def _masks(root: Path, cell: str) -> dict[str, Path]:
    """The masks that a cell names, by their spelling."""
    if not cell.strip():
        return {}
    whole = _find(root, cell)
    if MASK_SEPARATOR not in cell or _is_file(whole):
        return {cell: whole}
    return {name: _find(root, name) for name in cell.split(MASK_SEPARATOR) if name.strip()}


def _rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, cells by column) of every row that is not empty."""
    first, _, rest = text.partition("\n")
    stated = re.fullmatch(r"sep=([,;\t])\s*", first)
    if stated:
        first = rest.partition("\n")[0]
    delimiter = stated[1] if stated else max(",;\t", key=first.count)
    table = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        if stated:
            next(table)
        header = [
            ALIASES.get(name.strip().lower(), name.strip().lower()) for name in next(table, [])
        ]
        for name in ("image", "label"):
            if header.count(name) != 1:
                raise DataError(
                    f"{path}: the header needs one column {name!r}, but is {first.strip()!r}; "
                    f"known columns are {', '.join(COLUMNS)}"
                )
        for cells in table:
            if not any(cell.strip() for cell in cells):
                continue
            if any(cell.strip() for cell in cells[len(header) :]):
                raise DataError(
                    f"{path}: line {table.line_num} has more cells than the header; "
                    "put quotes around a name that holds the separator"
                )
            padded = cells + [""] * (len(header) - len(cells))
            row = {
                name: cell if name in ("image", "mask") else cell.strip()
                for name, cell in zip(header, padded, strict=False)
            }
            if not row["image"].strip():
                raise DataError(f"{path}: line {table.line_num} names no image; add its path")
            yield table.line_num, row
    except csv.Error as error:
        raise DataError(
            f"{path}: line {table.line_num} is not CSV ({error}); look for a quote that is never "
            "closed"
        ) from error


def _label(path: Path, line: int, word: str) -> bool:
    if word.lower() in GOOD_WORDS:
        return False
    if word.lower() in DEFECTIVE_WORDS:
        return True
    raise DataError(
        f"{path}: line {line} has the label {word!r}; "
        f"write one of {', '.join(GOOD_WORDS)} or one of {', '.join(DEFECTIVE_WORDS)}"
    )


def _split(path: Path, line: int, word: str) -> str | None:
    if word and word.lower() not in SPLITS:
        raise DataError(
            f"{path}: line {line} has the split {word!r}; "
            f"write one of {', '.join(SPLITS)}, or leave it empty"
        )
    return word.lower() or None


def _find(root: Path, text: str) -> Path:
    """The file that `text` names; where there is none, the path as written."""
    for spelling in (text, text.strip().replace("\\", "/")):
        for written in (
            spelling,
            unicodedata.normalize("NFC", spelling),
            unicodedata.normalize("NFD", spelling),
        ):
            found = absolute(root / written)
            if _is_file(found):
                return found
    return absolute(root / text)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have, such as one that is too long
        return False


def _missing_message(path: Path, root: Path, missing: list[str]) -> str:
    hint = f"names are relative to {root}"
    if any(not entry.isascii() for entry in missing):
        hint += "; accents were tried as written, composed (NFC) and decomposed (NFD)"
    if any("\udc80" <= character <= "\udcff" for entry in missing for character in entry):
        hint += "; the file is not UTF-8: save it as UTF-8"
    return f"{path}: {len(missing)} listed files are missing ({hint}):{listed(missing, 10)}"


def listed(lines: Iterable[str], most: int = 20) -> str:
    """The lines of a message, indented, one below another; beyond `most` only their number."""
    every = list(lines)
    shown = "".join(f"\n  {line}" for line in every[:most])
    return shown + (f"\n  and {len(every) - most} more" if len(every) > most else "")
