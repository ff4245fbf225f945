"""A trained model as an ONNX or OpenVINO file, written only where its numbers are those of torch.

One ONNX graph is made, with calibration and decision data inside, and OpenVINO reads that same
graph. The graph takes what ``data.images.to_input`` makes: float32 RGB in [0, 1], resized
bilinearly with antialiasing. Before anything is written, the runtime that the file is for scores
real images beside torch, in batches of 1, 3 and 5. A model that cuts images into windows becomes
two graphs, which take images of their own sizes one by one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from cdgp import artifact
from cdgp.artifact import Model
from cdgp.data.images import network_input, read_image
from cdgp.data.manifest import Manifest, read_csv
from cdgp.data.walk import Search, tell, walk_images
from cdgp.errors import CdgpError, DataError, ModelFileError, OutputError, SettingsError
from cdgp.files import digest, subsample_evenly
from cdgp.locks import one_writer
from cdgp.method.graph import InferenceGraph
from cdgp.method.network import Outputs
from cdgp.method.windows import cut, places
from cdgp.metrics.ranking import image_auroc
from cdgp.presets import size_problem
from cdgp.progress import Progress
from cdgp.run_folder import BEST, MANIFEST, check_one_run, check_writable, model_file, run_id_of
from cdgp.runtimes import EXPORTED, INPUT, Runtime, open_exported, require_package
from cdgp.runtimes.anomalib import AnomalibGraph, AnomalibOutputs, Difference, difference, runner
from cdgp.runtimes.base import Array
from cdgp.runtimes.card import FOREIGN, SECOND, VERSION, card_of, to_metadata
from cdgp.runtimes.onnx import OnnxRuntime
from cdgp.runtimes.openvino import OpenVinoRuntime
from cdgp.runtimes.parity import Parity, compare
from cdgp.runtimes.sealed import SEAL, files_of, outputs_path, read_exported
from cdgp.runtimes.tiled import EVIDENCE, TiledExport, Tiling
from cdgp.runtimes.torch import TiledRuntime, TorchRuntime
from cdgp.runtimes.writers import (
    anomalib_to_onnx,
    quantised,
    save_onnx,
    save_openvino,
    tiled_to_onnx,
    to_onnx,
    to_openvino,
)

OPSET = 18
"""The ONNX operator set where none is asked for: the oldest that the exporter writes."""
TOLERANCE = 1e-4
"""Most that U, the image evidence and the score may move; a file that moves them more is not
written."""
BATCHES = (1, 3, 5)
"""Sizes of the batches in which a file's runtime is compared with torch."""
PARITY_IMAGES = 50
"""At most so many images are compared."""
RESIZE = "bilinear with antialiasing, the aspect not kept"
WINDOWS = "none; windows of the image, see tiling"
QUANTISATION_IMAGES = 300
"""At most so many images set the ranges of an INT8 graph."""

InputSize = tuple[int, int] | Literal["free"] | None
"""(height, width) of a graph's input, the model's own where None, or any where free."""


class Target(NamedTuple):
    """A format that can be written."""

    suffix: str
    runtime: str
    """The package that runs the file."""


FLAVOURS = ("anomalib",)
TARGETS = {"onnx": Target(".onnx", "onnxruntime"), "openvino": Target(".xml", "openvino")}


@dataclass(frozen=True)
class ExportOptions:
    """What to write, and where.

    Args:
        target: a key of ``TARGETS``.
        out: the file to write, ending in .onnx or .xml; OpenVINO puts a .bin beside it.
        input_size: of the graph's input.
        opset: ONNX operator set.
        int8: quantise the network to 8 bits, for OpenVINO; no tolerance holds then.
        overwrite: replace an earlier file.
        defect_rate: that the graph's image score refers to; the model's own where None.
        flavour: ``anomalib`` for the inputs and outputs that its inferencers take, or None.
    """

    target: str
    out: Path
    input_size: InputSize = None
    opset: int = OPSET
    int8: bool = False
    overwrite: bool = False
    defect_rate: float | None = None
    flavour: str | None = None


