"""``cdgp train``: two bins of images to a calibrated detector, with its report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdgp.cli.common import (
    bars,
    build_settings,
    hint_at_gpu,
    parse_size,
    say,
    shortened,
    show_metrics,
    told,
    warn,
    write_results,
    writer,
)

if TYPE_CHECKING:
    from cdgp.presets import Settings
    from cdgp.progress import Progress
    from cdgp.training.fit import Run

Data = Annotated[
    Path,
    typer.Argument(help="Folder with good/ and defective/, or a CSV manifest (image,label,…)."),
]


@told
def train(
    data: Data,
    out_folder: Annotated[Path, typer.Option("--out", help="Folder of the run.")],
    preset: Annotated[
        str | None, typer.Option(help="lite (default) or paper.", metavar="lite|paper")
    ] = None,
    input_size: Annotated[
        str | None,
        typer.Option(help="Size that images are resized to; multiples of 16.", metavar="HxW"),
    ] = None,
    tile: Annotated[
        bool,
        typer.Option(
            "--tile",
            help="Cut images into overlapping windows of --input-size at their own resolution, "
            "instead of resizing them to it; prediction then does the same.",
        ),
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of split and training.")] = None,
    max_false_rejects: Annotated[
        float | None,
        typer.Option(
            help="Largest share of good parts that may be rejected, for example 0.01; keeps the "
            "calibration images out of training."
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Backbone weights: hub, bundled or a .safetensors file.")
    ] = None,
    good: Annotated[str | None, typer.Option(help="Name of the folder of good images.")] = None,
    defective: Annotated[
        str | None, typer.Option(help="Name of the folder of defective images.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings: a TOML file, or the config.json of a run.")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="Change one setting.", metavar="KEY=VALUE")
    ] = None,
    save_maps: Annotated[bool, typer.Option(help="Also write the raw maps, float16 .npy.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on with the interrupted run in --out.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace the run in --out.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress bars.")] = False,
) -> None:
    """Train on good and defective images.

    Examples:

      cdgp train parts --out runs/parts

      cdgp train parts/manifest.csv --out runs/parts --input-size 384x160 --seed 1

      cdgp train parts --out runs/strict --max-false-rejects 0.02

      cdgp train parts --out runs/parts --resume
    """
    settings = build_settings(
        preset,  # type: ignore[arg-type]
        config,
        assignments or [],
        {
            "input_size": parse_size(input_size) if input_size is not None else None,
            "tile": True if tile else None,
            "seed": seed,
            "decision.max_false_rejects": max_false_rejects,
            "calibration.pictures": "held_out" if max_false_rejects is not None else None,
            "backbone.weights": weights,
            "data.good": good,
            "data.defective": defective,
        },
    )
    hint_at_gpu(preset, config)
    run_training(data, out_folder, settings, resume, overwrite, save_maps, bars(quiet))


def run_training(
    data: Any,
    folder: Path,
    settings: "Settings",
    resume: bool,
    overwrite: bool,
    save_maps: bool,
    progress: "Progress",
) -> None:
    """Train, evaluate on the test part, and write everything that a run leaves."""
    from cdgp.training.fit import fit

    run = fit(data, folder, settings, resume=resume, overwrite=overwrite, progress=progress)
    for note in run.detector.card.image.notes:
        warn(f"note: {note}")
    detector = run.detector
    if detector.settings.calibration.tail == "counting" and (
        detector.region_level >= detector.colour_scale[1]
    ):
        warn(
            "note: no pixel can be rarer than decision.region_level with so few normal pixels, so "
            "no regions will be reported; raise the level, or use calibration.tail=pareto"
        )
    finish(run, folder, save_maps, progress)


def finish(run: "Run", folder: Path, save_maps: bool, progress: "Progress") -> None:
    """Scores, metrics, overlays and the report of a trained run."""
    from cdgp.audit.suspects import suspects, write_suspects
    from cdgp.evaluation import ScoredImage, evaluate
    from cdgp.report.html import Extra, write_report
    from cdgp.training.fit import read_log

    detector = run.detector
    test = run.manifest.of("test")
    metrics = None
    rows: list[ScoredImage] = []
    if test:
        computed_on = f"{len(test)} test images that no stage has seen"
        rows, metrics = evaluate(
            detector, run.manifest, test, progress, writer(folder, detector, save_maps)
        )
        metrics["computed_on"] = computed_on
        show_metrics(metrics, computed_on)
    else:
        computed_on = "nothing: no test images were set aside"
        warn("note: no test images were set aside, so there are no metrics")
    doubtful = suspects(run.manifest, detector.model.network.teacher, detector.settings, progress)
    write_suspects(folder / "suspects.csv", doubtful)
    extra: Extra = {
        "log": read_log(folder),
        "manifest_counts": run.manifest.counts(),
        "audit": [f"Data: {shortened(f.text)}." for f in run.audit.of("warning")],
        "suspects": doubtful,
    }
    if test:
        write_results(folder, detector, rows, metrics, computed_on, extra)
    else:
        write_report(folder / "report.html", folder.name, detector, rows, None, computed_on, extra)
    say(f"model:    {folder / 'model.safetensors'}")
    if test:
        say(f"overlays: {folder / 'overlays'}")
    if doubtful:
        say(f"suspect labels: {folder / 'suspects.csv'}")
    say(f"report:   {folder / 'report.html'}")
