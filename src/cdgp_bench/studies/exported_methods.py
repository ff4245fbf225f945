"""The methods of ``side_by_side``: built, exported in every way, and run in every runtime.

Imports neither torch nor a runtime by itself: a process that measures one of them loads only that
one.
"""

import contextlib
import io
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdgp_bench.measure.harness import peak_mib, seconds_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cdgp.method.backbone import Encoder
    from cdgp.presets import Settings

SIDE, THREADS = 256, 2
SIZE = (SIDE, SIDE)
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
OWN_WAYS = {
    "dynamo.onnx": "cdgp.runtimes.writers.to_onnx",
    "dynamo.xml": "OpenVINO's reading of that graph",
}
CORESET = 0.1
TOLERANCE = 0.01
"""Of the map's range: a way that is further from torch is not timed."""
Predict = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""An input (1, 3, 256, 256) to the map."""


def make_inputs(folder: Path) -> None:
    """Synthetic surfaces, a CDGP trained on them for a few steps, and one input."""
    import torch

    from cdgp.data.images import read_image, to_input
    from cdgp.presets import settings
    from cdgp.workflows import train_run
    from cdgp_bench.synthetic import make_dataset

    if (folder / "input.npy").exists() and (folder / "run" / "model.safetensors").exists():
        return
    torch.set_num_threads(THREADS)
    made = make_dataset(folder / "surfaces", size=SIZE)
    chosen = settings(
        "lite", input_size=SIZE, dual_gp={"steps": 10, "no_separation": "flag"},
        student={"steps": 10},
    )  # fmt: skip
    train_run(made, folder / "run", chosen)
    path = next(s for s in made.samples if s.defective).image
    image = to_input(read_image(path, chosen.data.white_level), SIZE)
    np.save(folder / "input.npy", image[None])


def build(name: str, folder: Path, images: int) -> "tuple[nn.Module, dict[str, Any]]":
    """A module from (1, 3, 256, 256) RGB in [0, 1] to (map, ..., score), and facts of it."""
    import torch

    from cdgp.presets import settings

    torch.manual_seed(0)
    if name == "cdgp":
        return _cdgp(folder)
    chosen = settings("lite", input_size=SIZE)
    facts: dict[str, Any] = {}
    if name == "efficientad":
        module = _efficientad(chosen)
    elif name == "supersimplenet":
        module = _supersimplenet(chosen)
    else:
        image = torch.from_numpy(np.load(folder / "input.npy"))
        module, facts = _with_backbone(name, chosen, image, images)
    module.eval().requires_grad_(False)
    return module, facts | {
        "parameters": sum(p.numel() for p in module.parameters()),
        "stored": sum(v.numel() for v in module.state_dict().values()),
        "options": _options(name).decides(),
    }


def _options(name: str) -> Any:
    from cdgp_bench.grid import METHODS as KNOWN

    options: Any = KNOWN[name].options["lite"]
    return options.model_copy(update={"coreset": CORESET}) if name == "patchcore" else options


def _cdgp(folder: Path) -> "tuple[nn.Module, dict[str, Any]]":
    from cdgp.artifact import load
    from cdgp.method.graph import EvidenceGraph, InferenceGraph

    model = load(folder / "run" / "model.safetensors")
    graph = InferenceGraph(EvidenceGraph(model.network), model.calibration).eval()
    return graph, {
        "parameters": sum(p.numel() for p in model.network.parameters()),
        "stored": sum(v.numel() for v in model.network.state_dict().values())
        + len(model.calibration.tail.scores),
        "head": type(graph.evidence.head).__name__,
    }


def _as_module(
    network: "nn.Module",
    predict: "Callable[[Any, Tensor], tuple[Tensor, Tensor]]",
    encoder: "Encoder | None" = None,
) -> "nn.Module":
    """A module that normalises images for the encoder, if there is one, and calls ``predict``."""
    from torch import nn

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network
            if encoder is not None:
                self.register_buffer("mean", encoder.mean.view(1, 3, 1, 1))
                self.register_buffer("std", encoder.std.view(1, 3, 1, 1))

        def forward(self, images: "Tensor") -> "tuple[Tensor, Tensor]":
            if encoder is not None:
                images = (images - self.mean) / self.std  # type: ignore[operator]
            return predict(self.network, images)

    return Whole()


def _of_anomalib(network: Any, images: "Tensor") -> "tuple[Tensor, Tensor]":
    found = network(images)
    return found.anomaly_map, found.pred_score


def _efficientad(chosen: "Settings") -> "nn.Module":
    """Untrained; it normalises its input itself."""
    import torch

    from cdgp_bench.methods import efficientad

    inner = efficientad.build(None, chosen, _options("efficientad")).model
    inner.mean_std.update({k: torch.ones_like(v) for k, v in inner.mean_std.items()})
    inner.quantiles.update({k: torch.tensor(float(k[1] == "b")) for k in inner.quantiles})
    return _as_module(inner, _of_anomalib)


def _supersimplenet(chosen: "Settings") -> "nn.Module":
    """Untrained; its encoder normalises the input."""
    from cdgp.method.build import pretrained_encoder
    from cdgp_bench.methods.supersimplenet import SuperSimpleNet

    def predict(network: SuperSimpleNet, images: "Tensor") -> "tuple[Tensor, Tensor]":
        anomaly_map, logit = network.predict(images)
        return anomaly_map, logit.sigmoid()

    return _as_module(
        SuperSimpleNet(pretrained_encoder(chosen), _options("supersimplenet")), predict
    )


def _with_backbone(
    name: str, chosen: "Settings", image: "Tensor", images: int
) -> "tuple[nn.Module, dict[str, Any]]":
    """One of anomalib's models over the backbone, with random memories of the real size."""
    import torch

    from cdgp.method.build import pretrained_encoder
    from cdgp_bench.methods import padim, patchcore, rd4ad

    encoder = pretrained_encoder(chosen)
    maker: Any = {"patchcore": patchcore, "padim": padim, "rd4ad": rd4ad}[name]
    inner = maker.build(encoder, chosen, _options(name)).model
    facts: dict[str, Any] = {}
    if name != "rd4ad":
        inner.train().feature_extractor.eval()  # in training mode both return the embedding
        with torch.no_grad():
            embedded = inner(encoder.normalise(image))
        fill = {"patchcore": _fill_patchcore, "padim": _fill_padim}[name]
        facts = fill(inner, embedded, images)
    return _as_module(inner, _of_anomalib, encoder), facts


