"""Find what is wrong with a set of images, before anything is trained."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cdgp import run_folder
from cdgp.audit.duplicates import grouped
from cdgp.audit.findings import Audit, audit
from cdgp.data import layouts
from cdgp.data.scan import scan
from cdgp.errors import SettingsError
from cdgp.files import absolute, write_text
from cdgp.presets import DataSettings
from cdgp.progress import Progress, Quiet
from cdgp.report.check import write_check


@dataclass(frozen=True)
class CheckedData:
    """Findings on a set of images."""

    audit: Audit
    page: Path | None
    groups: Path | None
    """The manifest with near duplicates in one group, where it was asked for."""


def check_data(
    data: str | Path,
    out: str | Path | None = None,
    groups: str | Path | None = None,
    *,
    good: str | None = None,
    defective: str | None = None,
    white_level: int | None = None,
    pages: Literal["single", "first"] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> CheckedData:
    """Find what is wrong with images, labels, masks and splits; changes none of them.

    Args:
        data: a folder with ``good/`` and ``defective/``, or a CSV manifest.
        out: folder for ``check.json`` and ``check.html``; None writes neither.
        groups: CSV manifest to write, with near duplicates in one group.
        good: name of the folder of good images; ``good`` where None.
        defective: name of the folder of defective images; ``defective`` where None.
        white_level: the value that means white in 16-bit files; 65535 where None.
        pages: whether a file of several pages is its first one, or is refused; ``single`` where
            None.
        overwrite: replace earlier results.
        progress: where to show the progress; nowhere where None.

    Raises:
        CdgpError: see ``cdgp.errors``. Findings are no errors: see the result's ``audit``.
    """
    own, source = DataSettings(), Path(data)
    bins = good or own.good, defective or own.defective
    white = own.white_level if white_level is None else white_level
    first_page = own.first_page if pages is None else pages == "first"
    folder, table = (None if place is None else Path(place) for place in (out, groups))
    names = (run_folder.CHECK, run_folder.CHECK_PAGE)
    files = [folder / name for name in names] if folder is not None else []
    if folder is not None:
        layouts.check_outside(folder, source, *bins)
    for path in (*files, *([table] if table is not None else [])):
        if path.exists() and not overwrite:
            raise SettingsError(f"{path}: exists; choose another place or give --overwrite")
        run_folder.check_writable(path, path.parent)
    manifest, notices = layouts.find(source, *bins)
    listed = absolute(source) if source.is_file() else absolute(source) / run_folder.MANIFEST
    read = {*manifest.paths(), *([listed] if listed.is_file() else [])}
    if table is not None and absolute(table) in read:
        raise SettingsError(f"--groups {table}: is read here; choose another file")
    with (progress or Quiet()).phase("Reading images", len(manifest.samples)) as advance:
        scanned = scan(manifest, white, advance, first_page)
    found = audit(scanned, white, notices)
    if folder is not None:
        write_text(files[0], json.dumps(found.record(), indent=1) + "\n")
        paths = {manifest.name(path): path for path in manifest.paths()}
        write_check(files[1], f"Check of {source.name}", found, paths, white, first_page)
    if table is not None:
        together = grouped(manifest, found)
        replace(together, root=table.resolve().parent).write_csv(table)
    return CheckedData(found, files[1] if files else None, table)
