"""Latency and memory of CDGP beside anomalib's methods, each in its own best exported runtime.

    python benchmarks/side_by_side.py [--images 500] [--sessions 2] [--pause]
    python benchmarks/side_by_side.py --table

256 x 256, batch one, two threads, `lite` options and backbone (EfficientNet-Lite0) as the adapters
in ``cdgp_bench.methods`` build them, from the image in [0, 1] to the map at 256 x 256 and the
image score; the methods' own upsampling and blur are inside, as CDGP's calibration is. What
decides latency is real, what does not is made up:

- PatchCore's bank holds random features with the real ones' mean and spread, as many as a 10 %
  coreset of IMAGES good images has (the adapter's own `lite` coreset is 1 %);
- PaDiM has one mean at all positions, and random positive definite inverse covariances;
- RD4AD's bottleneck and decoder, SuperSimpleNet's heads and all of EfficientAD-S are untrained;
- CDGP is trained for a few steps on made surfaces, so that its graph is a real one.

Every method is exported by several ways (ONNX by torch's two exporters for onnxruntime, the first
of these and OpenVINO's own conversion for OpenVINO; CDGP by its own `cdgp export` alone). A way
counts where its map is that of torch on a real input to 1 % of its range. All that are left are
timed, a clearly slower one only until that shows; the fastest stands for its runtime, and the
fastest runtime for its method.

Rounds alternate over all (method, way), in a new order each; every turn is a process of its own, so
that nothing but it is alive: it loads, is compared with torch, runs WARM_UPS times and then TIMED
times (torch, slow to load, takes every second round and runs twice as often). A turn during which
anything else took more than FOREIGN of the processor is run again. Peak memory is the resident set
of that process (VmHWM), libraries and loading included. With ``--pause`` every turn, once loaded,
waits for a line on standard input, so that other work on the machine can be stopped for it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

SIDE, THREADS = 256, 2
RUNTIMES = {"onnxruntime": ".onnx", "openvino": ".xml", "torch": "torch"}
"""And what the files that they run end in."""
METHODS = {
    "cdgp": "CDGP",
    "patchcore": "PatchCore (10 %)",
    "padim": "PaDiM",
    "rd4ad": "RD4AD",
    "efficientad": "EfficientAD-S",
    "supersimplenet": "SuperSimpleNet",
}
WAYS = {
    "dynamo.onnx": "torch.onnx.export(dynamo=True)",
    "script.onnx": "torch.onnx.export(dynamo=False)",
    "dynamo.xml": "openvino.convert_model of dynamo.onnx",
    "torch.xml": "openvino.convert_model of the torch module",
}
OWN_WAYS = {"dynamo.onnx": "cdgp.export.to_onnx", "dynamo.xml": "OpenVINO's reading of that graph"}
TOLERANCE = 0.01
"""Of the map's range: a way that is further from torch is not timed."""
WARM_UPS, TIMED = 3, 6
SLOWER = 1.1
"""A way that is slower than another one of its runtime by this factor is not timed any longer."""
FOREIGN, REPEATS = 0.1, 8
"""Share of the processor that others may take during a turn, and how often it is run at most."""