def _fill_patchcore(model: Any, embedded: "Tensor", images: int) -> dict[str, Any]:
    """A bank of random features with the mean and spread of real ones."""
    import torch

    model.embedding_store.clear()
    count = int(len(embedded) * images * CORESET)
    random = torch.randn(count, embedded.shape[1])
    model.memory_bank = embedded.mean(0) + embedded.std(0) * random
    return {"pictures": images, "coreset": CORESET, "positions": len(embedded),
            "bank": [count, embedded.shape[1]]}  # fmt: skip


def _fill_padim(model: Any, embedded: "Tensor", images: int) -> dict[str, Any]:
    """Random positive definite inverse covariances, and one mean for all positions."""
    import torch

    model.memory_bank.clear()
    features, positions = embedded.shape[1], embedded[0, 0].numel()
    factors = torch.randn(positions, features, features)
    # Its own mean would put each position at distance zero.
    mean = embedded.mean((0, 2, 3))[:, None]
    model.gaussian.mean = mean.expand(features, positions).contiguous()
    model.gaussian.inv_covariance = factors @ factors.mT / features + torch.eye(features)
    return {"covariances": list(factors.shape)}


def prepare(name: str, folder: Path, images: int) -> None:
    """Export a method in every way, compare each with torch, and write ``about.json``."""
    import torch

    warnings.simplefilter("ignore")
    place = folder / name
    place.mkdir(exist_ok=True)
    module, about = build(name, folder, images)
    image = torch.from_numpy(np.load(folder / "input.npy"))
    with torch.inference_mode():
        expected = module(image)[0].numpy()
    np.save(place / "map.npy", expected)
    about["exports"] = {}
    for file, way in (OWN_WAYS if name == "cdgp" else WAYS).items():
        facts: dict[str, Any] = {"way": way}
        about["exports"][file] = facts
        try:
            with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
                _export(name, module, image, place / file)
            found = predictor(name, file, folder, images)(image.numpy())
        except Exception as error:  # the exporters have no error class of their own
            facts["error"] = " ".join(str(error).split())[:300] or type(error).__name__
            continue
        facts["parity"] = _distance(found, expected)
        facts["file_mib"] = round(_bytes_of(place / file) / 2**20, 1)
    (place / "about.json").write_text(json.dumps(about))


