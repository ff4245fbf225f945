"""Score images without labels; stops and resumes at any image."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cdgp import run_folder
from cdgp.data.labels import tell_labels
from cdgp.data.walk import Notice, Search, walk_images
from cdgp.errors import (
    CdgpError,
    DataError,
    ImageError,
    Interrupted,
    ModelFileError,
    OutputError,
)
from cdgp.evaluation import ScoredImage
from cdgp.files import absolute, digest, lies_in
from cdgp.inference import Detector, Prediction, Prepared
from cdgp.ledger import Ledger
from cdgp.progress import Advance, Progress, Quiet
from cdgp.report.html import TrainingFacts
from cdgp.report.results import Overlays, ResultFiles, overlays_of
from cdgp.streaming import Threads, load_for, stream

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
    not_scored: list[str]
    """What else was found: how many files by reason, with the first names."""
    warned: int
    """Number of scored images with warnings; the column ``warnings`` of ``scores.csv`` has them."""
    warnings: list[str]
    """The first of them, with the image's name."""
    refers_to: str
    """The share of defective parts that the probabilities refer to, in words."""
    score_kind: str
    """As ``Detector.score_kind``."""
    rests_on: str
    """As ``Detector.rests_on``."""
    notes: tuple[str, ...]
    """What weakens the scores."""
    overlays: Overlays
    """Of which images there are overlays."""


def predict_folder(
    model: str | Path,
    images: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    overlays: Overlays | None = None,
    save_maps: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    defect_rate: float | None = None,
    best_runtime: bool = False,
    workers: int | None = None,
    batch: int | None = None,
    progress: Progress | None = None,
) -> PredictedFolder:
    """Score images without labels; each is decoded and predicted once, several at a time.

    An image that cannot be read is listed in ``unreadable.csv`` and the others are scored; so is
    one that has ended the process twice. What else lies in the folders is named in the result and
    in the report. Memory grows by a few hundred bytes an image at most.

    Args:
        model: as ``inference.load`` takes it.
        images: an image file or a folder that is searched with its sub-folders, or several.
        out: folder for the results.
        overlays: of which images an overlay and a record are written: ``all``, ``rejected`` or
            ``none``; where None of all, and from 1,000 images on of the rejected ones.
        save_maps: also write the raw maps.
        resume: go on with the unfinished prediction in ``out``.
        overwrite: replace the results of an earlier prediction in ``out``.
        defect_rate: as ``inference.load`` takes it.
        best_runtime: run the model in OpenVINO or onnxruntime where they are installed, see
            ``export.best_runtime``.
        workers: images that are worked on at the same time; one a core where None.
        batch: images that each worker hands to the network at once; 1 where None. Another number
            may move a score by a millionth.
        progress: where to show the progress; nowhere where None.

    Raises:
        OutputError: another process is writing into ``out``, or it holds something else.
        Interrupted: stopped by the user; ``resume`` goes on from there.
        CdgpError: see ``cdgp.errors``.
    """
    run_folder.check_not_both(resume, overwrite)
    folder = Path(out)
    given = [images] if isinstance(images, str | os.PathLike) else images
    threads = Threads.of(workers, batch)
    model = Path(model)
    if best_runtime:
        from cdgp import export  # it imports torch

        # Checked before the export, which takes its time.
        model = export.best_runtime(model, _places(given, folder), progress or Quiet())
    detector, model_sha256 = _load(model, threads, defect_rate)
    places = _places(given, folder)
    with run_folder.lock(folder, "predict"):
        count, not_scored = _counted(places)
        drawn = overlays_of(overlays, count)
        cache_key = _cache_key(model_sha256, places, drawn, save_maps, detector)
        if not count:
            also = "".join(f"; {notice.text}" for notice in not_scored)
            raise DataError(f"{', '.join(map(str, given))}: no images found{also}")
        run_id = _prepare_prediction(folder, places, resume, overwrite)
        facts = TrainingFacts(audit=[f"Not scored: {notice.text}." for notice in not_scored])
        with closing(Ledger(folder, cache_key)) as ledger:
            if resume:
                run_folder.remove_leftovers(folder)
                ledger.forget_unreadable()  # a network share that was away may be back
            files = ResultFiles(folder, run_id, detector, drawn, save_maps)
            try:
                with (progress or Quiet()).phase("Prediction", count, len(ledger)) as advance:
                    _predict(detector, places, files, ledger, threads, advance)
                files.write_tables(ledger, None)
                files.write_report(ledger, None, _computed_on(ledger), facts)
            except KeyboardInterrupt:
                done = f"interrupted after {len(ledger)} of {count} images"
                raise Interrupted(f"{done}; --resume goes on from there") from None
            found = _finished(
                ledger, files, [notice.text for notice in not_scored], detector, drawn
            )
        ledger.path.unlink()
    return found