class Source(NamedTuple):
    """A model to export, and real images."""

    path: Path
    model: Model
    compared: Sequence[Path]
    """On these the file's runtime is compared with torch; at most ``PARITY_IMAGES``."""
    defective: Sequence[bool]
    """Their labels; empty where they are not known."""
    fitted: Sequence[Path]
    """These set the ranges of an INT8 graph; at most ``QUANTISATION_IMAGES``."""


class Exported(NamedTuple):
    """How far a written file is from torch."""

    runtime: str
    parity: Parity
    image_auroc: dict[str, float] | None
    """By runtime, where the compared images have labels of both classes."""
    flavoured: Difference | None = None
    """Of the flavoured graph, on images of their own size."""


def export(
    model: Path, options: ExportOptions, progress: Progress, images: Sequence[Path] = ()
) -> Exported:
    """Write a trained model as a file for another runtime.

    Args:
        model: the model file, or the folder of its run.
        options: what to write, and where.
        images: image files and folders to compare on; the images of the run where none are given.

    Raises:
        SettingsError: an impossible option, or a package that is not installed.
        DataError: no images to compare on.
        ModelFileError: no such model, a graph that cannot be made, or numbers that are not those
            of torch.
        OutputError: the file exists, its place cannot be written, or another process writes it.
    """
    with one_writer(options.out.parent, "export", "choose another --out", options.out):
        check_options(options)
        return _export(model, options, progress, images)


def best_runtime(model: Path, images: Sequence[Path], progress: Progress) -> Path:
    """A run as the file of the fastest runtime that is installed: OpenVINO, else onnxruntime.

    It is exported beside the model, with the comparison that every export has, on ``images`` where
    no manifest of a run lies there, and kept until the model or cdgp changes. An exported file is
    given back as it is.

    Raises:
        SettingsError: no such runtime is installed.
        CdgpError: see ``export``.
    """
    if model.suffix.lower() in EXPORTED:
        return model
    path = model_file(model)
    for target in ("openvino", "onnx"):
        if all(find_spec(package) for package in packages_of(target)):
            break
    else:
        raise SettingsError(
            "--best-runtime: neither OpenVINO nor onnxruntime is installed: pip install "
            "'cdgp[openvino]' or 'cdgp[onnx]', or in a clone pip install -e '.[openvino]'"
        )
    out = path.with_name(f"{BEST}{TARGETS[target].suffix}")
    with suppress(CdgpError):  # none, of another version, or damaged
        made = open_exported(out)[0].export
        if (made["model_sha256"], made["versions"]["cdgp"]) == (digest(path), version("cdgp")):
            return out
    compared = () if path.with_name(MANIFEST).is_file() else images
    export(path, ExportOptions(target, out, overwrite=True), progress, compared)
    return out


