"""Progress of long work: bars with the time left, or nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Advance(Protocol):
    """Called once a finished piece of work, with a few words to show beside the bar."""

    def __call__(self, note: str = "") -> None: ...


class Progress(Protocol):
    """Shows phases of work, each of a known number of pieces."""

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Advance]: ...


class Quiet:
    """Shows nothing."""

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Advance]:
        yield lambda note="": None


class Bars:
    """A bar for each phase on standard error; one line each where that is no terminal.

    A phase inside another one gets a bar below it while it lasts.
    """

    def __init__(self) -> None:
        self._shown: RichProgress | None = None

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Advance]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        if self._shown is not None:
            outer = self._shown
            task = outer.add_task(name, total=total, completed=done, note="")
            try:
                yield _advancing(outer, task)
            finally:
                outer.remove_task(task)
            return
        console = Console(stderr=True)
        bar = RichProgress(
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            console=console,
            disable=not console.is_terminal,
        )
        if not console.is_terminal:
            console.print(f"{name}: {total}", highlight=False)
        with bar:
            self._shown = bar
            task = bar.add_task(name, total=total, completed=done, note="")
            try:
                yield _advancing(bar, task)
            finally:
                self._shown = None


def _advancing(bar: "RichProgress", task: "TaskID") -> Advance:
    def advance(note: str = "") -> None:
        if note:
            bar.update(task, advance=1, note=note)
        else:
            bar.update(task, advance=1)

    return advance
