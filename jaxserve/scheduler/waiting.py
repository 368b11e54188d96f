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
        # A heap. Sequences that have left the queue stay in it until they reach its top.
        self._heap: list[tuple[tuple, int, Sequence]] = []
        # The sequences of the queue in the order in which they were queued, with the numbers of their heap entries.
        self._queued: dict[Sequence, int] = {}
        self._numbers = count()
        self.size = 0  # sequences, with the deferred ones
        self.prompt_tokens = 0  # of these sequences

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        number = self._queued[sequence] = next(self._numbers)
        heapq.heappush(self._heap, (sequence.order, number, sequence))
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
            _, number, sequence = self._heap[0]
            if self._queued.get(sequence) == number:
                return sequence
            heapq.heappop(self._heap)
        return None

    def sort_by_age(self) -> None:
        """Put sequences that have waited elsewhere before they were pushed where their age puts them in `since`."""
        self._queued = dict(sorted(self._queued.items(), key=lambda item: item[0].queued_at))

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
