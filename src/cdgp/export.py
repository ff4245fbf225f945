"""A trained model as an ONNX or OpenVINO graph, written only where its numbers are those of torch.

One ONNX graph is made, with calibration and decision data inside, and OpenVINO reads that same
graph. The graph takes what ``data.images.to_input`` makes: float32 RGB in [0, 1], resized
bilinearly with antialiasing. Before anything is written, the runtime that will run the file scores
real images beside torch, in batches of 1, 3 and 5.
"""

import contextlib
import io
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cdgp import artifact
from cdgp.artifact import Model
from cdgp.data.images import read_image, to_input
from cdgp.data.layouts import walk_images
from cdgp.data.manifest import read_csv
from cdgp.errors import DataError, ModelFileError, OutputError, SettingsError
from cdgp.files import absolute, atomic_write, digest, subsample_evenly
from cdgp.method.backbone import STRIDES
from cdgp.method.calibration import image_probability
from cdgp.method.graph import InferenceGraph
from cdgp.method.network import Outputs
from cdgp.metrics.ranking import image_auroc
from cdgp.progress import Advance, Progress
from cdgp.run_folder import MANIFEST, model_file
from cdgp.runtimes import (
    FORMAT,
    INPUT,
    OnnxRuntime,
    OpenVinoRuntime,
    Runtime,
    TorchRuntime,
    card_of,
    needed,
    to_metadata,
)

Target = Literal["onnx", "openvino"]
SUFFIX: dict[str, str] = {"onnx": ".onnx", "openvino": ".xml"}
RUNTIME: dict[str, str] = {"onnx": "onnxruntime", "openvino": "openvino"}
OPSET = 18
"""The ONNX operator set where none is asked for; the least that the exporter writes."""
TOLERANCE = 1e-4
"""Most that U, a(x) and the probability may move; a file that moves them more is not written."""
BATCHES = (1, 3, 5)
PARITY_IMAGES = 50
"""At most so many images are compared."""
QUANTISATION_IMAGES = 300
"""At most so many images set the ranges of an INT8 graph."""


class Parity(NamedTuple):
    """How far a runtime is from torch, over all compared images and batches."""

    images: int
    fused: float
    """Largest difference of U, in standard deviations of the normal branches."""
    pooled: float
    """Largest difference of a(x)."""
    pred_score: float
    """Largest difference of the probability."""
    surprisal: float
    """Largest difference of the surprisal in nats; one rank at the end of the tail is log 2."""
    ranks: float
    """Share of map pixels that are more than one rank off among the normal scores."""
    labels: int
    """Images whose decision differs."""

    @property
    def worst(self) -> float:
        """The largest of the differences that the tolerance holds for."""
        return max(self.fused, self.pooled, self.pred_score)


Labelled = tuple[Path, bool | None]
"""An image, and whether it is defective where that is known."""


class Source(NamedTuple):
    """A model, and real images to compare on and to set ranges by."""

    path: Path
    model: Model
    compared: Sequence[Labelled]
    fitted: Sequence[Labelled]


def read_source(path: Path, images: Sequence[Path] = ()) -> Source:
    """A model with the calibration and fit images of its run, or with given images for both.

    Raises:
        ModelFileError: see ``artifact.load``.
        DataError: no images.
    """
    model = artifact.load(model_file(path))
    if images:
        found = [(p, None) for place in images for p in walk_images(place)]
        if not found:
            raise DataError(f"--images {', '.join(map(str, images))}: no images found")
        return Source(model_file(path), model, found, found)
    table = model_file(path).parent / MANIFEST
    if not table.is_file():
        raise DataError(
            f"{table}: is not there, so there are no images to compare the export on; give some "
            "with --images FOLDER"
        )
    manifest = read_csv(table)
    fitted = [(s.image, s.defective) for s in manifest.of("fit")]
    compared = [(s.image, s.defective) for s in manifest.of("calibration")]
    return Source(model_file(path), model, compared or fitted, fitted)


