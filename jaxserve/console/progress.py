"""Progress on standard error: bars in a terminal, a line that is rewritten in a notebook, and few lines elsewhere.

Importing this module loads the standard library alone. No bar makes its caller fail: what a closed or broken stream
cannot show is dropped.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Protocol, TextIO

from jaxserve.core.errors import ConfigError
from jaxserve.core.progress import COMPILING, COMPILING_UNKEPT, DOWNLOADING, Progress

LINE_INTERVAL_S = 10.0  # between two lines of a bar, where the output is neither a terminal nor a notebook
NOTEBOOK_DELAY_S, NOTEBOOK_INTERVAL_S = 0.5, 0.2  # before a notebook shows a bar, and between two changes of it
KNOWN_FROM = 0.05  # share of the work after which the time that is left can be told

Clock = Callable[[], float]


class ProgressBar:
    """A display of how far a piece of work has come.

    Its methods may be called from any thread, often, and return at once.

    With the unit "B", `done` and `total` are bytes.
    """

    def __init__(self, description: str, total: int | None, unit: str, clock: Clock):
        """`total`: None if it is not known."""
        self.description, self.total, self.unit, self.keep = description, total, unit, True
        self.done = 0
        self.conclusion = ""  # shown in place of the bar when the work has ended
        self._clock, self._lock = clock, threading.Lock()
        self._began = self._activity_began = clock()
        self._done_before = 0  # when the activity began, such as a download that goes on
        self._view: _View | None = None

    def advance(self, steps: int = 1) -> None:
        """Count further steps as done."""
        with self._lock:
            self.done += steps
        self._show()

    def update(self, description: str, done: int, total: int | None, unit: str | None = None) -> None:
        """Show another activity, or another number of steps, or steps of another unit."""
        with self._lock:
            if description != self.description:
                self._activity_began, self._done_before = self._clock(), done
            self.description, self.done, self.total = description, done, total
            self.unit = self.unit if unit is None else unit
        self._show()

    @property
    def seconds(self) -> float:
        """The time since the bar began."""
        return self._clock() - self._began

    @property
    def finished(self) -> bool:
        """True if all steps are done."""
        return self.total is not None and self.done >= self.total

    def line(self) -> str:
        """Return the state in one line, such as "reading weights: 3 of 18, 12 s left"."""
        if self.total is None:
            return f"{self.description}: {amount(self.done, self.unit)}" if self.done else self.description
        left, done, elapsed = "", self.done - self._done_before, self._clock() - self._activity_began
        if self.unit == "B" and done > 0 and elapsed > 0:
            left = f", {amount(int(done / elapsed), self.unit)}/s"
        # Before that, the first step's compilation would count for every step.
        if KNOWN_FROM * self.total <= self.done < self.total and done > 0:
            left += f", {elapsed / done * (self.total - self.done):.0f} s left"
        return f"{self.description}: {amount(self.done, self.unit)} of {amount(self.total, self.unit)}{left}"

    def open(self, view: "_View") -> None:
        """Show the bar from now on."""
        self._view = view
        with contextlib.suppress(OSError, ValueError):
            view.open(self)

    def close(self, *, failed: bool) -> None:
        """Show the last state, and end the bar."""
        view, self._view = self._view, None
        if view is not None:
            with contextlib.suppress(OSError, ValueError):
                view.close(self, failed)

    def _show(self) -> None:
        if self._view is not None:
            with contextlib.suppress(OSError, ValueError):
                self._view.show(self)


@contextlib.contextmanager
def progress_bar(
    description: str,
    total: int | None = None,
    *,
    unit: str = "",
    keep: bool = True,
    shown: bool = True,
    report_end: bool = False,
    clock: Clock = time.monotonic,
) -> Iterator[ProgressBar]:
    """Show a progress bar while the block runs.

    `unit`: "B" for bytes, or the plural of what is counted. `keep`: the bar stays in a terminal or notebook at its end.
    Where the output is neither, a line appears every ten seconds, and one at the end of such work. `report_end`:
    shorter work has a line at its end as well.
    """
    bar, failed = ProgressBar(description, total, unit, clock), True
    bar.keep = keep
    try:
        if shown:
            bar.open(_view(clock, report_end))
        yield bar
        failed = False
    finally:
        bar.close(failed=failed)


class Begin(Protocol):
    """A display for work in phases: `begin(description, steps)` returns the function to call after each step."""

    def __call__(self, description: str, total: int | None, unit: str = "") -> Callable[..., None]: ...


def ignore_phases(description: str, total: int | None, unit: str = "") -> Callable[..., None]:
    """Return a function that shows nothing: a `Begin` for work whose progress nobody wants to see."""
    return lambda steps=1: None


@contextlib.contextmanager
def phases(clock: Clock = time.monotonic) -> Iterator[Begin]:
    """Show a progress bar for each phase that begins in the block. All of them stay until its end."""
    with contextlib.ExitStack() as shown:

        def begin(description: str, total: int | None, unit: str = "") -> Callable[..., None]:
            bar = progress_bar(description, total, unit=unit, report_end=True, clock=clock)
            return shown.enter_context(bar).advance

        yield begin


@contextlib.contextmanager
def start_progress(
    progress: bool | Progress = True, *, doing: str = "loading the model", clock: Clock = time.monotonic
) -> Iterator[Progress]:
    """Yield the function to which an engine that starts reports its progress.

    `progress`: True shows a bar, False nothing, and a function gets the reports instead. At the end, the number of
    programs that were compiled takes the place of the bar, unless they took no time worth a line. Raise `ConfigError`
    for any other value.
    """
    if not callable(progress) and progress not in (True, False, None):
        raise ConfigError(f"progress is {progress!r}: it must be true, false or a function")
    if callable(progress):
        yield progress
        return
    with progress_bar(doing, keep=False, shown=progress, clock=clock) as bar:
        compiling = _Compiling(clock)

        def report(activity: str, done: int, total: int) -> None:
            compiling.note(activity, done)
            bar.update(activity, done, total, "B" if activity.startswith(DOWNLOADING) else "")

        yield report
        bar.update(doing, 0, None, "")
        if compiling.programs and round(compiling.seconds):
            programs, them = (
                ("1 program", "it") if compiling.programs == 1 else (f"{compiling.programs} programs", "them")
            )
            kept = "" if compiling.unkept else f"; the next start of this model with these options loads {them}"
            bar.conclusion = f"compiled {programs} in {compiling.seconds:.0f} s{kept}"


def amount(number: int, unit: str) -> str:
    """Return a number of bytes such as "1.2 GB", or any other number as it is with its unit."""
    if unit != "B":
        return f"{number} {unit}".rstrip()
    for size, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= size:
            return f"{number / size:.1f} {name}"
    return f"{number} B"


class _Compiling:
    """The number of programs that a start compiles, and how long that takes."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._began: float | None = None
        self._earlier = self._latest = 0  # programs of compilers that have ended, and of the present one
        self.seconds = 0.0
        self.unkept = False  # there is no folder in which later starts would find them

    @property
    def programs(self) -> int:
        return self._earlier + self._latest

    def note(self, activity: str, done: int) -> None:
        """Take note of one progress report."""
        if activity not in (COMPILING, COMPILING_UNKEPT):
            return
        self.unkept = activity == COMPILING_UNKEPT
        if done < self._latest:
            self._earlier += self._latest
        self._latest = done
        self._began = self._clock() if self._began is None else self._began
        self.seconds = self._clock() - self._began


