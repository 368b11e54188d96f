"""Clocks: the machine's clock, and a virtual one. Code that needs the time gets a clock as an argument."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def now(self) -> float:
        """Return the time in seconds since an arbitrary start."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when `advance` is called, for tests and the simulator."""

    def __init__(self, start: float = 0.0):
        self.time = start

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        """Move the clock forward by `seconds`."""
        self.time += seconds
