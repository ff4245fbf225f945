"""``cdgp export``: a trained model as an ONNX or OpenVINO file that gives the same numbers."""

from pathlib import Path
from typing import Annotated

import typer

from cdgp.cli.common import bars, handle_errors, parse_size, say


@handle_errors
def export(
    model: Annotated[Path, typer.Argument(help="Folder of a run, or its model.safetensors.")],
    target: Annotated[str, typer.Option("--to", help="Format.", metavar="onnx|openvino")],
    out: Annotated[Path, typer.Option("--out", help="File to write: .onnx, or .xml for OpenVINO.")],
    images: Annotated[
        list[Path] | None,
        typer.Option(
            help="Images or folders to compare on; the calibration images of the run where "
            "not given."
        ),
    ] = None,
    input_size: Annotated[
        str | None,
        typer.Option(help="Size of the graph's input, or free.", metavar="HxW|free"),
    ] = None,
    opset: Annotated[int, typer.Option(help="ONNX operator set.")] = 18,
    int8: Annotated[
        bool, typer.Option("--int8", help="Quantise to 8 bits (OpenVINO); the loss is measured.")
    ] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace the file.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress bars.")] = False,
) -> None:
    """Write a trained model as a file for onnxruntime or OpenVINO.

    Before it is written, the runtime scores real images beside torch, in batches of 1, 3 and 5; a
    file whose numbers differ by more than 1e-4 is refused. The comparison is stored in the file.
    predict and evaluate take the file in place of a run.

    Examples:

      cdgp export runs/parts --to onnx --out parts.onnx

      cdgp export runs/parts --to openvino --out parts.xml --int8

      cdgp export model.safetensors --to onnx --out parts.onnx --images some_images
    """
    from cdgp.errors import DataError, OutputError, SettingsError
    from cdgp.export import SUFFIX, check_export, read_source
    from cdgp.export import export as write

    if target not in SUFFIX:
        raise SettingsError(f"--to {target!r}: there are {' and '.join(SUFFIX)}")
    size = "free" if input_size == "free" else parse_size(input_size) if input_size else None
    check_export(target, out, size, opset, int8)  # type: ignore[arg-type]
    for place in (out, out.with_suffix(".bin")) if target == "openvino" else (out,):
        if place.exists() and not overwrite:
            raise OutputError(f"{place}: exists; choose another --out or give --overwrite")
    for place in images or ():
        if not place.exists():
            raise DataError(f"--images {place}: no such file or folder")
    source = read_source(model, images or ())
    about = write(source, target, out, bars(quiet), input_size=size, opset=opset, int8=int8)  # type: ignore[arg-type]
    parity = about["parity"]
    say(f"{about['runtime']} against torch, {parity['pictures']} images, largest differences:")
    say(
        f"  U {parity['fused']:.2g}, a(x) {parity['pooled']:.2g}, probability "
        f"{parity['pred_score']:.2g}, surprisal {parity['surprisal']:.2g}"
    )
    say(
        f"  {100 * parity['ranks']:.3f} % of map pixels more than one rank off, "
        f"{parity['labels']} decisions differ"
    )
    if about["image_auroc"]:
        told_by = ", ".join(f"{name} {value:.4f}" for name, value in about["image_auroc"].items())
        say(f"  image AUROC on these images: {told_by}")
    say(f"written: {out}")
