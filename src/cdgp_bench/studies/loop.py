"""Ten days at a station: what reviewing suspects teaches the next model, beside random review.

    CDGP_DATA=DATA python -m cdgp_bench.studies.loop [--seeds 3] [--only-figure]

A line starts with few labels, and each day new parts come. A person reviews some of them, and the
model of the next day is trained on all that was reviewed, under the station's two rules: a group
keeps the split that it was given when it first came, and suspects, the images with the highest
scores, are trained on and never calibrate. The other policy reviews as many images at random. Both
are measured on a hidden test part that is the same on all days: the first fold of `in-house-cv`.

Rows are written to docs/results/loop.jsonl as they come, and the same command goes on where it was
stopped; the figure is docs/results/figures/loop.png.
"""

import argparse
import hashlib
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from cdgp.data.manifest import Manifest, Sample
from cdgp.data.splits import needed_labels
from cdgp.errors import CdgpError, DataError, OutputError
from cdgp.metrics.ranking import image_auroc
from cdgp.presets import settings
from cdgp.progress import Bars
from cdgp_bench.figures import new_figure, save_figure
from cdgp_bench.folds import cross_test
from cdgp_bench.grid import METHODS
from cdgp_bench.plan import DatasetPlan
from cdgp_bench.prepare import load_categories, read_images
from cdgp_bench.rows import read_rows, write_rows
from cdgp_bench.studies import grouped, markdown_table

OUT = Path("docs/results/loop.jsonl")
FIGURE = Path("docs/results/figures/loop.png")
WORK = Path("runs/loop")
FOLDS = 5
DAYS = 10
FIRST = {False: 60, True: 4}
"""Good and defective images that the line starts with."""
DAILY = {False: 64, True: 8}
"""Good and defective images of a day."""
REVIEWS = 40
AUDITED = 20
"""Of the reviews of a day, so many are drawn at random under both policies."""
CALIBRATES = 0.25
"""Share of the groups whose images calibrate, where they were drawn at random."""
OVERKILL = 0.05
POLICIES = ("suspects", "random")
NAMES = {"suspects": "audit and suspects", "random": "random review"}
SETTINGS = settings(
    "lite", input_size=(128, 128), dual_gp={"steps": 120}, student={"steps": 120},
)  # fmt: skip


class Line(NamedTuple):
    """What comes, on which day, and what is measured on."""

    first: Sequence[Sample]
    days: Sequence[Sequence[Sample]]
    test: Manifest
    """With the hidden test part."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only-figure", action="store_true")
    given = parser.parse_args()
    if not given.only_figure:
        images = magnetic_tiles()
        for seed in range(given.seeds):
            for policy in POLICIES:
                ten_days(line_of(images, seed), policy, seed)
    rows = read_rows(OUT)
    print(table(rows))
    draw(rows)


def magnetic_tiles() -> Manifest:
    """All images of the set, the first fold as the test part."""
    place = DatasetPlan(path=f"{os.environ['CDGP_DATA']}/magnetic_tile", input_size=(128, 128))
    ((category, listed),) = load_categories("magnetic_tile", place, WORK, print).items()
    images = read_images("magnetic_tile", category, listed, SETTINGS.data, WORK, Bars())
    return cross_test(images, FOLDS)[0]


def line_of(images: Manifest, seed: int) -> Line:
    """Deal the images outside the test part to the start and to days, in the order of shuffled
    groups; of a group that is cut by the end of a day, the rest comes on the next."""
    rng = random.Random(f"line {seed}")
    groups = defaultdict(list)
    for sample in images.of("train"):
        groups[sample.group or str(sample.image)].append(sample)
    order = sorted(groups)
    rng.shuffle(order)
    split = {g: "calibration" if rng.random() < CALIBRATES else "fit" for g in order}
    queue = {label: [replace(s, split=split[g]) for g in order for s in groups[g]
                     if s.defective is label] for label in (False, True)}  # fmt: skip

    def take(number: dict[bool, int]) -> list[Sample]:
        taken = []
        for label, count in number.items():
            if len(queue[label]) < count:
                raise DataError(f"{images.root}: too few images for {DAYS} days")
            taken += queue[label][:count]
            del queue[label][:count]
        return taken

    return Line(take(FIRST), [take(DAILY) for _ in range(DAYS)], images)


def ten_days(line: Line, policy: str, seed: int) -> None:
    """Train and measure each day's model, and review by its scores."""
    rows = read_rows(OUT)
    made_with = setup_of(line)
    if any(row["setup"] != made_with for row in rows):
        raise OutputError(f"{OUT}: has rows of another setup; move it away")
    rng = random.Random(f"review {seed}")
    known = list(line.first)
    reviewed = 0
    for day in range(DAYS + 1):
        fitted = METHODS["cdgp"].fit(
            replace(line.test, samples=tuple(known)).weak_split(needed=needed_labels(SETTINGS)),
            SETTINGS.model_copy(update={"seed": seed}), WORK / "checkpoints", Bars(),
        )  # fmt: skip
        name = {"policy": policy, "day": day, "seed": seed, "setup": made_with}
        if not any(name.items() <= row.items() for row in rows):
            defects = sum(s.defective for s in known)
            counted = {"reviewed": reviewed, "images": len(known), "defects": defects}
            rows.append({**name, **counted, **measured(fitted, line.test.of("test"))})
            write_rows(OUT, rows)
            print(rows[-1], flush=True)
        if day == DAYS:
            return
        came = list(line.days[day])
        rng.shuffle(came)
        audited, others = came[:AUDITED], came[AUDITED:]
        if policy == "suspects":
            scores = scores_of(fitted, others)
            order = sorted(range(len(others)), key=lambda i: -scores[i])
            # A suspect is no fair sample of its split: it is trained on, or not used.
            chosen = [others[i] for i in order[: REVIEWS - AUDITED]]
            known += [s for s in chosen if s.split == "fit"]
        else:
            known += others[: REVIEWS - AUDITED]
        known += audited
        reviewed += REVIEWS


