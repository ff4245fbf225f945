"""``cdgp check``: what is wrong with a set of images, before anything is trained."""

from typing import TYPE_CHECKING

import typer

from cdgp.cli import options
from cdgp.cli.common import bars, handle_errors, say, warn

if TYPE_CHECKING:
    from cdgp.audit.findings import Audit


@handle_errors
def check(
    data: options.Data,
    out_folder: options.CheckFolder = None,
    groups: options.Groups = None,
    strict: options.Strict = False,
    good: options.Good = None,
    defective: options.Defective = None,
    white_level: options.WhiteLevel = None,
    pages: options.Pages = None,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
) -> None:
    """Find what is wrong with images, labels, masks and splits.

    Broken files, duplicates and near duplicates (across splits and labels too), masks that
    contradict the labels, trivial facts that predict the label, too few images. Nothing is changed.

    Exit code 0: usable; 1: usable with warnings, and --strict was given; 2: an option is wrong; 3:
    unusable.

    Examples:

      cdgp check parts

      cdgp check parts --out runs/check --strict

      cdgp check parts --groups parts/manifest.csv
    """
    from cdgp.errors import DataError
    from cdgp.report.check import verdict
    from cdgp.workflows import check_data

    done = check_data(
        data, out_folder, groups, good=good, defective=defective, white_level=white_level,
        pages=pages, overwrite=overwrite, progress=bars(quiet),
    )  # fmt: skip
    show_audit(done.audit)
    if done.page is not None:
        say(f"page: {done.page}")
    if done.groups is not None:
        say(f"manifest with groups: {done.groups}")
    say(verdict(done.audit.findings))
    if done.audit.of("error"):
        raise typer.Exit(DataError.exit_code)
    if strict and done.audit.of("warning"):
        raise typer.Exit(1)


def show_audit(audit: "Audit") -> None:
    """Counts, findings and shortcuts on the screen."""
    from cdgp.files import shortened

    for split, (good, defective) in audit.counts.items():
        say(f"{split}: {good} good, {defective} defective")
    sizes = [f"{size} ({number})" for size, number in audit.sizes.items()]
    say(f"sizes: {shortened(', '.join(sizes), 200)}")
    for finding in audit.findings:
        warn(f"{finding.severity}: {shortened(finding.text, 2000)}", finding.severity == "error")
        if finding.kind in ("broken", "no_content", "colours", "cmyk"):  # named in the text
            continue
        for group in finding.images[:3]:
            warn(f"    {shortened('  =  '.join(group), 200)}")
        if len(finding.images) > 3:
            warn(f"    and {len(finding.images) - 3} more")
    if audit.shortcuts:
        say("facts that predict the label (AUROC; 0.5 is guessing):")
        for s in audit.shortcuts:
            say(f"  {s.auroc:.3f}  {s.fact}")