def _places(given: Sequence[str | Path], folder: Path) -> list[Path]:
    """The files and folders to score, none twice; none of them holds the folder of the results."""
    for path in map(Path, given):
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
    places = outermost([absolute(Path(path)) for path in given])
    if any(place.is_dir() and lies_in(folder, place) for place in places):
        raise OutputError(f"{folder}: lies in a folder that is scored; choose another --out")
    return places


def _load(model: Path, threads: Threads, defect_rate: float | None) -> tuple[Detector, str]:
    """The detector, and the digest of the file that it was made from."""
    path = run_folder.model_file(model)
    before = digest(path) if path.is_file() else ""
    detector = load_for(model, threads, defect_rate)
    if digest(path) != before:
        raise ModelFileError(f"{path}: was replaced while it was read; start again")
    return detector, before


def _cache_key(
    model_sha256: str,
    places: Sequence[Path],
    overlays: Overlays,
    save_maps: bool,
    detector: Detector,
) -> dict[str, str]:
    """What must be the same for a prediction to be resumed, by the words that name it."""
    listed = b"\0".join(os.fsencode(place) for place in places)
    return {
        "model": model_sha256,
        "--overlays": overlays,
        "--save-maps": str(save_maps),
        "--defect-rate": repr(detector.card.decision.defect_rate),
        "list of images and folders": hashlib.sha256(listed).hexdigest(),
    }


def _prepare_prediction(folder: Path, places: Sequence[Path], resume: bool, overwrite: bool) -> str:
    """Check the folder of a prediction, and start a new one in it or go on; returns the run id."""
    if not resume:
        return run_folder.make_results_folder(folder, "predict", overwrite, places)
    run_folder.check_not_replaced(folder, run_folder.RESULT_FOLDERS, places)
    run_folder.check_no_links(folder)
    if not (folder / run_folder.LEDGER).is_file():
        raise OutputError(
            f"{folder}: holds no unfinished prediction; leave --resume out to start one"
        )
    return run_folder.go_on(folder, "predict")


def _predict(
    detector: Detector,
    places: Sequence[Path],
    files: ResultFiles,
    ledger: Ledger,
    threads: Threads,
    advance: Advance,
) -> None:
    """Score what is not done yet into the files; an image that cannot be scored is listed."""
    suspected = ledger.suspected
    # Alone, so that it is known which one ends the process.
    for name, path in named_images(places) if suspected else ():
        if name in suspected:
            if ledger.begin(name):
                _stream(detector, [(name, path)], files, ledger, Threads(1, 1), advance)
                continue
            problem = f"{path}: the process ended twice while this image was read"
            ledger.add_unreadable(name, path, f"{problem}; --overwrite tries it again")
            advance()
    unread = (image for image in named_images(places) if not ledger.has(image[0]))
    begun = (image for image in unread if ledger.begin(image[0]))
    _stream(detector, begun, files, ledger, threads, advance)