def build(name: str, folder: Path, images: int) -> tuple[Any, dict[str, Any]]:
    """A module from (1, 3, 256, 256) RGB in [0, 1] to (map, ..., score), and facts of it."""
    import torch
    from cdgp.training.stages import pretrained
    from torch import Tensor, nn

    from cdgp.artifact import load
    from cdgp.method.backbone import Encoder
    from cdgp.method.graph import EvidenceGraph, InferenceGraph
    from cdgp.presets import settings
    from cdgp_bench.grid import METHODS as KNOWN
    from cdgp_bench.methods import efficientad, padim, patchcore, rd4ad, supersimplenet

    torch.manual_seed(0)
    if name == "cdgp":
        model = load(folder / "run" / "model.safetensors")
        network = model.network
        graph = InferenceGraph(EvidenceGraph(network), model.calibration).eval()
        return graph, {
            "parameters": sum(p.numel() for p in network.parameters()),
            "stored": sum(v.numel() for v in network.state_dict().values())
            + len(model.calibration.tail.scores),
            "head": type(graph.evidence.head).__name__,
        }

    class Whole(nn.Module):
        """One of anomalib's models, with the scale of its backbone before it."""

        def __init__(self, model: nn.Module, encoder: Encoder | None) -> None:
            super().__init__()
            self.model = model
            if encoder is not None:  # EfficientAD scales its input itself
                self.register_buffer("mean", encoder.mean.view(1, 3, 1, 1))
                self.register_buffer("std", encoder.std.view(1, 3, 1, 1))

        def scaled(self, images: Tensor) -> Tensor:
            return (images - self.mean) / self.std if hasattr(self, "mean") else images

        def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
            told = self.model(self.scaled(images))
            return told.anomaly_map, told.pred_score

    class Weak(nn.Module):
        """What ``supersimplenet.fit`` runs on an image."""

        def __init__(self, model: supersimplenet.SuperSimpleNet) -> None:
            super().__init__()
            self.model = model

        def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
            said = self.model.said(self.model.adaptor(self.model.features(images)))
            size, blur = list(images.shape[2:]), supersimplenet.BLUR
            spread = nn.functional.interpolate(said.position, size, mode="bilinear")
            kernel = 2 * int(3 * blur) + 1
            blurred = supersimplenet.gaussian_blur(spread, [kernel, kernel], [blur, blur])
            return blurred, torch.sigmoid(said.image)

    chosen = settings("lite", input_size=(SIDE, SIDE))
    options: Any = KNOWN[name].options["lite"]
    facts: dict[str, Any] = {}
    if name == "efficientad":
        inner = efficientad.build(None, chosen, options).model
        inner.mean_std.update({k: torch.ones_like(v) for k, v in inner.mean_std.items()})
        inner.quantiles.update({k: torch.tensor(float(k[1] == "b")) for k in inner.quantiles})
        whole: Any = Whole(inner, None)
    elif name == "supersimplenet":
        whole = Weak(supersimplenet.SuperSimpleNet(pretrained(chosen), options))
    else:
        encoder = pretrained(chosen)
        if name == "patchcore":
            options = options.model_copy(update={"coreset": 0.1})
        made: Any = {"patchcore": patchcore, "padim": padim, "rd4ad": rd4ad}[name]
        inner = made.build(encoder, chosen, options).model
        whole = Whole(inner, encoder)
        if name != "rd4ad":  # in training mode, both give their embedding of an image
            inner.train().feature_extractor.eval()
            with torch.no_grad():
                embedded = inner(whole.scaled(torch.from_numpy(np.load(folder / "input.npy"))))
        if name == "patchcore":
            inner.embedding_store.clear()
            count = int(len(embedded) * images * options.coreset)
            random = torch.randn(count, embedded.shape[1])
            inner.memory_bank = embedded.mean(0) + embedded.std(0) * random
            facts |= {"pictures": images, "coreset": options.coreset,
                      "positions": len(embedded), "bank": [count, embedded.shape[1]]}  # fmt: skip
        if name == "padim":
            inner.memory_bank.clear()
            features, positions = embedded.shape[1], embedded[0, 0].numel()
            factors = torch.randn(positions, features, features)
            # One mean for all positions: with its own each would be at distance zero.
            mean = embedded.mean((0, 2, 3))[:, None]
            inner.gaussian.mean = mean.expand(features, positions).contiguous()
            inner.gaussian.inv_covariance = factors @ factors.mT / features + torch.eye(features)
            facts |= {"covariances": list(factors.shape)}
    whole.eval().requires_grad_(False)
    return whole, facts | {
        "parameters": sum(p.numel() for p in whole.parameters()),
        "stored": sum(v.numel() for v in whole.state_dict().values()),
        "options": options.decides(),
    }