def setup_of(line: Line) -> str:
    """A short digest of what the rows of all seeds depend on."""
    chosen = SETTINGS.model_dump_json(), FIRST, DAILY, REVIEWS, AUDITED, CALIBRATES, OVERKILL
    made = f"{chosen} {METHODS['cdgp'].version} {line.test.sha256}"
    return hashlib.sha256(made.encode()).hexdigest()[:12]


def scores_of(fitted: Any, samples: Sequence[Sample]) -> list[float]:
    return [scored.image_score for scored in fitted.score([s.image for s in samples])]


def measured(fitted: Any, test: Sequence[Sample]) -> dict[str, Any]:
    """AUROC-I on the test part, and the share of its defects that escape at ``OVERKILL``.

    The threshold of the latter is set on the test part's own good images: it compares rankings, and
    is not what a station would get.
    """
    scores = np.array(scores_of(fitted, test))
    labels = np.array([bool(s.defective) for s in test])
    good = np.sort(scores[~labels])
    threshold = good[int(np.ceil((1 - OVERKILL) * len(good))) - 1]
    return {
        "auroc": image_auroc(scores, labels).value,
        "escape": float((scores[labels] <= threshold).mean()),
    }


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Means over seeds, a line a policy and day."""
    lines = [
        [NAMES[policy], day, f"{mean(r['defects'] for r in found):.0f}",
         f"{100 * mean(r['auroc'] for r in found):.1f}",
         f"{100 * mean(r['escape'] for r in found):.1f}", len(found)]
        for (policy, day), found in grouped(rows, "policy", "day").items()
    ]  # fmt: skip
    head = ["review", "day", "defects known", "AUROC-I", "escape at 5 % overkill", "lines"]
    return markdown_table(head, lines)


def draw(rows: Sequence[dict[str, Any]]) -> None:
    """Both curves over the days, a thin line a seed, a thick one the mean."""
    figure, axes = new_figure(1, 2, (9, 3.6))
    titles = {"auroc": "AUROC-I", "escape": "escapes at 5 % overkill"}
    for axis, (metric, title) in zip(axes.flat, titles.items(), strict=True):
        for colour, policy in zip(("#0072b2", "#d55e00"), POLICIES, strict=True):
            own = [row for row in rows if row["policy"] == policy]
            for found in grouped(own, "seed").values():
                axis.plot([r["day"] for r in found], [100 * r[metric] for r in found],
                          color=colour, alpha=0.35, linewidth=1)  # fmt: skip
            days = grouped(own, "day")
            axis.plot([day for (day,) in days],
                      [100 * mean(r[metric] for r in found) for found in days.values()],
                      color=colour, linewidth=2.5, label=NAMES[policy])  # fmt: skip
        axis.set_xlabel(f"day, {REVIEWS} reviews each")
        axis.set_ylabel(f"{title}, %")
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    save_figure(figure, FIGURE)


if __name__ == "__main__":
    try:
        main()
    except CdgpError as error:
        raise SystemExit(str(error)) from None
