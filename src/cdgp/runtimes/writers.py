"""The inference graph as an ONNX or OpenVINO model: made, quantised and saved."""

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from cdgp.errors import ModelFileError, OutputError
from cdgp.files import atomic_write
from cdgp.method.graph import InferenceGraph
from cdgp.method.network import Outputs
from cdgp.method.tiles import BandGraph, WindowGraph
from cdgp.method.windows import Band
from cdgp.progress import Progress
from cdgp.runtimes.anomalib import AnomalibGraph, AnomalibOutputs
from cdgp.runtimes.base import INPUT, Array, require_package
from cdgp.runtimes.card import FORMAT
from cdgp.runtimes.sealed import SEAL, UNSEALED, sealed
from cdgp.runtimes.tiled import EVIDENCE, POOLED

T = TypeVar("T")


def to_onnx(graph: InferenceGraph, size: tuple[int, int], free: bool, opset: int) -> Any:
    """The graph as an ``onnx.ModelProto`` with a free batch size.

    Args:
        graph: to write.
        size: (height, width) of its input.
        free: whether height and width are free too, in steps of the coarsest stride.
        opset: ONNX operator set.

    Raises:
        ModelFileError: the exporter cannot express it.
    """
    dims: dict[int, Any] = {0: torch.export.Dim("batch")}
    stride = 0
    if free:
        stride = graph.evidence.teacher.strides[-1]
        dims |= {2: stride * torch.export.Dim("rows"), 3: stride * torch.export.Dim("columns")}
    # A batch of one would be fixed at one, and equal free sides would become one free size.
    height, width = size
    example = torch.rand(2, 3, height, width + (stride if height == width else 0))
    return _written(graph, {INPUT: (example, dims)}, Outputs._fields, opset)


def tiled_to_onnx(graph: InferenceGraph, window: tuple[int, int], opset: int) -> tuple[Any, Any]:
    """Both graphs of ``runtimes.tiled`` as ``onnx.ModelProto``; errors as ``to_onnx``.

    Args:
        graph: to write.
        window: (height, width).
        opset: ONNX operator set.
    """
    example = torch.rand(2, 3, *window)
    maps = 1 + (graph.evidence.head is not None)
    pooled = torch.rand(1, len(graph.outputs.calibration.image.centre))
    free = {n: torch.export.Dim(name) for n, name in {1: "rows", 2: "columns"}.items()}
    first = _written(
        WindowGraph(graph.evidence), {INPUT: (example, {0: torch.export.Dim("batch")})},
        [EVIDENCE], opset,
    )  # fmt: skip
    second = _written(
        BandGraph(graph.outputs, graph.evidence.teacher.strides[0]),
        {EVIDENCE: (torch.rand(maps, 20, 30), free), POOLED: (pooled, {})},
        Band._fields, opset,
    )  # fmt: skip
    return first, second


def anomalib_to_onnx(graph: AnomalibGraph, opset: int) -> Any:
    """The graph as an ``onnx.ModelProto``, free in the number of images and in their size; errors
    as ``to_onnx``."""
    free = {n: torch.export.Dim(name) for n, name in {0: "batch", 2: "height", 3: "width"}.items()}
    inputs = {INPUT: (torch.rand(2, 3, 50, 70), free)}
    return _written(graph, inputs, AnomalibOutputs._fields, opset)


def _written(
    graph: nn.Module,
    inputs: Mapping[str, tuple[torch.Tensor, Mapping[int, Any]]],
    names: Sequence[str],
    opset: int,
) -> Any:
    """``inputs`` are an example and the free dimensions of each, by name."""
    examples = tuple(example for example, _ in inputs.values())
    shapes = tuple(dict(free) for _, free in inputs.values())
    try:
        with warnings.catch_warnings(), torch.no_grad(), _quiet_packages():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                graph, examples, dynamo=True, dynamic_shapes=shapes, input_names=list(inputs),
                output_names=list(names), opset_version=opset, verbose=False,
            )  # fmt: skip
    except Exception as error:  # the exporter has no error class of its own
        first = str(error).strip().splitlines()
        raise ModelFileError(
            f"the graph cannot be written as ONNX with operator set {opset}: "
            f"{first[0] if first else type(error).__name__}"
        ) from error
    assert program is not None
    proto = program.model_proto
    written = next(o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))
    if written != opset:
        raise ModelFileError(
            f"--opset {opset}: the exporter wrote operator set {written} instead; give --opset "
            f"{written}, or another version of onnxscript"
        )
    return proto


def to_openvino(proto: Any, opset: int) -> Any:
    """An ONNX graph as an ``openvino.Model``; ModelFileError where OpenVINO cannot read it."""
    try:
        return require_package("openvino").Core().read_model(proto.SerializeToString())
    except RuntimeError as error:
        raise ModelFileError(
            f"OpenVINO cannot read the graph, operator set {opset}: {error}"
        ) from error


def quantised(
    network: Any, images: Sequence[T], read: Callable[[T], Array], progress: Progress
) -> Any:
    """An ``openvino.Model`` with its encoders and student in 8 bits, ranges set by real images.

    The dominance head stays in float32: it divides by norms that can be small. ``read`` makes of
    one of ``images`` a network input, (3, H, W) float32 RGB in [0, 1].
    """
    nncf = require_package("nncf")
    nncf.set_log_level(logging.ERROR)
    head = [
        op.get_friendly_name()
        for op in network.get_ops()
        if op.get_type_name() == "Convolution"  # only those of the head have no bias
        and all(i.get_node().get_type_name() != "Add" for i in op.output(0).get_target_inputs())
    ]
    in_float32 = nncf.IgnoredScope(
        names=head,
        types=["Subtract", "Divide", "Multiply", "MatMul", "Interpolate"],
        validate=False,
    )
    with progress.phase("Quantising to INT8", len(images)) as advance, _quiet_packages():

        def batch_of_one(image: T) -> Any:
            advance()
            return read(image)[None]

        dataset = nncf.Dataset(images, batch_of_one)
        return nncf.quantize(network, dataset, subset_size=len(images), ignored_scope=in_float32)


def save_onnx(proto: Any, metadata: Mapping[str, str], out: Path) -> None:
    """Write an ``onnx.ModelProto`` whole, with metadata, sealed."""
    for key, value in {**metadata, SEAL: UNSEALED}.items():
        proto.metadata_props.add(key=key, value=value)
    with atomic_write(out) as temporary:
        temporary.write_bytes(sealed(proto.SerializeToString()))


def save_openvino(network: Any, metadata: Mapping[str, str], out: Path) -> None:
    """Write both files of an ``openvino.Model``, with metadata, sealed as one."""
    for key, value in {**metadata, SEAL: UNSEALED}.items():
        network.set_rt_info(value, [FORMAT, key])
    openvino = require_package("openvino")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as folder:
            made = Path(folder) / out.name
            openvino.save_model(network, made, compress_to_fp16=False)
            made.write_bytes(sealed(made.read_bytes(), made.with_suffix(".bin").read_bytes()))
            out.unlink(missing_ok=True)  # an earlier .xml must not meet the new weights
            for suffix in (".bin", ".xml"):
                made.with_suffix(suffix).replace(out.with_suffix(suffix))
    except (OSError, RuntimeError) as error:
        raise OutputError(f"{out}: cannot be written: {error}") from error


@contextlib.contextmanager
def _quiet_packages() -> Iterator[None]:
    """Silence the progress messages of exporter and quantiser; their errors are still raised."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
