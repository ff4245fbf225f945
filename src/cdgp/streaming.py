"""Many images through one detector: as many at the same time as there are cores.

Each worker reads some images, runs the network on them, brings the maps to the images' size and
hands them on. Decoders, runtimes and compression release Python's lock; a network of one thread in
each of n workers gets more images through than one after the other with n threads, and all that is
not the network runs at the same time. Results come in the order of the images and are those of
``Detector.predict``; an image that fails costs no other.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from cdgp.errors import SettingsError
from cdgp.inference import Detector, Prediction, Prepared, load
from cdgp.prefetch import in_order
from cdgp.runtimes import EXPORTED
from cdgp.runtimes.base import Outputs, cores

K = TypeVar("K")
R = TypeVar("R")

PIXEL_BYTES = 2**29
"""Decoded images that wait, or are worked on, take about as much memory at most."""


BATCH = 1
"""Images that a worker hands to the network at once, where nothing else is asked for."""


class Threads(NamedTuple):
    """How images are streamed."""

    workers: int
    """Threads, each of which reads, predicts and finishes images."""
    batch: int
    """Images that each hands to the network at once."""

    @classmethod
    def of(cls, workers: int | None = None, batch: int | None = None) -> "Threads":
        """What is asked for; where nothing is, a worker a core, and ``BATCH``.

        Raises:
            SettingsError: a number below 1.
        """
        chosen = cls(cores() if workers is None else workers, BATCH if batch is None else batch)
        for name, number in chosen._asdict().items():
            if number < 1:
                raise SettingsError(f"--{name} {number}: at least 1 is needed")
        return chosen


def load_for(model: str | Path, threads: Threads, defect_rate: float | None) -> Detector:
    """``inference.load``, with a runtime that uses one thread a call where workers are several."""
    one = threads.workers > 1 and Path(model).suffix.lower() in EXPORTED
    return load(model, threads=1 if one else None, defect_rate=defect_rate)


def stream(
    detector: Detector,
    images: Iterable[tuple[K, Path]],
    finish: Callable[[K, Prepared, Prediction], R],
    threads: Threads,
) -> Generator[tuple[K, R | Exception]]:
    """Predict images and do something with each prediction; results in the images' order.

    Args:
        detector: predicts; as ``load_for`` gives it.
        images: (key, path) of each; taken only as far as there is room.
        finish: called for each by a worker, several at a time; what it returns comes back.
        threads: how many workers, and how many images at once.

    Yields:
        (key, result of ``finish``), or (key, what reading, predicting or finishing raised).
    """
    largest = 1

    def room(most: int) -> int:
        return max(1, min(most, PIXEL_BYTES // largest))

    def groups() -> Iterator[list[tuple[K, Path]]]:
        group: list[tuple[K, Path]] = []
        for image in images:
            group.append(image)
            if len(group) >= room(threads.batch):
                yield group
                group = []
        if group:
            yield group

    def work(group: list[tuple[K, Path]]) -> list[tuple[K, R | Exception]]:
        nonlocal largest
        read = [_read(detector, path) for _, path in group]
        readable = [image for image in read if isinstance(image, Prepared)]
        largest = max([largest, *(image.pixels.nbytes for image in readable)])
        found = iter(_answers(detector, readable))
        return [
            (key, image if isinstance(image, Exception) else last(key, image, next(found)))
            for (key, _), image in zip(group, read, strict=True)
        ]

    def last(key: K, image: Prepared, found: Outputs | Exception) -> R | Exception:
        if isinstance(found, Exception):
            return found
        try:
            return finish(key, image, detector.finish(image, found))
        except Exception as error:
            return error

    ahead = 2 * threads.workers
    with _one_thread_each(detector, threads.workers), ThreadPoolExecutor(threads.workers) as pool:
        done = in_order(
            pool, work, groups(), lambda: max(1, room(ahead * threads.batch) // threads.batch)
        )
        try:
            for group in done:
                yield from group
        finally:  # left early, nothing that waits is begun
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _one_thread_each(detector: Detector, workers: int) -> Iterator[None]:
    """One thread for each call of torch, where there are several workers; others are loaded so."""
    if detector.runtime.name != "torch" or workers == 1:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _read(detector: Detector, path: Path) -> Prepared | Exception:
    try:
        pixels, warnings = detector.read_with_warnings(path)
        return detector.prepare(pixels, warnings, path)
    except Exception as error:
        return error


def _answers(detector: Detector, images: list[Prepared]) -> list[Outputs | Exception]:
    """The network's answers for a batch; one by one where the batch as a whole fails."""
    try:
        return [*detector.infer(images)] if images else []
    except Exception as error:
        if len(images) == 1:
            return [error]
        return [answer for image in images for answer in _answers(detector, [image])]
