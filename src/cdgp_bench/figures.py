"""The paper's figures from rows and saved examples."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cdgp.files import atomic_write
from cdgp.metrics.reliability import calibration_error_interval, expected_calibration_error
from cdgp_bench.grid import FULL, METHODS, SPATIAL, budgets_of, variants_of
from cdgp_bench.reliability import ImageScores
from cdgp_bench.reliability import reliability as bins_of
from cdgp_bench.results import NAMES, Results
from cdgp_bench.statistics import Summary

COLOURS = {"final": "#0072b2", "spatial": "#d55e00"}
"""Distinguishable for the colour-blind."""
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""The same, by method."""


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> Any:
    """A figure of (width, height) inches, and its axes in rows and columns."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure so that equal figures give equal files."""
    import matplotlib

    # Without the date and the random ids that would make two equal figures differ.
    with atomic_write(path) as temporary, matplotlib.rc_context({"svg.hashsalt": "cdgp"}):
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(temporary, dpi=150, format=path.suffix[1:], metadata=metadata)


def learning_curves(
    curves: Mapping[str, Sequence[Sequence[float]]], title: str, stem: Path
) -> None:
    """Loss against the step, (step, loss) pairs by title: a panel a method, as PNG and SVG."""
    figure, (axes,) = new_figure(1, len(curves), (3.2 * len(curves), 2.6))
    for axis, (name, points) in zip(axes, curves.items(), strict=True):
        axis.plot([p[0] for p in points], [p[1] for p in points], color=COLOURS["final"])
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("step")
    axes[0].set_ylabel("training loss")
    figure.suptitle(title, fontsize=9)
    for ending in (".png", ".svg"):
        save_figure(figure, stem.with_name(stem.name + ending))


def complete(results: Results, found: Summary | None) -> bool:
    """Whether a mean is over all planned seeds or folds; one over fewer leaves a gap."""
    return found is not None and found.repeats == results.plan.planned.number


def label_budget(results: Results, dataset: str, stem: Path) -> None:
    """AUPRO against the number of defective training images, as PNG and SVG."""
    figure, ((left, right),) = new_figure(1, 2, (8, 3.2))
    budgets = [*sorted(results.plan.budgets), None]
    names = ["full" if b is None else str(b) for b in budgets]
    for axis, metric, title in (
        (left, "pixel_aupro_30", "AUPRO@.3"),
        (right, "pixel_aupro_05", "AUPRO@.05"),
    ):
        for shift, label, variant in ((-0.04, "spatial", SPATIAL), (0.04, "final", FULL)):
            found = [results.summary(dataset, variant, metric, budget) for budget in budgets]
            whole = [f if complete(results, f) else None for f in found]
            # A little apart, so that one series does not hide the other.
            places = [i + shift for i in range(len(budgets))]
            means = [100 * f.mean if f else math.nan for f in whole]
            spread = [100 * (f.std or 0) if f else math.nan for f in whole]
            axis.errorbar(places, means, yerr=spread, label=label, marker="o", capsize=3,
                          color=COLOURS[label])  # fmt: skip
        axis.set_xticks(range(len(names)), names)
        axis.set_xlabel("defective training images")
        axis.set_ylabel(f"{title} × 100")
        axis.set_title(f"{dataset}: {title}")
        axis.set_xlim(-0.3, len(budgets) - 0.7)
        axis.set_ylim(0, 100)
        axis.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    for ending in (".png", ".svg"):
        save_figure(figure, stem.with_name(stem.name + ending))


