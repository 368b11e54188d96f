"""An event loop whose time passes only by sleeping, and then at once, so that schedules are exact."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """A selector that moves the loop's time forward instead of waiting."""

    time_s = 0.0

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("nothing will ever happen")
        if not ready:
            self.time_s += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose `time` is the sum of all sleeps."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.time_s

    def busy(self, seconds: float) -> None:
        """Let time pass as if the program had computed."""
        self._virtual.time_s += seconds


def run(main: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
