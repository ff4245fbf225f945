"""Find what is wrong with a set of images, before anything is trained."""

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cdgp import run_folder
from cdgp.audit.duplicates import grouped
from cdgp.audit.findings import Audit, audit
from cdgp.data import layouts
from cdgp.data.manifest import Manifest
from cdgp.data.scan import scan
from cdgp.errors import OutputError, SettingsError
from cdgp.files import is_same, write_text
from cdgp.locks import one_writer
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
        data: a folder with ``good/`` and, where there are any, ``defective/``, or a CSV manifest.
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
    if folder is not None:
        layouts.check_outside(folder, source, *bins)
    with ExitStack() as held:
        if folder is not None:
            held.enter_context(run_folder.lock(folder, "check"))
        if table is not None:
            other = "choose another --groups"
            held.enter_context(one_writer(table.parent, "check", other, table))
        _check_places(folder, table, overwrite)
        manifest, notices = layouts.find(source, *bins)
        _check_not_read(table, source, manifest)
        with (progress or Quiet()).phase("Reading images", len(manifest.samples)) as advance:
            scanned = scan(manifest, white, advance, first_page)
        found, page = audit(scanned, white, notices), None
        if folder is not None:
            page = _write(folder, source.name, manifest, found, white, first_page)
        if table is not None:
            together = grouped(manifest, found)
            replace(together, root=table.resolve().parent).write_csv(table)
    return CheckedData(found, page, table)


def _check_places(folder: Path | None, table: Path | None, overwrite: bool) -> None:
    """Check that nothing of another origin stands where results go."""
    names = (run_folder.CHECK, run_folder.CHECK_PAGE)
    files = [folder / name for name in names] if folder is not None else []
    if folder is not None:
        run = run_folder.read_run(folder)
        if run and run.command != "check":
            kind = run_folder.KINDS[run.command]
            raise OutputError(f"{folder}: is the folder of {kind}; choose another --out")
        if (folder / run_folder.MODEL).exists() or (folder / run_folder.SCORES).exists():
            raise OutputError(f"{folder}: holds the results of a run; choose another --out")
    for path in (*files, *([table] if table is not None else [])):
        if path.exists() and not overwrite:
            raise SettingsError(f"{path}: exists; choose another place or give --overwrite")
        run_folder.check_writable(path, path.parent)


def _check_not_read(table: Path | None, source: Path, manifest: Manifest) -> None:
    """Check that the manifest to write is none of the files that are read."""
    listed = source if source.is_file() else source / run_folder.MANIFEST
    if table is None or not table.exists():
        return
    if any(is_same(table, path) for path in (listed, *manifest.paths())):
        raise SettingsError(f"--groups {table}: is read here; choose another file")


def _write(
    folder: Path, name: str, manifest: Manifest, found: Audit, white: int, first_page: bool
) -> Path:
    """Write the findings as JSON and as a page; returns the page's path."""
    run_folder.clear(folder)
    run_id, page = run_folder.start(folder, "check"), folder / run_folder.CHECK_PAGE
    record = found.record() | {"run_id": run_id}
    write_text(folder / run_folder.CHECK, json.dumps(record, indent=1) + "\n")
    paths = {manifest.name(path): path for path in manifest.paths()}
    write_check(page, f"Check of {name}", found, paths, white, first_page, run_id)
    return page
