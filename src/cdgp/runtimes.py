"""What can run a trained model: torch, or an exported file under onnxruntime or OpenVINO.

Each takes the same input, made by ``data.images.to_input``, and returns the same outputs; what
else a prediction needs is the ``Card`` that an exported file carries.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from cdgp.artifact import Decision, Model, decision_of, image_calibrator_of
from cdgp.errors import CdgpError, ModelFileError, SettingsError
from cdgp.method.calibration import ImageCalibrator
from cdgp.method.graph import EvidenceGraph, InferenceGraph
from cdgp.method.network import Outputs
from cdgp.method.tiles import outputs_of, tiled_evidence
from cdgp.presets import InferenceSettings, Settings, settings_from_json

FORMAT = "cdgp-export"
VERSION = 1
KEYS = ("format", "version", "settings", "decision", "image", "provenance", "export")
"""What an exported file holds beside the graph, each a text; all but the first two JSON."""
EXTRAS = {"onnxruntime": "onnx", "onnx": "onnx", "onnxscript": "onnx", "openvino": "openvino",
          "nncf": "openvino"}  # fmt: skip
"""Which of this package's extras installs a package."""


class Card(NamedTuple):
    """All that a prediction needs beside the graph."""

    settings: Settings
    decision: Decision
    image: ImageCalibrator
    largest_surprisal: float
    """The largest counted surprisal, in nats: where the colour scale ends."""
    provenance: dict[str, Any]
    export: dict[str, Any]
    """How the file was made and how far it is from torch; empty for torch itself."""


class Runtime(Protocol):
    """Something that runs the graph."""

    name: str

    def run(self, images: Tensor) -> Outputs:
        """(B, 3, H, W) float32 RGB in [0, 1] to maps and scores, all on the processor."""
        ...


class TorchRuntime:
    """The graph in torch.

    Args:
        model: a trained model.
        device: where it runs.
        inference: precision and mode; float32 and eager where None.
    """

    name = "torch"

    def __init__(
        self, model: Model, device: torch.device, inference: InferenceSettings | None = None
    ) -> None:
        self.device = device
        self.inference = inference or InferenceSettings()
        precision = getattr(torch, self.inference.precision)
        self.graph = InferenceGraph(EvidenceGraph(model.network, precision), model.calibration)
        self.graph.to(device)
        self._run: Callable[[Tensor], Outputs] = self.graph
        if self.inference.mode == "compiled":
            self._run = torch.compile(self.graph)
        self._replayed: dict[torch.Size, tuple[Tensor, Outputs, Any]] = {}

    @torch.inference_mode()
    def run(self, images: Tensor) -> Outputs:
        images = images.to(self.device).contiguous(memory_format=torch.channels_last)
        replay = self.inference.mode == "graph" and self.device.type == "cuda"
        found = self._replay(images) if replay else self._run(images)
        return Outputs(*(part.float().cpu() for part in found))

    def _replay(self, images: Tensor) -> Outputs:
        """The same by a CUDA graph, recorded once for each shape of input."""
        if images.shape not in self._replayed:
            kept = images.clone(memory_format=torch.channels_last)
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):  # libraries plan and take their memory before the recording
                    self._run(kept)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = self._run(kept)
            self._replayed[images.shape] = kept, found, graph
        kept, found, graph = self._replayed[images.shape]
        kept.copy_(images)
        graph.replay()
        return found

    @torch.inference_mode()
    def run_tiled(self, image: Tensor, window: tuple[int, int]) -> Outputs:
        """(3, H, W) float32 RGB in [0, 1] of any size, by windows, to maps of its size."""
        evidence = tiled_evidence(self.graph.evidence, image, window)
        return outputs_of(self.graph, evidence, (image.shape[1], image.shape[2]))


class OnnxRuntime:
    """An exported ``.onnx`` file under onnxruntime, on the processor.

    Args:
        source: the file, or its bytes.
        threads: number of threads; onnxruntime's own choice where None.

    Raises:
        SettingsError: onnxruntime is not installed.
        ModelFileError: it does not take the file.
    """

    name = "onnxruntime"

    def __init__(self, source: Path | bytes, threads: int | None = None) -> None:
        onnxruntime = needed("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            self.session = onnxruntime.InferenceSession(
                source if isinstance(source, bytes) else str(source),
                options,
                providers=["CPUExecutionProvider"],
            )
        except Exception as error:  # its exceptions have no common class of their own
            raise ModelFileError(f"{named(source)}: onnxruntime cannot run it: {error}") from error
        self.metadata: dict[str, str] = dict(self.session.get_modelmeta().custom_metadata_map)

    def run(self, images: Tensor) -> Outputs:
        found = self.session.run(list(Outputs._fields), {INPUT: images.contiguous().numpy()})
        return Outputs(*(torch.from_numpy(part) for part in found))


