"""The event loop of a simulated cluster, which handles events in the order of their times.

arrival -> frontend -> directory -> instance: step, step, ... -> answer
tick -> controller -> policy -> actuator -> between two steps of an instance, or of several
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from typing import Protocol

from jaxserve.core.clock import VirtualClock
from jaxserve.core.errors import RequestError
from jaxserve.core.request import Request, RequestMetrics
from jaxserve.core.sampling import SamplingParams
from jaxserve.sim.front import InFlight, SimFront, SimRequest as SimRequest
from jaxserve.sim.instance import Refused

MAX_WAIT = 600.0  # s for which requests wait in front of the instances while nothing else happens but ticks


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of a request. Times are virtual seconds, and None if the request was refused."""

    index: int  # in order of arrival, from 0
    request: SimRequest
    instance: str | None  # the name of the instance that answered; None if it was refused before it had one
    first_token: float | None = None
    last_token: float | None = None
    output_tokens: int = 0
    token_times: Sequence[float] = ()  # s; empty unless the simulation is detailed
    error: str | None = None  # why it was refused


class Control(Protocol):
    """A source of events other than requests and steps, such as the controller. It may change the instances."""

    def next_event(self) -> float:
        """Return when `advance` is due (s)."""
        ...

    def advance(self) -> None:
        """Handle the events that are due now."""
        ...


@dataclass(frozen=True)
class Frontend:
    """The time (s) that a request spends between its client and the engine.

    Answers that the instance is streaming delay a request because they share the event loops of server and client.
    """

    request: float = 0.0
    prompt_token: float = 0.0
    stream: float = 0.0  # for each answer that the instance is streaming


class Simulation:
    """A cluster of instances with one front."""

    def __init__(
        self,
        front: SimFront,
        clock: VirtualClock,
        *,
        frontend: Frontend | None = None,
        control: Control | None = None,
        linger: float = 0.0,
        token_times: dict[str, list[float]] | None = None,
    ):
        """`control` goes on for `linger` seconds after the last answer. `token_times` is that of the instances."""
        self.front = front
        self._clock, self._frontend = clock, frontend or Frontend()
        self._control, self._linger = control, linger
        self._token_times = {} if token_times is None else token_times
        self._order = count()  # of events at equal times
        # A heap of (time, order, the name of the instance or the request that the event is about).
        self._events: list[tuple[float, int, str | InFlight]] = []
        self._due: dict[str, float] = {}  # the time of each instance's valid event; its other events are void
        self._params: dict[int, SamplingParams] = {}  # by output tokens
        self._unshared: tuple[int, ...] = ()
        front.on_wake = self._schedule

    def run(self, requests: Iterable[SimRequest]) -> Iterator[Answered]:
        """Simulate until all requests have ended. Yield the result of each request when it ends."""
        arrivals = enumerate(requests)
        coming = next(arrivals, None)
        patience = MAX_WAIT
        while True:
            event = self._next_event()
            if coming is not None and coming[1].arrival <= event:
                index, request = coming
                due = request.arrival + self._frontend.request + self._frontend.prompt_token * request.input_tokens
                heapq.heappush(self._events, (due, next(self._order), InFlight(index, request)))
                coming = next(arrivals, None)
                continue
            tick = inf if self._control is None else self._control.next_event()
            waiting = event == inf and len(self.front.directory) > 0
            until = self._clock.time + (patience if waiting else self._linger)
            if tick <= event and (event < inf or tick <= until):
                last, self._clock.time = self._clock.time, tick
                self._tick()
                if waiting:
                    patience -= tick - last
                elif event == inf:
                    self._linger -= tick - last
            elif event < inf:
                patience = MAX_WAIT
                yield from self._handle_event()
            else:
                return
            if self.front.lost:
                yield from self._take_lost()

    # -- events

    def _next_event(self) -> float:
        """Return the time (s) of the next valid event; infinity if there is none."""
        events, due = self._events, self._due
        while events:
            time, _, target = events[0]
            if not isinstance(target, str) or due.get(target) == time:
                return time
            heapq.heappop(events)
        return inf

    def _handle_event(self) -> Iterator[Answered]:
        self._clock.time, _, target = heapq.heappop(self._events)
        if isinstance(target, InFlight):
            try:
                self._arrive(target)
            except RequestError as error:
                yield Answered(target.index, target.request, None, error=str(error))
            return
        self._due[target] = inf
        instance = self.front.instances[target]
        for output in instance.advance():
            if isinstance(output, Refused):
                yield self._end(output.request_id, output.error, None)
            elif output.finished:
                yield self._end(output.request_id, None, output.metrics)
        self.front.leave(instance.core.take_outgrown(), outgrown=True)
        self._schedule(target)

    def _tick(self) -> None:
        assert self._control is not None
        self._control.advance()

    def _schedule(self, name: str) -> None:
        """Add the instance's next event to the heap, if it changed."""
        if name not in self.front.instances:
            return  # it has ended
        wake = self.front.instances[name].wake
        if wake != self._due.get(name, inf):
            self._due[name] = wake
            if wake < inf:
                heapq.heappush(self._events, (wake, next(self._order), name))

    # -- requests

    def _arrive(self, sent: InFlight) -> None:
        """Route a request, or give it to its instance after the frontend's delay. Raise `RequestError` if refused."""
        request_id = str(sent.index)
        entry = self.front.directory.get(request_id)
        if entry is None:
            prompt, params = self._prompt(sent.request), self._sampling(sent.request.output_tokens)
            request = Request(request_id, prompt, params, arrival=self._clock.time, stream=False)
            delay = self._frontend.stream and self._frontend.stream * self.front.running_for(request)
            if delay:
                request = replace(request, arrival=self._clock.time + delay)
            entry = self.front.add(request, sent)
            if delay:
                heapq.heappush(self._events, (request.arrival, next(self._order), sent))
                return
        self.front.send(entry)

    def _prompt(self, request: SimRequest) -> tuple[int, ...]:
        if request.prompt is not None:
            return request.prompt
        if len(self._unshared) < request.input_tokens:
            self._unshared = (0,) * request.input_tokens
        return self._unshared[: request.input_tokens]

    def _sampling(self, output_tokens: int) -> SamplingParams:
        if output_tokens not in self._params:
            self._params[output_tokens] = SamplingParams(max_tokens=output_tokens, ignore_eos=True, seed=0)
        return self._params[output_tokens]

    def _end(self, request_id: str, error: str | None, times: RequestMetrics | None) -> Answered:
        entry = self.front.directory.get(request_id)
        assert entry is not None
        name, sent = entry.instance, entry.owner
        self.front.directory.end(entry)
        if times is None:
            return Answered(sent.index, sent.request, name, error=error)
        token_times = self._token_times.pop(request_id, ())
        return Answered(
            sent.index, sent.request, name, times.first_token, times.last_token, sent.request.output_tokens, token_times
        )

    def _take_lost(self) -> Iterator[Answered]:
        lost, self.front.lost = self.front.lost, []
        for sent, error in lost:
            self._token_times.pop(str(sent.index), None)
            yield Answered(sent.index, sent.request, None, error=error)
