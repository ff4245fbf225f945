"""The page of `cdgp check`: findings with their images side by side."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from cdgp.audit.checks import SHORTCUT, format_value
from cdgp.audit.findings import Audit, Finding
from cdgp.data.images import read_image, reason
from cdgp.errors import ImageError
from cdgp.files import IN_PAGE, printable, visible, write_text
from cdgp.report.page import jpeg, link, template

GROUPS, MEMBERS, SIZES = 12, 8, 6
"""At most so many groups of a finding, images of a group, and image sizes are shown."""
SIDE = 300
"""Longer side, in pixels, of an image that is shown."""


class Card(NamedTuple):
    """A small version of an image, or the reason why it is not shown."""

    name: str
    link: str
    image: str
    """Data URI; empty where it cannot be shown."""
    problem: str


def write_check(
    out: Path,
    title: str,
    audit: Audit,
    paths: Mapping[str, Path],
    white_level: int,
    first_page: bool = False,
    run_id: str = "",
) -> None:
    """Write the page; each image that it shows is decoded once.

    ``paths`` are those of images and masks, by the name that the findings use. ``white_level`` and
    ``first_page`` are those of `read_image`; ``run_id`` is that of the run that the page belongs
    to.
    """
    folder = out.absolute().parent

    @cache  # an image may be in several findings
    def card(name: str) -> Card:
        path = paths[name]
        try:
            image = read_image(path, white_level, first_page)
        except ImageError as error:
            return Card(name, link(path, folder), "", reason(error, path))
        small = Image.fromarray(np.rint(image * 255).astype(np.uint8))
        small.thumbnail((SIDE, SIDE))
        return Card(name, link(path, folder), jpeg(small), "")

    def groups(finding: Finding) -> list[list[Card]]:
        return [[card(name) for name in group[:MEMBERS]] for group in finding.images[:GROUPS]]

    text = template("check.html.j2").render(
        title=title,
        date=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        audit=audit,
        verdict=verdict(audit.findings),
        sizes=list(islice(audit.sizes.items(), SIZES)),
        findings=[
            (finding, groups(finding), max(0, len(finding.images) - GROUPS))
            for finding in audit.findings
        ],
        limit=SHORTCUT,
        format_value=format_value,
        version=version("cdgp"),
        run_id=run_id,
    )
    write_text(out, visible(printable(text), IN_PAGE))


def verdict(findings: Sequence[Finding]) -> str:
    """One line: whether the data can be used, and how many errors, warnings and notes there are."""
    counts = {
        kind: sum(f.severity == kind for f in findings) for kind in ("error", "warning", "note")
    }
    if not findings:
        return "Clean: nothing was found."
    counted = ", ".join(f"{n} {kind}{'s' if n != 1 else ''}" for kind, n in counts.items() if n)
    return f"{'Unusable as it is' if counts['error'] else 'Usable'}: {counted}."
