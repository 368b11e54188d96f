"""Transfers over links that they share, in virtual time.

A link sends only transfers of its highest waiting priority (strict and preemptive). These share its bandwidth equally
(processor sharing). A transfer arrives one latency after its last byte was sent.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from math import inf

from jaxserve.sim.hardware import Link

ROUNDING = 1e-6  # bytes; less than this is left of a transfer only because floating-point sums are rounded


class Priority(IntEnum):
    """Priorities of transfers; the smallest number is sent first."""

    ACTIVATIONS = 0
    KV = 1
    WEIGHTS = 2


@dataclass(eq=False, slots=True)
class Transfer:
    """A transfer of `size` bytes over a link. Its owner reads `end` to see when it arrived."""

    link: str
    size: int  # bytes
    priority: int
    start: float  # s
    end: float | None = None  # s, of its arrival; None until `SharedLinks.advance` has passed it


@dataclass(slots=True)
class _PriorityClass:
    """Unsent transfers of one priority on a link.

    All of them are sent at the same rate, so that one counter describes their progress: a transfer of size s that
    joined when `served` was v is completely sent when `served` is v + s.
    """

    served: float = 0.0  # bytes sent of a transfer that was in the class from its beginning
    queue: list[tuple[float, int, Transfer]] = field(default_factory=list)  # a heap of (`served` at its end, order)


class _LinkQueue:
    """The transfers of one link, as of `time`: the last time at which a transfer joined or was completely sent."""

    def __init__(self, link: Link):
        self.link = link
        self.time = -inf
        self._classes: dict[int, _PriorityClass] = {}  # by priority; none is empty

    @property
    def next_sent(self) -> float:
        """The time (s) at which the next transfer is completely sent if none joins; infinity if there is none."""
        if not self._classes:
            return inf
        first = self._classes[min(self._classes)]
        return self.time + max(0.0, first.queue[0][0] - first.served) * len(first.queue) / self.link.bandwidth

    def send(self, now: float) -> Iterator[tuple[float, int, Transfer]]:
        """Remove the transfers that are completely sent by `now`. Yield (arrival, order, transfer) for each."""
        # Otherwise a transfer that ends just as one of higher priority starts could wait for that one to end.
        tolerance = ROUNDING / self.link.bandwidth
        while (sent := self.next_sent) <= now + tolerance:
            sent = min(sent, now)
            priority = min(self._classes)
            first = self._classes[priority]
            first.served, order, transfer = heapq.heappop(first.queue)
            self.time = sent
            if not first.queue:
                # A new class starts from 0, so that `served` stays small and exact.
                del self._classes[priority]
            yield sent + self.link.latency, order, transfer

    def add(self, now: float, transfer: Transfer, order: int) -> None:
        """Add a transfer. To be called after `send` with the same `now`."""
        if self._classes:
            first = self._classes[min(self._classes)]
            first.served += (now - self.time) * self.link.bandwidth / len(first.queue)
        self.time = now
        own = self._classes.setdefault(transfer.priority, _PriorityClass())
        heapq.heappush(own.queue, (own.served + transfer.size, order, transfer))


class SharedLinks:
    """Links by name, each in one direction. The times given to its methods must not decrease."""

    def __init__(self, links: Mapping[str, Link]):
        self._queues = {name: _LinkQueue(link) for name, link in links.items()}
        self._sending: dict[str, _LinkQueue] = {}  # only links with unsent transfers
        self._sent: list[tuple[float, int, Transfer]] = []  # a heap of (arrival, order, transfer)
        self._order = count()
        self._now, self._next = -inf, inf

    def start(self, now: float, link: str, size: int, priority: int) -> Transfer:
        """Begin to send `size` bytes over a link."""
        assert size >= 0, size
        assert now >= self._now, (now, self._now)
        self._now = now
        queue = self._sending[link] = self._queues[link]
        transfer = Transfer(link, size, priority, now)
        self._add_sent(queue.send(now))
        queue.add(now, transfer, next(self._order))
        self._next = self._find_next()
        return transfer

    def next_event(self) -> float:
        """Return when the next transfer arrives (s) if none starts before; infinity if there is none."""
        return self._next

    def advance(self, now: float) -> list[Transfer]:
        """Send until `now`. Return the transfers that arrived since the last call, by arrival and then by start."""
        assert now >= self._now, (now, self._now)
        self._now = now
        if now < self._next:
            return []
        for name, queue in list(self._sending.items()):
            self._add_sent(queue.send(now))
            if queue.next_sent == inf:
                del self._sending[name]
        finished = []
        while self._sent and self._sent[0][0] <= now:
            end, _, transfer = heapq.heappop(self._sent)
            transfer.end = end
            finished.append(transfer)
        self._next = self._find_next()
        return finished

    def _add_sent(self, sent: Iterable[tuple[float, int, Transfer]]) -> None:
        for transfer in sent:
            heapq.heappush(self._sent, transfer)

    def _find_next(self) -> float:
        sent = (end for end, _, _ in self._sent[:1])
        sending = (queue.next_sent + queue.link.latency for queue in self._sending.values())
        return min((*sent, *sending), default=inf)