def export(
    source: Source,
    target: Target,
    out: Path,
    progress: Progress,
    *,
    input_size: tuple[int, int] | Literal["free"] | None = None,
    opset: int = OPSET,
    int8: bool = False,
) -> dict[str, Any]:
    """Write an exported file, and return what it says of itself.

    Args:
        source: see ``read_source``.
        target: ``onnx`` or ``openvino``.
        out: the file to write, ending in .onnx or .xml; OpenVINO puts a .bin beside it.
        progress: where to tell the progress.
        input_size: (height, width) of the graph's input, the model's own where None, or ``free``.
        opset: ONNX operator set.
        int8: quantise the network to 8 bits, for OpenVINO; the difference is then measured and
            stored, and no tolerance is held.

    Raises:
        SettingsError: an impossible option, or a package that is not installed.
        ModelFileError: the graph cannot be made, or its numbers are not those of torch.
        OutputError: the place cannot be written.
    """
    check_export(target, out, input_size, opset, int8)
    model = source.model
    if model.settings.tile:
        raise SettingsError(
            f"{source.path}: was trained with --tile, and windows are cut and blended in torch "
            "alone; train without --tile to export"
        )
    if isinstance(input_size, tuple) and input_size != model.settings.input_size:
        trained = "x".join(map(str, model.settings.input_size))
        model = model._replace(
            settings=model.settings.model_copy(update={"input_size": input_size}),
            # A bound holds for images as they were calibrated.
            decision=model.decision._replace(
                source=f"{model.decision.source}; calibrated at an input of {trained}",
                false_reject_bound=None,
            ),
        )
    card, data = card_of(model), model.settings.data
    inputs = _Inputs(subsample_evenly(source.compared, PARITY_IMAGES), data.white_level,
                     model.settings.input_size)  # fmt: skip
    reference = TorchRuntime(model, torch.device("cpu"))
    with progress.phase("Export", 1) as advance:
        proto = to_onnx(reference.graph, model.settings.input_size, input_size == "free", opset)
        advance()
    runtime: OnnxRuntime | OpenVinoRuntime
    if target == "onnx":
        runtime = OnnxRuntime(proto.SerializeToString())
    else:
        try:
            network = needed("openvino").Core().read_model(proto.SerializeToString())
        except RuntimeError as error:
            raise ModelFileError(
                f"OpenVINO cannot read the graph, operator set {opset}: {error}"
            ) from error
        if int8:
            chosen = subsample_evenly(source.fitted, QUANTISATION_IMAGES)
            network = quantised(
                network, _Inputs(chosen, data.white_level, model.settings.input_size), progress
            )
        runtime = OpenVinoRuntime(network)
    with progress.phase("Comparing with torch", len(inputs) * len(BATCHES)) as advance:
        found, scores = compare(reference, runtime, inputs, model, advance)
    if not int8 and not found.worst <= TOLERANCE:
        raise ModelFileError(
            f"{out}: not written: {RUNTIME[target]} and torch differ by {found.worst:.2g} on "
            f"{found.images} images, {TOLERANCE:g} is allowed (U {found.fused:.2g}, a(x) "
            f"{found.pooled:.2g}, probability {found.pred_score:.2g}); another version of "
            f"{RUNTIME[target]}, another --opset or the other target may do"
        )
    about = {
        "runtime": RUNTIME[target],
        "precision": "int8" if int8 else "float32",
        "opset": opset,
        "input": {
            "name": INPUT,
            "shape": ["batch", 3, *(("height", "width") if input_size == "free"
                                    else model.settings.input_size)],
            "range": [0, 1],
            "channels": "RGB",
            "resize": "bilinear with antialiasing, the aspect not kept",
        },
        "outputs": list(Outputs._fields),
        "classes": ["good", "defective"],
        "parity": found._asdict() | {"tolerance": None if int8 else TOLERANCE},
        "image_auroc": scores,
        "model_sha256": digest(source.path),
        "versions": {"cdgp": version("cdgp")}
        | {name: needed(name).__version__ for name in ("torch", "onnx", RUNTIME[target])},
    }  # fmt: skip
    metadata = to_metadata(card._replace(export=about))
    if target == "onnx":
        for key, value in metadata.items():
            proto.metadata_props.add(key=key, value=value)
        with atomic_write(out) as temporary:
            temporary.write_bytes(proto.SerializeToString())
    else:
        for key, value in metadata.items():
            network.set_rt_info(value, [FORMAT, key])
        _save_openvino(network, out)
    return about