# -- where a bar is shown


class _View(Protocol):
    """A place that shows bars."""

    def open(self, bar: ProgressBar) -> None: ...

    def show(self, bar: ProgressBar) -> None: ...

    def close(self, bar: ProgressBar, failed: bool) -> None: ...


def _view(clock: Clock, report_end: bool) -> _View:
    """Return what shows a bar that begins now."""
    if _in_notebook():
        return _NotebookLine(clock)
    if _is_terminal(sys.stderr):
        from jaxserve.console.bars import bars, console

        if console.is_interactive:  # what moves the cursor would fill the output of a simpler terminal
            return bars
    return _Lines(clock, report_end)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


class _Lines:
    """Lines of text: one every ten seconds, and one at the end of work for which there was another or must be one."""

    def __init__(self, clock: Clock, report_end: bool):
        self._clock, self._last, self._lock = clock, clock(), threading.Lock()
        self._report_end = report_end
        self._printed = self._ended = False

    def open(self, bar: ProgressBar) -> None:
        """Show nothing yet."""

    def show(self, bar: ProgressBar) -> None:
        with self._lock:
            if bar.finished:
                if self._report_end and not self._ended:
                    self._end(bar)
                return
            now = self._clock()
            if now - self._last < LINE_INTERVAL_S:
                return
            self._last, self._printed = now, True
            self._write(bar.line())

    def close(self, bar: ProgressBar, failed: bool) -> None:
        with self._lock:
            if not failed and not self._ended and (self._printed or self._report_end or bar.conclusion):
                self._end(bar)

    def _end(self, bar: ProgressBar) -> None:
        self._ended = True
        self._write(bar.conclusion or f"{bar.description}: done in {bar.seconds:.0f} s")

    def _write(self, line: str) -> None:
        if sys.stderr is not None:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


class _NotebookLine:
    """A line in the output of a notebook's cell that is rewritten in place. Work that ends at once shows none."""

    def __init__(self, clock: Clock):
        self._clock, self._shown_at = clock, clock() + NOTEBOOK_DELAY_S - NOTEBOOK_INTERVAL_S
        self._handle: Any = None
        self._lock = threading.Lock()

    def open(self, bar: ProgressBar) -> None:
        """Show nothing yet."""

    def show(self, bar: ProgressBar) -> None:
        with self._lock:
            now = self._clock()
            if now - self._shown_at < NOTEBOOK_INTERVAL_S:
                return
            self._shown_at = now
            self._display(bar.line())

    def close(self, bar: ProgressBar, failed: bool) -> None:
        with self._lock:
            if failed and self._handle is not None:
                self._display(bar.line())
            elif bar.conclusion or self._handle is not None:
                self._display(bar.conclusion or f"{bar.description}: done in {bar.seconds:.0f} s")

    def _display(self, text: str) -> None:
        if self._handle is None:
            display = import_module("IPython.display").display  # of the notebook, which has loaded it
            self._handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)
