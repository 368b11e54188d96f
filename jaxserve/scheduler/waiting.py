"""The waiting sequences of a scheduler, by priority and then by arrival."""

import heapq
from collections.abc import Iterator
from itertools import count

from jaxserve.core.request import Sequence


class WaitingQueue:
    """A queue of waiting sequences, and a count of those that wait for something else than their turn.

    These are *deferred*: siblings that wait for the prompt of the first one, and sequences that have outgrown the
    instance.
    """

    def __init__(self) -> None:
        # A heap. Sequences that have left the queue stay in it until they reach its top. The numbers only prevent that
        # sequences are compared.
        self._heap: list[tuple[tuple, int, Sequence]] = []
        self._numbers = count()
        self._queued: dict[Sequence, None] = {}  # the sequences of the queue in the order in which they were queued
        self.size = 0  # sequences, with the deferred ones
        self.prompt_tokens = 0  # of these sequences

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        self._queued[sequence] = None
        heapq.heappush(self._heap, (sequence.order, next(self._numbers), sequence))
        self._count(sequence, +1)

    def defer(self, sequence: Sequence) -> None:
        """Count a sequence without queueing it."""
        self._count(sequence, +1)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is queued or deferred."""
        self._queued.pop(sequence, None)
        self._count(sequence, -1)

    @property
    def first(self) -> Sequence | None:
        """The sequence whose turn is next, None if the queue is empty."""
        while self._heap:
            sequence = self._heap[0][-1]
            if sequence in self._queued:
                return sequence
            heapq.heappop(self._heap)
        return None

    def next(self, count: int) -> list[Sequence]:
        """Return up to `count` sequences of the queue in the order of their turns."""
        return [entry[-1] for entry in heapq.nsmallest(count, (e for e in self._heap if e[-1] in self._queued))]

    def sort_by_age(self) -> None:
        """Put sequences that have waited elsewhere before they were pushed where their age puts them in `since`."""
        self._queued = dict.fromkeys(sorted(self._queued, key=lambda sequence: sequence.queued_at))

    @property
    def num_deferred(self) -> int:
        """Number of deferred sequences."""
        return self.size - len(self._queued)

    @property
    def since(self) -> float | None:
        """The time at which the first sequence of the queue was queued (arrival or preemption), None without one."""
        return next((sequence.queued_at for sequence in self._queued), None)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the queue, without the deferred sequences, in the order in which they were queued."""
        return iter(self._queued)

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.size += sign
        self.prompt_tokens += sign * sequence.num_prompt