def check_export(
    target: Target,
    out: Path,
    input_size: tuple[int, int] | Literal["free"] | None,
    opset: int,
    int8: bool,
) -> None:
    """Refuse, before any work, what cannot come to a good end.

    Raises:
        SettingsError, OutputError: see ``export``.
    """
    if out.suffix != SUFFIX[target]:
        raise SettingsError(f"--out {out}: a file for {target} ends in {SUFFIX[target]}")
    if int8 and target != "openvino":
        raise SettingsError("--int8 is for OpenVINO: give --to openvino")
    if isinstance(input_size, tuple) and any(s % STRIDES[-1] or s < 64 for s in input_size):
        raise SettingsError(
            f"--input-size {input_size[0]}x{input_size[1]}: each side must be a multiple of "
            f"{STRIDES[-1]} and at least 64"
        )
    onnx = needed("onnx")
    needed("onnxscript")
    needed(RUNTIME[target])
    if int8:
        needed("nncf")
    newest = onnx.defs.onnx_opset_version()
    if not OPSET <= opset <= newest:
        raise SettingsError(f"--opset {opset}: {OPSET} to {newest} can be written")
    nearest = next(place for place in (out.parent, *absolute(out).parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise OutputError(f"{out}: cannot be written: no right to write into {nearest}")


def to_onnx(graph: InferenceGraph, size: tuple[int, int], free: bool, opset: int) -> Any:
    """The graph as an ``onnx.ModelProto``; the batch is free, height and width where asked for.

    Raises:
        ModelFileError: the exporter cannot express it.
    """
    sides = {
        2: STRIDES[-1] * torch.export.Dim("rows"),
        3: STRIDES[-1] * torch.export.Dim("columns"),
    }
    shapes = {0: torch.export.Dim("batch")} | (sides if free else {})
    # Two images, and sides that differ where they are free: equal ones would be tied together.
    example = torch.rand(
        2, 3, size[0], size[1] + (STRIDES[-1] if free and size[0] == size[1] else 0)
    )
    try:
        with warnings.catch_warnings(), torch.no_grad(), _quiet_exporter():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                graph, (example,), dynamo=True, dynamic_shapes=(shapes,), input_names=[INPUT],
                output_names=list(Outputs._fields), opset_version=opset, verbose=False,
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
        raise ModelFileError(f"operator set {opset} was asked for, the exporter wrote {written}")
    return proto


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Without the exporter's running commentary; its errors are raised, not printed."""
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


class _Inputs(Sequence[Tensor]):
    """Network inputs (3, H, W) of images, decoded when they are asked for."""

    def __init__(
        self, samples: Sequence[Labelled], white_level: int, size: tuple[int, int]
    ) -> None:
        self.samples, self.white_level, self.size = samples, white_level, size

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return to_input(read_image(self.samples[index][0], self.white_level), self.size)


def compare(
    reference: Runtime, runtime: Runtime, inputs: _Inputs, model: Model, advance: Advance
) -> tuple[Parity, dict[str, float] | None]:
    """Parity of a runtime with torch, and the image AUROC of both where there are labels."""
    largest = dict.fromkeys(("fused", "pooled", "pred_score", "surprisal"), 0.0)
    count, off, pixels, changed = len(model.calibration.tail.scores), 0, 0, set()
    scores: dict[str, list[float]] = {"torch": [], runtime.name: []}
    alone = [reference.run(x[None]) for x in inputs]
    for batch in BATCHES:
        for first in range(0, len(inputs), batch):
            found = runtime.run(torch.stack(inputs[first : first + batch]))
            expected = Outputs(
                *(torch.cat(p) for p in zip(*alone[first : first + batch], strict=True))
            )
            for name in largest:
                a, b = getattr(found, name), getattr(expected, name)
                # Not a number is the largest of all differences.
                moved = float((a - b).abs().max().nan_to_num(math.inf, math.inf))
                largest[name] = max(largest[name], moved)
            # The table interpolates between ranks.
            ranks = [
                ((count + 1) * torch.exp(-o.surprisal.double())).round() for o in (found, expected)
            ]
            off += int(((ranks[0] - ranks[1]).abs() > 1).sum())
            pixels += ranks[0].numel()
            a, b = (image_probability(o.pooled, model.calibration.image) for o in (found, expected))
            limit = model.decision.threshold
            changed |= {
                first + i for i in torch.nonzero((a > limit) != (b > limit)).flatten().tolist()
            }
            if batch == 1:
                scores["torch"] += b.tolist()
                scores[runtime.name] += a.tolist()
            for _ in range(len(a)):
                advance()
    labels = [label for _, label in inputs.samples]
    auroc = None
    if None not in labels and len(set(labels)) == 2:
        truth = np.array(labels, np.bool_)
        auroc = {
            name: float(image_auroc(np.nan_to_num(np.array(s)), truth).value or 0.0)
            for name, s in scores.items()
        }
    return Parity(len(inputs), **largest, ranks=off / max(1, pixels), labels=len(changed)), auroc


def quantised(network: Any, inputs: _Inputs, progress: Progress) -> Any:
    """An OpenVINO network with its encoders and student in 8 bits, ranges set by real images.

    The dominance head stays as it is: it divides by a length that can be small.
    """
    nncf = needed("nncf")
    nncf.set_log_level(logging.ERROR)
    head = [
        op.get_friendly_name()
        for op in network.get_ops()
        if op.get_type_name() == "Convolution"  # those of the head alone have no bias
        and all(i.get_node().get_type_name() != "Add" for i in op.output(0).get_target_inputs())
    ]
    kept = nncf.IgnoredScope(
        names=head,
        types=["Subtract", "Divide", "Multiply", "MatMul", "Interpolate"],
        validate=False,
    )
    with progress.phase("Quantising to INT8", len(inputs)) as advance, _quiet_exporter():

        def prepared(image: Tensor) -> Any:
            advance()
            return image[None].numpy()

        return nncf.quantize(
            network, nncf.Dataset(inputs, prepared), subset_size=len(inputs), ignored_scope=kept
        )


def _save_openvino(network: Any, out: Path) -> None:
    """Both files of an OpenVINO network; the weights first, so that no .xml stands without them."""
    openvino = needed("openvino")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as folder:
            made = Path(folder) / out.name
            openvino.save_model(network, made, compress_to_fp16=False)
            out.unlink(missing_ok=True)  # nor an earlier one over other weights
            for suffix in (".bin", ".xml"):
                made.with_suffix(suffix).replace(out.with_suffix(suffix))
    except (OSError, RuntimeError) as error:
        raise OutputError(f"{out}: cannot be written: {error}") from error
