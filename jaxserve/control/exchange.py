"""The exchange of KV pages after instances have come to share their layers, or have them all again.

New requests begin at once. The sequences whose pages are on their way are held, and go on as soon as these have come
(KunServe, section 4.2). Rows of pages are sent in chunks, in the order of the sequences. A chunk takes about as long as
a stage's step, and the next one is sent when it has come, so that what steps send waits for one chunk at most.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from jaxserve.control.reconfigure import Cancelled
from jaxserve.control.request_moves import GroupedInstance, MovableCore
from jaxserve.control.transitions import BetweenStepsOf, Rendezvous, Waits
from jaxserve.core.step_load import StepLoad
from jaxserve.kvcache import NULL_PAGE

log = logging.getLogger(__name__)

USUAL_SECONDS = 0.01  # of a stage's step, if it is unknown


class ExchangeHost(Protocol):
    """A host that exchanges rows of pages between the devices of instances."""

    def send(self, instances: Sequence[Any], rows: Sequence[int]) -> Any:
        """Begin to send rows of pages to the devices that keep them from now on. Called between steps."""
        ...

    def arrival(self, sent: Any, seconds: float) -> Waits[None]:
        """Wait until rows have been sent, which is estimated to take `seconds`."""
        ...

    def receive(self, instances: Sequence[Any], sent: Any) -> None:
        """Put rows that have come into the pools. Called between steps."""
        ...

    def end_exchange(self, instances: Sequence[Any]) -> None:
        """Free what only the exchange has needed."""
        ...


class PageExchange:
    """The exchange for the instances that a regroup makes: a group, or the members that a group becomes."""

    def __init__(
        self,
        host: ExchangeHost,
        lanes: int,
        stages: int,
        row_seconds: float,
        most_rows: int,
        now: Callable[[], float],
    ):
        """`lanes` and `stages` are those of each instance.

        All devices exchange one row in `row_seconds`, and have memory for `most_rows` on their way.
        """
        self._host, self._lanes, self._stages, self._now = host, lanes, stages, now
        self._row_seconds, self._most_rows = row_seconds, most_rows
        self._names: tuple[str, ...] = ()
        self._instances: list[GroupedInstance] = []
        self._rows: deque[int] = deque()
        self._sent: tuple[list[int], Any] | None = None  # the rows on their way

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

    def carry_out(self) -> Waits[None]:
        """Exchange all rows. If that fails, what has these pages computes them again."""
        try:
            yield self._between_steps(self._send)
            while self._sent is not None:
                rows, sent = self._sent
                yield from self._host.arrival(sent, len(rows) * self._row_seconds)
                yield self._between_steps(self._receive_and_send)
        except Cancelled:
            raise
        except Exception as error:
            log.warning("KV pages were lost on their way, and are computed again: %s", error, exc_info=True)
            yield self._between_steps(self._lose)
        yield self._between_steps(lambda: self._host.end_exchange(self._instances))

    @property
    def _cores(self) -> list[MovableCore]:
        return [instance.core for instance in self._instances]

    def _between_steps(self, function: Callable[[], None]) -> BetweenStepsOf | Rendezvous:
        if len(self._names) == 1:
            return BetweenStepsOf(function, self._names[0])
        return Rendezvous(self._names, function)

    def _receive_and_send(self) -> None:
        assert self._sent is not None
        rows, sent = self._sent
        self._host.receive(self._instances, sent)
        for core in self._cores:
            core.arrive(self._pages_of(rows))
        self._send()

    def _send(self) -> None:
        rows = [self._rows.popleft() for _ in range(min(len(self._rows), self._chunk()))]
        self._sent = (rows, self._host.send(self._instances, rows)) if rows else None

    def _lose(self) -> None:
        self._rows.clear()
        self._sent = None
        for core in self._cores:
            core.lose(self._now())

    def _chunk(self) -> int:
        """Return the number of rows that are exchanged in about the time of a stage's step."""
        if not self._row_seconds:
            return self._most_rows
        seconds = max(map(self._stage_seconds, self._cores))
        return max(1, min(int(seconds / self._row_seconds), self._most_rows))

    def _stage_seconds(self, core: MovableCore) -> float:
        running = core.scheduler.running
        if core.cost is None or not running:
            return USUAL_SECONDS
        count, context = len(running), sum(sequence.num_computed for sequence in running)
        return core.cost.seconds(StepLoad(count, count, count, context, 0)) / self._stages

    def _pages_of(self, rows: Iterable[int]) -> set[int]:
        """Return the pages of rows in all lanes, but for the null page."""
        return {row * self._lanes + lane for row in rows for lane in range(self._lanes)} - {NULL_PAGE}