class OpenVinoRuntime:
    """An exported ``.xml`` file, or a model in memory, under OpenVINO, on the processor.

    Args:
        source: the file, or an ``openvino.Model``.
        threads: number of threads; OpenVINO's own choice where None.

    Raises:
        SettingsError: OpenVINO is not installed.
        ModelFileError: it does not take the file.
    """

    name = "openvino"

    def __init__(self, source: Any, threads: int | None = None) -> None:
        openvino = needed("openvino")
        self.threads = threads
        try:
            self.model = openvino.Core().read_model(source) if isinstance(source, Path) else source
            batch_of_one = self.model.input(0).get_partial_shape()
            batch_of_one[0] = 1
            self.request = openvino_request(self.model, batch_of_one, threads)
        except (RuntimeError, IndexError) as error:  # the second where it has no input
            raise ModelFileError(f"{named(source)}: OpenVINO cannot run it: {error}") from error
        self.metadata: dict[str, str] = {
            key: self.model.get_rt_info([FORMAT, key]).astype(str)
            for key in KEYS
            if self.model.has_rt_info([FORMAT, key])
        }

    def run(self, images: Tensor) -> Outputs:
        array = images.contiguous().numpy()
        shape = needed("openvino").PartialShape(list(array.shape))
        if self.request.model_inputs[0].get_partial_shape() != shape:
            self.request = openvino_request(self.model, shape, self.threads)
        found = self.request.infer({INPUT: array}, share_inputs=True)
        return Outputs(*(torch.from_numpy(np.array(found[name])) for name in Outputs._fields))


def openvino_request(model: Any, shape: Any, threads: int | None) -> Any:
    """What runs an ``openvino.Model`` on inputs of one shape: an ``openvino.InferRequest``.

    Where the shape is settled, OpenVINO plans its memory ahead and merges more operations: a run
    takes a tenth less, for a fifth of a second once.
    """
    # Some processors compute in bfloat16 unless told not to, which moves the map.
    options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    if threads is not None:
        options["INFERENCE_NUM_THREADS"] = threads
    settled = model.clone()  # the file that is made of it keeps its free batch
    settled.reshape(shape)
    return needed("openvino").Core().compile_model(settled, "CPU", options).create_infer_request()


INPUT = "images"
"""Name of the graph's one input."""
EXPORTED: dict[str, type[OnnxRuntime] | type[OpenVinoRuntime]] = {
    ".onnx": OnnxRuntime,
    ".xml": OpenVinoRuntime,
}
"""By the ending of the file."""


def card_of(model: Model) -> Card:
    """What a model in torch needs beside its graph."""
    tail = model.calibration.tail
    largest = min(tail.floor, float(np.log(len(tail.scores) + 1)))
    return Card(model.settings, model.decision, model.calibration.image, largest,
                model.provenance, {})  # fmt: skip


def to_metadata(card: Card) -> dict[str, str]:
    """A card as texts, for an exported file."""
    image = card.image._asdict() | {"largest_surprisal": card.largest_surprisal}
    return {
        "format": FORMAT,
        "version": str(VERSION),
        "settings": card.settings.model_dump_json(),
        "decision": json.dumps(card.decision._asdict()),
        "image": json.dumps(image),
        "provenance": json.dumps(card.provenance),
        "export": json.dumps(card.export),
    }


def from_metadata(metadata: Mapping[str, str], source: str) -> Card:
    """The card of an exported file.

    Raises:
        ModelFileError: the file was not exported by this tool, or by another version, or it is
            damaged.
    """
    if metadata.get("format") != FORMAT:
        raise ModelFileError(f"{source}: not exported by this tool; make it with cdgp export")
    if metadata.get("version") != str(VERSION):
        raise ModelFileError(
            f"{source}: exported in format {metadata.get('version')}, this cdgp reads format "
            f"{VERSION}; use the version of cdgp that wrote it, or export again"
        )
    try:
        image = json.loads(metadata["image"])
        largest = image.pop("largest_surprisal")
        if not isinstance(largest, float) or not largest > 0:
            raise ValueError(f"the largest surprisal is {largest!r}")
        return Card(
            settings_from_json(metadata["settings"], source),
            decision_of(json.loads(metadata["decision"])),
            image_calibrator_of(image),
            largest,
            json.loads(metadata["provenance"]),
            json.loads(metadata["export"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, CdgpError) as error:
        raise ModelFileError(f"{source}: incomplete or damaged export ({error})") from error


def needed(package: str) -> Any:
    """A package of one of the extras.

    Raises:
        SettingsError: it is not installed.
    """
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError as error:
        extra = EXTRAS[package]
        raise SettingsError(
            f"this needs {package}, which is not installed: pip install 'cdgp[{extra}]', or in a "
            f"clone pip install -e '.[{extra}]'"
        ) from error


def named(source: object) -> str:
    """How to call a source in a message."""
    return str(source) if isinstance(source, Path) else "the exported graph"
