"""``cdgp export``: a trained model as an ONNX or OpenVINO file that gives the same numbers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cdgp.cli import options as shared
from cdgp.cli.common import bars, handle_errors, parse_size, say

if TYPE_CHECKING:
    from cdgp.export import Exported


@handle_errors
def export(
    model: Annotated[Path, typer.Argument(help="Folder of a run, or its model.safetensors.")],
    target: Annotated[str, typer.Option("--to", help="Format.", metavar="onnx|openvino")],
    out: Annotated[Path, typer.Option("--out", help="File to write: .onnx, or .xml for OpenVINO.")],
    images: Annotated[
        list[Path] | None,
        typer.Option(
            help="Images or folders to compare on; by default the run's calibration images."
        ),
    ] = None,
    input_size: Annotated[
        str | None, typer.Option(help="Size of the graph's input, or free.", metavar="HxW|free")
    ] = None,
    opset: Annotated[
        int | None,
        typer.Option(help="ONNX operator set; by default the oldest that can be written."),
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Quantise to 8 bits (OpenVINO); the loss is measured.")
    ] = False,
    flavour: Annotated[
        str | None,
        typer.Option(help="For the inferencers of another library.", metavar="anomalib"),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the file.")] = False,
    defect_rate: shared.DefectRate = None,
    quiet: Annotated[bool, typer.Option(help="No progress bars.")] = False,
) -> None:
    """Write a trained model as a file for onnxruntime or OpenVINO.

    First the runtime scores real images beside torch, in batches of 1, 3 and 5; where numbers
    differ by more than 1e-4, no file is written. The comparison is stored in the file. predict and
    evaluate take the file in place of a run.

    Examples:

      cdgp export runs/parts --to onnx --out parts.onnx

      cdgp export runs/parts --to openvino --out parts.xml --int8

      cdgp export model.safetensors --to onnx --out parts.onnx --images some_images

      cdgp export runs/parts --to onnx --out for_anomalib.onnx --flavour anomalib
    """
    from cdgp.export import OPSET, ExportOptions
    from cdgp.export import export as write

    options = ExportOptions(
        target,
        out,
        "free" if input_size == "free" else parse_size(input_size) if input_size else None,
        OPSET if opset is None else opset,
        int8,
        overwrite,
        defect_rate,
        flavour,
    )
    show_parity(write(model, options, bars(quiet), images or ()))
    say(f"written: {out}")


def show_parity(exported: "Exported") -> None:
    """Print how far a written file is from torch."""
    parity = exported.parity
    say(f"{exported.runtime} against torch, {parity.images} images, largest differences:")
    say(
        f"  U {parity.fused:.2g}, image evidence {parity.pooled:.2g}, score "
        f"{parity.pred_score:.2g}, surprisal {parity.surprisal:.2g}"
    )
    say(
        f"  {100 * parity.ranks:.3f} % of map pixels more than one rank off, "
        f"{len(parity.changed)} decisions differ"
    )
    if exported.flavoured:
        found = exported.flavoured
        say(
            f"  flavoured, images of their own size: anomaly map {found.anomaly_map:.2g} nats in "
            f"the mean and {found.largest:.2g} at most, score {found.pred_score:.2g}, "
            f"{found.labels} labels differ, {100 * found.marked:.3f} % of mask pixels"
        )
    if exported.image_auroc:
        aurocs = ", ".join(f"{name} {value:.4f}" for name, value in exported.image_auroc.items())
        say(f"  image AUROC on these images: {aurocs}")
