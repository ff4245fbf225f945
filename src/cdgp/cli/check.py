"""``cdgp check``: what is wrong with a set of images, before anything is trained."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cdgp.cli.common import bars, say, shortened, told, warn

if TYPE_CHECKING:
    from cdgp.audit.findings import Audit

STRICT = 1


@told
def check(
    data: Annotated[
        Path, typer.Argument(help="Folder with good/ and defective/, or a CSV manifest.")
    ],
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for check.json and check.html.")
    ] = None,
    groups: Annotated[
        Path | None,
        typer.Option(help="CSV manifest to write, near duplicates in one group.", metavar="FILE"),
    ] = None,
    strict: Annotated[bool, typer.Option(help="Warnings make the exit code 1.")] = False,
    good: Annotated[str | None, typer.Option(help="Name of the folder of good images.")] = None,
    defective: Annotated[
        str | None, typer.Option(help="Name of the folder of defective images.")
    ] = None,
    white_level: Annotated[
        int | None, typer.Option(help="The value that means white in 16-bit files; 65535.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace earlier results.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress bars.")] = False,
) -> None:
    """Tell what is wrong with images, labels, masks and splits.

    Broken files, copies and near duplicates (across splits and labels too), masks that contradict
    the labels, trivial facts that predict the label, too few images. Nothing is changed.

    Exit code 0: usable; 1: usable with warnings, and --strict was given; 2: an option is wrong; 3:
    unusable.

    Examples:

      cdgp check parts

      cdgp check parts --out runs/check --strict

      cdgp check parts --groups parts/manifest.csv
    """
    from cdgp.audit.duplicates import grouped
    from cdgp.audit.findings import audit
    from cdgp.data.layouts import check_outside, load
    from cdgp.data.scan import scan
    from cdgp.errors import DataError, SettingsError
    from cdgp.files import absolute, write_text
    from cdgp.presets import DataSettings
    from cdgp.report.check import verdict, write_check

    own = DataSettings()
    bins = (good or own.good, defective or own.defective)
    white = own.white_level if white_level is None else white_level
    if out_folder is not None:
        check_outside(out_folder, data, *bins)
    files = [out_folder / name for name in ("check.json", "check.html")] if out_folder else []
    for path in (*files, *([groups] if groups else [])):
        if path.exists() and not overwrite:
            raise SettingsError(f"{path}: exists; choose another place or give --overwrite")
    with collected() as notes:
        manifest = load(data, *bins)
    table = absolute(data) if data.is_file() else absolute(data) / "manifest.csv"
    read = {*manifest.paths(), *([table] if table.is_file() else [])}
    if groups is not None and absolute(groups) in read:
        raise SettingsError(f"--groups {groups}: is read here; choose another file")
    with bars(quiet).phase("Reading images", len(manifest.samples)) as advance:
        found = audit(scan(manifest, white, advance), white, notes)
    show(found)
    if out_folder is not None:
        write_text(files[0], json.dumps(found.record(), indent=1) + "\n")
        paths = {manifest.name(path): path for path in manifest.paths()}
        write_check(files[1], f"Check of {data.name}", found, paths, white)
        say(f"page: {files[1]}")
    if groups is not None:
        replace(grouped(manifest, found), root=groups.resolve().parent).write_csv(groups)
        say(f"manifest with groups: {groups}")
    say(verdict(found.findings))
    if found.of("error"):
        raise typer.Exit(DataError.exit_code)
    if strict and found.of("warning"):
        raise typer.Exit(STRICT)


def show(found: "Audit") -> None:
    """Counts, findings and shortcuts on the screen."""
    for split, (good, defective) in found.counts.items():
        say(f"{split}: {good} good, {defective} defective")
    sizes = [f"{size} ({number})" for size, number in found.sizes.items()]
    say(f"sizes: {shortened(', '.join(sizes), 200)}")
    for finding in found.findings:
        warn(f"{finding.severity}: {shortened(finding.text, 2000)}", finding.severity == "error")
        for group in finding.images[:3] if finding.kind != "broken" else ():
            warn(f"    {shortened('  =  '.join(group), 200)}")
        if len(finding.images) > 3 and finding.kind != "broken":
            warn(f"    and {len(finding.images) - 3} more")
    if found.shortcuts:
        say("facts that tell good from defective (AUROC; 0.5 is guessing):")
        for s in found.shortcuts:
            say(f"  {s.auroc:.3f}  {s.fact}")


@contextmanager
def collected() -> Iterator[list[str]]:
    """What the reader of the data warns of, instead of on the screen."""
    notes: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.append(record.getMessage())

    logger, handler = logging.getLogger("cdgp.data"), Collect(logging.WARNING)
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield notes
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
