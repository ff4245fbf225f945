"""Every method's maps of the same five defective test images, side by side.

    CDGP_DATA=DATA python benchmarks/montage.py --plan house --runs runs/house --states runs/core

Takes the first seed's trained methods from --states; writes RUNS/montages/SET-CATEGORY.png. The
images are five of the test part, evenly spaced by the marked share of the image, one of each
kind of defect where file names tell five kinds. Colours run, for each method, from the median to
the maximum over its five maps. The drawings show real parts, so they stay with the run.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import matplotlib
import numpy as np

from cdgp.data.images import read_image
from cdgp.data.manifest import Sample
from cdgp.errors import CdgpError
from cdgp.inference import resize_map
from cdgp.presets import DataSettings
from cdgp.progress import Bars
from cdgp_bench.grid import METHODS
from cdgp_bench.plan import read_plan
from cdgp_bench.protocol import Key, Prepared
from cdgp_bench.qualitative import marked, marked_shares
from cdgp_bench.run import key_of, only_one, prepare_all
from cdgp_bench.scoring import kind_of
from cdgp_bench.studies.paired import finished

matplotlib.use("Agg")
COUNT = 5


def main() -> None:
    import matplotlib.pyplot as plt

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plan", default="house")
    parser.add_argument("--runs", type=Path, default=Path("runs/house"))
    parser.add_argument("--states", type=Path, default=Path("runs/core"))
    arguments = parser.parse_args()
    plan, progress = read_plan(arguments.plan), Bars()
    columns: dict[Key, dict[str, list[np.ndarray]]] = defaultdict(dict)
    shown: dict[Key, list[Sample]] = {}
    with only_one(arguments.runs):
        prepared = prepare_all(plan, arguments.runs, progress, print)
        for cell, _ in finished(plan, prepared, arguments.runs):
            key = key_of(cell)
            if cell.seed != plan.seeds[0]:
                continue
            chosen = shown.setdefault(key, examples(prepared[key]))
            fitted = cell.fit(prepared[key].weak, arguments.states / cell.dataset, progress)
            columns[key][cell.line.method] = [
                resize_map(scored.anomaly_map, scored.size)
                for scored in fitted.score([s.image for s in chosen])
            ]
    for key, maps in columns.items():
        images = [read_image(s.image, DataSettings().white_level) for s in shown[key]]
        masks = [marked(s) for s in shown[key]]
        height = 2.0 * max(p.shape[0] / p.shape[1] for p in images)
        figure, axes = plt.subplots(
            COUNT, 1 + len(maps), figsize=(2.0 * (1 + len(maps)), COUNT * height), squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for row, (pixels, mask) in enumerate(zip(images, masks, strict=True)):
            axes[row, 0].imshow(pixels)
            for axis in axes[row]:
                axis.contour(mask, levels=[0.5], colors="lime", linewidths=0.7)
                axis.set_axis_off()
        axes[0, 0].set_title("image, true mask", fontsize=8)
        for column, (method, found) in enumerate(maps.items(), start=1):
            pooled = np.concatenate([m.ravel() for m in found])
            low, high = float(np.median(pooled)), float(pooled.max())
            axes[0, column].set_title(METHODS[method].title.replace(" (", "\n("), fontsize=8)
            for row, values in enumerate(found):
                axes[row, column].imshow(values, cmap="inferno", vmin=low, vmax=high)
        path = arguments.runs / "montages" / f"{key.dataset}-{key.category}.png"
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, dpi=90)
        print(path)


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