def prepare(name: str, folder: Path, images: int) -> None:
    """Export a method by every way, compare each with torch, and write ``about.json``."""
    import contextlib
    import io
    import warnings

    import openvino
    import torch

    from cdgp import export

    warnings.simplefilter("ignore")
    place = folder / name
    place.mkdir(exist_ok=True)
    module, about = build(name, folder, images)
    image = torch.from_numpy(np.load(folder / "input.npy"))
    with torch.inference_mode():
        expected = module(image)[0].numpy()
    np.save(place / "map.npy", expected)
    core = openvino.Core()

    def dynamo() -> None:
        if name == "cdgp":
            proto = export.to_onnx(module, (SIDE, SIDE), False, export.OPSET)
            (place / "dynamo.onnx").write_bytes(proto.SerializeToString())
            return
        torch.onnx.export(
            module, (image,), dynamo=True, opset_version=export.OPSET, verbose=False
        ).save(place / "dynamo.onnx", external_data=False)

    def script() -> None:
        torch.onnx.export(
            module, (image,), place / "script.onnx", dynamo=False, opset_version=export.OPSET - 1
        )

    def of_onnx() -> None:
        network = core.read_model(place / "dynamo.onnx")
        openvino.save_model(network, place / "dynamo.xml", compress_to_fp16=False)

    def of_torch() -> None:
        network = openvino.convert_model(module, example_input=image, input=[tuple(image.shape)])
        openvino.save_model(network, place / "torch.xml", compress_to_fp16=False)

    ways = {"dynamo.onnx": dynamo, "script.onnx": script, "dynamo.xml": of_onnx,
            "torch.xml": of_torch}  # fmt: skip
    about["exports"] = {}
    for file in OWN_WAYS if name == "cdgp" else WAYS:
        told: dict[str, Any] = {"way": (OWN_WAYS if name == "cdgp" else WAYS)[file]}
        about["exports"][file] = told
        try:
            with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
                ways[file]()
            found = runner(name, file, folder, images)(image.numpy())
        except Exception as error:  # the exporters have no error class of their own
            told["error"] = " ".join(str(error).split())[:300] or type(error).__name__
            continue
        told["parity"] = float(np.abs(found - expected).max() / np.ptp(expected))
        told["file_mib"] = round(
            sum(f.stat().st_size for f in {place / file, (place / file).with_suffix(".bin")}
                if f.exists() and (f.suffix != ".bin" or file.endswith(".xml"))) / 2**20, 1
        )  # fmt: skip
    (place / "about.json").write_text(json.dumps(about))


def runner(name: str, file: str, folder: Path, images: int) -> Any:
    """A function from an input array to the map, by one way; only what it needs is imported."""
    if file == "torch":
        import torch

        torch.set_num_threads(THREADS)
        module = build(name, folder, images)[0]

        def run(image: Any) -> Any:
            with torch.inference_mode():
                given = torch.from_numpy(image)
                if name == "cdgp":  # as TorchRuntime does
                    given = given.contiguous(memory_format=torch.channels_last)
                return module(given)[0].numpy()

    elif file.endswith(".onnx"):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = THREADS
        session = onnxruntime.InferenceSession(
            str(folder / name / file), options, providers=["CPUExecutionProvider"]
        )
        given = session.get_inputs()[0].name

        def run(image: Any) -> Any:
            return session.run(None, {given: image})[0]

    else:
        import openvino

        core = openvino.Core()
        network = core.read_model(folder / name / file)
        network.reshape([1, 3, SIDE, SIDE])  # as OpenVinoRuntime does
        request = core.compile_model(
            network,
            "CPU",
            {"INFERENCE_NUM_THREADS": THREADS, "PERFORMANCE_HINT": "LATENCY",
             "INFERENCE_PRECISION_HINT": "f32"},
        ).create_infer_request()  # fmt: skip

        def run(image: Any) -> Any:
            found = request.infer([image], share_inputs=True)
            return next(np.array(part) for part in found.values())

    return run


