"""Searches folders for images: every file is an image, a label file, or told with a reason."""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from cdgp.data.decode import EXTENSIONS, UNREADABLE_EXTENSIONS, is_image
from cdgp.data.labels import LABEL_FOLDER, Told, looks_like_label, named_like_label, tell_labels
from cdgp.errors import DataError
from cdgp.files import printable

IMAGES = frozenset({*EXTENSIONS, *UNREADABLE_EXTENSIONS})
HOLDERS = frozenset({
    ".pdf", ".doc", ".docx", ".ppt", ".pptx", ".xls", ".xlsx", ".zip", ".rar", ".7z", ".tar",
    ".gz", ".tgz", ".bz2", ".xz", ".zst", ".mp4", ".m4v", ".avi", ".mov", ".mkv", ".wmv", ".webm",
    ".mpg", ".mpeg", ".h5", ".hdf5", ".npy", ".npz", ".mat", ".parquet", ".tfrecord", ".lmdb",
})  # fmt: skip
"""Suffixes of files that may hold images, and are not opened."""
COPIES = frozenset({
    ".bak", ".old", ".orig", ".tmp", ".temp", ".part", ".partial", ".crdownload", ".download",
    ".swp", ".filepart",
})  # fmt: skip
"""Suffixes of backups, and of copies that never were finished."""
SIDECARS = frozenset({".json", ".xml", ".txt", ".csv", ".yaml", ".yml", ".xmp", ".aux"})
RESULTS = frozenset({"scores.csv", "report.html", "config.json", "run.json", "unfinished.sqlite"})
"""Beside one of these, the folders `OWN` hold our own drawings and anomaly maps."""
OWN = ("overlays", "maps")

JUNK_FOLDERS = frozenset({
    "__MACOSX", "#recycle", "#snapshot", "$RECYCLE.BIN", "System Volume Information", "lost+found",
})  # fmt: skip
"""Folders that systems make beside the user's own, besides those that start with . or @."""

SAMPLED = 3
"""So many files of a folder that is named like one of labels are looked at."""
SHOWN = 5
"""So many names stand for the entries of one reason."""

log = logging.getLogger("cdgp.data")

Severity = Literal["warning", "note"]

REASONS: dict[str, tuple[Severity, str]] = {
    "holder": ("warning", "archives, documents, videos or arrays (unpack or convert the images "
               "that they hold)"),
    "broken": ("warning", "links that lead nowhere"),
    "above": ("warning", "linked folders that lead above the folder that is searched"),
    "locked": ("warning", "folders that cannot be read"),
    "special": ("warning", "no regular files"),
    "orphan": ("warning", "named like label files, without an image of that name beside them "
               "(rename them if they are images)"),
    "label": ("warning", "label files of images beside them"),
    "label_folder": ("warning", "in folders of labels (if they are images, rename the folder or "
                     "give it by itself)"),
    "results": ("note", "overlays and maps of cdgp"),
    "repeated": ("note", "linked folders that are read elsewhere"),
    "copy": ("note", "backups or unfinished copies"),
    "sidecar": ("note", "data files of images beside them, which are not read"),
    "no_image": ("note", "no images"),
    "hidden": ("note", "hidden, or folders of thumbnails"),
}  # fmt: skip
"""Why an entry is not used: how much that matters, and the words."""


class Notice(NamedTuple):
    """Something that the search for images has to say."""

    kind: str
    """A stable name, for programs."""
    severity: Severity
    text: str


