"""The progress bars of a terminal, which are one display for all threads and calls of the process."""

import threading

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from jaxserve.console.progress import ProgressBar, amount

BAR_WIDTH = 24  # characters

console = Console(stderr=True, highlight=False)


class Activity(ProgressColumn):
    """The column that names the work, cut where the terminal is too narrow for all columns."""

    def render(self, task: Task) -> Text:
        """Return the cell of a task."""
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class Amount(ProgressColumn):
    """The steps done and all steps, or bytes with their unit and their speed."""

    def render(self, task: Task) -> Text:
        """Return the cell of a task."""
        done, unit = int(task.completed), task.fields["unit"]
        if task.total is None:
            return Text(amount(done, unit) if done else "")
        if unit == "B":
            speed = f" {amount(int(task.speed), unit)}/s" if task.speed and not task.finished else ""
            return Text(f"{amount(done, unit)}/{amount(int(task.total), unit)}{speed}")
        return Text(f"{done}/{int(task.total)} {unit}".rstrip())


class Elapsed(TimeElapsedColumn):
    """The time since the work began; not for bytes, which have a speed."""

    def render(self, task: Task) -> Text:
        """Return the cell of a task."""
        return Text() if task.fields["unit"] == "B" else super().render(task)


class Left(ProgressColumn):
    """The time that the work is expected to take still, once that is known."""

    max_refresh = 0.5  # seconds between two estimates

    def render(self, task: Task) -> Text:
        """Return the cell of a task."""
        if task.finished or task.time_remaining is None:
            return Text()
        minutes, seconds = divmod(int(task.time_remaining), 60)
        return Text(f"{minutes}:{seconds:02} left", style="dim")


class Bars:
    """The display, which is there while at least one bar is open."""

    def __init__(self, console: Console):
        self._console = console
        self._lock = threading.RLock()
        self._progress: Progress | None = None
        self._tasks: dict[ProgressBar, TaskID] = {}  # of open bars
        self._kept = False  # a bar that has ended stays

    def open(self, bar: ProgressBar) -> None:
        """Add a bar."""
        with self._lock:
            if self._progress is None:
                self._progress = self._new()
                self._progress.start()
                # Rich hides the cursor, which would stay hidden if a signal ends the process at once.
                self._console.show_cursor(True)
            self._tasks[bar] = self._progress.add_task(bar.description, total=bar.total, unit=bar.unit)

    def show(self, bar: ProgressBar) -> None:
        """Show the state of a bar that is open."""
        progress, task = self._progress, self._tasks.get(bar)
        if progress is not None and task is not None:
            progress.update(task, description=bar.description, completed=bar.done, total=bar.total, unit=bar.unit)

    def close(self, bar: ProgressBar, failed: bool) -> None:
        """End a bar, and the display if it was the last."""
        with self._lock:
            task, progress = self._tasks.pop(bar, None), self._progress
            if progress is None:
                return
            if task is not None and bar.keep and not bar.conclusion:
                self._kept = True
                progress.stop_task(task)
            elif task is not None:
                progress.update(task, visible=False)
            if not self._tasks:
                progress.live.transient = not self._kept
                self._progress, self._kept = None, False
                progress.stop()
        if bar.conclusion and not failed:
            self._console.print(bar.conclusion, markup=False, soft_wrap=True)

    def _new(self) -> Progress:
        return Progress(
            Activity(),
            BarColumn(BAR_WIDTH),
            Amount(table_column=Column(no_wrap=True)),
            Elapsed(table_column=Column(no_wrap=True)),
            Left(table_column=Column(no_wrap=True)),
            console=self._console,
            redirect_stdout=False,  # it may be a file, whose text would get into the terminal
        )


bars = Bars(console)
