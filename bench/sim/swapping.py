"""Preemption that swaps KV pages to the host, after InferCept, for comparison: jaxserve computes them again instead.

The pages of a preempted sequence go to the host over PCIe and come back when there is room for them, while steps go
on: each way has the whole bandwidth, and the devices are not slowed down. The host has room for everything. All of that
is in favour of swapping.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from jaxserve.core.numeric import ceil_div
from jaxserve.core.request import Sequence
from jaxserve.core.work import Chunk, Work
from jaxserve.planning.memory import MemoryPlan
from jaxserve.scheduler import Scheduler
from jaxserve.sim.build import BuiltSimulation


class SwappingScheduler(Scheduler):
    """A scheduler that keeps the KV of preempted sequences on the host."""

    def __init__(self, *args: Any, page_seconds: float):
        """A page crosses the link to the host, or back, in `page_seconds`."""
        super().__init__(*args)
        self.occupy: Callable[[float], None] = lambda seconds: None
        """Lets the device wait for pages for some seconds. The instance sets it."""
        self.swapped_pages = 0
        self._page_seconds = page_seconds
        self._on_host: dict[Sequence, tuple[int, float]] = {}  # tokens, and when their KV has come to the host
        self._coming: dict[Sequence, float] = {}  # running sequences, and when their KV has come back
        self._out_free = self._in_free = self._now = 0.0  # when each way of the link is free
        self._in_flight = 0  # steps

    def schedule(self, step: int, now: float) -> Work:
        self._now = now
        self._receive(now)
        work = super().schedule(step, now)
        if not work and self._coming and not self._in_flight:
            first = min(self._coming.values())
            self.occupy(first - now)
            self._receive(first)
            work = super().schedule(step, now)
        self._in_flight += bool(work)
        return work

    def ended(self) -> None:
        self._in_flight -= 1

    def _receive(self, now: float) -> None:
        for sequence in [sequence for sequence, time in self._coming.items() if time <= now]:
            del self._coming[sequence]
            self._held.discard(sequence)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        computed = sequence.num_computed
        super()._preempt(sequence, now)
        if self._coming.pop(sequence, None) is None:  # otherwise the host has all of it
            self._out_free = max(now, self._out_free) + self._seconds(computed)
        self._on_host[sequence] = computed, self._out_free

    def _take_pages(self, sequence: Sequence) -> bool:
        if not super()._take_pages(sequence):
            return False
        if sequence in self._on_host:
            sequence.num_computed, there = self._on_host.pop(sequence)
            self._in_free = max(self._now, there, self._in_free) + self._seconds(sequence.num_computed)
            self._coming[sequence] = self._in_free
            self._held.add(sequence)
        return True

    def _admit(self, chunks: list[Chunk], tiles: int) -> None:
        while tiles > 0 and (sequence := self._admit_next()) is not None:
            if sequence not in self._held:
                tiles -= self._add_chunk(chunks, sequence, tiles)

    def _seconds(self, tokens: int) -> float:
        pages = ceil_div(tokens, self.limits.page_size)
        self.swapped_pages += pages
        return pages * self._page_seconds


@contextmanager
def swapping(page_seconds: float) -> Iterator[None]:
    """Let instances of one stage that are made meanwhile swap KV pages to the host."""

    def made(plan: MemoryPlan, instance: Any, *args: Any) -> Scheduler:
        return SwappingScheduler(*args, page_seconds=page_seconds)

    with patch.object(MemoryPlan, "_scheduler_of", made):
        yield


def connect(built: BuiltSimulation) -> None:
    """Let the devices of instances that swap wait for pages when they have nothing else to do."""
    for instance in built.simulation.front.instances.values():
        scheduler = instance.core.scheduler
        assert isinstance(scheduler, SwappingScheduler)
        scheduler.occupy = instance.occupy
