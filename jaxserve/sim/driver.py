"""The driver of procedures of `control` in virtual time: an agenda of events in the place of a thread."""

import heapq
from collections.abc import Callable
from itertools import count
from math import inf
from typing import Any

from jaxserve.control.transitions import Sleep, StepsEnded, Waits
from jaxserve.core.clock import Clock
from jaxserve.sim.links import SharedLinks, Transfer


class Agenda:
    """Functions to call at times of a virtual clock, in the order of their times."""

    def __init__(self, clock: Clock):
        self._clock, self._order = clock, count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def add(self, time: float, function: Callable[[], None]) -> None:
        """Have a function called at a time (s); now, if that has passed."""
        heapq.heappush(self._events, (max(time, self._clock.now()), next(self._order), function))

    def next_event(self) -> float:
        """Return when the next function is due (s); infinity if there is none."""
        return self._events[0][0] if self._events else inf

    def advance(self) -> None:
        """Call the functions that are due."""
        while self._events and self._events[0][0] <= self._clock.now():
            heapq.heappop(self._events)[2]()


class Fence:
    """A moment at which steps have ended, for which at most one function waits."""

    def __init__(self) -> None:
        self.passed = False
        self.then: Callable[[], None] | None = None

    def passes(self) -> None:
        """Take note that the steps have ended."""
        self.passed = True
        if self.then is not None:
            self.then()


class ProcedureDriver:
    """A driver of one procedure at a time, which is a generator of waits; whoever owns the agenda advances it."""

    def __init__(self, clock: Clock, agenda: Agenda, links: SharedLinks, wait: Callable[[Any], None]):
        """`links` are those of `Transfer`. `wait` begins all other waits, and calls `soon` when they are over."""
        self._clock, self._agenda, self._links, self._wait = clock, agenda, links, wait
        self._procedure: Waits[None] | None = None

    @property
    def busy(self) -> bool:
        """True while the procedure has not ended."""
        return self._procedure is not None

    def start(self, procedure: Waits[None]) -> None:
        """Run a procedure up to its first wait. Call it only while none is under way."""
        assert not self.busy
        self._procedure = procedure
        self._go_on(None)

    def soon(self, value: Any, error: Exception | None = None) -> None:
        """Go on after the present event with the value, or the error, of the wait."""
        self._agenda.add(self._clock.now(), lambda: self._go_on(value, error))

    def _go_on(self, value: Any, error: Exception | None = None) -> None:
        """Run the procedure until it waits for something that has not happened yet."""
        assert self._procedure is not None
        try:
            wait = self._procedure.send(value) if error is None else self._procedure.throw(error)
        except StopIteration:
            self._procedure = None
            return
        match wait:
            case Sleep():
                self._agenda.add(wait.until, lambda: self._go_on(None))
            case StepsEnded():
                fence: Fence = wait.fence
                if fence.passed:
                    self.soon(None)
                else:
                    fence.then = lambda: self.soon(None)
            case Transfer():
                self._agenda.add(self._links.next_event(), self._transferred)
            case _:
                self._wait(wait)

    def _transferred(self) -> None:
        self._links.advance(self._clock.now())
        self._go_on(None)
