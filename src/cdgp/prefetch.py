"""Work that is done ahead by threads, in order, with a bounded number of pieces begun."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 4
"""Pieces that ``read_ahead`` has begun."""


def in_order(
    pool: Executor, work: Callable[[T], R], items: Iterable[T], ahead: Callable[[], int]
) -> Iterator[R]:
    """``work(item)`` for each item, by a pool, in the order of the items.

    At most ``ahead()`` pieces are begun and not yet taken, so that memory is bounded whatever the
    number of items. What ``work`` raises is raised in its place; what was begun after it is
    dropped, as it is where the iteration is left early.
    """
    begun: deque[Future[R]] = deque()
    try:
        for item in items:
            begun.append(pool.submit(work, item))
            while len(begun) >= ahead():
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        for piece in begun:
            piece.cancel()


def read_ahead(read: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """``read(item)`` for each item, in order: one thread reads the next few while one is used."""
    with ThreadPoolExecutor(1) as pool:
        yield from in_order(pool, read, items, lambda: AHEAD)
