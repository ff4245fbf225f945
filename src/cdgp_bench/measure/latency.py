"""What a prediction costs in each runtime: latency, throughput, memory, cold start, stages.

Every model file runs in a process of its own, and single runs of all files take turns, so that all
of them meet the same load of the machine.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from cdgp.data.images import to_input
from cdgp.data.resize import resize_map
from cdgp.inference import Detector, find_regions, load
from cdgp.progress import Progress
from cdgp.runtimes.torch import TorchRuntime
from cdgp_bench.figures import new_figure, save_figure
from cdgp_bench.measure import harness

WARM_UPS = 5
BATCHES = (1, 2, 4, 8, 16)


def measure(
    paths: Sequence[Path], threads: int | None, runs: int, progress: Progress
) -> dict[str, Any]:
    """Cost of one prediction at the model's input size, for each model file.

    Returns:
        ``machine``, ``threads``, ``runs`` and ``files``: for each of them ``runtime``,
        ``precision``, ``input_size``, ``latency_ms`` (median, p95), ``throughput`` (by batch, in
        images a second), ``peak_memory_mib`` at batch one, ``cold_start_s``; for torch also
        ``parameters``, ``macs`` and ``stages_ms``.
    """
    with contextlib.ExitStack() as stack:
        workers, found = [], []
        for path in paths:
            began = time.perf_counter()
            worker = stack.enter_context(harness.Worker(_Model, path, threads))
            seconds = time.perf_counter() - began
            workers.append(worker)
            found.append({"file": str(path), **worker.call("facts"), "cold_start_s": seconds})

        def timed(batch: int, count: int) -> list[list[float]]:
            turns = {str(i): partial(w.call, "run", batch) for i, w in enumerate(workers)}
            with progress.phase("Timing", (WARM_UPS + count) * len(turns)) as advance:
                return list(
                    harness.alternate(turns, count, WARM_UPS, harness.PAUSE, advance).values()
                )

        for facts, times, worker in zip(found, timed(1, runs), workers, strict=True):
            latency = 1000 * np.array(times)
            facts["latency_ms"] = {
                "median": float(np.median(latency)), "p95": float(np.percentile(latency, 95)),
            }  # fmt: skip
            facts["peak_memory_mib"] = worker.call("peak")
            facts |= worker.call("stages", runs)
        for batch in BATCHES:
            for facts, times in zip(found, timed(batch, max(3, runs // 10)), strict=True):
                facts.setdefault("throughput", {})[batch] = batch / float(np.median(times))
    return {"machine": harness.machine(), "threads": threads, "runs": runs, "files": found}


class _Model:
    """A model file in the process that measures it."""

    def __init__(self, path: Path, threads: int | None) -> None:
        self.detector = load(path, threads)
        self.device = getattr(self.detector.runtime, "device", torch.device("cpu"))
        self.inputs = {
            b: np.random.default_rng(b).random(
                (b, 3, *self.detector.settings.input_size), np.float32
            )
            for b in BATCHES
        }
        harness.reset_peak_memory(self.device)
        self.run(1)  # the first one plans and takes its memory

    def facts(self) -> dict[str, Any]:
        return {
            "runtime": self.detector.runtime.name,
            "precision": precision_of(self.detector),
            "input_size": list(self.detector.settings.input_size),
            "device": self.device.type,
        }

    def run(self, batch: int) -> float:
        return harness.seconds_of(lambda: self.detector.runtime.run(self.inputs[batch]))

    def peak(self) -> float | None:
        return harness.peak_memory(self.device).mib

    def stages(self, runs: int) -> dict[str, Any]:
        return stages(self.detector, self.inputs[1], runs)


def precision_of(detector: Detector) -> str:
    """Of the networks, with torch's mode where that is not eager."""
    runtime = detector.runtime
    if not isinstance(runtime, TorchRuntime):
        return str(detector.card.export["precision"])
    chosen = runtime.inference
    return chosen.precision + ("" if chosen.mode == "eager" else f" {chosen.mode}")