def _export(name: str, module: "nn.Module", image: "Tensor", path: Path) -> None:
    """Write one file of ``WAYS``."""
    import openvino
    import torch

    from cdgp import export
    from cdgp.runtimes import writers

    if path.name == "dynamo.xml":
        network = openvino.Core().read_model(path.with_suffix(".onnx"))
        openvino.save_model(network, path, compress_to_fp16=False)
    elif path.name == "torch.xml":
        network = openvino.convert_model(module, example_input=image, input=[tuple(image.shape)])
        openvino.save_model(network, path, compress_to_fp16=False)
    elif path.name == "script.onnx":
        opset = export.OPSET - 1
        torch.onnx.export(module, (image,), path, dynamo=False, opset_version=opset)
    elif name == "cdgp":
        graph: Any = module
        proto = writers.to_onnx(graph, SIZE, False, export.OPSET)
        path.write_bytes(proto.SerializeToString())
    else:
        opset = export.OPSET
        program = torch.onnx.export(
            module, (image,), dynamo=True, opset_version=opset, verbose=False
        )
        assert program is not None
        program.save(path, external_data=False)


def _bytes_of(path: Path) -> int:
    """Of an exported file, with the weights beside an ``.xml``."""
    files = [path, path.with_suffix(".bin")] if path.suffix == ".xml" else [path]
    return sum(file.stat().st_size for file in files if file.exists())


def _distance(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Largest difference of two maps, as a share of the second one's range."""
    return float(np.abs(found - expected).max() / np.ptp(expected))


def predictor(name: str, file: str, folder: Path, images: int) -> Predict:
    """A method by one way; imports only what that needs."""
    if file == "torch":
        return _torch_predictor(build(name, folder, images)[0], channels_last=name == "cdgp")
    path = folder / name / file
    return _onnx_predictor(path) if path.suffix == ".onnx" else _openvino_predictor(path)


def _torch_predictor(module: "nn.Module", channels_last: bool) -> Predict:
    import torch

    torch.set_num_threads(THREADS)

    def predict(image: NDArray[np.float32]) -> NDArray[np.float32]:
        with torch.inference_mode():
            batch = torch.from_numpy(image)
            if channels_last:  # as TorchRuntime does
                batch = batch.contiguous(memory_format=torch.channels_last)
            found: NDArray[np.float32] = module(batch)[0].numpy()
            return found

    return predict


def _onnx_predictor(path: Path) -> Predict:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, THREADS
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    entry = session.get_inputs()[0].name

    return lambda image: session.run(None, {entry: image})[0]


def _openvino_predictor(path: Path) -> Predict:
    import openvino

    network = openvino.Core().read_model(path)
    network.reshape([1, 3, SIDE, SIDE])  # as OpenVinoRuntime does
    options = {"INFERENCE_NUM_THREADS": THREADS, "PERFORMANCE_HINT": "LATENCY",
               "INFERENCE_PRECISION_HINT": "f32"}  # fmt: skip
    request = openvino.Core().compile_model(network, "CPU", options).create_infer_request()

    return lambda image: np.array(next(iter(request.infer([image], share_inputs=True).values())))


class Exported:
    """One method by one way, in the process that measures it; its map must be that of torch."""

    def __init__(self, name: str, file: str, folder: Path, images: int) -> None:
        self.image = np.load(folder / "input.npy")
        self.predict = predictor(name, file, folder, images)
        self.distance = _distance(self.predict(self.image), np.load(folder / name / "map.npy"))
        if not self.distance < TOLERANCE:
            raise SystemExit(
                f"{name} by {file}: {self.distance:.2g} of the map's range away from torch"
            )

    def parity(self) -> float:
        return self.distance

    def turn(self, warm_ups: int, timed: int) -> dict[str, Any]:
        """Times in milliseconds, the peak of the process, and the processor time used."""
        started = time.process_time()
        run = partial(self.predict, self.image)
        for _ in range(warm_ups):
            run()
        times = [1000 * seconds_of(run) for _ in range(timed)]
        return {"ms": times, "peak_mib": peak_mib(), "used": time.process_time() - started}
