"""Devices that only count virtual seconds: executors for the real step loop."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.core.clock import VirtualClock
from jaxserve.core.work import StepOutput, Work


@dataclass
class PendingStep:
    """A dispatched step, whose `fetch` waits until it ends and returns the same token for every row."""

    end: float
    rows: int
    wait_until: Callable[[float], None]
    token: int = 0

    def fetch(self) -> StepOutput:
        self.wait_until(self.end)
        return StepOutput(np.full(self.rows, self.token, np.int32))


class VirtualDevice:
    """An executor that runs one step after the other, each for the seconds that `seconds_of` returns for its work.

    `wait_until` makes time pass until a step has ended; by default it sets the clock. On an idle device, a step starts
    `dispatch_s` after its dispatch.
    """

    def __init__(
        self,
        clock: VirtualClock,
        seconds_of: Callable[[Work], float],
        wait_until: Callable[[float], None] | None = None,
        *,
        dispatch_s: float = 0.0,
        token: int = 0,
    ):
        self.clock, self.seconds_of, self.dispatch_s, self.token = clock, seconds_of, dispatch_s, token
        self.wait_until = wait_until or self._pass_time
        self.end = 0.0  # s, of the last dispatched step

    def execute(self, work: Work) -> PendingStep:
        self.end = max(self.end, self.clock.time + self.dispatch_s) + self.seconds_of(work)
        return PendingStep(self.end, len(work.decodes) + len(work.chunks), self.wait_until, self.token)

    def _pass_time(self, end: float) -> None:
        self.clock.time = max(self.clock.time, end)
