"""What the commands share: where they speak to the user, how they tell an error, and how far an engine's start is."""

import contextlib
import time
from collections.abc import Callable, Iterator

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeElapsedColumn

from jaxserve.core.errors import JaxserveError
from jaxserve.core.progress import COMPILING, Progress

console = Console(stderr=True, highlight=False)
LINES_APART = 10  # seconds, where the output is no terminal


@contextlib.contextmanager
def told_errors() -> Iterator[None]:
    """Turns errors that jaxserve raises on purpose into one line and exit status 1."""
    try:
        yield
    except JaxserveError as error:
        console.print(f"jaxserve: {error}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error


@contextlib.contextmanager
def told_progress(clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """Shows how far an engine's start is: a bar in a terminal, elsewhere a line every ten seconds.

    Says at the end what was compiled, if anything was, and that the next start finds it.
    """
    with _bar() if console.is_terminal else _lines(clock) as show:
        compiling = _Compiling(clock)

        def progress(doing: str, done: int, total: int) -> None:
            compiling.note(doing, done)
            show(doing, done, total)

        yield progress
    if compiling.programs:
        console.print(
            f"compiled {compiling.programs} programs in {compiling.seconds:.0f} s; the next start of this model with "
            "these options loads them",
            soft_wrap=True,
        )


@contextlib.contextmanager
def _bar() -> Iterator[Progress]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda doing, done, total: bar.update(task, description=doing, completed=done, total=total)


@contextlib.contextmanager
def _lines(clock: Callable[[], float]) -> Iterator[Progress]:
    last = clock()

    def show(doing: str, done: int, total: int) -> None:
        nonlocal last
        if clock() - last >= LINES_APART:
            last = clock()
            console.print(f"{doing}: {done} of {total}", soft_wrap=True)

    yield show


class _Compiling:
    """What a start compiles, and how long that takes."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._began: float | None = None
        self.programs, self.seconds = 0, 0.0

    def note(self, doing: str, done: int) -> None:
        """Takes in what progress is told. Mutates."""
        if doing == COMPILING:
            self._began = self._clock() if self._began is None else self._began
            self.programs, self.seconds = max(self.programs, done), self._clock() - self._began
