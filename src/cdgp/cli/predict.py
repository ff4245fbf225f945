"""``cdgp predict``: images to scores, decisions, regions and overlays."""

import typer

from cdgp.cli import options
from cdgp.cli.common import SHOWN, bars, handle_errors, say, score_line, warn


@handle_errors
def predict(
    model: options.Model,
    paths: options.Images,
    out_folder: options.ResultsFolder,
    overlays: options.Overlays = None,
    save_maps: options.SaveMaps = False,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    defect_rate: options.DefectRate = None,
    best_runtime: options.BestRuntime = False,
    workers: options.Workers = None,
    batch: options.Batch = None,
    quiet: options.Quiet = False,
) -> None:
    """Score images with a trained model.

    Writes scores.csv, an overlay and a JSON file an image, and report.html. Images that cannot
    be read are listed in unreadable.csv, the others are scored, and the exit code is 3. What else
    lies in the folders is named with its reason; label files beside images are not scored. What is
    in doubt about an image (no content, odd colours) is in the column warnings. Memory grows by a
    few hundred bytes an image at most. A prediction that was stopped goes on with
    --resume.

    Examples:

      cdgp predict runs/parts new_images --out runs/parts-monday

      cdgp predict runs/parts/model.safetensors a.png b.png --out scores --save-maps

      cdgp predict runs/parts new_images --out runs/parts-monday --resume

      cdgp predict runs/parts new_images --out runs/parts-monday --best-runtime
    """
    from cdgp.errors import DataError
    from cdgp.report.results import FEW
    from cdgp.run_folder import SCORES, UNREADABLE
    from cdgp.workflows import predict_folder

    done = predict_folder(
        model, paths, out_folder, overlays=overlays, save_maps=save_maps, resume=resume,
        overwrite=overwrite, defect_rate=defect_rate, best_runtime=best_runtime,
        workers=workers, batch=batch, progress=bars(quiet),
    )  # fmt: skip
    say(f"{done.scored} scored, {done.rejected} called defective: {out_folder}")
    if done.overlays == "rejected" and overlays is None:
        say(f"{FEW:,} images or more: overlays of the rejected ones; --overlays all draws all")
    say(score_line(done.score_kind, done.rests_on))
    if done.score_kind == "probability":
        say(f"probabilities refer to a line with {done.refers_to}")
    for note in done.notes:
        warn(f"note: {note}")
    for text in done.not_scored:
        warn(f"not scored: {text}")
    if done.warned:
        words = "image carries" if done.warned == 1 else "images carry"
        warn(f"{done.warned} {words} warnings, see {out_folder / SCORES}:")
        for warning in done.warnings[:SHOWN]:
            warn(f"  {warning}")
        if done.warned > SHOWN:
            warn(f"  and {done.warned - SHOWN} more")
    if done.unreadable:
        place = out_folder / UNREADABLE
        warn(f"{done.unreadable} images could not be read, listed in {place}:", error=True)
        for problem in done.problems:
            warn(f"  {problem}")
        if done.unreadable > len(done.problems):
            warn(f"  and {done.unreadable - len(done.problems)} more")
        raise typer.Exit(DataError.exit_code)