class Unused:
    """What a search does not use: how many entries by reason, and the first names of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._names: dict[str, list[str]] = defaultdict(list)
        """The first names, and one more where there are more."""

    def add(self, reason: str, name: str, number: int = 1) -> None:
        """Count entries of one name, for one of `REASONS`."""
        self.counts[reason] += number
        if len(self._names[reason]) <= SHOWN:
            self._names[reason].append(name)

    def merge(self, other: Unused, reasons: Collection[str]) -> None:
        """Add what another search does not use, for some reasons."""
        for reason in reasons:
            self.counts[reason] += other.counts[reason]
            self._names[reason] = (self._names[reason] + other._names[reason])[: SHOWN + 1]

    def notices(self, place: Path) -> list[Notice]:
        """One notice on what may hold images, and one on the rest."""
        found = []
        kinds: tuple[tuple[Severity, str], ...] = (("warning", "not_used"), ("note", "no_images"))
        for severity, kind in kinds:
            reasons = [r for r, (how, _) in REASONS.items() if how == severity and self.counts[r]]
            parts = [f"{REASONS[r][1]}: {self.counts[r]} ({self._listed(r)})" for r in reasons]
            if parts:
                number = sum(self.counts[reason] for reason in reasons)
                entries = "1 entry is" if number == 1 else f"{number} entries are"
                text = f"{place}: {entries} not used: {'; '.join(parts)}"
                found.append(Notice(kind, severity, text))
        return found

    def _listed(self, reason: str) -> str:
        names = self._names[reason]
        return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


class Search:
    """One search through places, which enters no folder twice.

    Arguments:
        places: All places that will be searched; links that lead to them or above them are not
            followed, so that no image is found twice, and none in the wrong bin.
        base: What the names of unused entries are relative to.
        labels: Whether label files are told from images; else they are images.
        skip: Folders that are not entered.
        peek: Whether files of unknown suffixes are looked into.
        strict: Whether a folder that cannot be read is an error; else it is told.
    """

    def __init__(
        self,
        places: Sequence[Path],
        base: Path | None,
        labels: bool = True,
        skip: Collection[Path] = (),
        peek: bool = True,
        strict: bool = True,
    ) -> None:
        self.unused = Unused()
        self.label_folders: list[Path] = []
        self._tops = [os.path.realpath(place) for place in places]
        self._base = base
        self._labels, self._skip = labels, frozenset(skip)
        self._peek, self._strict = peek, strict
        self._entered: set[str] = set()

    def folders(self, place: Path) -> Iterator[Told]:
        """The image files of a folder and of its sub-folders; at most one folder is held.

        Of a file, that file alone, whatever it is.

        Raises:
            DataError: A folder cannot be read.
        """
        if place.is_file():
            yield Told([place], {}, [], [])
            return
        waiting = [(place, os.path.realpath(place))]
        while waiting:
            here, real = waiting.pop()
            if here != place and here.is_symlink():
                if not self.leads_elsewhere(here):
                    continue
                real = os.path.realpath(here)
            if real in self._entered:
                self.leave("repeated", here)
                continue
            self._entered.add(real)
            folders, files = self._entries(here)
            images = self._images(here, files)
            # What was asked for is searched whatever its name.
            if self._labels and here != place and _holds_labels(here, images):
                self.label_folders.append(here)
                continue
            yield self._told(images)
            waiting += [
                (folder, f"{real}{os.sep}{folder.name}")
                for folder in reversed(folders)
                if folder not in self._skip
            ]

    def leave(self, reason: str, path: Path, number: int = 1) -> None:
        """Count entries that are not used, for one of `REASONS`."""
        inside = self._base is not None and path.is_relative_to(self._base)
        name = path.relative_to(self._base) if self._base is not None and inside else path
        self.unused.add(reason, name.as_posix(), number)

    def leads_elsewhere(self, link: Path) -> bool:
        """Whether a linked folder leads to one that is not read anyway; tells where not."""
        real = os.path.realpath(link)
        if real in self._entered or any(_lies_in(real, top) for top in self._tops):
            self.leave("repeated", link)
            return False
        if any(_lies_in(top, real) for top in self._tops):
            self.leave("above", link)
            return False
        return True

    def _entries(self, here: Path) -> tuple[list[Path], list[str]]:
        """The sub-folders to enter, and the names of regular files, both sorted."""
        folders, files = [], []
        try:
            with os.scandir(here) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            if not self._strict:
                self.leave("locked", here)
                return [], []
            raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
        for entry in listed:
            name, linked = entry.name, entry.is_symlink()
            image = _suffix(name) in IMAGES
            # Path.is_dir and is_file would raise where a link leads to a place without rights.
            if os.path.isdir(entry.path) if linked else entry.is_dir():  # noqa: PTH112
                if is_junk_folder(name):
                    self.leave("hidden", here / name)
                else:
                    folders.append(here / name)
            elif name.startswith("."):
                # The notes of a Mac about a file, ._7.png, are no images.
                if image and not name.startswith("._"):
                    self.leave("hidden", here / name)
            # A link of an image's name that leads nowhere is told as unreadable where it is read.
            elif (os.path.isfile(entry.path) or image) if linked else entry.is_file():  # noqa: PTH113
                files.append(name)
            else:
                self.leave("broken" if linked else "special", here / name)
        if RESULTS & set(files):
            for own in [here / name for name in OWN if here / name in folders]:
                folders.remove(own)
                self.leave("results", own)
        return folders, files

    def _images(self, here: Path, files: Sequence[str]) -> list[Path]:
        """The files that are images by suffix or content; the others are told."""
        images, others = list[Path](), list[Path]()
        for name in files:
            path, suffix = here / name, _suffix(name)
            if suffix in IMAGES:
                images.append(path)
            elif suffix in COPIES or name.endswith("~"):
                self.leave("copy", path)
            elif suffix in HOLDERS:
                self.leave("holder", path)
            elif self._peek and is_image(path):
                images.append(path)
            else:
                others.append(path)
        stems = {path.stem for path in images} if others else set()
        for path in others:
            sidecar = _suffix(path.name) in SIDECARS and (
                path.stem in stems or Path(path.stem).stem in stems
            )
            self.leave("sidecar" if sidecar else "no_image", path)
        return images

    def _told(self, files: Sequence[Path]) -> Told:
        if not self._labels:
            return Told(list(files), {}, [], [])
        told = tell_labels(files)
        for path in told.orphans:
            self.leave("orphan", path)
        return told


def walk_images(place: Path, search: Search | None = None) -> Iterator[Path]:
    """The images of a place, without label files, one sub-folder after another.

    Label files, and all else that is not used, are added to the `unused` of the search.
    """
    search = search or Search([place], place)
    for told in search.folders(place):
        for label in told.labels:
            search.leave("label", label)
        yield from told.images
    for folder in search.label_folders:
        labels = Search([folder], folder, labels=False).folders(folder)
        search.leave("label_folder", folder, sum(len(told.images) for told in labels))
    search.label_folders.clear()


def images_in(folder: Path, notices: list[Notice] | None = None) -> list[Path]:
    """All images under `folder`, sorted, label files among them.

    What is not used is added to the notices; without any, it is a log warning.
    """
    search = Search([folder], folder, labels=False)
    images = sorted(path for told in search.folders(folder) for path in told.images)
    add_notices(search.unused.notices(folder), notices)
    return images


def first_names(paths: Sequence[Path]) -> str:
    """The first names of a list, for a message."""
    return ", ".join(path.name for path in paths[:SHOWN]) + (", …" if len(paths) > SHOWN else "")


def tell(notices: Sequence[Notice]) -> None:
    """Notices as log warnings."""
    for notice in notices:
        log.warning("%s", printable(notice.text))


def add_notices(new: Sequence[Notice], notices: list[Notice] | None) -> None:
    """Add to a list of notices; without one, they are log warnings."""
    if notices is None:
        tell(new)
    else:
        notices += new


def is_junk_folder(name: str) -> bool:
    """Whether a folder is hidden, or made by a system for thumbnails."""
    return name.startswith((".", "@")) or name in JUNK_FOLDERS


def _holds_labels(folder: Path, images: Sequence[Path]) -> bool:
    """Whether a sub-folder holds label files: it, or all files, are named so and look like some."""
    if LABEL_FOLDER.fullmatch(folder.name):
        below = (p for told in Search([folder], folder, labels=False).folders(folder)
                 for p in told.images)  # fmt: skip
        first = list(islice(below, SAMPLED))
    else:
        first = list(images[:SAMPLED]) if all(named_like_label(path) for path in images) else []
    return bool(first) and all(looks_like_label(path) for path in first)


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122 - a Path for each file takes its time


def _lies_in(real: str, top: str) -> bool:
    return real == top or real.startswith(top.rstrip(os.sep) + os.sep)
