"""CDGP against every other method of a plan: paired intervals over groups of test pictures.

    CDGP_DATA=DATA python benchmarks/paired.py --plan house --runs runs/house --states runs/core

Scores the test pictures anew with the methods as they were trained (--states), within each set and
seed; draws groups of test pictures with replacement, the same draws for all methods. Writes
docs/results/PLAN/paired.jsonl: one row a set, seed, pair and metric, and one a set, seed, method
and size of defect. What a method adds to the curves is kept under RUNS/profiles, so that a method
that comes later costs its own scoring alone. `--table` prints the rows as Markdown.
"""

import argparse
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cdgp.bench.grid import METHODS, Cell
from cdgp.bench.plan import Plan, read_plan
from cdgp.bench.protocol import Prepared
from cdgp.bench.run import (
    ROWS,
    key_of,
    plan_cells,
    prepare_all,
    read_rows,
    wanted_hash,
    write_rows,
)
from cdgp.evaluation import MapFile, true_mask
from cdgp.files import written_whole
from cdgp.inference import resized
from cdgp.metrics.resampling import (
    Profile,
    difference,
    group_draws,
    profile,
    region_areas,
    resampled,
)
from cdgp.metrics.resampling import weighted_metrics as metrics_of
from cdgp.progress import Bars, Progress

OURS = ("cdgp", "cdgp_paper")
NAMES = {
    "image_auroc": "AUROC-I",
    "pixel_auroc": "AUROC-P",
    "pixel_aupro_30": "AUPRO@.3",
    "pixel_aupro_05": "AUPRO@.05",
}
SIZES = ("small", "middle", "large")
"""Thirds of a set's regions, all seeds together, by their share of the picture."""
CLOSE = 2e-3
"""How far curves kept at some thousand thresholds may lead from a row's exact metrics."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plan", default="house")
    parser.add_argument("--runs", type=Path, default=Path("runs/house"))
    parser.add_argument("--states", type=Path, default=Path("runs/core"))
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    out = Path("docs/results") / Path(arguments.plan).stem / "paired.jsonl"
    if not arguments.table:
        plan = read_plan(arguments.plan)
        write_rows(out, compared(plan, arguments.runs, arguments.states))
    print(table(read_rows(out)))


def compared(plan: Plan, runs: Path, states: Path) -> list[dict[str, Any]]:
    progress = Bars()
    prepared = prepare_all(plan, runs, progress, print)
    rows = {
        (r["dataset"], r["method"], r["seed"]): r
        for r in read_rows(runs / ROWS)
        if r["setting"] == "default" and r["budget"] is None and r["status"] == "ok"
    }
    found: dict[tuple[str, int], dict[str, Profile]] = defaultdict(dict)
    parts: dict[tuple[str, int], Prepared] = {}
    for cell in plan_cells(plan, {key[:2] for key in prepared}):
        method = cell.line.method
        row = rows.get((cell.dataset, method, cell.seed))
        whole = cell.line.setting == "default" and cell.budget is None
        if not whole or row is None or METHODS[method].supervision == "control":
            continue
        part = prepared[key_of(cell)]
        digest = hashlib.sha256(repr(wanted_hash(cell, part, plan)).encode()).hexdigest()
        kept = runs / "profiles" / f"{cell.dataset}-{cell.seed}-{method}-{digest[:16]}.npz"
        if not kept.is_file():
            with written_whole(kept) as temporary, temporary.open("wb") as file:
                told = profiled(cell, part, states, progress)
                np.savez_compressed(file, **told._asdict())
        with np.load(kept) as arrays:
            of_method = Profile(**arrays)
        refuse_others(of_method, row)
        found[cell.dataset, cell.seed][method] = of_method
        parts[cell.dataset, cell.seed] = part
    return [
        told
        for key, methods in found.items()
        for told in (*pairs(*key, methods, parts[key]), *sizes(*key, methods, found))
    ]


def profiled(cell: Cell, part: Prepared, states: Path, progress: Progress) -> Profile:
    """Curves of one trained method on its test pictures, at their own size."""
    fitted = cell.fit(part.weak, states / cell.dataset, progress)
    samples = part.manifest.of("test")
    maps, masks, scores = MapFile(), [], []
    with progress.phase(f"{cell.dataset} {cell.line.method} {cell.seed}", len(samples)) as advance:
        for sample, told in zip(samples, fitted.score([s.image for s in samples]), strict=True):
            name = part.manifest.name(sample.image)
            maps.append(resized(told.anomaly_map, told.size))
            masks.append(true_mask(sample, told.size, told.size, name, defaultdict(list)))
            scores.append(told.image_score)
            advance()
    return profile(maps.maps(), masks, scores, [bool(s.defective) for s in samples])


def refuse_others(found: Profile, row: dict[str, Any]) -> None:
    """The curves must be those of the row that stands in the tables."""
    for name, value in metrics_of(found, np.ones((1, len(found.scores)))).items():
        if abs(value[0] - row[name]) > CLOSE:
            raise SystemExit(
                f"{row['dataset']} {row['method']} seed {row['seed']}: {name} is {value[0]:.4f} "
                f"here and {row[name]:.4f} in the row; run the plan again"
            )


def pairs(dataset: str, seed: int, methods: dict[str, Profile], part: Prepared) -> list[dict]:
    samples = part.manifest.of("test")
    groups = [s.group or part.manifest.name(s.image) for s in samples]
    weights = group_draws(groups, seed=seed)
    measured = {method: resampled(one, weights) for method, one in methods.items()}
    told = []
    for ours in (m for m in OURS if m in methods):
        for other in (m for m in methods if m != ours):
            for name in NAMES:
                value = difference(measured[ours], measured[other], name)
                if value is not None:
                    told.append({
                        "kind": "pair", "dataset": dataset, "seed": seed, "first": ours,
                        "second": other, "metric": name, **value._asdict(),
                        "groups": len(set(groups)), "draws": len(weights),
                    })  # fmt: skip
    return told


def sizes(dataset: str, seed: int, methods: dict[str, Profile], found: dict) -> list[dict]:
    """AUPRO over small, middle and large regions, each against all normal pixels."""

    def share(one: Profile) -> np.ndarray:
        pixels = (one.normal[:, -1] + one.marked[:, -1])[one.picture_of]
        return one.area / pixels

    every = np.concatenate([
        share(next(iter(m.values()))) for (d, _), m in found.items() if d == dataset
    ])  # fmt: skip
    ends = np.quantile(every, [0, 1 / 3, 2 / 3, 1])
    told = []
    for method, one in methods.items():
        place = np.clip(np.searchsorted(ends, share(one), "right") - 1, 0, 2)
        for index, size in enumerate(SIZES):
            chosen = place == index
            if chosen.any():
                told.append({
                    "kind": "size", "dataset": dataset, "seed": seed, "method": method,
                    "size": size, "share_from": ends[index], "share_to": ends[index + 1],
                    "regions": int(chosen.sum()),
                    **{f"pixel_aupro_{key}": float(region_areas(one, limit)[chosen].mean())
                       for key, limit in (("30", 0.3), ("05", 0.05))},
                })  # fmt: skip
    return told


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Both tables, with a line between them."""
    return f"{pairs_table(rows)}\n\n{sizes_table(rows)}"


