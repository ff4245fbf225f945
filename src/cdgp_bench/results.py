"""The rows of a plan, found by what names them, and their means over seeds."""

from collections.abc import Iterable, Mapping
from typing import Any

from cdgp_bench.grid import Variant
from cdgp_bench.plan import Plan
from cdgp_bench.statistics import Summary, summarise

Row = Mapping[str, Any]
NAMES = {
    "image_auroc": "AUROC-I",
    "pixel_auroc": "AUROC-P",
    "pixel_aupro_30": "AUPRO@.3",
    "pixel_aupro_05": "AUPRO@.05",
}
PIXEL = ("pixel_auroc", "pixel_aupro_30", "pixel_aupro_05")
FAIR_SHARE = 0.25
"""A method that trained for less than this share of its published training is not ranked."""


class Results:
    """The rows of a plan, of failed runs too."""

    def __init__(self, plan: Plan, rows: Iterable[Row]) -> None:
        self.plan = plan
        rows = list(rows)
        self._rows = {
            (r["dataset"], r["category"], r["method"], r["setting"], r["seed"], r["budget"]): r
            for r in rows
            if r["status"] == "ok"
        }
        self.not_run = {
            (r["dataset"], r["method"]): r["reason"] for r in rows if r["status"] == "not run"
        }
        # Of failed rows too: a mean over the other categories would be another quantity.
        self.categories = {
            name: sorted({r["category"] for r in rows if r["dataset"] == name})
            for name in plan.datasets
        }

    def sets(self, experiment: str) -> list[str]:
        """The data sets of an experiment that have rows."""
        wanted = self.plan.experiments.get(experiment, ())
        return [name for name in wanted if self.categories[name]]

    def row(
        self, dataset: str, category: str, variant: Variant, seed: int, budget: int | None = None
    ) -> Row | None:
        """The finished row of one run, None where there is none."""
        return self._rows.get((dataset, category, variant.method, variant.setting, seed, budget))

    def rows_of(self, dataset: str, variant: Variant, budget: int | None = None) -> list[Row]:
        """The finished rows of a variant, over seeds and categories."""
        found = [
            self.row(dataset, category, variant, seed, budget)
            for seed in self.plan.seeds
            for category in self.categories[dataset]
        ]
        return [row for row in found if row is not None]

    def summary(
        self,
        dataset: str,
        variant: Variant,
        metric: str,
        budget: int | None = None,
        category: str | None = None,
    ) -> Summary | None:
        """Category mean within each seed, then mean and standard deviation over seeds."""
        chosen = self.categories[dataset] if category is None else [category]
        values = {}
        for seed in self.plan.seeds:
            of_seed = {c: self.row(dataset, c, variant, seed, budget) for c in chosen}
            values[seed] = {c: None if r is None else r[metric] for c, r in of_seed.items()}
        return summarise(values)

    def by_category(self, dataset: str, variant: Variant, metric: str) -> dict[str, float | None]:
        """The mean over seeds of each category, None where a seed is missing."""
        means: dict[str, float | None] = {}
        for category in self.categories[dataset]:
            found = self.summary(dataset, variant, metric, category=category)
            complete = found is not None and found.seeds == len(self.plan.seeds)
            means[category] = found.mean if found is not None and complete else None
        return means

    def is_short(self, variant: Variant) -> bool:
        """Whether a row of the main table had less than ``FAIR_SHARE`` of its training."""
        rows = [row for d in self.sets("main") for row in self.rows_of(d, variant)]
        return any(row.get("facts", {}).get("budget_share", 1) < FAIR_SHARE for row in rows)