@torch.inference_mode()
def stages(detector: Detector, batch: NDArray[np.float32], runs: int) -> dict[str, Any]:
    """Parameters, multiply-adds and the time of each stage, where torch runs the model.

    The last three stages are of an image of 1024 × 768 pixels, with one region of a fortieth of
    it: noise, which the other stages are given, would be regions all over.
    """
    runtime = detector.runtime
    if not isinstance(runtime, TorchRuntime):
        return {}
    graph, device = runtime.graph, runtime.device
    head, distance = graph.evidence.head, graph.evidence.distance
    images = torch.from_numpy(batch).to(device).contiguous(memory_format=torch.channels_last)
    with FlopCounterMode(display=False) as counter:
        graph(images)
    tuned, frozen = graph.evidence.encoders(images)
    sizes = [(f.shape[-2], f.shape[-1]) for f in frozen]
    evidence = graph.evidence(images)
    size = detector.settings.input_size

    image = np.random.default_rng(0).random((768, 1024, 3), dtype=np.float32)
    found = runtime.run(batch)
    native = np.zeros((768, 1024), np.float32)
    native[300:400, 400:600] = detector.region_level + 1
    work: dict[str, Callable[[], object]] = {
        "encoders": lambda: graph.evidence.encoders(images),
        **({"dominance head": lambda: head(tuned)} if head else {}),
        **({"normal distance": lambda: distance(frozen)} if distance else {}),
        "student": lambda: graph.evidence.student(frozen[2], sizes),
        "residual": lambda: graph.evidence.residual(frozen),
        "fusion and surprisal": lambda: graph.outputs(evidence, size),
        "input from image": lambda: to_input(image, size),
        "maps to image": lambda: [
            resize_map(m[0], (768, 1024)) for m in (found.anomaly_map, found.surprisal)
        ],
        "regions": lambda: find_regions(native, detector.region_level),
    }
    turns = {name: partial(harness.seconds_of, task, device) for name, task in work.items()}
    times = harness.alternate(turns, runs, WARM_UPS)
    times["residual"] = [a - b for a, b in zip(times["residual"], times["student"], strict=True)]
    return {
        "parameters": sum(p.numel() for p in graph.parameters()),
        "macs": counter.get_total_flops() // 2,
        "stages_ms": {n: max(0.0, 1000 * float(np.median(t))) for n, t in times.items()},
    }


def plot(found: dict[str, Any], path: Path) -> None:
    """Latency of each file, and the share of each stage in torch's time."""
    files = found["files"]
    staged = [facts for facts in files if "stages_ms" in facts]
    size = 9, 1.4 + 0.45 * len(files) + (1.2 if staged else 0)
    figure, axes = new_figure(1 + bool(staged), 1, size)
    _plot_latency(axes[0, 0], files)
    if staged:
        _plot_stages(axes[1, 0], staged[0]["stages_ms"])
    save_figure(figure, path)


def _plot_latency(axis: Any, files: Sequence[dict[str, Any]]) -> None:
    names = [f"{Path(f['file']).name}: {f['runtime']}, {f['precision']}" for f in files]
    latencies = [f["latency_ms"] for f in files]
    axis.barh(range(len(files)), [ms["median"] for ms in latencies], color="#0072b2")
    axis.set_yticks(range(len(files)), names)  # by place: two files may have one name
    for place, ms in enumerate(latencies):
        axis.plot([ms["median"], ms["p95"]], [place, place], color="#222222", linewidth=1)
        axis.text(ms["p95"], place, f"  {ms['median']:.1f} ms", va="center", fontsize=8)
    axis.set_xlim(0, 1.2 * max(ms["p95"] for ms in latencies))
    axis.invert_yaxis()
    axis.set_title("One image: median, line to the 95th percentile, in ms", fontsize=9)


def _plot_stages(axis: Any, stages_ms: dict[str, float]) -> None:
    start, total = 0.0, sum(stages_ms.values())
    colours = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999",
               "#f0e442", "#882255"]  # fmt: skip
    for (name, ms), colour in zip(stages_ms.items(), colours, strict=True):
        axis.barh(["torch"], [ms], left=start, color=colour,
                  label=f"{name} {100 * ms / total:.0f} %")  # fmt: skip
        start += ms
    axis.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.3))
    axis.set_title("Stages in torch, in ms", fontsize=9)
