"""A job: many images scored on a cluster into one folder, shard by shard.

| Name                            | What it holds                                              |
|---------------------------------|------------------------------------------------------------|
| ``_job.json``                   | the model's digest, what was given, the size of a shard    |
| ``_list.parquet``               | every image of the job, in its order                       |
| ``part-SHARD.parquet``          | the rows of a shard                                        |
| ``part-SHARD-FROM-TO.parquet``  | those of a part of one, where the whole ended its workers  |

The file of a shard has its name once all its rows are in it: it is the receipt, and a job that
goes on skips the shard. The list is made once, so that a job scores what it was started with.
"""

import hashlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from cdgp import run_folder
from cdgp.cluster.engine import Engine, connected, workers_of
from cdgp.cluster.images import LIST, check_outside, images_of, shards, write_list
from cdgp.cluster.scorer import (
    SHOWN,
    Facts,
    Model,
    Piece,
    Tally,
    culprit,
    part_name,
    shard_digest,
    tally,
    tally_of,
    write_rows,
)
from cdgp.cluster.store import Store, as_place
from cdgp.data.walk import Notice
from cdgp.errors import DataError, Interrupted, ModelFileError, OutputError
from cdgp.prefetch import in_order
from cdgp.progress import Advance, Progress, Quiet
from cdgp.runtimes.base import require_package
from cdgp.runtimes.sealed import files_of
from cdgp.streaming import Threads

JOB = "_job.json"
FORMAT = "cdgp-ray-job"
SHARDS: tuple[int, ...] = (1024, 512, 256)
"""Images of a shard: the first number that gives every worker ``SHARDS_EACH``, else the last."""
SHARDS_EACH = 4
WORKERS = 2
"""Threads of a worker, where nothing else is asked for: one reads while the other computes."""
READERS = 8
PART = re.compile(r"part-(?P<shard>[0-9a-f]{32})(-(?P<begin>\d+)-(?P<end>\d+))?\.parquet")
WHOLE = (0, sys.maxsize)
Ranges = dict[str, list[tuple[int, int]]]
"""By shard, which parts of it have rows: from one number to another, or ``WHOLE``."""


@dataclass(frozen=True)
class PredictedShards:
    """Images scored on a cluster."""

    folder: str
    """Path or URL."""
    images: int
    rejected: int
    unreadable: int
    """Number of images without a score; the column ``problem`` says why."""
    warned: int
    problems: list[str]
    """The first of them."""
    skipped: int
    """Images whose rows were there already."""
    ended: int
    """Workers that ended before their work was done, and were replaced."""
    not_scored: list[str]
    """What else was found beside the images, as ``PredictedFolder.not_scored``."""
    facts: Facts | None
    """What all scores of the model share; None where everything was there already."""


