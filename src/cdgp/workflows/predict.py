"""Score images without labels; stops and resumes at any image."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cdgp import run_folder
from cdgp.data.layouts import walk_images
from cdgp.errors import DataError, ImageError, Interrupted, OutputError
from cdgp.evaluation import ScoredImage
from cdgp.files import absolute, digest
from cdgp.inference import Detector, load
from cdgp.ledger import Ledger
from cdgp.progress import Progress, Quiet
from cdgp.report.results import ResultFiles

SHOWN = 20
"""Messages about unreadable images that a result holds; ``unreadable.csv`` lists all."""


@dataclass(frozen=True)
class PredictedFolder:
    """Images without labels, scored into a folder."""

    folder: Path
    scored: int
    rejected: int
    unreadable: int
    """Number of images that could not be read; ``unreadable.csv`` lists them."""
    problems: list[str]
    """Why, for the first of them."""
    refers_to: str
    """The share of defective parts that the probabilities refer to, in words."""
    notes: tuple[str, ...]
    """What weakens the probabilities."""


def predict_folder(
    model: str | Path,
    images: Sequence[str | Path],
    out: str | Path,
    *,
    save_maps: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    defect_rate: float | None = None,
    progress: Progress | None = None,
) -> PredictedFolder:
    """Score images without labels; each is decoded and predicted once.

    An image that cannot be read is listed in ``unreadable.csv`` and the others are scored. Memory
    grows by a few hundred bytes an image at most.

    Args:
        model: as ``inference.load`` takes it.
        images: image files, and folders that are searched with their sub-folders.
        out: folder for the results.
        save_maps: also write the raw maps.
        resume: go on with the unfinished prediction in ``out``.
        overwrite: replace the results in ``out``.
        defect_rate: as ``inference.load`` takes it.
        progress: where to show the progress; nowhere where None.

    Raises:
        Interrupted: stopped by the user; ``resume`` goes on from there.
        CdgpError: see ``cdgp.errors``.
    """
    run_folder.check_not_both(resume, overwrite)
    folder, detector = Path(out), load(model, defect_rate=defect_rate)
    for path in map(Path, images):
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
    places = outermost([absolute(Path(path)) for path in images])
    count = sum(1 for place in places for _ in walk_images(place))
    if not count:
        raise DataError(f"{', '.join(map(str, images))}: no images found")
    _prepare_prediction(folder, places, resume, overwrite)
    with closing(Ledger(folder, _cache_key(Path(model), places, save_maps, detector))) as ledger:
        if resume:
            run_folder.remove_leftovers(folder)
            ledger.forget_unreadable()  # a network share that was away may be back
        files = ResultFiles(folder, detector, save_maps)
        try:
            with (progress or Quiet()).phase("Prediction", count) as advance:
                for name, path in named_images(places):
                    if not ledger.has(name):
                        _predict_one(detector, name, path, files, ledger)
                    advance()
            files.write_tables(ledger, None)
            files.write_report(ledger, None, f"{len(ledger)} images without labels")
        except KeyboardInterrupt:
            done = f"interrupted after {len(ledger)} of {count} images"
            raise Interrupted(f"{done}; --resume goes on from there") from None
        found = _finished(ledger, folder, detector)
    ledger.path.unlink()
    return found


def _cache_key(
    model: Path, places: Sequence[Path], save_maps: bool, detector: Detector
) -> dict[str, str]:
    """What must be the same for a prediction to be resumed, by the words that name it."""
    listed = b"\0".join(os.fsencode(place) for place in places)
    return {
        "model": digest(run_folder.model_file(model)),
        "--save-maps": str(save_maps),
        "--defect-rate": repr(detector.card.decision.defect_rate),
        "list of images and folders": hashlib.sha256(listed).hexdigest(),
    }


def _prepare_prediction(
    folder: Path, places: Sequence[Path], resume: bool, overwrite: bool
) -> None:
    """Check the folder of a prediction, and make it where a new one starts."""
    if any(place.is_dir() and absolute(folder).is_relative_to(place) for place in places):
        raise OutputError(f"{folder}: lies in a folder that is scored; choose another --out")
    if not resume:
        run_folder.make_results_folder(folder, overwrite, places, resumable=True)
        return
    run_folder.check_not_replaced(folder, run_folder.RESULT_FOLDERS, places)
    if not (folder / run_folder.LEDGER).is_file():
        raise OutputError(
            f"{folder}: holds no unfinished prediction; leave --resume out to start one"
        )


def _predict_one(
    detector: Detector, name: str, path: Path, files: ResultFiles, ledger: Ledger
) -> None:
    try:
        pixels = detector.read(path)
        prediction = detector.predict_pixels(pixels)
    except ImageError as error:
        ledger.add_unreadable(name, path, error)
        return
    row = ScoredImage.of(prediction, name, path)
    files.add(row, pixels, prediction)
    ledger.add(row)


def _finished(ledger: Ledger, folder: Path, detector: Detector) -> PredictedFolder:
    """List the unreadable images, and count."""
    place = folder / run_folder.UNREADABLE
    if ledger.unreadable:
        ledger.write_unreadable(place)
    else:
        place.unlink(missing_ok=True)
    problems = [problem for _, problem in islice(ledger.problems(), SHOWN)]
    return PredictedFolder(
        folder, len(ledger), ledger.rejected, ledger.unreadable, problems,
        detector.card.decision.refers_to, detector.card.image.notes,
    )  # fmt: skip


def outermost(places: Sequence[Path]) -> list[Path]:
    """The places, sorted, without repetitions and without those that lie in another of them."""
    chosen: list[Path] = []
    for place in sorted(set(places)):
        # Sorted by their parts, so that what lies in a folder comes right after it.
        if not (chosen and place.is_relative_to(chosen[-1])):
            chosen.append(place)
    return chosen


def named_images(places: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """(name, path) of every image; names are relative to what the places have in common."""
    folders = [place if place.is_dir() else place.parent for place in places]
    try:
        root = Path(os.path.commonpath(folders))
    except ValueError:  # on two drives of a Windows machine nothing is common
        root = None
    for place in places:
        for path in walk_images(place, warn=True):
            yield (path.relative_to(root) if root else path).as_posix(), path
