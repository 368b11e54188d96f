"""The exchange of KV pages after instances have come to share their layers, or have them all again.

New requests begin at once. The sequences whose pages are on their way are held, and go on as soon as these have come
(KunServe, section 4.2). Rows of pages are sent in chunks, in the order of the sequences. A chunk takes about as long as
a stage's step, and at most one is sent between two steps, so that what steps send waits for one chunk at most. Several
chunks are on their way at once, since each leaves its device after the steps that have been dispatched.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from jaxserve.control.reconfigure import Cancelled
from jaxserve.control.request_moves import GroupedInstance, MovableCore
from jaxserve.control.transitions import EachBetweenSteps, Waits
from jaxserve.core.step_load import StepLoad
from jaxserve.kvcache import NULL_PAGE

log = logging.getLogger(__name__)

USUAL_SECONDS = 0.01  # of a stage's step, if it is unknown


class ExchangeHost(Protocol):
    """A host that exchanges rows of pages between the devices of instances."""

    def send(self, instances: Sequence[Any], index: int, rows: Sequence[int]) -> Any:
        """Begin to send rows of one of the instances to the devices that keep them. Called between its steps."""
        ...

    def arrival(self, sent: Sequence[Any]) -> Waits[None]:
        """Wait until what `send` has returned for each instance has come."""
        ...

    def receive(self, instances: Sequence[Any], index: int, sent: Sequence[Any]) -> None:
        """Put what has come for one of the instances into its pools. Called between its steps."""
        ...

    def end_exchange(self, instances: Sequence[Any]) -> None:
        """Free what only the exchange has needed."""
        ...


@dataclass
class Exchanged:
    """The work that an exchange has done, and what it has cost."""

    chunks: int = 0
    bytes: int = 0  # that have crossed links between devices
    seconds: float = 0.0
    held_seconds: float = 0.0  # that sequences were held, all together


@dataclass(frozen=True)
class RowCost:
    """The cost of the exchange of one row between all devices."""

    seconds: float
    bytes: int  # that cross links between devices
    most: int  # rows that devices have memory for while these are on their way


@dataclass
class _Chunk:
    rows: Sequence[int]
    sent: list[Any]  # by the number of the instance


class PageExchange:
    """The exchange for the instances that a regroup makes: a group, or the members that a group becomes."""

    def __init__(self, host: ExchangeHost, lanes: int, stages: int, cost: RowCost, now: Callable[[], float]):
        """`lanes` and `stages` are those of each instance."""
        self._host, self._lanes, self._stages, self._cost, self._now = host, lanes, stages, cost, now
        self._names: tuple[str, ...] = ()
        self._instances: list[GroupedInstance] = []
        self._rows: deque[int] = deque()
        self._on_their_way: deque[_Chunk] = deque()
        self._stage_seconds: list[float] = []  # of each instance, as of its latest chunk
        self._began = self._counted = 0.0
        self.done = Exchanged()

    def begin(self, names: Sequence[str], instances: Sequence[GroupedInstance]) -> None:
        """Hold the pages of all rows with contents, at the rendezvous at which instances begin."""
        self._names, self._instances = tuple(names), list(instances)
        rows: dict[int, None] = {}  # in the order of the sequences, then of the pages
        for core in self._cores:
            for sequence in core.scheduler.running:
                rows.update(dict.fromkeys(page // self._lanes for page in sequence.pages))
        for core in self._cores:
            rows.update(dict.fromkeys(page // self._lanes for page in core.scheduler.pages.occupied))
        self._rows.extend(rows)
        for core in self._cores:
            core.withhold(self._pages_of(rows))
        self._stage_seconds = [self._measured(core) for core in self._cores]
        self._began = self._counted = self._now()

    def carry_out(self) -> Waits[None]:
        """Exchange all rows. If that fails, what has these pages computes them again."""
        try:
            while self._rows or self._on_their_way:
                under_way = sum(len(chunk.rows) for chunk in self._on_their_way)
                rows = self._next_rows(self._cost.most - under_way)
                if rows:
                    yield from self._send(rows)
                else:
                    yield from self._receive()
        except Cancelled:
            raise
        except Exception as error:
            log.warning("KV pages were lost on their way, and are computed again: %s", error, exc_info=True)
            self._rows.clear()
            self._on_their_way.clear()
            yield self._between_steps(lambda index: self._cores[index].lose(self._now()))
        yield EachBetweenSteps({self._names[0]: lambda: self._host.end_exchange(self._instances)})
        self.done.seconds = self._now() - self._began

    @property
    def _cores(self) -> list[MovableCore]:
        return [instance.core for instance in self._instances]

    def _between_steps(self, function: Callable[[int], None]) -> EachBetweenSteps:
        """Return the wait until a function has been called for each instance, by its number."""
        return EachBetweenSteps({name: partial(function, index) for index, name in enumerate(self._names)})

    def _next_rows(self, room: int) -> list[int]:
        """Take the rows of the next chunk if there is room for it. There is, if no other one is on its way."""
        count = min(len(self._rows), self._chunk())
        return [self._rows.popleft() for _ in range(count)] if count <= room or not self._on_their_way else []

    def _send(self, rows: Sequence[int]) -> Waits[None]:
        chunk = _Chunk(rows, [None] * len(self._instances))

        def send(index: int) -> None:
            chunk.sent[index] = self._host.send(self._instances, index, rows)
            self._stage_seconds[index] = self._measured(self._cores[index])

        self._on_their_way.append(chunk)
        yield self._between_steps(send)
        self.done.chunks += 1
        self.done.bytes += len(rows) * self._cost.bytes

    def _receive(self) -> Waits[None]:
        """Wait for the chunk that was sent first, and let sequences go on that have all their pages."""
        chunk = self._on_their_way[0]
        yield from self._host.arrival(chunk.sent)
        now = self._now()
        held = sum(core.scheduler.num_held for core in self._cores)
        self.done.held_seconds += held * (now - self._counted)
        self._counted = now

        def receive(index: int) -> None:
            self._host.receive(self._instances, index, chunk.sent)
            self._cores[index].arrive(self._pages_of(chunk.rows))

        yield self._between_steps(receive)
        self._on_their_way.popleft()

    def _chunk(self) -> int:
        """Return the number of rows that are exchanged in about the time of a stage's step.

        As many chunks fit into the memory as steps can be dispatched before one of them leaves, and one more.
        """
        most = max(1, self._cost.most // (self._stages + 2))
        if not self._cost.seconds:
            return most
        return max(1, min(int(max(self._stage_seconds) / self._cost.seconds), most))

    def _measured(self, core: MovableCore) -> float:
        """Return the seconds that a stage takes for what there is to compute now, prompts included."""
        scheduler = core.scheduler
        running, limits = scheduler.running, scheduler.limits
        if core.cost is None or not running:
            return USUAL_SECONDS
        count, context = len(running), sum(sequence.num_computed for sequence in running)
        left = sum(len(sequence.tokens) - sequence.num_computed - 1 for sequence in running)
        prompts = min(max(0, left) + scheduler.waiting_tokens, limits.max_tiles * limits.tile)
        load = StepLoad(count + prompts, count, count, context, prompts * (prompts + 1))
        return core.cost.seconds(load) / self._stages

    def _pages_of(self, rows: Iterable[int]) -> set[int]:
        """Return the pages of rows in all lanes, but for the null page."""
        return {row * self._lanes + lane for row in rows for lane in range(self._lanes)} - {NULL_PAGE}
