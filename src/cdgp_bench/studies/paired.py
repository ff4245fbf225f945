"""CDGP against every other method of a plan: paired intervals over groups of test images.

An interval covers which images were drawn for the test part of one set and seed. It does not cover
that another training of the same method would differ.

    CDGP_DATA=DATA python -m cdgp_bench.studies.paired [--plan in-house]

Draws groups of test images with replacement, within each set and seed, the same draws for all
methods. Writes docs/results/PLAN/paired.jsonl: one row a set, seed, pair and metric, one a set,
seed, method and size of defect, and one a set, seed and method of where its false alarms are. For a
plan with folds: one row a set, pair and metric, over all folds (`cross_testing`). The curves that
are measured lie under --checkpoints, where the benchmark has left them; where they are missing, the
trained methods score the test images again. Rows of the plan that are missing in RUNS, or were made
with other settings, are left out and listed. `--table` prints the rows as Markdown.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cdgp.errors import CdgpError
from cdgp.metrics.resampling import group_draws
from cdgp.progress import Bars, Progress
from cdgp.run_folder import lock
from cdgp_bench import resampling
from cdgp_bench.curves import check_curves, curves_file, profile_of, read_curves, write_curves
from cdgp_bench.grid import METHODS, Run
from cdgp_bench.plan import Plan, read_plan
from cdgp_bench.prepare import prepare_all
from cdgp_bench.protocol import Prepared, SplitKey
from cdgp_bench.resampling import LIMITS, Profile
from cdgp_bench.results import NAMES
from cdgp_bench.rows import (
    ROWS,
    Row,
    hash_of,
    identity,
    identity_of,
    read_rows,
    run_name,
    wanted_hash,
    write_rows,
)
from cdgp_bench.run import is_compared, plan_runs
from cdgp_bench.scoring import scores_of
from cdgp_bench.studies import cross_testing, grouped, markdown_table

OURS = ("cdgp", "cdgp_paper")
SIZES = ("small", "middle", "large")
"""Thirds of a set's regions, all seeds together, by their share of the image."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", action="store_true")
    given = plan_arguments(parser)
    plan = read_plan(given.plan)
    out = Path("docs/results") / plan.name / "paired.jsonl"
    if not given.table:
        write_rows(out, compared(plan, given.runs, given.checkpoints))
    found = read_rows(out)
    print(table(found) if plan.folds is None else cross_testing.tables(found))


def plan_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, with those that name a finished plan."""
    parser.add_argument("--plan", default="in-house")
    parser.add_argument("--runs", type=Path, default=Path("runs/in-house"))
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/core"))
    return parser.parse_args()


def compared(plan: Plan, runs: Path, checkpoints: Path) -> list[Row]:
    """Rows of all pairs, and of a plan by seeds also of sizes."""
    progress = Bars()
    with lock(runs, "benchmark"):
        prepared = prepare_all(plan, runs, progress, print)
        every = curves_of(plan, prepared, runs, checkpoints, progress)
        if plan.folds is not None:
            return cross_testing.pairs(every, prepared, plan.folds)
        found: dict[SplitKey, dict[str, Profile]] = defaultdict(dict)
        for run, curves in every:
            found[run.split_key][run.variant.method] = curves
    return [
        row
        for key, methods in found.items()
        for row in (
            *pairs(key, methods, prepared[key]),
            *sizes(key, methods, found),
            *alarms(key, methods),
        )
    ]


def curves_of(
    plan: Plan,
    prepared: Mapping[SplitKey, Prepared],
    runs: Path,
    checkpoints: Path,
    progress: Progress,
) -> Iterator[tuple[Run, Profile]]:
    """The curves of all finished methods, one after another, scored again where none were kept."""
    for run, row in finished(plan, prepared, runs):
        file = curves_file(checkpoints, run.dataset, run.variant.method, hash_of(row))
        if not file.is_file():
            size = run.settings.input_size if plan.metric_size == "input" else None
            write_curves(file, profiled(run, prepared[run.split_key], size, checkpoints, progress))
        curves = read_curves(file)
        check_curves(curves, row)
        yield run, curves


def finished(
    plan: Plan, prepared: Mapping[SplitKey, Prepared], folder: Path
) -> Iterator[tuple[Run, Row]]:
    """The methods of a plan's main table with their rows, in its order; prints what lacks."""
    rows = {identity_of(row): row for row in read_rows(folder / ROWS)}
    for run in plan_runs(plan, {key[:2] for key in prepared}):
        if not is_compared(run):
            continue
        row = rows.get(run.identity)
        wanted = wanted_hash(run, prepared[run.split_key], plan)
        if row is not None and row["status"] == "ok" and hash_of(row) == wanted:
            yield run, row
        else:
            print(f"{run_name(identity(run, plan))}: no such row, left out")


def profiled(
    run: Run, part: Prepared, size: tuple[int, int] | None, checkpoints: Path, progress: Progress
) -> Profile:
    """Curves of one trained method on its test images, at a size or at each image's own."""
    fitted = run.fit(part.weak, checkpoints / run.dataset, progress)
    return profile_of(scores_of(fitted, part.manifest, size, False, progress))


def pairs(key: SplitKey, methods: dict[str, Profile], part: Prepared) -> list[Row]:
    samples = part.manifest.of("test")
    groups = [s.group or part.manifest.name(s.image) for s in samples]
    weights = group_draws(groups, seed=key.seed)
    measured = {method: resampling.resampled(one, weights) for method, one in methods.items()}
    rows = []
    for ours in (m for m in OURS if m in methods):
        for other in (m for m in methods if m != ours):
            for name in NAMES:
                value = resampling.difference(measured[ours], measured[other], name)
                if value is not None:
                    rows.append({
                        "kind": "pair", "dataset": key.dataset, "category": key.category,
                        "seed": key.seed, "first": ours, "second": other, "metric": name,
                        **value._asdict(), "groups": len(set(groups)),
                    })  # fmt: skip
    return rows