def predict_on_ray(
    model: str | Path,
    images: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    address: str = "",
    actors: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    defect_rate: float | None = None,
    workers: int | None = None,
    batch: int | None = None,
    progress: Progress | None = None,
) -> PredictedShards:
    """Score images without labels on Ray, into a Parquet file a shard.

    An image that cannot be read is a row with a ``problem``; so is one that ends its workers. A
    worker or a node that is lost costs the shards in work, which are scored again.

    Args:
        model: as ``inference.load`` takes it; it is sent to the workers.
        images: images, folders, or lists of images (``.parquet`` with a column ``path``, ``.txt``
            with a path a line): paths, or URLs of fsspec. Paths must lead to the same files on
            all nodes.
        out: folder for the results, path or URL, that all nodes write to.
        address: of the cluster, see ``engine.connected``.
        actors: worker processes; as many as the cluster has room for where None.
        resume: go on with the unfinished job in ``out``.
        overwrite: replace the job in ``out``.
        defect_rate: as ``inference.load`` takes it.
        workers: threads of each worker process; 2 where None.
        batch: images that each thread hands to the network at once; 1 where None.
        progress: where to show the progress; nowhere where None.

    Raises:
        SettingsError: Ray is not installed, or no such cluster.
        OutputError: ``out`` cannot be written, or holds something else.
        ModelFileError: the model is not the one that the job was started with.
        Interrupted: stopped by the user; ``resume`` goes on from there.
        CdgpError: see ``cdgp.errors``.
    """
    run_folder.check_not_both(resume, overwrite)
    for package in ("ray", "pyarrow", "fsspec"):
        require_package(package)
    threads = Threads.of(WORKERS if workers is None else workers, batch)
    given = [str(place) for place in ([images] if isinstance(images, str | Path) else images)]
    store = Store(as_place(str(out)))
    check_outside(given, store)
    sent = read_model(Path(model), defect_rate)
    job = {
        "format": FORMAT,
        "version": version("cdgp"),
        "model": sent.sha256,
        "defect_rate": defect_rate,
        "images": [as_place(place) for place in given],
    }
    with ExitStack() as held:
        if store.local is not None:
            held.enter_context(run_folder.lock(store.local, "predict --ray"))
        started = check_folder(store, job, resume, overwrite)
        ray = held.enter_context(connected(address, sum(map(len, sent.files.values()))))
        number, processors = workers_of(ray, threads, actors)
        notices: list[Notice] = []
        if started is None:
            started = start(store, job, given, number, notices)
        number = min(number, -(-started["count"] // started["shard"]))
        engine = Engine(ray, sent, threads, store, number, processors)
        sent = sent._replace(files={})  # Ray holds them now
        total = Total()
        try:
            with (progress or Quiet()).phase("Prediction", started["count"]) as advance:
                _score(engine, store, sent, started, total, advance)
        except KeyboardInterrupt:
            done = f"interrupted after {total.images} of {started['count']} images"
            raise Interrupted(f"{done}; --resume goes on from there") from None
    return PredictedShards(
        store.place, total.images, total.rejected, total.unreadable, total.warned, total.problems,
        total.skipped, engine.ended, [notice.text for notice in notices], engine.facts,
    )  # fmt: skip


class Total:
    """Sums over pieces."""

    def __init__(self) -> None:
        self.images = self.rejected = self.unreadable = self.warned = self.skipped = 0
        self.problems: list[str] = []

    def add(self, found: Tally) -> None:
        self.images += found.images
        self.rejected += found.rejected
        self.unreadable += found.unreadable
        self.warned += found.warned
        self.problems += found.problems[: SHOWN - len(self.problems)]


def read_model(path: Path, defect_rate: float | None) -> Model:
    """A model as it is sent to workers, which need not see its place.

    Raises:
        ModelFileError: it cannot be read.
    """
    file = run_folder.model_file(path)
    try:
        files = {part.name: part.read_bytes() for part in files_of(file)}
    except OSError as error:
        raise ModelFileError(
            f"{file}: cannot be read: {error.strerror}; give a trained model, its run's folder, or "
            "an exported file"
        ) from error
    sha256 = hashlib.sha256(files[file.name]).hexdigest()
    return Model(file.name, files, str(file), sha256, defect_rate)


def check_folder(
    out: Store, job: dict[str, Any], resume: bool, overwrite: bool
) -> dict[str, Any] | None:
    """Check that a job may start or go on in a folder; returns the one that goes on, else None.

    Raises:
        OutputError: the folder holds something else, or nothing to go on with.
        ModelFileError: the job was started with another model.
        DataError: it was started with other images.
    """
    names = {n for n in out.names() if not n.startswith(".")}
    started = read_job(out) if JOB in names else None
    if started is None:
        if resume:
            raise OutputError(f"{out.place}: holds no job; leave --resume out to start one")
        if names - {LIST}:
            raise OutputError(
                f"{out.place}: is not empty, and holds no job of cdgp predict --ray; choose "
                "another --out"
            )
        return None
    if resume:
        check_same(out, started, job)
        return started
    if not overwrite:
        raise OutputError(
            f"{out.place}: holds a job; go on with it with --resume, replace it with --overwrite, "
            "or choose another --out"
        )
    return None


def read_job(out: Store) -> dict[str, Any]:
    """What a job was started with; OutputError where it cannot be told."""
    with out.reading(JOB) as file:
        text = file.read()
    try:
        found = json.loads(text)
        if found["format"] == FORMAT and {"model", "images", "count", "shard"} <= found.keys():
            return dict(found)
    except (ValueError, TypeError, KeyError):
        pass
    raise OutputError(f"{out.place}: holds a {JOB} that is not ours; choose another --out")


def check_same(out: Store, started: dict[str, Any], job: dict[str, Any]) -> None:
    """Check that a job goes on with what it was started with; errors as ``check_folder``."""
    same = "give the same one to go on, or choose another --out"
    if started["model"] != job["model"]:
        raise ModelFileError(
            f"{out.place}: was started with model {started['model'][:12]}, this one is "
            f"{job['model'][:12]}; {same}"
        )
    if started["defect_rate"] != job["defect_rate"]:
        raise OutputError(
            f"{out.place}: was started with --defect-rate {started['defect_rate']}; {same}"
        )
    if started["images"] != job["images"]:
        raise DataError(f"{out.place}: was started with {', '.join(started['images'])}; {same}")


def start(
    out: Store, job: dict[str, Any], given: Sequence[str], workers: int, notices: list[Notice]
) -> dict[str, Any]:
    """List the images of a new job, and mark the folder as its own.

    Raises:
        DataError: there are no images.
        OutputError: the folder cannot be written.
    """
    places = images_of(given, notices)
    first = next(places, None)
    if first is None:
        also = "".join(f"; {notice.text}" for notice in notices)
        raise DataError(f"{', '.join(given)}: no images found{also}")
    for name in (*filter(PART.fullmatch, out.names()), JOB):  # of the job that is replaced
        out.remove(name)
    count = write_list(out, chain([first], places))
    fitting = (size for size in SHARDS if count >= size * workers * SHARDS_EACH)
    started = {**job, "count": count, "shard": next(fitting, SHARDS[-1])}
    with out.writing(JOB) as file:
        file.write((json.dumps(started, indent=1) + "\n").encode())
    return started


def _score(
    engine: Engine,
    out: Store,
    model: Model,
    started: dict[str, Any],
    total: Total,
    advance: Advance,
) -> None:
    """Score what has no rows yet; OutputError where rows are missing at the end."""

    def count(found: Tally) -> None:
        total.add(found)
        for _ in range(found.images):
            advance()

    def blame(piece: Piece) -> Tally:
        rows = [culprit(piece, model.sha256)]
        write_rows(out, piece.name, rows, engine.facts)
        return tally(rows)

    ranges, names = settled(out)
    with ThreadPoolExecutor(READERS) as pool:
        tallies = in_order(pool, lambda name: tally_of(out, name), names, lambda: 2 * READERS)
        for found in tallies:
            total.skipped += found.images
            count(found)
    with closing(engine.score(pieces(out, model, started, ranges), blame)) as scored:
        for piece, found in scored:
            if not out.has(piece.name):
                raise OutputError(
                    f"{out.place}: {piece.name} was written by a worker and is not there; give an "
                    "--out that all nodes of the cluster share"
                )
            count(found)
    settled(out)
    if total.images != started["count"]:
        raise OutputError(
            f"{out.place}: holds {total.images} rows of {started['count']} images; files were "
            "added or removed meanwhile: start again with --overwrite"
        )


def pieces(out: Store, model: Model, started: dict[str, Any], done: Ranges) -> Iterator[Piece]:
    """What has no rows yet: shards, or the rest of one that was scored in parts."""
    for number, places in enumerate(shards(out, started["shard"])):
        shard = shard_digest(model.sha256, model.defect_rate, number, places)
        if shard not in done:
            yield Piece(shard, 0, places, whole=True)
            continue
        for begin, end in gaps(done[shard], len(places)):
            yield Piece(shard, begin, places[begin:end], whole=False)


def settled(out: Store) -> tuple[Ranges, list[str]]:
    """Which parts of which shards have rows, and the files that hold them.

    A worker that was thought lost may have written a shard after parts of it were; the parts are
    removed then, so that no row is there twice.
    """
    found: Ranges = defaultdict(list)
    names: list[str] = []
    for name in out.names():
        if name.startswith(".part-"):  # a worker was killed while it wrote
            out.remove(name)
        elif named := PART.fullmatch(name):
            begin, end = named["begin"], named["end"]
            found[named["shard"]].append((int(begin), int(end)) if begin else WHOLE)
    for shard, ranges in found.items():
        kept: list[tuple[int, int]] = []
        for part in sorted(ranges, key=lambda ends: (ends[0], -ends[1])):
            if kept and part[1] <= kept[-1][1]:
                out.remove(part_name(shard, part))
            else:
                kept.append(part)
        found[shard] = kept
        names += [part_name(shard, None if part == WHOLE else part) for part in kept]
    return found, names


def gaps(done: Sequence[tuple[int, int]], length: int) -> Iterator[tuple[int, int]]:
    """The ranges of a shard that have no rows; those that have some are sorted."""
    at = 0
    for begin, end in (*done, (length, length)):
        if at < begin:
            yield at, begin
        at = end
