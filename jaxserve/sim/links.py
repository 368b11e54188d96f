"""SharedLinks: bytes on their way over links that several transfers share, in virtual time.

A link serves the transfers of the highest class that has any (strict priority, preemptive), and gives all of them the
same share of its bandwidth (processor sharing). A transfer is there one latency after its last byte was sent.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from math import inf

from jaxserve.sim.hardware import Link


class Priority(IntEnum):
    """Classes of transfers; smaller goes first."""

    ACTIVATIONS = 0
    KV = 1
    WEIGHTS = 2


@dataclass(eq=False, slots=True)
class Transfer:
    """Bytes that go over a link. Where several parts share the links, each looks at the `end` of its own transfers."""

    link: str
    size: int  # bytes
    priority: int
    start: float  # s
    end: float | None = None  # s, when it was there; None until `SharedLinks.advance` has come so far


@dataclass(slots=True)
class _Class:
    """Transfers of one priority that a link has still to send.

    All have got the same bytes since they joined, so that one number tells of each how far it is: a transfer of size s
    that joined at `served` = v is sent when `served` is v + s.
    """

    served: float = 0.0  # bytes that each got which was there all the time
    queue: list[tuple[float, int, Transfer]] = field(default_factory=list)  # a heap: `served` at its end, order


class _Server:
    """One link as it was at `time`, when a transfer joined or had been sent: no other moment has to be looked at."""

    def __init__(self, link: Link):
        self.link = link
        self.time = -inf
        self._classes: dict[int, _Class] = {}  # by priority; none is empty

    @property
    def next_sent(self) -> float:
        """When the next transfer has been sent, if none joins before; infinity if there is none."""
        if not self._classes:
            return inf
        first = self._classes[min(self._classes)]
        return self.time + max(0.0, first.queue[0][0] - first.served) * len(first.queue) / self.link.bandwidth

    def send(self, now: float) -> Iterator[tuple[float, int, Transfer]]:
        """The transfers that have been sent by `now`: when each is there, its order, and itself. Mutates."""
        while (sent := self.next_sent) <= now:
            priority = min(self._classes)
            first = self._classes[priority]
            first.served, order, transfer = heapq.heappop(first.queue)
            self.time = sent
            if not first.queue:
                del self._classes[priority]  # the next one starts from 0: `served` stays small, and exact
            yield sent + self.link.latency, order, transfer

    def add(self, now: float, transfer: Transfer, order: int) -> None:
        """A transfer joins, after `send` of the same time. Mutates."""
        if self._classes:
            first = self._classes[min(self._classes)]
            first.served += (now - self.time) * self.link.bandwidth / len(first.queue)
        self.time = now
        own = self._classes.setdefault(transfer.priority, _Class())
        heapq.heappush(own.queue, (own.served + transfer.size, order, transfer))


class SharedLinks:
    """Links by name, each in one direction. Times that are given never go back."""

    def __init__(self, links: Mapping[str, Link]):
        self._servers = {name: _Server(link) for name, link in links.items()}
        self._sending: dict[str, _Server] = {}  # those with something to send
        self._sent: list[tuple[float, int, Transfer]] = []  # a heap: end, order
        self._order = count()
        self._now, self._next = -inf, inf

    def start(self, now: float, link: str, size: int, priority: int) -> Transfer:
        """Begins to send `size` bytes over a link. Mutates."""
        assert size >= 0, size
        assert now >= self._now, (now, self._now)
        self._now = now
        server = self._sending[link] = self._servers[link]
        transfer = Transfer(link, size, priority, now)
        self._take(server.send(now))
        server.add(now, transfer, next(self._order))
        self._next = self._find_next()
        return transfer

    def next_event(self) -> float:
        """When the next transfer is there, if none starts before; infinity if none is under way."""
        return self._next

    def advance(self, now: float) -> list[Transfer]:
        """Sends until `now`; returns the transfers that are there since the last call, by their ends, and of those
        that end together the one first that started first. Mutates.
        """
        assert now >= self._now, (now, self._now)
        self._now = now
        if now < self._next:
            return []
        for name, server in list(self._sending.items()):
            self._take(server.send(now))
            if server.next_sent == inf:
                del self._sending[name]
        finished = []
        while self._sent and self._sent[0][0] <= now:
            end, _, transfer = heapq.heappop(self._sent)
            transfer.end = end
            finished.append(transfer)
        self._next = self._find_next()
        return finished

    def _take(self, sent: Iterable[tuple[float, int, Transfer]]) -> None:
        for transfer in sent:
            heapq.heappush(self._sent, transfer)

    def _find_next(self) -> float:
        sent = (end for end, _, _ in self._sent[:1])
        sending = (server.next_sent + server.link.latency for server in self._sending.values())
        return min((*sent, *sending), default=inf)
