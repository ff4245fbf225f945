"""Time and memory of `cdgp.metrics.regions.aupro` against a plain full sort of all pixels.

    python -m cdgp_bench.studies.aupro

Writes docs/results/aupro.json. 500 float32 maps of 256 x 256 pixels, a third of them with several
elliptic defects. Every measurement has a process of its own; the two ways take turns. Memory is
the growth of the highest resident size during the call; maps and masks are loaded before.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray
from scipy import ndimage

from cdgp.files import write_text
from cdgp.metrics.regions import aupro
from cdgp_bench.measure.harness import alternate, in_process, peak_mib, processor

IMAGES, SIDE, REPEATS, LIMITS = 500, 256, 7, (0.3, 0.05)
OUT = Path("docs/results/aupro.json")

Images = tuple[list[NDArray[np.float32]], list[NDArray[np.bool_]]]


def surfaces(count: int, seed: int = 0) -> Images:
    """Smooth random maps (SIDE, SIDE); every third one has 2 to 6 defects with raised scores."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:SIDE, :SIDE].astype(np.float32)
    maps, masks = [], []
    for index in range(count):
        noise = rng.standard_normal((SIDE, SIDE), dtype=np.float32)
        values = 6 * ndimage.uniform_filter(noise, 7) + np.float32(0.3) * noise
        mask = np.zeros((SIDE, SIDE), dtype=bool)
        for _ in range(rng.integers(2, 7) if index % 3 == 0 else 0):
            (cy, cx), (ry, rx) = rng.uniform(20, SIDE - 20, 2), rng.uniform(3, 18, 2)
            blob = ((y - cy) / ry) ** 2 + ((x - cx) / rx) ** 2 <= 1
            values[blob] += np.float32(rng.uniform(0.5, 3))
            mask |= blob
        maps.append(values)
        masks.append(mask)
    return maps, masks


def full_sort(
    maps: list[NDArray[np.float32]], masks: list[NDArray[np.bool_]], limit: float
) -> float:
    """AUPRO by its definition: sort every pixel, add up, keep the last of equal scores."""
    scores = np.concatenate([values.ravel() for values in maps])
    marked = np.concatenate([mask.ravel() for mask in masks])
    weights, regions = [], 0
    for mask in masks:
        labels, count = ndimage.label(mask, structure=np.ones((3, 3)))
        sizes = np.bincount(labels[mask], minlength=count + 1)
        weights.append(1 / sizes[labels[mask]])
        regions += count
    overlap = np.zeros(scores.size)
    overlap[marked] = np.concatenate(weights) / regions
    order = np.argsort(scores)[::-1]
    scores = scores[order]
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))
    rate = np.append(0, np.cumsum(~marked[order])[last]) / np.count_nonzero(~marked)
    curve = np.append(0, np.cumsum(overlap[order])[last])
    inside = rate < limit
    rate, curve = (
        np.append(rate[inside], limit),
        np.append(curve[inside], np.interp(limit, rate, curve)),
    )
    return float(np.trapezoid(curve, rate) / limit)


def ours(maps: list[NDArray[np.float32]], masks: list[NDArray[np.bool_]], limit: float) -> float:
    """The product's function for one limit."""
    return aupro(maps, masks, limits=[limit])[limit].value or 0.0


WAYS: dict[str, Callable[..., float]] = {"full sort": full_sort, "cdgp": ours}


def measure(way: str, limit: float) -> dict[str, float]:
    """One call in this process, after a small one that loads what is loaded once."""
    WAYS[way](*surfaces(3), limit)
    maps, masks = surfaces(IMAGES)
    before, start = peak_mib(), time.perf_counter()
    value = WAYS[way](maps, masks, limit)
    seconds = time.perf_counter() - start
    return {"value": value, "seconds": seconds, "mib": peak_mib() - before}


def compare(limit: float) -> dict[str, Any]:
    """Medians of both ways at one limit, and their ratios."""
    turns = {way: partial(in_process, measure, way, limit) for way in WAYS}
    runs = alternate(turns, REPEATS, warm_ups=0)
    row: dict[str, Any] = {"limit": limit}
    for way, results in runs.items():
        row[way] = {
            "value": results[0]["value"],
            "seconds": statistics.median(run["seconds"] for run in results),
            "seconds_each": [round(run["seconds"], 4) for run in results],
            "peak_mib": statistics.median(run["mib"] for run in results),
        }
    row["times_faster"] = row["full sort"]["seconds"] / row["cdgp"]["seconds"]
    row["memory_share"] = row["cdgp"]["peak_mib"] / row["full sort"]["peak_mib"]
    row["value_difference"] = abs(row["cdgp"]["value"] - row["full sort"]["value"])
    return row


def main() -> None:
    """Measure both limits, print a table and write the result file."""
    rows = [compare(limit) for limit in LIMITS]
    facts = {
        "command": "python -m cdgp_bench.studies.aupro",
        "processor": processor(),
        "cpus": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "pictures": IMAGES,
        "side": SIDE,
        "dtype": "float32",
        "repeats": REPEATS,
    }
    write_text(OUT, json.dumps({"facts": facts, "rows": rows}, indent=2) + "\n")
    print(f"{'limit':>6} {'full sort':>17} {'cdgp':>17} {'faster':>7} {'memory':>7} {'differ':>8}")
    for row in rows:
        cells = " ".join(
            f"{row[way]['seconds']:7.2f} s {row[way]['peak_mib']:4.0f} MiB" for way in WAYS
        )
        print(
            f"{row['limit']:6} {cells} {row['times_faster']:6.1f}x {row['memory_share']:7.0%} "
            f"{row['value_difference']:8.0e}"
        )


if __name__ == "__main__":
    main()
