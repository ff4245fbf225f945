"""The whole pipeline against its floor, the two encoders alone, in every runtime.

    python -m cdgp_bench.studies.latency --preset lite --preset paper   # processor, two threads
    python -m cdgp_bench.studies.latency --preset paper --device cuda   # on a GPU
    python -m cdgp_bench.studies.latency --table                        # the results as Markdown

Writes docs/results/latency.json. Weights are random: they do not change what is computed, and the
table of the normal tail has the paper's million scores. "Encoders" are two plain passes, each with
its batch norms folded in and its own stem; "stem once" are the same two behind one stem, which is
what the pipeline computes; the whole pipeline runs from the network's input to the final map at the
input's size and the probability. Each round starts a process for each runtime, in which single runs
of the three take turns, with a pause before each in which the threads of the last one go to sleep;
all rounds' runs are pooled. Ratios are medians over neighbouring runs. On a GPU torch alone is
measured: float32 and bfloat16, eager, compiled, and replayed as a CUDA graph.
"""

import argparse
import contextlib
import copy
import io
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cdgp.files import write_text
from cdgp.method.backbone import Encoder
from cdgp.method.build import assemble, new_pair, new_projection, new_student
from cdgp.method.calibration import BranchStatistics, Calibration, NormalTail
from cdgp.method.distance import NormalDistance, fit_distance
from cdgp.method.fold import fix_padding, fold_batch_norms
from cdgp.method.graph import Encoders, EvidenceGraph, InferenceGraph
from cdgp.method.score import ImageCalibrator
from cdgp.presets import Settings, settings
from cdgp.runtimes.base import require_package
from cdgp.runtimes.onnx import OnnxRuntime
from cdgp.runtimes.openvino import compiled_for
from cdgp_bench.measure import harness
from cdgp_bench.studies import markdown_table

OUT = Path("docs/results/latency.json")
SIZE = (256, 256)
BATCHES = (1, 8)
ROUNDS, WARM_UPS, RUNS = 4, 3, 18
RUNTIMES = ("torch", "onnxruntime", "openvino")


class Plain(nn.Module):
    """Two encoders and nothing else."""

    def __init__(self, encoder: Encoder, teacher: Encoder) -> None:
        super().__init__()
        self.encoder, self.teacher = copy.deepcopy(encoder), copy.deepcopy(teacher)
        for encoder in (self.encoder, self.teacher):
            fold_batch_norms(encoder.trunk)
            fix_padding(encoder.trunk)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        tuned = self.encoder(self.encoder.normalise(images))
        return (*tuned, *self.teacher(self.teacher.normalise(images)))


def built(preset: str) -> dict[str, nn.Module]:
    """Both encoders, both behind one stem, and the whole pipeline over those."""
    torch.manual_seed(0)
    chosen = settings(preset)  # type: ignore[arg-type]
    # All weights differ: a runtime that finds equal ones computes them only once.
    encoder, teacher = Encoder(chosen.backbone.name), Encoder(chosen.backbone.name)
    both = Plain(encoder, teacher)
    # As after training: one stem, and behind it weights that differ.
    stem = [name for name, _ in encoder.named_stem()]
    own = {k: v for k, v in encoder.trunk.state_dict().items() if k.split(".")[0] in stem}
    teacher.trunk.load_state_dict(own, strict=False)
    dim, s = chosen.backbone.token_dim, chosen.inducing
    Zn, Za = (nn.functional.normalize(torch.randn(n, dim), dim=1) for n in (s.normal, s.anomaly))
    pair = new_pair(Zn, Za, chosen.dual_gp)
    for name, values in pair.named_parameters():
        if name.endswith(".m"):
            values.data.normal_()
    projection, student = new_projection(encoder, chosen), new_student(teacher, chosen)
    distance = random_distance(teacher, chosen) if chosen.distance.weight else None
    network = assemble((encoder, projection, pair), teacher, student, distance, chosen)
    entries = 3 if chosen.calibration.image_evidence == "all" else 1
    scores = torch.randn(chosen.calibration.tail_pixels).sort().values
    tail = NormalTail(scores, math.nan, math.nan, math.nan, chosen.calibration.tail_floor)
    calibration = Calibration(
        BranchStatistics(0.0, 1.0), BranchStatistics(0.3, 0.1), tail,
        ImageCalibrator((0.0,) * entries, (1.0,) * entries, (1.0,) * entries, 0.0),
        chosen.calibration.fusion_weight, chosen.calibration.image_weight,
        distance_weight=chosen.distance.weight,
    )  # fmt: skip
    parts = {"encoders": both, "stem once": Encoders(encoder, teacher),
             "whole": InferenceGraph(EvidenceGraph(network), calibration)}  # fmt: skip
    for module in parts.values():
        module.requires_grad_(False).eval().to(memory_format=torch.channels_last)
    return parts


