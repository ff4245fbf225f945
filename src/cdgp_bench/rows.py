"""Result rows: what names them, what decides their numbers, and the files that hold them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cdgp.errors import OutputError
from cdgp.files import write_text
from cdgp_bench.grid import Run
from cdgp_bench.plan import Plan
from cdgp_bench.protocol import Prepared
from cdgp_bench.scoring import METRICS

Row = dict[str, Any]
ROWS = "results.jsonl"
COSTS = "complexity.jsonl"
IDENTITY = ("dataset", "category", "method", "setting", "seed", "budget", "fold")
HASHES = ("config_sha256", "manifest_sha256", "masks_sha256", "metric_size")
"""Rows that agree in these hold the same numbers."""


def identity(run: Run, plan: Plan) -> Row:
    """The keys that name a row, in every table."""
    return {
        **dict(zip(IDENTITY, run.identity, strict=True)),
        "preset": plan.preset,
        "input_size": list(run.settings.input_size),
    }


def identity_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """``Run.identity`` of a row."""
    return tuple(row[key] for key in IDENTITY)


def run_name(row: Mapping[str, Any]) -> str:
    """A row in words."""
    name = f"{row['dataset']}/{row['category']} {row['method']} {row['setting']} seed {row['seed']}"
    fold = "" if row["fold"] is None else f" fold {row['fold']}"
    budget = "" if row["budget"] is None else f" k={row['budget']}"
    return f"{name}{fold}{budget}"


def hash_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What decides a row's numbers."""
    return tuple(row[key] for key in HASHES)


def wanted_hash(run: Run, prepared: Prepared, plan: Plan) -> tuple[str, ...]:
    """``hash_of`` the row that a run will give."""
    images = prepared.manifest.sha256
    return run.config_sha256, images, prepared.masks_sha256, plan.metric_size


def check_stale(
    path: Path, rows: Sequence[Row], hashes: Mapping[tuple[Any, ...], tuple[str, ...]]
) -> None:
    """Check that rows under a run's name were made with what the plan says now."""
    rows_by_name = {identity_of(row): row for row in rows if row["status"] == "ok"}
    stale = []
    for name, wanted in hashes.items():
        row = rows_by_name.get(name)
        if row is not None and hash_of(row) != wanted:
            changed = [k for k, a, b in zip(HASHES, hash_of(row), wanted, strict=True) if a != b]
            stale.append(f"{run_name(row)} (another {', '.join(changed)})")
    if stale:
        raise OutputError(
            f"{path}: {len(stale)} rows were made with other settings, images or masks, first "
            f"{stale[0]}. To keep them, go on in another folder and reuse what still fits: --out "
            f"NEW --reuse {path} --checkpoints {path.parent / 'checkpoints'}"
        )


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, of earlier versions too; none where the file is missing."""
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise OutputError(f"{path}: damaged: {error}") from error
    missing = dict.fromkeys(HASHES, "")
    return [{"status": "ok", "budget": None, "fold": None, **missing, **row} for row in rows]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write all rows in one step, so that a killed program leaves no torn row."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def finished_line(row: Row) -> str:
    """One line about a finished run."""
    if row["status"] != "ok":
        return f"{run_name(row)}: {row['status'].upper()}: {row['reason']}"
    values = " ".join(
        f"{key} {'–' if row[key] is None else f'{100 * row[key]:.1f}'}" for key in METRICS
    )
    seconds = row.get("seconds", 0) + row.get("evaluation_seconds", 0)
    how = "taken over" if "computed_as" in row else f"{seconds:.0f} s"
    return f"{run_name(row)}: {values} ({how})"
