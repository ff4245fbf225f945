"""Progress of long work: bars with the time left, or nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from cdgp.files import visible

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
        from rich import progress as rich_progress
        from rich.console import Console

        if self._shown is not None:
            outer = self._shown
            task = outer.add_task(name, total=total, completed=done, note="")
            try:
                yield _advancing(outer, task)
            finally:
                outer.remove_task(task)
            return
        console = Console(stderr=True)
        bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description:<22}"),
            rich_progress.BarColumn(bar_width=24),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TextColumn("left"),
            rich_progress.TimeRemainingColumn(),
            rich_progress.TextColumn("{task.fields[note]}", style="dim"),
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
    from rich.markup import escape

    def advance(note: str = "") -> None:
        fields: dict[str, Any] = {"note": escape(visible(note))} if note else {}
        bar.update(task, advance=1, **fields)

    return advance