def random_distance(teacher: Encoder, chosen: Settings) -> NormalDistance:
    """A normal distance of random images' features; its work does not depend on the numbers."""
    with torch.no_grad():
        features = teacher.eval()(torch.randn(2, 3, *SIZE))
    return fit_distance(lambda: [features], chosen.distance.components)


def one(preset: str, batch: int, runtime: str, threads: int, count: int) -> dict[str, list[float]]:
    """Seconds of runs of each part, taking turns, in this process."""
    torch.set_num_threads(threads)
    parts = built(preset)
    images = torch.rand(batch, 3, *SIZE)
    with torch.inference_mode():
        if runtime == "torch":
            images = images.contiguous(memory_format=torch.channels_last)
            runs: dict[str, Callable[[], object]] = {
                name: partial(module, images) for name, module in parts.items()
            }
        else:
            runs = {name: exported(module, runtime, images.numpy(), threads)
                    for name, module in parts.items()}  # fmt: skip
        return timed(runs, torch.device("cpu"), count)


def exported(
    module: nn.Module, runtime: str, images: np.ndarray, threads: int
) -> Callable[[], object]:
    """One run of a module in another runtime, with the options that the product gives it."""
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, (torch.rand(2, 3, *SIZE),), dynamo=True, dynamic_shapes=({0: batch},),
            input_names=["images"], opset_version=18, verbose=False,
        )  # fmt: skip
    assert program is not None
    data = program.model_proto.SerializeToString()
    if runtime == "onnxruntime":
        session = OnnxRuntime(data, threads).session
        return lambda: session.run(None, {"images": images})
    openvino = require_package("openvino")

    model = openvino.Core().read_model(data)
    request = compiled_for(model, list(images.shape), threads).create_infer_request()
    return lambda: request.infer({"images": images}, share_inputs=True)


def timed(
    runs: dict[str, Callable[[], object]], device: torch.device, count: int
) -> dict[str, list[float]]:
    """Seconds of ``count`` runs of each, taking turns."""
    turns = {name: partial(harness.seconds_of, run, device) for name, run in runs.items()}
    return harness.alternate(turns, count, WARM_UPS, harness.PAUSE)