def _stream(
    detector: Detector,
    images: Iterable[tuple[str, Path]],
    files: ResultFiles,
    ledger: Ledger,
    threads: Threads,
    advance: Advance,
) -> None:
    def finish(image: tuple[str, Path], read: Prepared, prediction: Prediction) -> ScoredImage:
        row = ScoredImage.of(prediction, *image)
        files.add(row, read.pixels, prediction)
        return row

    keyed = ((image, image[1]) for image in images)
    with closing(stream(detector, keyed, finish, threads)) as scored:
        for (name, path), found in scored:
            if isinstance(found, ScoredImage):
                ledger.add(found)
            elif isinstance(found, ImageError):
                ledger.add_unreadable(name, path, str(found))
            elif isinstance(found, CdgpError):  # a full disk: it would be the same for every image
                raise found
            else:  # no memory, or a decoder's own error
                reason = f"{type(found).__name__}: {found}".rstrip(": ")
                ledger.add_unreadable(name, path, f"{path}: cannot be scored: {reason}")
            advance()


def _counted(places: Sequence[Path]) -> tuple[int, list[Notice]]:
    """How many images there are, and what else there is, with the reasons."""
    root = common_folder(places)
    search = Search(places, root)
    count = sum(1 for _ in searched(places, search))
    return count, search.unused.notices(root or places[0])


def searched(places: Sequence[Path], search: Search) -> Iterator[Path]:
    """Every image of the places, one folder after another; label files are left out and told.

    Of the files that were given by themselves, those are left out that are labels of others.
    """
    given: dict[Path, list[Path]] = defaultdict(list)
    for place in places:
        if place.is_file():
            given[place.parent].append(place)
    labels = {label for files in given.values() for label in tell_labels(files).labels}
    for place in places:
        if place in labels:
            search.leave("label", place)
        else:
            yield from walk_images(place, search)


def _computed_on(ledger: Ledger) -> str:
    """What the report is about: the images that it shows, and how many it cannot show."""
    text = f"{len(ledger)} images without labels"
    if not ledger.unreadable:
        return text
    return f"{text}; {ledger.unreadable} more could not be read, see {run_folder.UNREADABLE}"


def _finished(
    ledger: Ledger,
    files: ResultFiles,
    not_scored: list[str],
    detector: Detector,
    overlays: Overlays,
) -> PredictedFolder:
    """List the unreadable images, and count."""
    folder = files.folder
    place = folder / run_folder.UNREADABLE
    if ledger.unreadable:
        ledger.write_unreadable(place, files.run_id)
    else:
        place.unlink(missing_ok=True)
    problems = [problem for _, problem in islice(ledger.problems(), SHOWN)]
    warned = (f"{row.name}: {'; '.join(row.warnings)}" for row in ledger if row.warnings)
    return PredictedFolder(
        folder, len(ledger), ledger.rejected, ledger.unreadable, problems, not_scored,
        ledger.warned, list(islice(warned, SHOWN)), detector.card.decision.refers_to,
        detector.score_kind, detector.rests_on, detector.card.image.notes, overlays,
    )  # fmt: skip


def outermost(places: Sequence[Path]) -> list[Path]:
    """The places, sorted, without repetitions and without those that lie in another of them."""
    chosen: list[Path] = []
    for place in sorted(set(places)):
        # Sorted by their parts, so that what lies in a folder comes right after it.
        if not (chosen and place.is_relative_to(chosen[-1])):
            chosen.append(place)
    return chosen


def common_folder(places: Sequence[Path]) -> Path | None:
    """The folder that all places lie in; None where they have none in common."""
    try:
        return Path(os.path.commonpath([p if p.is_dir() else p.parent for p in places]))
    except ValueError:  # on two drives of a Windows machine nothing is common
        return None


def named_images(places: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """(name, path) of every image; names are relative to what the places have in common."""
    root = common_folder(places)
    for path in searched(places, Search(places, None)):
        yield (path.relative_to(root) if root else path).as_posix(), path
