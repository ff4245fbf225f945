"""What a prediction costs in each runtime: latency, throughput, memory, cold start, stages.

Every model file runs in a process of its own, and single runs of all files take turns, so that what
else the machine does meets them alike.
"""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from cdgp.data.images import to_input
from cdgp.errors import CdgpError, LatencyError, OutputError
from cdgp.files import atomic_write
from cdgp.inference import Detector, find_regions, load
from cdgp.method.calibration import fuse, upsample
from cdgp.progress import Progress
from cdgp.runtimes.torch import TorchRuntime
from cdgp_bench.measure.complexity import machine, peak_memory, start_peak_memory, wait_for

WARM_UPS = 5
BATCHES = (1, 2, 4, 8, 16)
PAUSE = 0.05
"""Seconds between runs, in which the threads of the last runtime go to sleep; those of onnxruntime
take more than 20 ms, and until then slow down whatever runs next."""


def measure(
    paths: Sequence[Path], threads: int | None, runs: int, progress: Progress
) -> dict[str, Any]:
    """Cost of one prediction at the model's input size, for each model file.

    Args:
        paths: runs, model files and exported files.
        threads: each runtime's own choice where None.
        runs: timed runs of each file.
        progress: where to tell the progress.

    Returns:
        ``machine``, ``threads``, ``runs`` and ``files``: for each of them ``runtime``,
        ``precision``, ``input_size``, ``latency_ms`` (median, p95), ``throughput`` (by batch, in
        images a second), ``peak_memory_mib`` at batch one, ``cold_start_s``; for torch also
        ``parameters``, ``macs`` and ``stages_ms``.

    Raises:
        CdgpError: a file that cannot be loaded.
    """
    context = multiprocessing.get_context("spawn")
    workers, found = [], []
    try:
        for path in paths:
            began = time.monotonic()
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, path, threads), daemon=True)
            process.start()
            theirs.close()
            workers.append((process, ours))
            facts = _ask(ours, None)
            found.append({"file": str(path), **facts, "cold_start_s": time.monotonic() - began})
        seconds = alternate([_turn(ours, 1) for _, ours in workers], runs, progress)
        for facts, times, (_, ours) in zip(found, seconds, workers, strict=True):
            told = 1000 * np.array(times)
            facts["latency_ms"] = {
                "median": float(np.median(told)), "p95": float(np.percentile(told, 95)),
            }  # fmt: skip
            facts["peak_memory_mib"] = _ask(ours, ("memory",))
            facts |= _ask(ours, ("stages", runs))
        few = max(3, runs // 10)
        for batch in BATCHES:
            turns = [_turn(ours, batch) for _, ours in workers]
            for facts, times in zip(found, alternate(turns, few, progress), strict=True):
                facts.setdefault("throughput", {})[batch] = batch / float(np.median(times))
    finally:
        for process, _ in workers:
            process.kill()
            process.join()
    return {"machine": machine(), "threads": threads, "runs": runs, "files": found}


def alternate(
    turns: Sequence[Callable[[], float]], runs: int, progress: Progress
) -> list[list[float]]:
    """Seconds of ``runs`` runs of each, taking turns, after some that do not count."""
    seconds: list[list[float]] = [[] for _ in turns]
    with progress.phase("Timing", (WARM_UPS + runs) * len(turns)) as advance:
        for index in range(WARM_UPS + runs):
            for turn, kept in zip(turns, seconds, strict=True):
                time.sleep(PAUSE)
                spent = turn()
                if index >= WARM_UPS:
                    kept.append(spent)
                advance()
    return seconds


def _turn(pipe: Connection, batch: int) -> Callable[[], float]:
    """One run of a worker, in seconds."""
    return lambda: float(_ask(pipe, ("run", batch)))


def _ask(pipe: Connection, question: tuple[Any, ...] | None) -> Any:
    """What a worker answers; ``None`` waits for what it says of itself when it is ready."""
    try:
        if question is not None:
            pipe.send(question)
        answer = pipe.recv()
    except (EOFError, OSError):
        raise LatencyError("a measuring process ended early; is there enough memory?") from None
    if isinstance(answer, CdgpError):
        raise answer
    return answer


def _work(pipe: Connection, path: Path, threads: int | None) -> None:
    """A measuring process: loads one file, then does what it is told."""
    try:
        detector = load(path, threads)
        size = detector.settings.input_size
        device = getattr(detector.runtime, "device", torch.device("cpu"))
        inputs = {b: torch.rand(b, 3, *size, generator=torch.Generator().manual_seed(b))
                  for b in BATCHES}  # fmt: skip
        start_peak_memory(device)
        detector.runtime.run(inputs[1])  # the first one plans and takes its memory
    except CdgpError as error:
        pipe.send(error)
        return
    pipe.send({
        "runtime": detector.runtime.name,
        "precision": precision_of(detector),
        "input_size": list(size),
        "device": device.type,
    })  # fmt: skip
    while True:
        what, *arguments = pipe.recv()
        if what == "run":
            began = time.perf_counter()
            detector.runtime.run(inputs[arguments[0]])
            pipe.send(time.perf_counter() - began)
        elif what == "memory":
            pipe.send(peak_memory(device)[0])
        else:
            pipe.send(stages(detector, inputs[1], arguments[0]))


def precision_of(detector: Detector) -> str:
    """Of the networks, with torch's mode where that is not eager."""
    runtime = detector.runtime
    if not isinstance(runtime, TorchRuntime):
        return str(detector.card.export["precision"])
    chosen = runtime.inference
    return chosen.precision + ("" if chosen.mode == "eager" else f" {chosen.mode}")


@torch.inference_mode()
def stages(detector: Detector, images: torch.Tensor, runs: int) -> dict[str, Any]:
    """Parameters, multiply-adds and the time of each stage, where torch runs the model.

    The last three stages are of an image of 1024 × 768 pixels, with one region of a fortieth of
    it: noise, which the other stages are given, would be regions all over.
    """
    runtime = detector.runtime
    if not isinstance(runtime, TorchRuntime):
        return {}
    graph, device = runtime.graph, runtime.device
    images = images.to(device).contiguous(memory_format=torch.channels_last)
    with FlopCounterMode(display=False) as counter:
        graph(images)
    tuned, frozen = graph.evidence.encoders(images)
    sizes = [(f.shape[-2], f.shape[-1]) for f in frozen]
    dominance, residual, _ = graph.evidence(images)
    c, size = graph.calibration, detector.settings.input_size

    def calibrate() -> None:
        low = fuse(dominance, residual, c.dominance, c.residual, c.fusion_weight)
        graph.table(upsample(low, size))

    image = np.random.default_rng(0).random((768, 1024, 3), dtype=np.float32)
    found = runtime.run(images)
    native = np.zeros((768, 1024), np.float32)
    native[300:400, 400:600] = detector.region_level + 1
    work: dict[str, Callable[[], object]] = {
        "encoders": lambda: graph.evidence.encoders(images),
        "dominance head": lambda: graph.evidence.head(tuned),
        "student": lambda: graph.evidence.student(frozen[2], sizes),
        "residual": lambda: graph.evidence.residual(frozen),
        "fusion and surprisal": calibrate,
        "input from image": lambda: to_input(image, size),
        "maps to image": lambda: [
            upsample(m, (768, 1024)) for m in (found.anomaly_map, found.surprisal)
        ],
        "regions": lambda: find_regions(native, detector.region_level),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for index in range(WARM_UPS + runs):
        for name, task in work.items():
            began = time.perf_counter()
            task()
            wait_for(device)
            if index >= WARM_UPS:
                times[name].append(1000 * (time.perf_counter() - began))
    times["residual"] = [a - b for a, b in zip(times["residual"], times["student"], strict=True)]
    return {
        "parameters": sum(p.numel() for p in graph.parameters()),
        "macs": counter.get_total_flops() // 2,
        "stages_ms": {name: max(0.0, float(np.median(t))) for name, t in times.items()},
    }


def plot(found: dict[str, Any], path: Path) -> None:
    """Latency of each file, and the share of each stage in torch's time.

    Raises:
        OutputError: it cannot be written.
    """
    from matplotlib.figure import Figure

    files = found["files"]
    staged = [facts for facts in files if "stages_ms" in facts]
    figure = Figure(figsize=(9, 1.4 + 0.45 * len(files) + (1.2 if staged else 0)),
                    layout="constrained")  # fmt: skip
    axes = figure.subplots(1 + bool(staged), 1, squeeze=False)[:, 0]
    names = [f"{Path(f['file']).name}: {f['runtime']}, {f['precision']}" for f in files]
    medians = [f["latency_ms"]["median"] for f in files]
    axes[0].barh(range(len(files)), medians, color="#0072b2")
    axes[0].set_yticks(range(len(files)), names)  # by place: two files may have one name
    for place, facts in enumerate(files):
        told = facts["latency_ms"]
        axes[0].plot([told["median"], told["p95"]], [place, place], color="#222222", linewidth=1)
        axes[0].text(told["p95"], place, f"  {told['median']:.1f} ms", va="center", fontsize=8)
    axes[0].set_xlim(0, 1.2 * max(f["latency_ms"]["p95"] for f in files))
    axes[0].invert_yaxis()
    axes[0].set_title("One image: median, line to the 95th percentile, in ms", fontsize=9)
    if staged:
        start, total = 0.0, sum(staged[0]["stages_ms"].values())
        colours = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999",
                   "#f0e442"]  # fmt: skip
        for (name, ms), colour in zip(staged[0]["stages_ms"].items(), colours, strict=True):
            axes[1].barh(["torch"], [ms], left=start, color=colour,
                         label=f"{name} {100 * ms / total:.0f} %")  # fmt: skip
            start += ms
        axes[1].legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.3))
        axes[1].set_title("Stages in torch, in ms", fontsize=9)
    try:
        with atomic_write(path) as temporary:
            figure.savefig(temporary, dpi=150, format="png", metadata={"Software": None})
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error
