"""``cdgp predict``: pictures to probabilities, decisions, regions and overlays."""

import os
from pathlib import Path
from typing import Annotated

import typer

from cdgp.cli.common import (
    INTERRUPTED,
    bars,
    make_folder,
    say,
    told,
    warn,
    write_results,
    writer,
)


@told
def predict(
    model: Annotated[Path, typer.Argument(help="model.safetensors, or the folder of a run.")],
    paths: Annotated[list[Path], typer.Argument(help="Pictures, or folders of pictures.")],
    out_folder: Annotated[Path, typer.Option("--out", help="Folder for the results.")],
    save_maps: Annotated[bool, typer.Option(help="Also write the raw maps, float16 .npy.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace the results in --out.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress bars.")] = False,
) -> None:
    """Score pictures with a trained model.

    Writes scores.csv, an overlay and a JSON file a picture, and report.html. Pictures that cannot
    be read are listed, the others are scored, and the exit code is 3.

    Examples:

      cdgp predict runs/parts new_pictures --out runs/parts-monday

      cdgp predict runs/parts/model.safetensors a.png b.png --out scores --save-maps
    """
    from cdgp.data.layouts import pictures_in
    from cdgp.data.manifest import absolute
    from cdgp.errors import DataError, OutputError, PictureError
    from cdgp.evaluation import ScoredPicture, predict_rows, write_scores
    from cdgp.inference import load

    detector = load(model)
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += pictures_in(path)
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"{path}: no such file or folder")
    found = sorted({absolute(path) for path in found})
    if not found:
        raise DataError(f"{', '.join(map(str, paths))}: no pictures found")
    if any(path.is_dir() and absolute(out_folder).is_relative_to(absolute(path)) for path in paths):
        raise OutputError(f"{out_folder}: lies in a folder that is scored; choose another --out")
    make_folder(out_folder, overwrite, found)
    try:
        root = Path(os.path.commonpath([path.parent for path in found]))
        named = [(path.relative_to(root).as_posix(), path) for path in found]
    except ValueError:  # on two drives of a Windows machine nothing is common
        named = [(path.as_posix(), path) for path in found]
    rows: list[ScoredPicture] = []
    bad: list[PictureError] = []
    write = writer(out_folder, detector, save_maps)
    try:
        predict_rows(detector, named, bars(quiet), write, rows, bad)
    except KeyboardInterrupt:
        write_scores(out_folder / "scores.csv", rows)
        warn(f"interrupted; the scores of {len(rows)} of {len(found)} pictures are in {out_folder}")
        raise typer.Exit(INTERRUPTED) from None
    if rows:
        computed_on = f"{len(rows)} pictures without labels"
        write_results(out_folder, detector, rows, None, computed_on, {})
    else:
        write_scores(out_folder / "scores.csv", rows)
    rejected = sum(row.pred_label for row in rows)
    say(f"{len(rows)} scored, {rejected} called defective: {out_folder}")
    if bad:
        warn(f"{len(bad)} pictures could not be read:", error=True)
        for error in bad:
            warn(f"  {error}")
        raise typer.Exit(DataError.exit_code)
