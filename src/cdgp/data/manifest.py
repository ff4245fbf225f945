"""The one table: picture, label, mask, group, split. Training receives rows without masks."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cdgp.errors import DataError
from cdgp.files import write_text

GOOD_WORDS = ("good", "normal", "ok", "0", "false")
DEFECTIVE_WORDS = ("defective", "anomaly", "bad", "ng", "1", "true")
SPLITS = ("fit", "calibration", "test", "train")
COLUMNS = ("image", "label", "mask", "group", "split", "sha256", "pixel_sha256")
ALIASES = {"path": "image", "image_path": "image", "mask_path": "mask"}
SHOWN = 10


@dataclass(frozen=True)
class Sample:
    """One picture with everything that is known about it; paths are absolute.

    `split` is "fit", "calibration", "test", "train" (not yet divided into fit and calibration) or
    None. `mask` is for evaluation only. The digests are those of `images.digest` and
    `images.pixel_digest`.
    """

    image: Path
    defective: bool
    mask: Path | None = None
    group: str | None = None
    split: str | None = None
    sha256: str | None = None
    pixel_sha256: str | None = None


@dataclass(frozen=True)
class WeakSample:
    """What training receives: a picture and its label; there is no mask to look at."""

    image: Path
    defective: bool


@dataclass(frozen=True)
class WeakSplit:
    """All that a training may see of a manifest: pictures and labels; no mask, no test picture."""

    fit: tuple[WeakSample, ...]
    calibration: tuple[WeakSample, ...]
    train: tuple[WeakSample, ...]
    """Both, in the manifest's order."""
    sha256: str
    """Digest of the manifest."""
    good_fit_sha256: str
    """Digest of the good fit pictures alone: what the student's training depends on."""


@dataclass(frozen=True)
class Manifest:
    """Samples, sorted by path, and the folder that their paths are relative to on disk."""

    root: Path
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        order = sorted(self.samples, key=lambda sample: self.name(sample.image))
        object.__setattr__(self, "samples", tuple(order))

    def name(self, path: Path) -> str:
        """The path as it is written: relative to the root where inside it, else absolute."""
        if path.is_relative_to(self.root):
            return path.relative_to(self.root).as_posix()
        return path.as_posix()

    def paths(self) -> list[Path]:
        """Every picture and every mask."""
        return [path for s in self.samples for path in (s.image, s.mask) if path]

    def of(self, split: str | None) -> tuple[Sample, ...]:
        """The samples of one split; "train" is all of train, fit and calibration; None is all."""
        if split is not None and split not in SPLITS:
            raise DataError(f"split {split!r} is unknown; it is one of {', '.join(SPLITS)}")
        wanted = ("train", "fit", "calibration") if split == "train" else (split,)
        return tuple(s for s in self.samples if split is None or s.split in wanted)

    def weak(self, split: str | None) -> tuple[WeakSample, ...]:
        """The samples of one split as training may see them."""
        return tuple(WeakSample(s.image, s.defective) for s in self.of(split))

    def weak_split(self) -> WeakSplit:
        """The training part as training may see it."""
        good_fit = tuple(s for s in self.of("fit") if not s.defective)
        return WeakSplit(
            self.weak("fit"),
            self.weak("calibration"),
            self.weak("train"),
            self.sha256,
            replace(self, samples=good_fit).sha256,
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

    def write_csv(self, path: Path) -> None:
        """Writes the table in one step: a reader sees the old file or the whole new one."""
        text = io.StringIO(newline="")
        table = csv.writer(text)
        table.writerow(COLUMNS)
        table.writerows(self._row(sample) for sample in self.samples)
        write_text(path, text.getvalue(), errors="surrogateescape")

    def _row(self, sample: Sample) -> tuple[str, ...]:
        return (
            self.name(sample.image),
            "defective" if sample.defective else "good",
            self.name(sample.mask) if sample.mask else "",
            sample.group or "",
            sample.split or "",
            sample.sha256 or "",
            sample.pixel_sha256 or "",
        )


def absolute(path: Path) -> Path:
    """The path made absolute and freed of `..`, symbolic links kept."""
    return Path(os.path.normpath(path.absolute()))


def read_csv(path: Path, root: Path | None = None) -> Manifest:
    """Reads a manifest.

    The header must have `image` (or `path`, `image_path`) and `label`; `mask` (or `mask_path`),
    `group`, `split`, `sha256` and `pixel_sha256` are optional, other columns are ignored. Commas,
    semicolons and tabs separate; UTF-8 with or without a byte-order mark. Names are looked up as
    written, then with their accents composed (NFC), then decomposed (NFD).

    Arguments:
        path: The CSV file.
        root: The folder that relative paths start from; by default the one that holds the file.

    Raises:
        DataError: A row cannot be used; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    root = absolute(path.parent if root is None else root)
    samples: list[Sample] = []
    seen: dict[Path, tuple[int, bool]] = {}
    missing: list[str] = []
    for line, row in _rows(path, text):
        defective = _label(path, line, row["label"])
        image = _find(root, row["image"])
        mask = _find(root, row["mask"]) if row.get("mask", "").strip() else None
        if not _is_file(image):
            missing.append(f"line {line}: {row['image']}")
        if mask and not _is_file(mask):
            missing.append(f"line {line}: {row['mask']}")
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
            row.get(name) or None for name in ("group", "sha256", "pixel_sha256")
        )
        samples.append(Sample(image, defective, mask, group, split, sha256, pixel_sha256))
    if missing:
        raise DataError(_missing_message(path, root, missing))
    if not samples:
        raise DataError(f"{path}: has a header but no rows; list one picture per row")
    return Manifest(root, tuple(samples))


def _rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, cells by column) of every row that is not empty."""
    first = text.split("\n", 1)[0]
    table = csv.reader(io.StringIO(text), delimiter=max(",;\t", key=first.count))
    try:
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
                raise DataError(f"{path}: line {table.line_num} names no image")
            yield table.line_num, row
    except csv.Error as error:
        raise DataError(f"{path}: line {table.line_num} is not CSV: {error}") from error


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
    except OSError:  # a name that no file can have, for one a longer one than the system allows
        return False


def _missing_message(path: Path, root: Path, missing: list[str]) -> str:
    shown = "".join(f"\n  {entry}" for entry in missing[:SHOWN])
    more = f"\n  and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    hint = f"names are relative to {root}"
    if any(not entry.isascii() for entry in missing):
        hint += "; accents were tried as written, composed (NFC) and decomposed (NFD)"
    if any("\udc80" <= character <= "\udcff" for entry in missing for character in entry):
        hint += "; the file is not UTF-8: save it as UTF-8"
    return f"{path}: {len(missing)} listed files are missing ({hint}):{shown}{more}"
