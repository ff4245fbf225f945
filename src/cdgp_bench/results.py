"""The rows of a plan, found by what names them, and their means over seeds or folds."""

from collections.abc import Iterable, Mapping
from typing import Any

from cdgp_bench.grid import Variant
from cdgp_bench.plan import Plan
from cdgp_bench.protocol import Repeat
from cdgp_bench.rows import identity_of
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
        self._rows = {identity_of(row): row for row in rows if row["status"] == "ok"}
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
        self,
        dataset: str,
        category: str,
        variant: Variant,
        repeat: Repeat,
        budget: int | None = None,
    ) -> Row | None:
        """The finished row of one run, None where there is none."""
        method, setting = variant.method, variant.setting
        return self._rows.get(
            (dataset, category, method, setting, repeat.seed, budget, repeat.fold)
        )

    def rows_of(self, dataset: str, variant: Variant, budget: int | None = None) -> list[Row]:
        """The finished rows of a variant, over seeds or folds, and categories."""
        found = [
            self.row(dataset, category, variant, repeat, budget)
            for repeat in self.plan.repeats
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
        """Category mean within each seed or fold, then mean and standard deviation over them."""
        chosen = self.categories[dataset] if category is None else [category]
        values = {}
        for repeat in self.plan.repeats:
            found = {c: self.row(dataset, c, variant, repeat, budget) for c in chosen}
            values[repeat] = {c: None if r is None else r[metric] for c, r in found.items()}
        return summarise(values)

    def by_category(self, dataset: str, variant: Variant, metric: str) -> dict[str, float | None]:
        """The mean over seeds or folds of each category, None where one is missing."""
        means: dict[str, float | None] = {}
        for category in self.categories[dataset]:
            found = self.summary(dataset, variant, metric, category=category)
            complete = found is not None and found.repeats == self.plan.planned.number
            means[category] = found.mean if found is not None and complete else None
        return means

    def is_short(self, variant: Variant) -> bool:
        """Whether a row of the main table had less than ``FAIR_SHARE`` of its training."""
        rows = [row for d in self.sets("main") for row in self.rows_of(d, variant)]
        return any(row.get("facts", {}).get("budget_share", 1) < FAIR_SHARE for row in rows)