def budget_curve(results: Results, dataset: str, stem: Path) -> None:
    """All metrics against the number of defective training images, a line a method, as PNG and SVG.

    A method that uses good images alone is level.
    """
    figure, (axes,) = new_figure(1, len(NAMES), (3.2 * len(NAMES), 3.2))
    budgets = budgets_of("budget_curve", results.plan.budgets)
    budgets = tuple(sorted(budgets, key=lambda k: math.inf if k is None else k))
    variants = variants_of("budget_curve", results.plan.methods)
    for axis, (metric, title) in zip(axes, NAMES.items(), strict=True):
        for number, variant in enumerate(variants):
            means, spread = [], []
            for budget in budgets:
                level = METHODS[variant.method].supervision == "normal"
                found = results.summary(dataset, variant, metric, None if level else budget)
                known = found if complete(results, found) else None
                means.append(100 * known.mean if known else math.nan)
                spread.append(100 * (known.std or 0) if known else math.nan)
            # A little apart, so that one line's bars do not hide another's.
            places = [i + 0.06 * (number - len(variants) / 2) for i in range(len(budgets))]
            axis.errorbar(places, means, yerr=spread, label=variant.label, marker="o", capsize=3,
                          color=SERIES[number % len(SERIES)])  # fmt: skip
        axis.set_xticks(range(len(budgets)), ["full" if k is None else str(k) for k in budgets])
        axis.set_xlabel("defective training images")
        axis.set_title(f"{dataset}: {title} × 100", fontsize=9)
        axis.grid(alpha=0.3)
    names = axes[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=len(variants))
    for ending in (".png", ".svg"):
        save_figure(figure, stem.with_name(stem.name + ending))


def reliability(sets: Mapping[str, ImageScores], stem: Path) -> None:
    """Observed against predicted rate of defects, a panel a data set, as PNG and SVG."""
    figure, (axes,) = new_figure(1, len(sets), (3.2 * len(sets), 3.9))
    for axis, (name, found) in zip(axes, sets.items(), strict=True):
        bins = bins_of(found)
        means, rates = [b.mean for b in bins], [b.rate for b in bins]
        around = [[b.rate - b.low for b in bins], [b.high - b.rate for b in bins]]
        axis.plot([0, 1], [0, 1], color="#999999", linewidth=1)
        axis.errorbar(means, rates, yerr=around, marker="o", capsize=3, linestyle="none",
                      color=COLOURS["final"])  # fmt: skip
        axis.set_xlim(-0.03, 1.03)
        axis.set_ylim(-0.03, 1.03)
        axis.set_box_aspect(1)
        axis.set_xlabel("predicted P(defective)")
        error = expected_calibration_error(found.probability, found.defective).value
        low, high = calibration_error_interval(*found)
        ece = "–" if error is None else f"{100 * error:.1f}"
        axis.set_title(f"{name}\nECE × 100: {ece} [{100 * low:.1f}, {100 * high:.1f}]", fontsize=9)
    axes[0].set_ylabel("observed share of defective images")
    for ending in (".png", ".svg"):
        save_figure(figure, stem.with_name(stem.name + ending))


QUALITATIVE_SCALES = (
    "The two means of a row share one scale; every final map has its model's own, from 0 to its "
    "largest value here. The bars give the values."
)


def qualitative(examples: Sequence[Path], path: Path) -> None:
    """A row a category: image, truth, normal mean, anomaly mean, final map."""
    titles = ("raw", "ground truth", "normal mean", "anomaly mean", "final CDGP")
    figure, axes = new_figure(len(examples), len(titles), (11, 2.2 * len(examples)))
    for row, example in zip(axes, examples, strict=True):
        with np.load(example) as found:
            parts = {key: found[key] for key in found.files}
        height, width = parts["mask"].shape
        extent = (0, width, height, 0)
        row[0].imshow(parts["image"], extent=extent)
        row[1].imshow(parts["mask"], cmap="gray", extent=extent, vmin=0, vmax=1)
        means = np.stack([parts["normal"], parts["anomaly"]])
        scales = [(means.min(), means.max())] * 2 + [(0, max(float(parts["final"].max()), 1e-6))]
        keys = ("normal", "anomaly", "final")
        for axis, key, (low, high) in zip(row[2:], keys, scales, strict=True):
            image = axis.imshow(parts[key].astype(np.float32), cmap="magma", extent=extent,
                                interpolation="bilinear", vmin=low, vmax=high)  # fmt: skip
            if key != "normal":
                figure.colorbar(image, ax=axis, fraction=0.046).ax.tick_params(labelsize=6)
        row[0].set_ylabel(example.stem.replace("-", "\n", 1), fontsize=8)
        for axis in row:
            axis.set_xticks([])
            axis.set_yticks([])
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=9)
    save_figure(figure, path)
