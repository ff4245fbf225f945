"""Images that lie beside what was read: in a third bin, a part of another name, or loose."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cdgp.data.labels import LABEL_FOLDER
from cdgp.data.manifest import Manifest
from cdgp.data.walk import Notice, Search, Unused

SHOWN, SINGLE = 10, 5
"""So many folders are named, and so many files in folders of which others are used."""


def unread(
    manifest: Manifest, places: Sequence[Path], words: str, peek: bool = True
) -> tuple[list[Notice], Unused]:
    """Images below the root that are neither used nor in a place that was read, by folder.

    Arguments:
        manifest: What is used.
        places: Folders that were read, and have told what is not used in them.
        words: What became of the images: "are not read".
        peek: Whether files of unknown suffixes are looked into.

    Returns:
        A notice where there are any, and what else was found on the way.
    """
    real: dict[Path, str] = {}

    def identity(path: Path) -> str:
        """The same for each spelling: links of the folder resolved, accents composed."""
        if path.parent not in real:
            real[path.parent] = os.path.realpath(path.parent)
        return unicodedata.normalize("NFC", f"{real[path.parent]}{os.sep}{path.name}")

    used = {identity(path) for path in manifest.paths()}
    search = Search(
        [manifest.root], manifest.root, labels=False, skip=places, peek=peek, strict=False
    )
    parents = {path.parent for path in (*places, *manifest.paths())}
    holding = {*places, *(folder for parent in parents for folder in (parent, *parent.parents))}
    counts: Counter[Path] = Counter()
    loose: list[str] = []
    for told in search.folders(manifest.root):
        for path in told.images:
            if identity(path) in used:
                continue
            above = [f for f in reversed(path.parents) if f.is_relative_to(manifest.root)]
            top = next((folder for folder in above if folder not in holding), None)
            if top is None:
                loose.append(manifest.name(path))
            else:
                counts[top] += 1
    if not counts and not loose:
        return [], search.unused
    listed = [f"{f.relative_to(manifest.root).as_posix()} ({n})" for f, n in sorted(counts.items())]
    shown = listed[:SHOWN] + [f"{len(listed) - SHOWN} more folders"] * (len(listed) > SHOWN)
    if loose:
        more = ", …" if len(loose) > SINGLE else ""
        shown.append(f"{len(loose)} single files ({', '.join(loose[:SINGLE])}{more})")
    total = counts.total() + len(loose)
    images = "1 image is" if total == 1 else f"{total} images are"
    text = (
        f"{manifest.root}: {images}{words.removeprefix('are')}: {', '.join(shown)}; move them into "
        "a folder that is read, or list every image in a manifest.csv, if they should be used"
    )
    if places and any(LABEL_FOLDER.fullmatch(folder.name) for folder in counts):
        text += "; masks are read from a folder 'masks'"
    return [Notice("not_read", "warning", text)], search.unused
