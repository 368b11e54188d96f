"""The progress of commands that work in phases: bars in a terminal, elsewhere lines with the time that is left."""

import contextlib
import time
from collections.abc import Callable, Iterator

from jaxserve.cli.terminal import PROGRESS_INTERVAL_S, console

Begin = Callable[[str, int], Callable[[], None]]
"""A progress display: (description, number of steps) -> a function to call after each step."""

KNOWN_FROM = 0.05  # share of the steps after which the time that is left can be told


@contextlib.contextmanager
def phases(clock: Callable[[], float] = time.monotonic) -> Iterator[Begin]:
    """Show on standard error how far each phase has come, and the time that it is expected to take still."""
    with _bars() if console.is_terminal else contextlib.nullcontext(_lines(clock)) as begin:
        yield begin


@contextlib.contextmanager
def _bars() -> Iterator[Begin]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, TextColumn("left:"), TimeRemainingColumn(), console=console)
    with contextlib.ExitStack() as shown:

        def begin(what: str, steps: int) -> Callable[[], None]:
            if not progress.live.is_started:  # not earlier: an empty bar prints an empty line
                shown.enter_context(progress)
            task = progress.add_task(what, total=steps)
            return lambda: progress.advance(task)

        yield begin


def _lines(clock: Callable[[], float]) -> Begin:
    """Return a display that prints a line when a phase begins, at most one every ten seconds, and one at its end."""

    def begin(what: str, steps: int) -> Callable[[], None]:
        done, began, last = 0, clock(), clock()
        console.print(f"{what}: 0 of {steps}", soft_wrap=True)

        def step() -> None:
            nonlocal done, last
            done, now = done + 1, clock()
            if done == steps:
                console.print(f"{what}: done in {now - began:.0f} s", soft_wrap=True)
            elif now - last >= PROGRESS_INTERVAL_S:
                last = now
                # Before that, the first step's compilation would count for every step.
                known = done >= KNOWN_FROM * steps
                left = f", {(now - began) / done * (steps - done):.0f} s left" if known else ""
                console.print(f"{what}: {done} of {steps}{left}", soft_wrap=True)

        return step

    return begin
