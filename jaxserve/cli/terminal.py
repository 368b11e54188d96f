"""Output that the commands share: errors, the end by Ctrl-C, and the progress of an engine's start."""

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeElapsedColumn
from typer.core import TyperGroup

from jaxserve.core.errors import ConfigError, JaxserveError
from jaxserve.core.progress import COMPILING, Progress

console = Console(stderr=True, highlight=False)
LINES_APART = 10  # seconds, where the output is not a terminal
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it


class Commands(TyperGroup):
    """A group of commands in which Ctrl-C and every error that a user can mend are one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        with ended_in_a_line():
            return super().invoke(ctx)


@contextlib.contextmanager
def ended_in_a_line() -> Iterator[None]:
    """Turn Ctrl-C, errors that jaxserve raises on purpose, and those of a file into one line and an exit status."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        tell("interrupted")
        raise typer.Exit(INTERRUPTED) from interrupt
    except JaxserveError as error:
        tell(str(error))
        raise typer.Exit(1) from error
    except OSError as error:
        if error.filename is None:  # of a pipe or a connection, where the message alone would explain nothing
            raise
        tell(f"{error.filename}: {error.strerror}")
        raise typer.Exit(1) from error


def tell(message: str) -> None:
    """Print one line about what went wrong, on standard error."""
    console.print(f"jaxserve: {message}", style="bold red", markup=False, soft_wrap=True)


def replace_unknown_characters() -> None:
    """Have "?" or U+FFFD stand for what a stream's encoding lacks, in place of an error in the middle of an answer."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def read_stdin() -> str:
    """Return all of standard input. Raises ConfigError if it is closed."""
    if sys.stdin is None:
        raise ConfigError("standard input is closed")
    return sys.stdin.read()


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
