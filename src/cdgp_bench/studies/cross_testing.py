"""Paired intervals over all folds of a plan; `paired` writes the rows, `render` the page.

Within each fold, groups of its test images are drawn with replacement, the same draws for all
methods. A metric is measured on each fold; the difference of two methods is averaged over folds,
and so is each draw's.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from cdgp.data.groups import group_numbers
from cdgp.metrics.resampling import group_draws
from cdgp_bench.grid import METHODS, Run
from cdgp_bench.protocol import Prepared, SplitKey
from cdgp_bench.resampling import Profile, Resampled, averaged, difference, resampled
from cdgp_bench.results import NAMES
from cdgp_bench.rows import Row
from cdgp_bench.studies import grouped, markdown_table

PAGE = """# Methods over all folds

Every image is tested once, by models that have not seen it or its group. A metric is measured
within each fold and averaged over folds, × 100. Intervals: nominal 95 %, percentiles over {draws:,}
draws of groups of test images within each fold, the same for all methods. An interval covers which
images were tested; it does not cover another training, nor another division into fit and
calibration images, and is not adjusted for the number of comparisons. With about ten groups a fold
it comes out somewhat too narrow. First and second are picked on the same images that the interval
is of. Made by `python -m cdgp_bench.studies.paired --plan {plan}`.

## Who is first

{leaders}

## Every pair

Percentage points, first minus second.

{pairs}
"""


def pairs(
    curves: Iterable[tuple[Run, Profile]], prepared: Mapping[SplitKey, Prepared], folds: int
) -> list[Row]:
    """A row for each set, pair of methods and metric; methods that lack a fold are left out."""
    found: dict[tuple[str, str], dict[str, dict[int, Resampled]]] = {}
    groups: dict[SplitKey, list[int]] = {}
    for run, one in curves:  # one at a time, since each takes megabytes
        assert run.fold is not None
        manifest = prepared[run.split_key].manifest
        groups[run.split_key] = group_numbers(manifest, manifest.of("test")).tolist()
        weights = group_draws(groups[run.split_key], seed=run.fold)
        methods = found.setdefault((run.dataset, run.category), defaultdict(dict))
        methods[run.variant.method][run.fold] = resampled(one, weights)
    rows = []
    for (dataset, category), methods in found.items():
        whole = {m: averaged(list(f.values())) for m, f in methods.items() if len(f) == folds}
        of_set = [members for key, members in groups.items() if key[:2] == (dataset, category)]
        for first, second in itertools.combinations(whole, 2):
            for metric in NAMES:
                value = difference(whole[first], whole[second], metric)
                if value is not None:
                    rows.append({
                        "kind": "folds", "dataset": dataset, "category": category,
                        "first": first, "second": second, "metric": metric,
                        "first_mean": whole[first].whole[metric],
                        "second_mean": whole[second].whole[metric],
                        **value._asdict(), "folds": folds,
                        "groups": sum(len(set(members)) for members in of_set),
                        "images": sum(len(members) for members in of_set),
                    })  # fmt: skip
    return rows


def page(rows: Sequence[Row], plan: str) -> str:
    """The page of a plan with folds."""
    draws = max((row["draws"] for row in rows), default=0)
    return PAGE.format(draws=draws, plan=plan, leaders=leaders_table(rows), pairs=pairs_table(rows))


def tables(rows: Sequence[Row]) -> str:
    """Both tables, with a line between them."""
    return f"{leaders_table(rows)}\n\n{pairs_table(rows)}"


def leaders_table(rows: Sequence[Row]) -> str:
    """The best method of each set and metric, how far it is ahead of the second, and how surely."""
    lines = []
    for (dataset, category, metric), found in grouped(
        rows, "dataset", "category", "metric"
    ).items():
        means = {row[side]: row[f"{side}_mean"] for row in found for side in ("first", "second")}
        first, second = sorted(means, key=lambda m: -means[m])[:2]
        ((lead, low, high),) = [
            (r["value"], r["low"], r["high"]) if r["first"] == first
            else (-r["value"], -r["high"], -r["low"])
            for r in found if {r["first"], r["second"]} == {first, second}
        ]  # fmt: skip
        lines.append([
            set_name(dataset, category), NAMES[metric],
            METHODS[first].title, f"{100 * means[first]:.1f}",
            METHODS[second].title, f"{100 * means[second]:.1f}",
            f"{100 * lead:+.1f}", f"[{100 * low:+.1f}, {100 * high:+.1f}]",
            "yes" if low > 0 else "no",
        ])  # fmt: skip
    head = ["set", "metric", "first", "mean", "second", "mean", "ahead by", "95 %", "above zero"]
    return markdown_table(head, lines)


def pairs_table(rows: Sequence[Row]) -> str:
    """Every difference with its interval."""
    lines = []
    keys = ("dataset", "category", "first", "second", "images", "groups")
    for (dataset, category, *pair, images, groups), found in grouped(rows, *keys).items():
        of_metric = {row["metric"]: row for row in found}
        cells = [
            f"{100 * r['value']:+.1f} [{100 * r['low']:+.1f}, {100 * r['high']:+.1f}]" if r else "–"
            for r in map(of_metric.get, NAMES)
        ]
        names = [METHODS[method].title for method in pair]
        lines.append([set_name(dataset, category), *names, images, groups, *cells])
    head = ["set", "first", "minus", "images", "groups", *NAMES.values()]
    return markdown_table(head, lines)


def set_name(dataset: str, category: str) -> str:
    """A category with its set, where the set has several."""
    return dataset if category == dataset else f"{dataset}/{category}"