def _export(
    model: Path, options: ExportOptions, progress: Progress, images: Sequence[Path]
) -> Exported:
    source = read_source(model, images)
    check_model(source.model, options)
    resized = with_input_size(source.model, options.input_size)
    if options.defect_rate is not None:
        resized = resized._replace(decision=resized.decision.at(options.defect_rate))
    whole = TorchRuntime(resized, torch.device("cpu"))
    size, free = resized.settings.input_size, options.input_size == "free"
    with progress.phase("Export", 1) as advance:
        graph = whole.graph if free else whole.graph.at_size(size)
        if resized.settings.tile:
            written = [*tiled_to_onnx(graph, size, options.opset)]
        else:
            written = [to_onnx(graph, size, free, options.opset)]
        advance()

    def read(image: Path) -> Array:
        return network_input(image, resized.settings)[0]

    if options.target == "openvino":
        written = [to_openvino(proto, options.opset) for proto in written]
        if options.int8:
            fitted = partial(_middle_window, read=read, window=size, graph=graph)
            written[0] = quantised(written[0], source.fitted, fitted, progress)
    runtime, tiling = _runtime_of(written, options.target, resized, graph)
    # Images that are cut into windows keep their own sizes, and run one by one.
    reference = TiledRuntime(whole, size) if tiling else whole
    batches = (1,) if tiling else BATCHES
    with progress.phase("Comparing with torch", len(source.compared) * len(batches)) as advance:
        inputs = map(read, source.compared)
        parity = compare(reference, runtime, inputs, resized, batches, advance)
    if not options.int8:
        check_parity(parity, options.out, runtime.name)
    exported = Exported(runtime.name, parity, _aurocs(parity, source.defective, runtime.name))
    if options.flavour:
        flavoured_graph, flavoured = _flavoured(resized, graph, options, source.compared, progress)
        written, exported = [flavoured_graph], exported._replace(flavoured=flavoured)
    save = save_openvino if options.target == "openvino" else save_onnx
    about = describe(exported, options, resized, source.path)
    if tiling:  # first, so that the file that names it is whole
        second = outputs_path(options.out)
        save(written[1], {"format": SECOND, "version": str(VERSION)}, second)
        seal = read_exported(second).metadata[SEAL]
        about["tiling"] = tiling._replace(outputs_sha256=seal)._asdict()
    else:  # of an earlier export that is replaced
        for left in files_of(outputs_path(options.out)):
            left.unlink(missing_ok=True)
    metadata = to_metadata(card_of(resized)._replace(export=about))
    if options.flavour:
        metadata["format"] = FOREIGN + options.flavour
    save(written[0], metadata, options.out)
    return exported


def _runtime_of(
    written: Sequence[Any], target: str, model: Model, graph: InferenceGraph
) -> tuple[Runtime, Tiling | None]:
    """What runs the graphs of a file, and how it is tiled."""
    parts: list[OnnxRuntime | OpenVinoRuntime] = [
        OnnxRuntime(one.SerializeToString())
        if target == "onnx"
        else OpenVinoRuntime(one, any_size=one is not written[0])
        for one in written
    ]
    if not model.settings.tile:
        return parts[0], None
    evidence = graph.evidence
    tiling = Tiling(
        model.settings.input_size, tuple(evidence.teacher.strides), evidence.sharpness,
        evidence.image_evidence,
    )  # fmt: skip
    return TiledExport(parts[0], parts[1], tiling), tiling