def pairs_table(rows: Sequence[dict[str, Any]]) -> str:
    """Difference and interval, means over seeds; in how many the interval lies off zero."""
    pooled: dict[tuple[str, ...], list[dict]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "pair":
            pooled[row["dataset"], row["first"], row["second"], row["metric"]].append(row)
    lines = [f"| set | first | second | seeds | {' | '.join(NAMES.values())} |",
             "|---" * 8 + "|"]  # fmt: skip
    order = list(METHODS)
    named = sorted(
        dict.fromkeys(key[:3] for key in pooled), key=lambda k: (k[0], k[1], order.index(k[2]))
    )
    for dataset, first, second in named:
        told = [pooled[dataset, first, second, metric] for metric in NAMES]
        cells = " | ".join(_cell(found) if found else "–" for found in told)
        names = METHODS[first].title, METHODS[second].title
        seeds = max(len(found) for found in told)
        lines.append(f"| {dataset} | {names[0]} | {names[1]} | {seeds} | {cells} |")
    return "\n".join(lines)


def _cell(found: Sequence[dict[str, Any]]) -> str:
    value, low, high = (100 * np.mean([r[key] for r in found]) for key in ("value", "low", "high"))
    ahead, behind = sum(r["low"] > 0 for r in found), sum(r["high"] < 0 for r in found)
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}] {ahead}/{behind}"


def sizes_table(rows: Sequence[dict[str, Any]]) -> str:
    """AUPRO of small, middle and large regions, means over seeds."""
    heads = [f"{size} {name}" for name in ("AUPRO@.3", "AUPRO@.05") for size in SIZES]
    lines = [f"| set | method | seeds | {' | '.join(heads)} |", "|---" * 9 + "|"]
    by_size: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "size":
            by_size[row["dataset"], row["method"]].append(row)
    order = list(METHODS)
    for (dataset, method), found in sorted(
        by_size.items(), key=lambda item: (item[0][0], order.index(item[0][1]))
    ):
        cells = [
            f"{100 * np.mean([r[key] for r in found if r['size'] == size]):.1f}"
            for key in ("pixel_aupro_30", "pixel_aupro_05")
            for size in SIZES
        ]
        seeds = len({r["seed"] for r in found})
        lines.append(f"| {dataset} | {METHODS[method].title} | {seeds} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
