"""The stages of a simulated instance, each of which computes one step at a time."""

from collections.abc import Sequence
from typing import NamedTuple


class StageTime(NamedTuple):
    """What a step takes on one stage (s): the computation, then the way of its results to the next stage."""

    seconds: float
    hand_off: float


class Interval(NamedTuple):
    """The time in which a stage computes a step (s)."""

    start: float
    end: float


class Pipeline:
    """The times of the steps of an instance with several stages."""

    def __init__(self, stages: int):
        self.stages = stages
        self.busy = 0.0  # s that stages computed, added up over stages
        self.span = 0.0  # s in which there were steps in flight
        self._free = [0.0] * stages  # the time from which each stage is free
        self._link_free = [0.0] * stages  # the time from which the link of each stage to others is free of KV pages
        self._last_end = 0.0

    def dispatch(self, begin: float, times: Sequence[StageTime]) -> list[Interval]:
        """Return when each stage computes a step that the first one may start at time `begin`."""
        intervals, ready = [], begin
        for stage, (seconds, hand_off) in enumerate(times):
            start = max(ready, self._free[stage])
            self._free[stage] = start + seconds
            intervals.append(Interval(start, start + seconds))
            ready = max(start + seconds, self._link_free[stage]) + hand_off
        end = intervals[-1].end
        self.busy += sum(time.seconds for time in times)
        self.span += end - max(begin, self._last_end)
        self._last_end = end
        return intervals

    def occupy(self, now: float, seconds: float) -> None:
        """Let all stages do other work after the dispatched steps."""
        self._free = [max(free, now) + seconds for free in self._free]

    def send(self, now: float, seconds: float) -> float:
        """Send KV pages between the stages, each after its dispatched steps, and return when all have arrived.

        Results of later steps wait for the pages that their stage sends.
        """
        self._link_free = [max(free, now) + seconds for free in self._free]
        return max(self._link_free)


def bubbles(pipelines: Sequence[Pipeline]) -> float | None:
    """Return the share of the time with work in which stages were idle, None without pipelines that had work."""
    there = sum(pipeline.stages * pipeline.span for pipeline in pipelines)
    return 1 - sum(pipeline.busy for pipeline in pipelines) / there if there else None