def _middle_window(
    image: Path, read: Callable[[Path], Array], window: tuple[int, int], graph: InferenceGraph
) -> Array:
    """The middle window (3, h, w) of an image that is cut; all of one that is not."""
    whole = read(image)
    possible = places(whole.shape[1:], window, graph.evidence.teacher.strides)
    return cut(whole, possible[len(possible) // 2], window)


def _flavoured(
    model: Model,
    graph: InferenceGraph,
    options: ExportOptions,
    images: Sequence[Path],
    progress: Progress,
) -> tuple[Any, Difference]:
    """The flavoured graph, written, and how far it is from torch on images of their own size."""
    settings = model.settings
    level = settings.decision.region_level
    whole = AnomalibGraph(graph, settings.input_size, model.decision, level)
    written = anomalib_to_onnx(whole, options.opset)
    if options.target == "openvino":
        written = to_openvino(written, options.opset)
    with progress.phase("Comparing the flavoured graph", len(images)) as advance:

        def inputs() -> Iterator[Array]:
            for image in images:
                pixels = read_image(image, settings.data.white_level, settings.data.first_page)
                yield np.ascontiguousarray(pixels.transpose(2, 0, 1))
                advance()

        found = difference(whole, runner(written), inputs())
    if not max(found.pred_score, found.anomaly_map) <= TOLERANCE:
        raise ModelFileError(
            f"{options.out}: not written: on {len(images)} images the flavoured graph and torch "
            f"differ by {found.pred_score:.2g} in a score and {found.anomaly_map:.2g} nats in the "
            f"mean of the map, {TOLERANCE:g} is allowed; another --opset or the other target may do"
        )
    return written, found


def packages_of(target: str) -> tuple[str, ...]:
    """The packages that write and compare a file of a target."""
    return "onnx", "onnxscript", TARGETS[target].runtime


def check_options(options: ExportOptions) -> None:
    """Check, before any work, what can be known of an export beforehand; see ``export``."""
    target, out = options.target, options.out
    if target not in TARGETS:
        raise SettingsError(f"--to {target!r}: there are {' and '.join(TARGETS)}")
    if out.suffix != TARGETS[target].suffix:
        raise SettingsError(f"--out {out}: a file for {target} ends in {TARGETS[target].suffix}")
    if options.flavour is not None and options.flavour not in FLAVOURS:
        raise SettingsError(f"--flavour {options.flavour!r}: there is {', '.join(FLAVOURS)}")
    if options.flavour and (options.int8 or options.input_size == "free"):
        raise SettingsError(
            f"--flavour {options.flavour} takes images of any size and resizes them in float32: "
            "leave --int8 and --input-size free out"
        )
    if options.int8 and target != "openvino":
        raise SettingsError("--int8 is for OpenVINO: give --to openvino")
    for package in packages_of(target):
        require_package(package)
    if options.int8:
        require_package("nncf")
    newest = require_package("onnx").defs.onnx_opset_version()
    if not OPSET <= options.opset <= newest:
        raise SettingsError(f"--opset {options.opset}: {OPSET} to {newest} can be written")
    check_absent(out, options.overwrite)
    check_writable(out, out.parent)


def check_absent(out: Path, overwrite: bool) -> None:
    """Raise OutputError where a file, or an .xml's .bin, is there and is not to be replaced."""
    for path in (out, out.with_suffix(".bin")) if out.suffix == ".xml" else (out,):
        if path.exists() and not overwrite:
            raise OutputError(f"{path}: exists; choose another --out or give --overwrite")


def check_model(model: Model, options: ExportOptions) -> None:
    """Check what a model allows: sizes, what has to be convolutional, windows; see ``export``."""
    size, name = options.input_size, model.settings.backbone.name
    if model.settings.tile:
        if size or options.flavour:
            raise SettingsError(
                "the model was trained with --tile, and cuts images of any size into windows of "
                "the size that it was trained with: leave --input-size and --flavour out"
            )
        second = outputs_path(options.out)
        check_absent(second, options.overwrite)
    problem = size_problem(size, name) if isinstance(size, tuple) else None
    if problem:
        raise SettingsError(f"--input-size {problem}")
    encoder = model.network.teacher
    if size == "free" and options.target == "openvino" and encoder.resizes_positions:
        raise SettingsError(
            f"--input-size free: OpenVINO does not resize the position embedding of {name} as "
            "torch does; give --input-size HEIGHTxWIDTH, or --to onnx"
        )
    if options.int8 and encoder.blocks:
        raise SettingsError(
            f"--int8: 8 bits are for convolutional networks, and {name} is a transformer, which "
            "would stay as it is; leave --int8 out"
        )


def read_source(path: Path, images: Sequence[Path] = ()) -> Source:
    """A model with the calibration and fit images of its run, or with given images for both."""
    path = model_file(path)
    for place in images:
        if not place.exists():
            raise DataError(f"--images {place}: no such file or folder")
    model = artifact.load(path)
    if images:
        search = Search(images, None)
        found = [file for place in images for file in walk_images(place, search)]
        tell(search.unused.notices(Path("--images")))
        if not found:
            raise DataError(f"--images {', '.join(map(str, images))}: no images found")
        compared, defective, fitted = subsample_evenly(found, PARITY_IMAGES), [], found
    else:
        manifest = _run_manifest(path.parent)
        calibration = manifest.of("calibration") or manifest.of("fit")
        samples = subsample_evenly(calibration, PARITY_IMAGES)
        compared = [sample.image for sample in samples]
        defective = [sample.defective for sample in samples]
        fitted = [sample.image for sample in manifest.of("fit")]
    check_one_run(path, run_id_of(model.provenance))  # now: a training may have replaced some
    return Source(path, model, compared, defective, subsample_evenly(fitted, QUANTISATION_IMAGES))


def _run_manifest(folder: Path) -> Manifest:
    """The manifest of a run, which has fit images."""
    advice = "give images to compare the export on with --images FOLDER"
    table = folder / MANIFEST
    if not table.is_file():
        raise DataError(f"{table}: there is no such file; {advice}")
    manifest = read_csv(table)
    if not manifest.of("fit"):
        raise DataError(f"{table}: has no fit images, so it is not the manifest of a run; {advice}")
    return manifest


def with_input_size(model: Model, size: InputSize) -> Model:
    """The model with another size of input; its own where the size is None or free."""
    if not isinstance(size, tuple) or size == model.settings.input_size:
        return model
    trained = "x".join(map(str, model.settings.input_size))
    decision = model.decision._replace(
        source=f"{model.decision.source}; calibrated at an input of {trained}",
        false_reject_bound=None,  # it holds for images of the size that they were calibrated at
    )
    settings = model.settings.model_copy(update={"input_size": size})
    return model._replace(settings=settings, decision=decision)


def check_parity(parity: Parity, out: Path, runtime: str) -> None:
    """Raise ModelFileError where a number moves by more than ``TOLERANCE`` against torch."""
    if not parity.worst <= TOLERANCE:
        raise ModelFileError(
            f"{out}: not written: {runtime} and torch differ by {parity.worst:.2g} on "
            f"{parity.images} images, {TOLERANCE:g} is allowed (U {parity.fused:.2g}, image "
            f"evidence {parity.pooled:.2g}, score {parity.pred_score:.2g}); another version of "
            f"{runtime}, another --opset or the other target may do"
        )


def _aurocs(parity: Parity, defective: Sequence[bool], runtime: str) -> dict[str, float] | None:
    """Image AUROC in torch and in a file's runtime, where both labels occur."""
    if len(set(defective)) < 2:
        return None
    truth = np.array(defective, np.bool_)
    return {
        name: float(image_auroc(np.nan_to_num(np.array(scores)), truth).value or 0.0)
        for name, scores in (("torch", parity.expected_scores), (runtime, parity.scores))
    }


def describe(
    exported: Exported, options: ExportOptions, model: Model, source: Path
) -> dict[str, Any]:
    """The record in an exported file: its input and outputs, its parity, its origin."""
    free = options.input_size == "free" or options.flavour
    sides = ("height", "width") if free else model.settings.input_size
    flavoured, tile = exported.flavoured, model.settings.tile
    names = AnomalibOutputs._fields if flavoured else (EVIDENCE,) if tile else Outputs._fields
    packages = ("torch", "onnx", exported.runtime)
    return {
        "runtime": exported.runtime,
        "precision": "int8" if options.int8 else "float32",
        "opset": options.opset,
        "input": {
            "name": INPUT,
            "shape": ["batch", 3, *sides],
            "range": [0, 1],
            "channels": "RGB",
            "resize": "in the graph" if flavoured else WINDOWS if tile else RESIZE,
        },
        "outputs": list(names),
        "classes": ["good", "defective"],
        "score": {
            "kind": model.calibration.image.score_kind,
            "rests_on": model.provenance.get("rests_on"),
        },
        "parity": exported.parity.record() | {"tolerance": None if options.int8 else TOLERANCE},
        "image_auroc": exported.image_auroc,
        "flavoured": flavoured and flavoured._asdict(),
        "model_sha256": digest(source),
        "versions": {"cdgp": version("cdgp")}
        | {name: require_package(name).__version__ for name in packages},
    }
