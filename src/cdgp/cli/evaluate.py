"""``cdgp evaluate``: metrics of a trained model on labelled images."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cdgp.cli.common import (
    bars,
    make_folder,
    say,
    show_metrics,
    told,
    warn,
    write_results,
    writer,
)


@told
def evaluate(
    model: Annotated[Path, typer.Argument(help="model.safetensors, or the folder of a run.")],
    manifest: Annotated[
        Path, typer.Argument(help="CSV manifest, or a folder with good/ and defective/.")
    ],
    good: Annotated[
        str | None, typer.Option(help="Name of the folder of good images; the model's own name.")
    ] = None,
    defective: Annotated[
        str | None, typer.Option(help="Name of the folder of defective images; as for --good.")
    ] = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for scores, overlays and report.")
    ] = None,
    save_maps: Annotated[bool, typer.Option(help="Also write the raw maps, float16 .npy.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace the results in --out.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress bars.")] = False,
) -> None:
    """Score labelled images and print the metrics.

    Where the manifest has a split column, its test images are used, otherwise all of them. Copies
    and groups on two sides of a stated split are refused.
    Undefined metrics are null in metrics.json, with a reason.

    Examples:

      cdgp evaluate runs/parts runs/parts/manifest.csv

      cdgp evaluate runs/parts labelled_images --out runs/parts-check
    """
    from cdgp.data.layouts import check_outside
    from cdgp.data.layouts import load as load_manifest
    from cdgp.data.scan import digested
    from cdgp.data.splits import check_leaks
    from cdgp.evaluation import evaluate as evaluate_samples
    from cdgp.inference import load

    detector = load(model)
    data = detector.settings.data
    bins = (good or data.good, defective or data.defective)
    if out_folder is not None:
        check_outside(out_folder, manifest, *bins)
    table = load_manifest(manifest, *bins)
    part = "test images" if table.of("test") else "images"
    progress = bars(quiet)
    # Training images are only compared with: where the table has their digests, these serve.
    is_known = [bool(table.of("test") and s.split != "test" and s.pixel_sha256)
                for s in table.samples]  # fmt: skip
    known_ones = [s for s, known in zip(table.samples, is_known, strict=True) if known]
    unread = [s for s, known in zip(table.samples, is_known, strict=True) if not known]
    with progress.phase("Reading images", len(unread)) as advance:
        # All that cannot be used is told before the first image is scored.
        read = digested(replace(table, samples=tuple(unread)), data.white_level, advance)
    table = replace(table, samples=(*read.samples, *known_ones))
    if table.of("test"):
        check_leaks(table)
    samples = table.of("test") or table.samples
    computed_on = f"{len(samples)} {part} of {manifest}"
    known = trained_on(model)
    seen = sum(sample.pixel_sha256 in known for sample in samples)
    if seen:
        computed_on += f", {seen} of which the model was trained on"
        warn(f"warning: the model was trained on {seen} of these images: no measure of new ones")
    if out_folder is not None:
        make_folder(out_folder, overwrite, table.paths())
        write = writer(out_folder, detector, save_maps)
        rows, metrics = evaluate_samples(detector, table, samples, progress, write)
    else:
        rows, metrics = evaluate_samples(detector, table, samples, progress)
    metrics["computed_on"] = computed_on
    show_metrics(metrics, computed_on)
    if out_folder is not None:
        write_results(out_folder, detector, rows, metrics, computed_on, {})
        say(f"report: {out_folder / 'report.html'}")


def trained_on(model: Path) -> set[str]:
    """Pixel digests of the images that a run trained on, where its manifest lies beside it."""
    table = (model if model.is_dir() else model.parent) / "manifest.csv"
    if not table.is_file():
        return set()
    # Not read_csv: the images need not be there any more.
    with table.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        rows = [row for row in csv.DictReader(file) if row.get("split") in ("fit", "calibration")]
    return {row["pixel_sha256"] for row in rows if row.get("pixel_sha256")}