def work(name: str, file: str, folder: Path, images: int) -> None:
    """Run when told to on standard input; ``warm-ups timed`` a line."""
    image = np.load(folder / "input.npy")
    run = runner(name, file, folder, images)
    expected = np.load(folder / name / "map.npy")
    parity = float(np.abs(run(image) - expected).max() / np.ptp(expected))
    if not parity < TOLERANCE:
        raise SystemExit(f"{name} by {file}: {parity:.2g} of the map's range away from torch")
    print(json.dumps({"parity": parity}), flush=True)
    for line in sys.stdin:
        warm_ups, timed = map(int, line.split())
        started = time.process_time()
        for _ in range(warm_ups):
            run(image)
        told = []
        for _ in range(timed):
            began = time.perf_counter()
            run(image)
            told.append(1000 * (time.perf_counter() - began))
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found
        answer = {"ms": told, "peak_mib": int(found[1]) / 1024,
                    "used": time.process_time() - started}  # fmt: skip
        print(json.dumps(answer), flush=True)


class Worker:
    """A process that runs one method by one way."""

    def __init__(self, arguments: argparse.Namespace, name: str, file: str) -> None:
        self.name, self.file = name, file
        self.process = subprocess.Popen(
            command(arguments, "--work", name, file), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} by {self.file} has died")
        told: dict[str, Any] = json.loads(line)
        return told

    def turn(self, runs: int, pause: bool) -> dict[str, Any]:
        """Warm-ups and timed runs, again while others disturb them."""
        assert self.process.stdin
        told: dict[str, Any] = {}
        for again in range(REPEATS):
            if pause:
                print("ready: send a line to start", flush=True)
                sys.stdin.readline()
            before, began = busy(), time.perf_counter()
            self.process.stdin.write(f"{WARM_UPS} {runs}\n")
            self.process.stdin.flush()
            told = self.answer()
            passed = (time.perf_counter() - began) * (os.cpu_count() or 1)
            told["foreign"], told["again"] = (busy() - before - told["used"]) / passed, again
            if pause:
                print("timed", flush=True)
            if told["foreign"] < FOREIGN:
                break
        return told

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def command(arguments: argparse.Namespace, *more: str) -> list[str]:
    return [sys.executable, __file__, "--folder", str(arguments.folder),
            "--images", str(arguments.images), *more]  # fmt: skip


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": str(THREADS)}


def make_inputs(folder: Path) -> None:
    """Made surfaces, a CDGP trained on them for a few steps, and one input."""
    import torch

    from cdgp.data.images import read_image, to_input
    from cdgp.presets import settings
    from cdgp.workflows import train_run as fit
    from cdgp_bench.synthetic import make_dataset

    if (folder / "input.npy").exists() and (folder / "run" / "model.safetensors").exists():
        return
    torch.set_num_threads(THREADS)
    made = make_dataset(folder / "surfaces", size=(SIDE, SIDE))
    chosen = settings(
        "lite", input_size=(SIDE, SIDE), dual_gp={"steps": 10, "no_separation": "flag"},
        student={"steps": 10},
    )  # fmt: skip
    fit(made, folder / "run", chosen)
    pixels = next(s for s in made.samples if s.defective).image
    image = to_input(read_image(pixels, chosen.data.white_level), (SIDE, SIDE))
    np.save(folder / "input.npy", image[None].numpy())


def busy() -> float:
    """Seconds that all processors have worked since the machine started."""
    parts = [int(part) for part in Path("/proc/stat").read_text().split("\n")[0].split()[1:8]]
    return (sum(parts) - parts[3] - parts[4]) / os.sysconf("SC_CLK_TCK")


