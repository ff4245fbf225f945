"""What is wrong with a data set: broken files, duplicates, leaks, odd masks, shortcuts, balance.

`cdgp train` and `cdgp check` draw them from one `scan` of the images. No file is ever changed.
"""

from collections import Counter
from collections.abc import Sequence

from cdgp.audit import checks, duplicates
from cdgp.audit.types import Audit, Finding, Severity, Shortcut
from cdgp.data.scan import Scan
from cdgp.data.walk import Notice

__all__ = ["Audit", "Finding", "Severity", "Shortcut", "audit"]

RULES = {
    "near_correlation": duplicates.NEAR,
    "hash_bits": duplicates.HASH_BITS,
    "shortcut_auroc": checks.SHORTCUT,
    "shortcut_p_value": checks.CHANCE,
}
ORDER = {"error": 0, "warning": 1, "note": 2}


def audit(scan: Scan, white_level: int, notices: Sequence[Notice] = ()) -> Audit:
    """All findings of a data set; `notices` came up while its manifest was put together."""
    manifest, stats = scan.manifest, scan.stats
    near, alike = duplicates.near_duplicates(stats)
    by_name = tuple(tuple(manifest.name(stats[i].sample.image) for i in c) for c in near)
    shortcuts = checks.shortcuts(stats)
    findings = [
        *checks.unreadable(scan),
        *(Finding(*notice) for notice in notices),
        *duplicates.exact_duplicates(manifest),
        *duplicates.near_findings(manifest, stats, near),
        *duplicates.alike_finding(manifest, stats, alike),
        *checks.content(manifest, stats),
        *checks.colours(manifest, stats),
        *checks.files(manifest, stats, white_level),
        *checks.masks(manifest, stats),
        *checks.shortcut_findings(shortcuts),
        *checks.balance(manifest, duplicates.joined(manifest, by_name)),
    ]
    if not any(f.severity == "error" for f in findings):
        findings += checks.unusable_split(manifest)
    sizes = Counter(f"{s.width} × {s.height}" for s in stats)
    return Audit(
        str(manifest.root),
        manifest.counts(),
        dict(sizes.most_common()),
        tuple(sorted(findings, key=lambda f: ORDER[f.severity])),
        tuple(shortcuts),
        by_name,
        RULES,
    )