def on_processor(
    presets: list[str], batches: list[int], rounds: int, runs: int, threads: int
) -> Iterator[dict[str, Any]]:
    """A row for each preset, batch and runtime."""
    pooled: dict[tuple[str, int, str], dict[str, list[float]]] = {}
    for _, preset, batch, runtime in itertools.product(range(rounds), presets, batches, RUNTIMES):
        times = harness.in_process(one, preset, batch, runtime, threads, runs // rounds)
        kept = pooled.setdefault((preset, batch, runtime), {})
        for name, values in times.items():
            kept.setdefault(name, []).extend(values)
    for (preset, batch, runtime), kept in pooled.items():
        yield {"device": "cpu", "threads": threads, "precision": "float32", "mode": "eager",
               **row(preset, batch, runtime, kept)}  # fmt: skip


def row(preset: str, batch: int, runtime: str, kept: dict[str, list[float]]) -> dict[str, Any]:
    """Medians and ratios of one preset, batch and runtime."""
    both, once, whole = (1000 * np.array(kept[name]) for name in ("encoders", "stem once", "whole"))
    return {
        "preset": preset, "batch": batch, "runtime": runtime, "runs": len(whole),
        # Of neighbouring runs, since the machine's speed may change between rounds.
        "ratio": float(np.median(whole / both)), "ratio_stem_once": float(np.median(whole / once)),
        "encoders_ms": float(np.median(both)), "whole_ms": float(np.median(whole)),
        "whole_p95_ms": float(np.percentile(whole, 95)),
    }  # fmt: skip


def in_torch(
    presets: list[str], batches: list[int], device: torch.device, runs: int
) -> Iterator[dict[str, Any]]:
    """A row for each preset, batch, precision and mode, on one device."""
    for preset in presets:
        parts = {name: module.to(device) for name, module in built(preset).items()}
        for batch in batches:
            images = torch.rand(batch, 3, *SIZE, device=device)
            images = images.contiguous(memory_format=torch.channels_last)
            for precision in ("float32", "bfloat16"):
                for mode in ("eager", "compiled", *(("graph",) if device.type == "cuda" else ())):
                    made = {name: way(module, images, precision, mode)
                            for name, module in parts.items()}  # fmt: skip
                    harness.reset_peak_memory(device)
                    made["whole"]()
                    memory, memory_of = harness.peak_memory(device)
                    kept = timed(made, device, runs)
                    yield {"device": device.type, "threads": torch.get_num_threads(),
                           "precision": precision, "mode": mode,
                           **row(preset, batch, "torch", kept),
                           "peak_memory_mib": memory, "memory_of": memory_of}  # fmt: skip
                    torch.compiler.reset()


def way(module: nn.Module, images: Tensor, precision: str, mode: str) -> Callable[[], object]:
    """One run of a module in a precision and a mode."""
    chosen: Callable[[Tensor], object] = torch.compile(module) if mode == "compiled" else module
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]

    def run() -> object:
        with (
            torch.inference_mode(),
            torch.autocast(images.device.type, dtype, enabled=precision != "float32"),
        ):
            return chosen(images)

    if mode != "graph":
        return run
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def table(found: dict[str, Any]) -> str:
    """The result file as Markdown."""
    lines = []
    for r in found["rows"]:
        name = r["runtime"] + ("" if (r["precision"], r["mode"]) == ("float32", "eager")
                               else f", {r['precision']}, {r['mode']}")  # fmt: skip
        name += "" if r["device"] == "cpu" else f" ({found['machine'].get('device')})"
        whole = f"{r['whole_ms']:.1f} ({r['whole_p95_ms']:.1f})"
        ratios = f"{r['ratio']:.2f}", f"{r['ratio_stem_once']:.2f}"
        lines.append([r["preset"], r["batch"], name, *ratios, whole, f"{r['encoders_ms']:.1f}",
                      r["runs"]])  # fmt: skip
    head = ["preset", "batch", "runtime", "whole ÷ encoders", "÷ those with the stem once",
            "whole, ms (p95)", "encoders, ms", "n"]  # fmt: skip
    return markdown_table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", action="append", choices=["lite", "paper"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--modes", action="store_true", help="torch's precisions and modes instead")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--batch", type=int, action="append", choices=BATCHES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--runs", type=int, default=ROUNDS * RUNS, help="of each, in all rounds")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if not given.table:
        if given.device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("no GPU here; leave --device out")
        presets, batches = given.preset or ["lite", "paper"], given.batch or list(BATCHES)
        if given.modes or given.device == "cuda":
            torch.set_num_threads(given.threads)
            new = in_torch(presets, batches, torch.device(given.device), given.runs)
        else:
            new = on_processor(presets, batches, given.rounds, given.runs, given.threads)
        add_rows(given.out, list(new))
    print(table(json.loads(given.out.read_text())))


def add_rows(path: Path, new: list[dict[str, Any]]) -> None:
    """Put rows into the result file, in place of those that they measure again."""
    old = json.loads(path.read_text())["rows"] if path.is_file() else []
    keys = ("preset", "batch", "runtime", "device", "precision", "mode")
    replaced = {tuple(r[k] for k in keys) for r in new}
    rows = [r for r in old if tuple(r[k] for k in keys) not in replaced] + new
    rows.sort(key=lambda r: [r[k] for k in keys])
    write_text(path, json.dumps({"machine": harness.machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
