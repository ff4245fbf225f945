"""Tiled prediction: its seams, its time against the number of pixels, and its memory.

    OMP_NUM_THREADS=1 python -m cdgp_bench.studies.tiles [--parts model seams times memory figure]

Trains a `lite` model with windows of 256 x 256 on synthetic surfaces, then measures

- seams: the fused evidence U of 1024 x 768 images, half of them with a defect, by windows and in
  one pass over the whole image; with the windows blended, and with each cut off in the middle of
  its overlaps;
- times: seconds of processor time per image from 0.5 to 12 megapixels, which other work on the
  machine lengthens little, added to those of earlier calls;
- memory: the largest resident memory of `cdgp predict` of an image of 4000 x 3000.

The parts are saved in runs/tiles; `figure` writes docs/results/tiles.json and
docs/results/figures/tiles.png from it.
"""

import argparse
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import cdgp
from cdgp.files import write_text
from cdgp.method import tiles, windows
from cdgp.method.backbone import STRIDES
from cdgp.method.calibration import fuse
from cdgp.method.network import Evidence
from cdgp.presets import settings
from cdgp.progress import Bars
from cdgp.runtimes.torch import TorchRuntime
from cdgp.workflows import train_run
from cdgp_bench.figures import COLOURS, new_figure, save_figure
from cdgp_bench.measure.harness import machine
from cdgp_bench.studies.streaming import cost_of
from cdgp_bench.synthetic import make_dataset, make_surface, plant_defect, save

