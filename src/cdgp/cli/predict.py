"""``cdgp predict``: images to probabilities, decisions, regions and overlays."""

import csv
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from cdgp.ledger import Ledger

SHOWN = 20
"""Images that could not be read are listed on screen up to this number, all in a file."""


@told
def predict(
    model: Annotated[Path, typer.Argument(help="model.safetensors, or the folder of a run.")],
    paths: Annotated[list[Path], typer.Argument(help="Images, or folders of images.")],
    out_folder: Annotated[Path, typer.Option("--out", help="Folder for the results.")],
    save_maps: Annotated[bool, typer.Option(help="Also write the raw maps, float16 .npy.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on with what is unfinished in --out.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace the results in --out.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress bars.")] = False,
) -> None:
    """Score images with a trained model.

    Writes scores.csv, an overlay and a JSON file an image, and report.html. Images that cannot
    be read are listed in unreadable.csv, the others are scored, and the exit code is 3. Memory
    grows by a few hundred bytes an image at most. A prediction that was stopped goes on with
    --resume.

    Examples:

      cdgp predict runs/parts new_images --out runs/parts-monday

      cdgp predict runs/parts/model.safetensors a.png b.png --out scores --save-maps

      cdgp predict runs/parts new_images --out runs/parts-monday --resume
    """
    from cdgp.data.layouts import walk_images
    from cdgp.errors import DataError, OutputError, SettingsError
    from cdgp.files import RESULT_FOLDERS, absolute, check_not_replaced, digest, remove_leftovers
    from cdgp.inference import load, model_file
    from cdgp.ledger import LEDGER, Ledger, predict_into

    if resume and overwrite:
        raise SettingsError("--resume goes on and --overwrite starts again: give one of them")
    detector = load(model)
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
    places = outermost([absolute(path) for path in paths])
    count = sum(1 for place in places for _ in walk_images(place))
    if not count:
        raise DataError(f"{', '.join(map(str, paths))}: no images found")
    if any(place.is_dir() and absolute(out_folder).is_relative_to(place) for place in places):
        raise OutputError(f"{out_folder}: lies in a folder that is scored; choose another --out")
    if resume and not (out_folder / LEDGER).is_file():
        raise OutputError(
            f"{out_folder}: holds no unfinished prediction; leave --resume out to start one"
        )
    check_not_replaced(out_folder, RESULT_FOLDERS, places)
    if not resume:
        make_folder(out_folder, overwrite, places, resume=LEDGER)
    listed = b"\0".join(os.fsencode(place) for place in places)
    marks = {
        "model": digest(model_file(model)),
        "--save-maps": str(save_maps),
        "list of images and folders": hashlib.sha256(listed).hexdigest(),
    }
    ledger = Ledger(out_folder, marks)
    if resume:
        remove_leftovers(out_folder)
        ledger.forget_unreadable()  # a share that was away may be back
    try:
        with bars(quiet).phase("Prediction", count) as advance:
            named = named_images(places)
            write = writer(out_folder, detector, save_maps)
            predict_into(ledger, detector, named, write, advance)
        scored = f"{len(ledger)} images without labels"
        write_results(out_folder, detector, ledger, None, scored, {})
    except KeyboardInterrupt:
        warn(f"interrupted after {len(ledger)} of {count} images; --resume goes on from there")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        ledger.save()
    say(f"{len(ledger)} scored, {ledger.rejected} called defective: {out_folder}")
    unreadable = list_unreadable(ledger, out_folder)
    ledger.close()
    ledger.path.unlink()
    if unreadable:
        raise typer.Exit(DataError.exit_code)


def outermost(places: Sequence[Path]) -> list[Path]:
    """Without repetitions and without what lies in another one of them, sorted."""
    chosen: list[Path] = []
    for place in sorted(set(places)):
        # Sorted by their parts, so that what lies in a folder comes right after it.
        if not (chosen and place.is_relative_to(chosen[-1])):
            chosen.append(place)
    return chosen


def named_images(places: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """(name, path) of every image; names are relative to what the places have in common."""
    from cdgp.data.layouts import walk_images

    folders = [place if place.is_dir() else place.parent for place in places]
    try:
        root = Path(os.path.commonpath(folders))
    except ValueError:  # on two drives of a Windows machine nothing is common
        root = None
    for place in places:
        for path in walk_images(place, warn=True):
            yield (path.relative_to(root) if root else path).as_posix(), path


def list_unreadable(ledger: "Ledger", folder: Path) -> int:
    """Tell of images that could not be read, all of them in ``unreadable.csv``; their number."""
    from cdgp.files import atomic_write, printable

    count = ledger.unreadable
    place = folder / "unreadable.csv"
    if not count:
        place.unlink(missing_ok=True)
    else:
        with atomic_write(place) as path, path.open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(["image", "problem"])
            for name, problem in ledger.problems():
                table.writerow([printable(name), problem])
        warn(f"{count} images could not be read, listed in {place}:", error=True)
        for number, (_, problem) in enumerate(ledger.problems()):
            if number == SHOWN:
                warn(f"  and {count - SHOWN} more")
                break
            warn(f"  {problem}")
    return count