def too_slow(
    turns: dict[tuple[str, str], list[dict[str, Any]]], left: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    """The ways, of those left, that another one of the same method and runtime beats clearly."""
    medians = {way: float(np.median([ms for t in turns[way] for ms in t["ms"]])) for way in left}
    return [
        (name, file)
        for name, file in left
        if medians[name, file]
        > SLOWER
        * min(
            median
            for (other, rival), median in medians.items()
            if other == name and Path(rival).suffix == Path(file).suffix
        )
    ]


def timed(
    arguments: argparse.Namespace, ways: list[tuple[str, str]], seed: int
) -> dict[tuple[str, str], dict[str, Any]]:
    """All (method, file) alternating: medians, 95 % quantiles, peaks."""
    rng = np.random.default_rng(seed)
    parity: dict[tuple[str, str], float] = {}
    turns: dict[tuple[str, str], list[dict[str, Any]]] = {way: [] for way in ways}
    left = list(ways)
    for index in range(arguments.rounds):
        for place in rng.permutation(len(left)):
            name, file = way = left[place]
            if file == "torch" and index % 2:
                continue
            worker = Worker(arguments, name, file)
            parity[way] = worker.answer()["parity"]
            turns[way].append(worker.turn(TIMED * (1 + (file == "torch")), arguments.pause))
            worker.end()
        slow = too_slow(turns, left)
        left = [way for way in left if way not in slow]
        print(f"round {index + 1} of {arguments.rounds}", flush=True)
    print("ended", flush=True)
    found = {}
    for way, told in turns.items():
        every = [ms for turn in told for ms in turn["ms"]]
        found[way] = {
            "median_ms": float(np.median(every)),
            "p95_ms": float(np.percentile(every, 95)),
            "round_medians_ms": [round(float(np.median(turn["ms"])), 3) for turn in told],
            "runs": len(every),
            "peak_mib": max(turn["peak_mib"] for turn in told),
            "foreign_cpu_share": max(turn["foreign"] for turn in told),
            "turns_again": sum(turn["again"] for turn in told),
            "parity": parity[way],
        }
    return found


def measure(arguments: argparse.Namespace) -> None:
    """Everything, into the result file."""
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    make_inputs(folder)
    abouts: dict[str, dict[str, Any]] = {}
    for name in arguments.only:
        path = folder / name / "about.json"
        if not path.exists():
            subprocess.run(command(arguments, "--prepare", name), check=True, env=environment())
        abouts[name] = json.loads(path.read_text())
    ways = [(name, "torch") for name in abouts] + [
        (name, file)
        for name, about in abouts.items()
        for file, told in about["exports"].items()
        if told.get("parity", 1) < TOLERANCE
    ]
    sessions: list[dict[tuple[str, str], dict[str, Any]]] = []
    most = arguments.rounds * TIMED
    for seed in range(arguments.sessions):
        sessions.append(timed(arguments, ways, seed))
        ways = [way for way in ways if sessions[-1][way]["runs"] == most]
        write(arguments, abouts, sessions)
    print(table(json.loads(arguments.out.read_text())))


def write(
    arguments: argparse.Namespace,
    abouts: dict[str, dict[str, Any]],
    sessions: list[dict[tuple[str, str], dict[str, Any]]],
) -> None:
    """The result file, from all sessions so far."""
    rows = []
    for name, about in abouts.items():
        timed_ways = {file: [s[name, file] for s in sessions if (name, file) in s]
                      for of, file in sessions[0] if of == name}  # fmt: skip
        most = arguments.rounds * TIMED
        found = {
            file: told
            for file, told in timed_ways.items()
            if len(told) == len(sessions) and all(s["runs"] == most for s in told)
        }
        runtimes = {}
        for runtime, suffix in RUNTIMES.items():
            files = [file for file in found if file.endswith(suffix)]
            if files:
                file = min(files, key=lambda file: latency(found[file]))
                runtimes[runtime] = {"file": file, "sessions": found[file]}
        best = min(
            (r for r in runtimes if r != "torch"),
            key=lambda r: latency(runtimes[r]["sessions"]),
            default="torch",
        )
        for file, told in about["exports"].items():
            if file in timed_ways:
                told["median_ms"] = [s["median_ms"] for s in timed_ways[file]]
                told["runs"] = [s["runs"] for s in timed_ways[file]]
        rows.append({"method": name, "title": METHODS[name], **about, "runtimes": runtimes,
                     "best": best})  # fmt: skip
    own = next((row for row in rows if row["method"] == "cdgp"), rows[0])
    for row in rows:
        pairs = list(zip(best_of(own), best_of(row), strict=True))
        row["latency_ratio"] = [a["median_ms"] / b["median_ms"] for a, b in pairs]
        row["memory_ratio"] = [a["peak_mib"] / b["peak_mib"] for a, b in pairs]
        row["torch_ratio"] = [
            a["median_ms"] / b["median_ms"]
            for a, b in zip(
                own["runtimes"]["torch"]["sessions"], row["runtimes"]["torch"]["sessions"],
                strict=True,
            )
        ]  # fmt: skip
    import torch

    from cdgp_bench.measure.complexity import machine

    torch.set_num_threads(THREADS)
    told = {
        "command": "python benchmarks/side_by_side.py",
        "input": [1, 3, SIDE, SIDE],
        "threads": THREADS,
        "rounds": arguments.rounds,
        "runs_a_round": TIMED,
        "warm_ups_a_round": WARM_UPS,
        "ratio": "CDGP's median over the method's, each in its best exported runtime; by session",
        "made_up": "PatchCore's bank (random features, 10 % coreset size), PaDiM's statistics; "
        "untrained: RD4AD's decoder, SuperSimpleNet's heads, EfficientAD-S; none of their values "
        "changes the work done",
        "torch_layout": "channels last for CDGP, as its runtime does; as anomalib runs them else",
        "pictures": arguments.images,
        "versions": {p: version(p) for p in ("anomalib", "onnx", "onnxruntime", "openvino")},
        "machine": machine() | {"cpus": os.cpu_count()},
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(told, indent=1) + "\n")


def latency(sessions: list[dict[str, Any]]) -> float:
    """What decides among ways and runtimes: the mean of the sessions' medians."""
    return float(np.mean([s["median_ms"] for s in sessions]))


def best_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The sessions of a method in its best runtime."""
    sessions: list[dict[str, Any]] = row["runtimes"][row["best"]]["sessions"]
    return sessions


def table(told: dict[str, Any]) -> str:
    """The result as a Markdown table, ratios first."""
    lines = [
        "| method | CDGP's latency ÷ its | CDGP's memory ÷ its | CDGP's ÷ its in torch "
        "| best runtime | ms (95 %) | onnxruntime ms | OpenVINO ms | torch ms | peak MiB |",
        "|" + "---|" * 10,
    ]

    def each(values: list[float], form: str) -> str:
        return " / ".join(format(value, form) for value in values)

    def medians(row: dict[str, Any], runtime: str) -> str:
        if runtime not in row["runtimes"]:
            return "–"
        return each([s["median_ms"] for s in row["runtimes"][runtime]["sessions"]], ".1f")

    for row in told["rows"]:
        best = best_of(row)
        lines.append(
            f"| {row['title']} | {each(row['latency_ratio'], '.2f')} "
            f"| {each(row['memory_ratio'], '.2f')} | {each(row['torch_ratio'], '.2f')} "
            f"| {row['best']} "
            f"| {each([s['median_ms'] for s in best], '.1f')} "
            f"({each([s['p95_ms'] for s in best], '.1f')}) "
            f"| {medians(row, 'onnxruntime')} | {medians(row, 'openvino')} "
            f"| {medians(row, 'torch')} | {each([s['peak_mib'] for s in best], '.0f')} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/side_by_side"),
                        help="where exports are kept; remove it to make them anew")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("docs/results/side_by_side.json"))
    parser.add_argument("--images", type=int, default=500, help="good images of the coreset")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sessions", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--pause", action="store_true", help="wait for a line before each turn")
    parser.add_argument("--table", action="store_true", help="print the result file")
    parser.add_argument("--prepare", help=argparse.SUPPRESS)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.out.read_text())))
    elif arguments.prepare:
        prepare(arguments.prepare, arguments.folder, arguments.images)
    elif arguments.work:
        work(*arguments.work, arguments.folder, arguments.images)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
