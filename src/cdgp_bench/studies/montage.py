"""Every method's maps of the same five defective test images, side by side.

    CDGP_DATA=DATA python -m cdgp_bench.studies.montage

Loads the trained methods of the first seed or fold from --checkpoints; writes
RUNS/montages/SET-CATEGORY.png. The images are five of the test part, evenly spaced by the marked
share of the image, one of each kind of defect where file names hold five kinds. The colours of each
method run from the median to the maximum over its five maps. The drawings show real parts, so they
stay in the run's folder.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdgp.data.images import read_image
from cdgp.data.manifest import Sample
from cdgp.data.resize import resize_map
from cdgp.errors import CdgpError
from cdgp.presets import DataSettings
from cdgp.progress import Bars
from cdgp.run_folder import lock
from cdgp_bench.figures import new_figure, save_figure
from cdgp_bench.grid import METHODS
from cdgp_bench.plan import read_plan
from cdgp_bench.prepare import prepare_all
from cdgp_bench.protocol import Prepared, SplitKey
from cdgp_bench.qualitative import marked, marked_shares
from cdgp_bench.scoring import kind_of
from cdgp_bench.studies.paired import finished, plan_arguments

COUNT = 5


def main() -> None:
    given = plan_arguments(argparse.ArgumentParser(description=__doc__.split("\n")[0]))
    plan, progress = read_plan(given.plan), Bars()
    maps: dict[SplitKey, dict[str, list[NDArray[np.float32]]]] = defaultdict(dict)
    shown: dict[SplitKey, list[Sample]] = {}
    with lock(given.runs, "benchmark"):
        prepared = prepare_all(plan, given.runs, progress, print)
        for run, _ in finished(plan, prepared, given.runs):
            key = run.split_key
            if (run.seed, run.fold) != plan.repeats[0]:
                continue
            chosen = shown.setdefault(key, examples(prepared[key]))
            fitted = run.fit(prepared[key].weak, given.checkpoints / run.dataset, progress)
            maps[key][run.variant.method] = [
                resize_map(scored.anomaly_map, scored.size)
                for scored in fitted.score([s.image for s in chosen])
            ]
    for key, of_method in maps.items():
        path = given.runs / "montages" / f"{key.dataset}-{key.category}.png"
        draw(shown[key], of_method, path)
        print(path)


def draw(samples: list[Sample], maps: dict[str, list[NDArray[np.float32]]], path: Path) -> None:
    """A row an image, a column a method."""
    images = [read_image(s.image, DataSettings().white_level) for s in samples]
    height = 2.0 * max(p.shape[0] / p.shape[1] for p in images)
    columns = 1 + len(maps)
    figure, axes = new_figure(COUNT, columns, (2.0 * columns, COUNT * height))
    for row, (pixels, sample) in enumerate(zip(images, samples, strict=True)):
        axes[row, 0].imshow(pixels)
        for axis in axes[row]:
            axis.contour(marked(sample), levels=[0.5], colors="lime", linewidths=0.7)
            axis.set_axis_off()
    axes[0, 0].set_title("image, true mask", fontsize=8)
    for column, (method, found) in enumerate(maps.items(), start=1):
        pooled = np.concatenate([m.ravel() for m in found])
        low, high = float(np.median(pooled)), float(pooled.max())
        axes[0, column].set_title(METHODS[method].title.replace(" (", "\n("), fontsize=8)
        for row, values in enumerate(found):
            axes[row, column].imshow(values, cmap="inferno", vmin=low, vmax=high)
    save_figure(figure, path)


def examples(part: Prepared) -> list[Sample]:
    """Five defective test images with a marked mask."""
    samples = [share.sample for share in marked_shares(part)]
    if len(samples) < COUNT:
        raise SystemExit(f"{part.dataset}: fewer than {COUNT} defective test images with a mask")
    kinds: dict[str | None, list[Sample]] = defaultdict(list)
    for sample in samples:
        kinds[kind_of(sample.image.stem)].append(sample)
    if len(kinds) == COUNT:
        return [of_kind[len(of_kind) // 2] for of_kind in kinds.values()]
    return [samples[i] for i in np.linspace(0, len(samples) - 1, COUNT).round().astype(int)]


if __name__ == "__main__":
    try:
        main()
    except CdgpError as error:
        raise SystemExit(str(error)) from None
