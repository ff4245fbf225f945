"""``cdgp evaluate``: metrics of a trained model on labelled pictures."""

from pathlib import Path
from typing import Annotated

import typer

from cdgp.cli.common import bars, make_folder, say, show_metrics, told, write_results, writer


@told
def evaluate(
    model: Annotated[Path, typer.Argument(help="model.safetensors, or the folder of a run.")],
    manifest: Annotated[
        Path, typer.Argument(help="CSV manifest, or a folder with good/ and defective/.")
    ],
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for scores, overlays and report.")
    ] = None,
    save_maps: Annotated[bool, typer.Option(help="Also write the raw maps, float16 .npy.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Write into a folder that is not empty.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress bars.")] = False,
) -> None:
    """Score labelled pictures and print the metrics.

    Where the manifest has a split column, its test pictures are used, otherwise all of them.
    Undefined metrics are null in metrics.json, with a reason.

    Examples:

      cdgp evaluate runs/parts runs/parts/manifest.csv

      cdgp evaluate runs/parts labelled_pictures --out runs/parts-check
    """
    from cdgp.data.layouts import load as load_manifest
    from cdgp.evaluation import evaluate as evaluate_samples
    from cdgp.inference import load

    detector = load(model)
    data = detector.settings.data
    table = load_manifest(manifest, data.good, data.defective)
    samples = table.of("test") or table.samples
    part = "test pictures" if table.of("test") else "pictures"
    if not table.of("test") and table.of("train"):
        part = "pictures, training ones among them,"
    computed_on = f"{len(samples)} {part} of {manifest}"
    if out_folder is not None:
        make_folder(out_folder, overwrite)
        write = writer(out_folder, detector, save_maps)
        rows, metrics = evaluate_samples(detector, table, samples, bars(quiet), write)
    else:
        rows, metrics = evaluate_samples(detector, table, samples, bars(quiet))
    metrics["computed_on"] = computed_on
    show_metrics(metrics, computed_on)
    if out_folder is not None:
        write_results(out_folder, detector, rows, metrics, computed_on, {})
        say(f"report: {out_folder / 'report.html'}")
