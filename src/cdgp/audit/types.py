"""What an audit of a data set consists of: findings, shortcuts, counts."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cdgp.files import printable

Severity = Literal["error", "warning", "note"]


class Finding(NamedTuple):
    """One finding on a data set."""

    kind: str
    """A stable name, for programs."""
    severity: Severity
    """An error makes the data unusable, a warning should be read, a note is for information."""
    text: str
    images: tuple[tuple[str, ...], ...] = ()
    """Names as the manifest writes them; those that belong together form one tuple."""


class Suspect(NamedTuple):
    """An image with the probability that its label is wrong."""

    name: str
    path: Path
    defective: bool
    split: str | None
    probability: float
    """Of being defective, in [0, 1], by a classifier that has not seen the image."""

    @property
    def doubt(self) -> float:
        """Probability of the other label, in [0, 1]."""
        return 1 - self.probability if self.defective else self.probability


class Shortcut(NamedTuple):
    """How well one trivial fact, such as the brightness, predicts the label."""

    fact: str
    auroc: float
    """In [0.5, 1]: of the fact or of its opposite."""
    p_value: float
    """Two-sided, of the Mann-Whitney test."""
    good: float
    defective: float


@dataclass(frozen=True)
class Audit:
    """Everything that was found in a data set."""

    root: str
    counts: dict[str, tuple[int, int]]
    """(good, defective) by split, as `Manifest.counts` gives them, of readable images."""
    sizes: dict[str, int]
    """Images by "WIDTH × HEIGHT", the most frequent first."""
    findings: tuple[Finding, ...]
    """Errors first, then warnings, then notes."""
    shortcuts: tuple[Shortcut, ...]
    near: tuple[tuple[str, ...], ...]
    """Clusters of near duplicates, by name."""
    rules: dict[str, float]
    """The thresholds that the findings rest on."""

    def of(self, severity: Severity) -> list[Finding]:
        """The findings of one severity."""
        return [f for f in self.findings if f.severity == severity]

    def record(self) -> dict[str, Any]:
        """The audit as `check.json` holds it; bytes of names that are not UTF-8 are escaped."""
        return {
            "root": printable(self.root),
            "counts": {name: list(counts) for name, counts in self.counts.items()},
            "sizes": self.sizes,
            "findings": [
                {
                    "kind": f.kind,
                    "severity": f.severity,
                    "text": printable(f.text),
                    "pictures": _printable(f.images),
                }
                for f in self.findings
            ],
            "shortcuts": [
                {key: _finite(value) for key, value in s._asdict().items()} for s in self.shortcuts
            ],
            "near_duplicates": _printable(self.near),
            "rules": self.rules,
        }


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 image", "2 images"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _printable(groups: tuple[tuple[str, ...], ...]) -> list[list[str]]:
    return [[printable(name) for name in group] for group in groups]


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
