"""How much of a runtime's speed `cdgp predict` passes on, for torch, onnxruntime and OpenVINO.

    python -m cdgp_bench.studies.throughput RUN IMAGES [--count 2000] [--rounds 3]

RUN is the folder of a run, which is exported here; IMAGES is a folder of images. In each round and
for each runtime a process of its own runs the bare network in a loop on inputs in memory (batches
of one and four, all threads), then `predict_folder` over IMAGES with overlays of the rejected
images, then with all overlays. Writes docs/results/throughput.json: images a second, medians over
rounds, and ratios within rounds; cold starts and peaks of `cdgp predict` on one image; and
`Detector.predict` against runtime plus resize.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdgp.data.images import to_input
from cdgp.data.walk import Search, walk_images
from cdgp.export import TARGETS, ExportOptions, export
from cdgp.files import write_text
from cdgp.inference import load
from cdgp.progress import Quiet
from cdgp.report.results import Overlays
from cdgp.workflows import predict_folder
from cdgp_bench.measure import harness

OUT = Path("docs/results/throughput.json")
KEPT = 64
"""Inputs of the bare loop."""
LOOPS = 4


class Measured:
    """A model in a process of its own."""

    def __init__(self, model: str, images: str) -> None:
        self.model, self.images = model, Path(images)
        self.detector = load(model)
        paths = sorted(self.images.iterdir())
        chosen = paths[:: max(1, len(paths) // KEPT)][:KEPT]
        self.pixels = [self.detector.read(path) for path in chosen]
        size = self.detector.settings.input_size
        self.inputs = np.stack([to_input(pixels, size) for pixels in self.pixels])

    def bare(self, batch: int) -> float:
        """Images a second of the network alone."""
        parts = [self.inputs[i : i + batch] for i in range(0, len(self.inputs), batch)]
        self.detector.runtime.run(parts[0])
        seconds = harness.seconds_of(
            lambda: [self.detector.runtime.run(part) for part in parts * LOOPS]
        )
        return LOOPS * len(self.inputs) / seconds

    def predicted(self, overlays: Overlays) -> float:
        """Images a second of the whole prediction, tables and report included."""
        with tempfile.TemporaryDirectory() as folder:
            seconds = harness.seconds_of(
                lambda: predict_folder(
                    self.model, self.images, Path(folder) / "out", overlays=overlays
                )
            )
        return len(list(self.images.iterdir())) / seconds

    def single(self) -> tuple[float, float]:
        """Milliseconds of ``Detector.predict`` on an array, and of resize and runtime alone."""
        size, run = self.detector.settings.input_size, self.detector.runtime.run
        work: dict[str, Callable[[NDArray[np.float32]], object]] = {
            "predict": self.detector.predict,
            "bare": lambda pixels: run(to_input(pixels, size)[None]),
        }
        turns = {name: partial(timed, task, cycle(self.pixels)) for name, task in work.items()}
        times = harness.alternate(turns, len(self.pixels), warm_ups=1)
        predict, bare = (1000 * float(np.median(times[name])) for name in ("predict", "bare"))
        return predict, bare


def timed(
    task: Callable[[NDArray[np.float32]], object], images: Iterator[NDArray[np.float32]]
) -> float:
    """Seconds of a task on the next image."""
    pixels = next(images)
    return harness.seconds_of(lambda: task(pixels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        models = {"torch": arguments.run}
        for target, (suffix, runtime) in TARGETS.items():
            models[runtime] = folder / f"a{suffix}"
            export(arguments.run, ExportOptions(target, models[runtime]), Quiet())
        images, one = folder / "images", folder / "one"
        link_images(arguments.images, images, arguments.count)
        link_images(arguments.images, one, 1)
        found = {
            name: measured(str(m), images, one, arguments.rounds) for name, m in models.items()
        }
    facts = {"images": arguments.count, "rounds": arguments.rounds}
    write_text(
        OUT, json.dumps({"machine": harness.machine(), **facts, "runtimes": found}, indent=1)
    )


def link_images(source: Path, folder: Path, count: int) -> None:
    """A folder with so many links to images, from the first again where there are too few."""
    folder.mkdir()
    paths = sorted(walk_images(source, Search([source], None)))
    for i, path in enumerate(islice(cycle(paths), count)):
        (folder / f"{i:06}{path.suffix}").symlink_to(path.resolve())


def measured(model: str, images: Path, one: Path, rounds: int) -> dict[str, Any]:
    """All figures of one runtime."""
    rows: list[dict[str, float]] = []
    for _ in range(rounds):
        with harness.Worker(Measured, model, str(images)) as worker:
            row = {f"bare_{batch}": worker.call("bare", batch) for batch in (1, 4)}
            row |= {name: worker.call("predicted", name) for name in ("rejected", "all")}
            row["bare_1_again"] = worker.call("bare", 1)
            predict, bare = worker.call("single")
        row |= {"predict_ms": predict, "resize_and_runtime_ms": bare}
        loop = (row["bare_1"] + row["bare_1_again"]) / 2
        row |= {
            "share_rejected": row["rejected"] / loop,
            "share_all": row["all"] / loop,
            "predict_over_bare": predict / bare,
        }
        print(model, {key: round(value, 3) for key, value in row.items()}, flush=True)
        rows.append(row)
    starts = []
    for _ in range(rounds):
        out = one.parent / "out"
        starts.append(harness.command_cost(
            [f"{sys.prefix}/bin/cdgp", "predict", model, str(one), "--out", str(out), "--quiet"]
        ))  # fmt: skip
        shutil.rmtree(out)
    medians = {key: round(float(np.median([r[key] for r in rows])), 3) for key in rows[0]}
    return {
        "median": medians,
        "rounds": [{key: round(value, 3) for key, value in row.items()} for row in rows],
        "cold_start_s": round(float(np.median([s.seconds for s in starts])), 2),
        "cold_start_peak_mib": round(float(np.median([s.peak_kib for s in starts])) / 1024),
    }


if __name__ == "__main__":
    main()
