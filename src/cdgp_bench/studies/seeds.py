"""How much of CDGP's result is chance: of the training, and of the split into fit and calibration.

    CDGP_DATA=DATA python -m cdgp_bench.studies.seeds

The test part is the first fold of `in-house-cv`'s magnetic tiles throughout. Five trainings share
one split into fit and calibration images and differ by the seed of all that training draws; five
share that seed and differ by the split. The two groups of five have one training in common. Each
finished training is a row of docs/results/in-house-cv/seeds.jsonl; the same command goes on where
it was stopped. `--table` prints the rows as Markdown.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cdgp.errors import CdgpError
from cdgp.progress import Bars
from cdgp.run_folder import lock
from cdgp_bench.folds import cross_test
from cdgp_bench.grid import METHODS, Variant
from cdgp_bench.plan import Plan, read_plan
from cdgp_bench.prepare import load_categories, read_images
from cdgp_bench.protocol import Repeat, prepare
from cdgp_bench.results import NAMES
from cdgp_bench.rows import HASHES, Row, hash_of, identity, read_rows, wanted_hash, write_rows
from cdgp_bench.run import Place, computed, run_of
from cdgp_bench.studies import grouped, markdown_table

PLAN, DATASET, METHOD = "in-house-cv", "magnetic_tile", "cdgp"
FOLD = 0
SEEDS = range(5)
PAIRS = [*((0, seed) for seed in SEEDS), *((split, 0) for split in SEEDS if split)]
"""Seed of the split into fit and calibration, and seed of the training."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs") / PLAN)
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/core"))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    out = Path("docs/results") / PLAN / "seeds.jsonl"
    if not given.table:
        place = Place(given.runs, given.checkpoints, Bars(), print)
        with lock(given.runs, "benchmark"):
            trained(read_plan(PLAN), DATASET, METHOD, place, out)
    print(table(read_rows(out)))


def trained(plan: Plan, dataset: str, method: str, place: Place, out: Path) -> list[Row]:
    """Rows of all pairs of seeds; those that ``out`` has from the same settings and images stay."""
    assert plan.folds is not None
    ((category, listed),) = load_categories(
        dataset, plan.datasets[dataset], place.out, place.say
    ).items()
    variant = Variant(METHODS[method].title, method)
    data = plan.settings_of(dataset, variant, 0).data
    images = read_images(dataset, category, listed, data, place.out, place.progress)
    part = cross_test(images, plan.folds)[FOLD]
    known = {hash_of(row): row for row in read_rows(out) if row["status"] == "ok"}
    rows: dict[tuple[int, int], Row] = {}
    todo = []
    for split_seed, seed in PAIRS:
        run = run_of(plan, dataset, category, variant, Repeat(seed, FOLD))
        prepared = prepare(dataset, category, part, data, split_seed, None, FOLD)
        wanted = wanted_hash(run, prepared, plan)
        if wanted in known:
            rows[split_seed, seed] = known[wanted]
        else:
            todo.append((split_seed, run, prepared, dict(zip(HASHES, wanted, strict=True))))
    for split_seed, run, prepared, hashes in todo:
        row = {"split_seed": split_seed, **identity(run, plan), **prepared.facts(), **hashes}
        row |= computed(run, prepared, plan, place)
        row.pop("images", None)  # metrics alone are compared
        rows[split_seed, run.seed] = row
        write_rows(out, rows.values())
        place.say(f"split {split_seed}, training {run.seed}: {row.get('reason', row['status'])}")
    return [rows[pair] for pair in PAIRS]


def table(rows: Sequence[Row]) -> str:
    """Mean over the trainings of one split, and both standard deviations, x 100."""
    lines = []
    for (dataset, method), found in grouped(rows, "dataset", "method").items():
        whole = [row for row in found if row["status"] == "ok"]
        trainings = [row for row in whole if row["split_seed"] == 0]
        splits = [row for row in whole if row["seed"] == 0]
        for metric, name in NAMES.items():
            values = [100 * row[metric] for row in trainings]
            others = [100 * row[metric] for row in splits]
            mean = f"{np.mean(values):.1f}" if values else "–"
            cells = [mean, _spread(values), len(values), _spread(others), len(others)]
            lines.append([dataset, METHODS[method].title, name, *cells])
    head = ["set", "method", "metric", "mean", "std of training", "trainings",
            "std of the fit/calibration split", "splits"]  # fmt: skip
    return markdown_table(head, lines)


def _spread(values: Sequence[float]) -> str:
    """Sample standard deviation."""
    return f"{np.std(values, ddof=1):.1f}" if len(values) > 1 else "–"


if __name__ == "__main__":
    try:
        main()
    except CdgpError as error:
        raise SystemExit(str(error)) from None
