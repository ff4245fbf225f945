"""What a run keeps of its maps: each test image's share in the method's curves, in one file.

The maps of a test part take hundreds of megabytes. A ``resampling.Profile`` of them takes a few,
and any draw of its images is measured from it. The files lie beside the checkpoints.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cdgp.files import atomic_write
from cdgp_bench.resampling import Profile, profile, weighted_metrics
from cdgp_bench.rows import run_name
from cdgp_bench.scoring import Scores

CLOSE = 5e-4
"""How far metrics from curves at some thousand thresholds may be from a row's exact ones."""
VERSION = 1
"""Raised when ``Profile`` changes, so that older files are not read."""


def curves_file(checkpoints: Path, dataset: str, method: str, row_hash: Sequence[str]) -> Path:
    """Where the curves of a row lie; rows that hold the same numbers share them."""
    digest = hashlib.sha256(repr((VERSION, tuple(row_hash))).encode()).hexdigest()
    return checkpoints / dataset / "curves" / f"{method}-{digest[:16]}.npz"


def profile_of(found: Scores) -> Profile:
    """The curves of a scored test part."""
    scored = iter(found.maps["final"].maps())
    unused = np.zeros((1, 1), np.float32)  # of images that take no part in the pixel metrics
    maps = [unused if mask is None else next(scored) for mask in found.masks]
    return profile(maps, found.masks, found.image_scores, found.defective.tolist())


def write_curves(file: Path, curves: Profile) -> None:
    """Keep curves; the file appears whole."""
    with atomic_write(file) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **curves._asdict())


def read_curves(file: Path) -> Profile:
    """Curves as they were kept."""
    with np.load(file) as arrays:
        return Profile(**arrays)


def check_curves(found: Profile, row: Mapping[str, Any]) -> None:
    """Check that the curves give the metrics of the row in the tables."""
    for name, values in weighted_metrics(found, np.ones((1, len(found.scores)))).items():
        exact = np.nan if row[name] is None else row[name]
        if not np.isclose(values[0], exact, rtol=0, atol=CLOSE, equal_nan=True):
            raise SystemExit(
                f"{run_name(row)}: {name} is {values[0]:.4f} in the kept curves and {exact:.4f} in "
                "the row: other checkpoints; remove the folder curves beside them, or run the plan "
                "again"
            )