OUT, RESULTS = Path("runs/tiles"), Path("docs/results")
WINDOW = (256, 256)
IMAGES = 6
NEAR = 32
"""Positions closer to a seam than this, in pixels, count as near it."""
MEGAPIXELS = (0.5, 1, 2, 4, 8, 12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known: dict[str, Callable[[], None]] = {
        "model": model, "seams": seams, "times": lambda: times(arguments.megapixels),
        "memory": memory, "figure": figure,
    }  # fmt: skip
    parser.add_argument("--parts", nargs="+", choices=list(known), default=list(known))
    parser.add_argument("--megapixels", type=float, nargs="+", default=MEGAPIXELS, help="of times")
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    for part in arguments.parts:
        known[part]()


def model() -> None:
    """Train on windows of synthetic surfaces."""
    shutil.rmtree(OUT / "surfaces", ignore_errors=True)
    make_dataset(OUT / "surfaces", good=20, defective=12, size=(320, 448))
    chosen = settings(
        "lite", input_size=WINDOW, tile=True, student={"steps": 150},
        dual_gp={"steps": 40, "batch_size": 6, "no_separation": "flag"},
    )  # fmt: skip
    train_run(OUT / "surfaces", OUT / "run", chosen, overwrite=True, progress=Bars())


def image_of(size: tuple[int, int], seed: int, defective: bool) -> np.ndarray:
    rng = np.random.default_rng([7, seed])
    image = make_surface(size, rng)
    return plant_defect(image, rng)[0] if defective else image


def cut_off(length: int, side: int, strides: windows.Strides = STRIDES) -> windows.Array:
    """Weights as ``windows.weights`` gives them, without blending: the heaviest window has all."""
    blend = TRUE_WEIGHTS(length, side, strides)
    heaviest: windows.Array = (np.arange(len(blend))[:, None] == blend.argmax(0)).astype(np.float32)
    return heaviest


TRUE_WEIGHTS = windows.weights


@torch.inference_mode()
def seams() -> None:
    """Differences of U from the untiled one, near seams and elsewhere."""
    size = (768, 1024)
    runtime = cdgp.load(OUT / "run").runtime
    assert isinstance(runtime, TorchRuntime)
    graph, c = runtime.graph, runtime.graph.outputs.calibration

    def fused(evidence: Evidence) -> np.ndarray:
        low = fuse(evidence.maps, c.branches, c.weights)
        values: np.ndarray = low[0].numpy()
        return values

    rows: dict[str, list[np.ndarray]] = {"blended": [], "cut_off": []}
    pooled: dict[str, list[float]] = {name: [] for name in rows}
    for index in range(IMAGES):
        image = torch.from_numpy(image_of(size, index, index % 2 == 1)).permute(2, 0, 1)
        whole = graph.evidence(image[None].contiguous(memory_format=torch.channels_last))
        for name, weights in (("blended", TRUE_WEIGHTS), ("cut_off", cut_off)):
            windows.weights = weights
            found = tiles.tiled_evidence(graph.evidence, image, WINDOW)
            rows[name].append(fused(found) - fused(whole))
            pooled[name].append(float(found.pooled - whole.pooled))
    windows.weights = TRUE_WEIGHTS
    keep("seams", {
        "size": list(size), "window": list(WINDOW), "pictures": IMAGES, "near": NEAR,
        **{name: differences(np.array(maps), np.array(pooled[name]), size)
           for name, maps in rows.items()},
    })  # fmt: skip


def differences(maps: np.ndarray, pooled: np.ndarray, size: tuple[int, int]) -> dict[str, Any]:
    """How far tiled U is from the untiled one.

    Args:
        maps: (n, h, w) differences of U.
        pooled: (n,) differences of the pooled evidence.
        size: (height, width) of the images.
    """
    distance = seam_distance(size)
    near = distance < NEAR
    across = np.diff(seam_sides(size), axis=1) != 0
    off, steps = np.abs(maps), np.abs(np.diff(maps, axis=2))
    return {
        "max_near": float(off[:, near].max()), "mean_near": float(off[:, near].mean()),
        "max_elsewhere": float(off[:, ~near].max()),
        "mean_elsewhere": float(off[:, ~near].mean()),
        "step_across_seams": float(steps[:, across].mean()),
        "step_elsewhere": float(steps[:, ~across].mean()),
        "pooled_max": float(np.abs(pooled).max()),
        "by_distance": [
            [4 * d, float(off[:, (distance // 4) == d].mean())] for d in range(24)
            if ((distance // 4) == d).any()
        ],
    }  # fmt: skip


def seam_sides(size: tuple[int, int]) -> np.ndarray:
    """(h, w) which column of windows has a position, where they are cut off."""
    columns = cut_off(size[1], WINDOW[1]).argmax(0).numpy()
    return np.broadcast_to(columns, (size[0] // STRIDES[0], len(columns)))


def seam_distance(size: tuple[int, int]) -> np.ndarray:
    """(h, w) pixels from each position's centre to the nearest seam."""
    axes = []
    for length, side in zip(size, WINDOW, strict=True):
        owner = cut_off(length, side).argmax(0).numpy()
        lines = np.flatnonzero(np.diff(owner)) + 1
        axes.append(np.abs(np.arange(len(owner)) + 0.5 - lines[:, None]).min(0) * STRIDES[0])
    nearest: np.ndarray = np.minimum.outer(*axes)
    return nearest


def times(megapixels: Sequence[float]) -> None:
    """Processor time per image, held in memory, added to what was measured before."""
    detector = cdgp.load(OUT / "run")
    whole = big_image()
    path = OUT / "times.json"
    found = json.loads(path.read_text())["found"] if path.is_file() else []
    detector.predict(whole[:512, :512])
    for size in megapixels:
        height = round((size * 0.75e6) ** 0.5)
        width = height * 4 // 3
        began = time.process_time()
        detector.predict(whole[:height, :width])
        found.append([height * width, round(time.process_time() - began, 3)])
        keep("times", {"found": found, "threads": torch.get_num_threads()})


def memory() -> None:
    """Peak of one prediction in a process of its own, overlay and report included."""
    path = OUT / "large" / "large.png"
    if not path.is_file():
        save(path, big_image())
    shutil.rmtree(OUT / "predicted", ignore_errors=True)
    seconds, peak = cost_of(["predict", OUT / "run", path, "--out", OUT / "predicted", "--quiet"])
    overlay = OUT / "predicted" / "overlays" / "large.png.png"
    with Image.open(overlay) as image:
        shown = image.size
    keep("memory", {"size": [3000, 4000], "peak_mib": peak // 1024, "seconds": round(seconds, 1),
                    "overlay_size": list(shown), "overlay_kib": overlay.stat().st_size // 1024,
                    "threads": torch.get_num_threads()})  # fmt: skip


def big_image() -> np.ndarray:
    return image_of((3000, 4000), 99, True)


def keep(name: str, facts: dict[str, Any]) -> None:
    """Save what one part has measured."""
    write_text(OUT / f"{name}.json", json.dumps(facts | {"machine": machine()}) + "\n")
    print(json.dumps(facts), flush=True)


def figure() -> None:
    """The result file and its figure."""
    parts = {
        name: json.loads((OUT / f"{name}.json").read_text())
        for name in ("seams", "times", "memory")
    }
    runs = defaultdict(list)
    for count, seconds in parts["times"].pop("found"):
        runs[count].append(seconds)
    pixels = np.array(sorted(runs), np.float64)
    medians = np.array([np.median(runs[int(count)]) for count in pixels])
    slope, start = np.polyfit(pixels, medians, 1)
    left = medians - (slope * pixels + start)
    r2 = 1 - float((left**2).sum() / ((medians - medians.mean()) ** 2).sum())
    parts["times"] |= {
        "seconds": {str(int(count)): runs[int(count)] for count in pixels},
        "seconds_a_megapixel": round(slope * 1e6, 3),
        "start_seconds": round(start, 3), "r2": round(r2, 5),
    }  # fmt: skip
    machines = [part.pop("machine") for part in parts.values()]
    record = parts | {"machine": machines[1]}
    write_text(RESULTS / "tiles.json", json.dumps(record, indent=1) + "\n")
    drawn, ((first, second),) = new_figure(1, 2, (9, 3.4))
    for (name, title), colour in zip(
        (("blended", "blended"), ("cut_off", "cut off")), COLOURS.values(), strict=True
    ):
        first.plot(*zip(*parts["seams"][name]["by_distance"], strict=True), color=colour,
                   marker="o", markersize=3, label=title)  # fmt: skip
    first.set(xlabel="pixels from the nearest seam", ylim=(0, None),
              ylabel="mean |U, tiled − untiled|\nin standard deviations")  # fmt: skip
    second.plot(pixels / 1e6, medians, "o", color=COLOURS["final"])
    second.plot(pixels / 1e6, slope * pixels + start, color="0.6", linewidth=1,
                label=f"{slope * 1e6:.2f} s a megapixel, R² {r2:.4f}")  # fmt: skip
    second.set(xlabel="megapixels", ylabel="seconds of one thread", ylim=(0, None))
    for axes in (first, second):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(drawn, RESULTS / "figures" / "tiles.png")
    print(json.dumps(record["times"]))


if __name__ == "__main__":
    main()
