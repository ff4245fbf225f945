"""``cdgp evaluate``: metrics of a trained model on labelled images."""

from cdgp.cli import options
from cdgp.cli.common import bars, handle_errors, say, show_metrics


@handle_errors
def evaluate(
    model: options.Model,
    data: options.Data,
    good: options.Good = None,
    defective: options.Defective = None,
    out_folder: options.ReportFolder = None,
    overlays: options.Overlays = None,
    save_maps: options.SaveMaps = False,
    overwrite: options.Overwrite = False,
    defect_rate: options.DefectRate = None,
    workers: options.Workers = None,
    batch: options.Batch = None,
    quiet: options.Quiet = False,
) -> None:
    """Score labelled images and print the metrics.

    Where the manifest has a split column, its test images are used, otherwise all of them. The
    same image or group on two sides of a stated split is an error. Undefined metrics are null in
    metrics.json, with a reason. --good and --defective are those of the training where not given.

    Examples:

      cdgp evaluate runs/parts runs/parts/manifest.csv

      cdgp evaluate runs/parts labelled_images --out runs/parts-check
    """
    from cdgp.run_folder import REPORT
    from cdgp.workflows import evaluate_run

    done = evaluate_run(
        model, data, out_folder, good=good, defective=defective, overlays=overlays,
        save_maps=save_maps, overwrite=overwrite, defect_rate=defect_rate, workers=workers,
        batch=batch, progress=bars(quiet),
    )  # fmt: skip
    show_metrics(done.metrics)
    if done.folder is not None:
        say(f"report: {done.folder / REPORT}")
