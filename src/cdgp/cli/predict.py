"""``cdgp predict``: images to scores, decisions, regions and overlays."""

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from cdgp.cli import options
from cdgp.cli.common import SHOWN, bars, handle_errors, say, score_line, warn

if TYPE_CHECKING:
    from cdgp.cluster import PredictedShards
    from cdgp.cluster.scorer import Facts
    from cdgp.workflows import PredictedFolder


class WithAddress(TyperCommand):
    """A command whose ``--ray`` may stand without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        filled: list[str] = []
        for argument, following in pairwise([*args, "-"]):
            filled.append(argument)
            if argument == "--ray" and following.startswith("-"):
                filled.append("")
        return super().parse_args(ctx, filled)


@handle_errors
def predict(
    model: options.Model,
    paths: options.Places,
    out_folder: options.ResultsPlace,
    overlays: options.Overlays = None,
    save_maps: options.SaveMaps = False,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    defect_rate: options.DefectRate = None,
    best_runtime: options.BestRuntime = False,
    workers: options.Workers = None,
    batch: options.Batch = None,
    ray: options.Ray = None,
    actors: options.Actors = None,
    quiet: options.Quiet = False,
) -> None:
    """Score images with a trained model.

    Writes scores.csv, an overlay and a JSON file an image, and report.html. Images that cannot
    be read are listed in unreadable.csv, the others are scored, and the exit code is 3. What else
    lies in the folders is named with its reason; label files beside images are not scored. What is
    in doubt about an image (no content, odd colours) is in the column warnings. Memory grows by a
    few hundred bytes an image at most. A prediction that was stopped goes on with
    --resume. With --ray the results are Parquet files, a row an image.

    Examples:

      cdgp predict runs/parts new_images --out runs/parts-monday

      cdgp predict runs/parts/model.safetensors a.png b.png --out scores --save-maps

      cdgp predict runs/parts new_images --out runs/parts-monday --resume

      cdgp predict runs/parts new_images --out runs/parts-monday --best-runtime

      cdgp predict parts.onnx new_images --out runs/parts-monday --ray
    """
    from cdgp.cluster.store import is_url
    from cdgp.errors import DataError, SettingsError
    from cdgp.report.results import FEW
    from cdgp.run_folder import SCORES, UNREADABLE
    from cdgp.workflows import predict_folder

    if ray is not None:
        for name, given in (("--overlays", overlays), ("--save-maps", save_maps)):
            if given:
                raise SettingsError(f"{name}: is not written with --ray; leave one of them out")
        if best_runtime:
            raise SettingsError("--best-runtime: with --ray, give the file that cdgp export wrote")
        from cdgp.cluster import predict_on_ray

        show_shards(
            predict_on_ray(
                model, paths, out_folder, address=ray, actors=actors, resume=resume,
                overwrite=overwrite, defect_rate=defect_rate, workers=workers, batch=batch,
                progress=bars(quiet),
            )
        )  # fmt: skip
        return
    for place in (*paths, out_folder):
        if is_url(place):
            raise SettingsError(f"{place}: URLs are read and written with --ray; give it too")
    if actors is not None:
        raise SettingsError("--actors: is the number of workers on Ray; give --ray too")
    done = predict_folder(
        model, paths, out_folder, overlays=overlays, save_maps=save_maps, resume=resume,
        overwrite=overwrite, defect_rate=defect_rate, best_runtime=best_runtime,
        workers=workers, batch=batch, progress=bars(quiet),
    )  # fmt: skip
    say(f"{done.scored} scored, {done.rejected} called defective: {out_folder}")
    if done.overlays == "rejected" and overlays is None:
        say(f"{FEW:,} images or more: overlays of the rejected ones; --overlays all draws all")
    show_facts(done)
    for text in done.not_scored:
        warn(f"not scored: {text}")
    if done.warned:
        words = "image carries" if done.warned == 1 else "images carry"
        warn(f"{done.warned} {words} warnings, see {Path(out_folder, SCORES)}:")
        for warning in done.warnings[:SHOWN]:
            warn(f"  {warning}")
        if done.warned > SHOWN:
            warn(f"  and {done.warned - SHOWN} more")
    if done.unreadable:
        where = f"listed in {Path(out_folder, UNREADABLE)}"
        show_unreadable(done.unreadable, done.problems, where)
        raise typer.Exit(DataError.exit_code)


def show_shards(done: "PredictedShards") -> None:
    """What a prediction on Ray has left."""
    from cdgp.errors import DataError

    scored = done.images - done.unreadable
    say(f"{scored} scored, {done.rejected} called defective: {done.folder}")
    if done.skipped:
        say(f"{done.skipped} of these images had their rows already")
    if done.facts is not None:
        show_facts(done.facts)
    for text in done.not_scored:
        warn(f"not scored: {text}")
    if done.warned:
        words = "image carries" if done.warned == 1 else "images carry"
        warn(f"{done.warned} {words} warnings, see the column warnings")
    if done.ended:
        warn(f"{done.ended} workers ended before their work was done, and were replaced")
    if done.unreadable:
        show_unreadable(done.unreadable, done.problems, "see the column problem")
        raise typer.Exit(DataError.exit_code)


def show_facts(facts: "PredictedFolder | Facts") -> None:
    """What the scores are, what they refer to, and what weakens them."""
    say(score_line(facts.score_kind, facts.rests_on))
    if facts.score_kind == "probability":
        say(f"probabilities refer to a line with {facts.refers_to}")
    for note in facts.notes:
        warn(f"note: {note}")


def show_unreadable(count: int, problems: list[str], where: str) -> None:
    """How many images could not be read, and the first of them."""
    warn(f"{count} images could not be read, {where}:", error=True)
    for problem in problems:
        warn(f"  {problem}")
    if count > len(problems):
        warn(f"  and {count - len(problems)} more")