def sizes(
    key: SplitKey, methods: dict[str, Profile], found: dict[SplitKey, dict[str, Profile]]
) -> list[Row]:
    """AUPRO over small, middle and large regions, each against all normal pixels."""

    def share(one: Profile) -> np.ndarray:
        pixels = (one.normal[:, -1] + one.marked[:, -1])[one.image_of]
        return one.area / pixels

    every = np.concatenate([
        share(next(iter(m.values()))) for other, m in found.items() if other[:2] == key[:2]
    ])  # fmt: skip
    if not every.size:
        return []
    ends = np.quantile(every, [0, 1 / 3, 2 / 3, 1])
    rows = []
    for method, one in methods.items():
        place = np.clip(np.searchsorted(ends, share(one), "right") - 1, 0, 2)
        for index, size in enumerate(SIZES):
            chosen = place == index
            if chosen.any():
                rows.append({
                    "kind": "size", "dataset": key.dataset, "category": key.category,
                    "seed": key.seed, "method": method, "size": size,
                    "share_from": ends[index], "share_to": ends[index + 1],
                    "regions": int(chosen.sum()),
                    **{name: float(resampling.region_areas(one, limit)[chosen].mean())
                       for name, limit in LIMITS.items()},
                })  # fmt: skip
    return rows


def alarms(key: SplitKey, methods: dict[str, Profile]) -> list[Row]:
    """Where the false alarms lie at a false-positive rate of 5 %."""
    rows = []
    for method, one in methods.items():
        rates = one.normal.sum(0) / one.normal[:, -1].sum()
        at_limit = one.normal[:, np.searchsorted(rates, LIMITS["pixel_aupro_05"])]
        share = at_limit[one.defective].sum() / at_limit.sum()
        rows.append({"kind": "alarms", "dataset": key.dataset, "category": key.category,
                     "seed": key.seed, "method": method,
                     "in_defective_pictures": float(share)})  # fmt: skip
    return rows


def table(rows: Sequence[Row]) -> str:
    """All tables, with a line between them."""
    return f"{pairs_table(rows)}\n\n{seeds_table(rows)}\n\n{sizes_table(rows)}"


def by_method(rows: Iterable[Row], *keys: str) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Rows by some keys, sorted by them; methods in the order of the main table."""
    order = list(METHODS).index

    def place(item: tuple[tuple[Any, ...], list[Row]]) -> list[Any]:
        named = zip(keys, item[0], strict=True)
        return [order(value) if key in ("method", "second") else value for key, value in named]

    return sorted(grouped(rows, *keys).items(), key=place)


def against_others(rows: Sequence[Row]) -> list[Row]:
    """Differences of ours from the others, not from each other."""
    return [row for row in rows if row["kind"] == "pair" and row["second"] not in OURS]


def pairs_table(rows: Sequence[Row]) -> str:
    """Mean difference over seeds (and categories), and where its interval lies off zero."""
    lines = []
    for (dataset, *pair), found in by_method(against_others(rows), "dataset", "first", "second"):
        by_metric = grouped(found, "metric")
        cells = [_cell(by_metric.get((metric,), [])) for metric in NAMES]
        seeds = max(map(len, by_metric.values()))
        lines.append([dataset, *(METHODS[method].title for method in pair), seeds, *cells])
    return markdown_table(["set", "first", "minus", "seeds", *NAMES.values()], lines)


def _cell(found: Sequence[Row]) -> str:
    if not found:
        return "–"
    ahead, behind = sum(r["low"] > 0 for r in found), sum(r["high"] < 0 for r in found)
    return f"{100 * np.mean([r['value'] for r in found]):+.1f} ({ahead} / {behind})"


def seeds_table(rows: Sequence[Row]) -> str:
    """Every difference with its interval."""
    lines = []
    keys = ("dataset", "category", "first", "second", "seed", "groups")
    for (dataset, _, *pair, seed, groups), found in by_method(against_others(rows), *keys):
        of_metric = {r["metric"]: r for r in found}
        cells = [
            f"{100 * r['value']:+.1f} [{100 * r['low']:+.1f}, {100 * r['high']:+.1f}]" if r else "–"
            for r in map(of_metric.get, NAMES)
        ]
        names = [METHODS[method].title for method in pair]
        lines.append([dataset, *names, seed, groups, *cells])
    return markdown_table(["set", "first", "minus", "seed", "groups", *NAMES.values()], lines)


def sizes_table(rows: Sequence[Row]) -> str:
    """AUPRO by size of region, and the share of false alarms in defective images; seed means."""
    lines = []
    others = (row for row in rows if row["kind"] != "pair")
    for (dataset, method), found in by_method(others, "dataset", "method"):
        of_size = {size: [r for r in found if r.get("size") == size] for size in SIZES}
        values = [np.mean([r[key] for r in of_size[size]]) for key in LIMITS for size in SIZES]
        values.append(np.mean([r["in_defective_pictures"] for r in found if "size" not in r]))
        seeds = len({r["seed"] for r in found})
        cells = [f"{100 * value:.1f}" for value in values]
        lines.append([dataset, METHODS[method].title, seeds, *cells])
    heads = [f"{size} {NAMES[key]}" for key in LIMITS for size in SIZES]
    return markdown_table(["set", "method", "seeds", *heads, "alarms beside defects"], lines)


if __name__ == "__main__":
    try:
        main()
    except CdgpError as error:
        raise SystemExit(str(error)) from None
