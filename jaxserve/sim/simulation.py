"""The event loop of a simulated cluster, which handles events in the order of their times.

arrival -> frontend -> router -> instance: step, step, ... -> answer
tick -> controller -> policy -> actuator -> between two steps of an instance
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from typing import Protocol

from jaxserve.core.clock import VirtualClock
from jaxserve.core.request import Request, RequestMetrics
from jaxserve.core.sampling import SamplingParams
from jaxserve.scheduler.routing import Route, Router
from jaxserve.sim.instance import Refused, SimInstance


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request of the workload: its arrival and its lengths."""

    arrival: float  # s
    input_tokens: int
    output_tokens: int
    prompt: tuple[int, ...] | None = None  # token ids; needed only if prompts share prefixes


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of a request. Times are virtual seconds, and None if the request was refused."""

    index: int  # in order of arrival, from 0
    request: SimRequest
    instance: int  # the index of the instance that served it
    first_token: float | None = None
    last_token: float | None = None
    output_tokens: int = 0
    token_times: Sequence[float] = ()  # s; empty unless the instances are detailed
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


@dataclass(slots=True)
class _InFlight:
    index: int
    request: SimRequest
    instance: int = -1  # -1 until it is routed


class Simulation:
    """A cluster of instances that share one router."""

    def __init__(
        self,
        instances: Sequence[SimInstance],
        clock: VirtualClock,
        *,
        frontend: Frontend | None = None,
        control: Control | None = None,
        linger: float = 0.0,
    ):
        """Connect the instances to one router. `control` goes on for `linger` seconds after the last answer."""
        self.instances = instances
        self._clock, self._frontend = clock, frontend or Frontend()
        self._control, self._linger = control, linger
        longest = [instance.core.info.max_model_len for instance in instances]
        self._router = Router(Route(str(index), length) for index, length in enumerate(longest))
        self._order = count()  # of events at equal times
        # A heap of (time, order, the instance's index or the request that the event is about).
        self._events: list[tuple[float, int, int | _InFlight]] = []
        self._due = [inf] * len(instances)  # the time of each instance's valid event; its other events are void
        self._in_flight: dict[str, _InFlight] = {}
        self._params: dict[int, SamplingParams] = {}  # by output tokens
        self._unshared: tuple[int, ...] = ()
        for index, instance in enumerate(instances):
            instance.on_wake = partial(self._schedule, index)

    def run(self, requests: Iterable[SimRequest]) -> Iterator[Answered]:
        """Simulate until all requests have ended. Yield the result of each request when it ends."""
        arrivals = enumerate(requests)
        coming = next(arrivals, None)
        while True:
            event = self._next_event()
            if coming is not None and coming[1].arrival <= event:
                index, request = coming
                due = request.arrival + self._frontend.request + self._frontend.prompt_token * request.input_tokens
                heapq.heappush(self._events, (due, next(self._order), _InFlight(index, request)))
                coming = next(arrivals, None)
                continue
            tick = inf if self._control is None else self._control.next_event()
            if tick <= event and (event < inf or tick <= self._clock.time + self._linger):
                last = self._clock.time if event == inf else None
                self._clock.time = tick
                self._tick()
                if last is not None:
                    self._linger -= tick - last
            elif event < inf:
                yield from self._handle_event()
            else:
                return

    # -- events

    def _next_event(self) -> float:
        """Return the time (s) of the next valid event; infinity if there is none."""
        events, due = self._events, self._due
        while events:
            time, _, target = events[0]
            if not isinstance(target, int) or due[target] == time:
                return time
            heapq.heappop(events)
        return inf

    def _handle_event(self) -> Iterator[Answered]:
        self._clock.time, _, target = heapq.heappop(self._events)
        if isinstance(target, _InFlight):
            self._send(target)
            return
        self._due[target] = inf
        for output in self.instances[target].advance():
            if isinstance(output, Refused):
                yield self._end(output.request_id, output.error, None)
            elif output.finished:
                yield self._end(output.request_id, None, output.metrics)
        self._schedule(target)

    def _tick(self) -> None:
        assert self._control is not None
        self._control.advance()

    def _schedule(self, index: int) -> None:
        """Add the instance's next event to the heap, if it changed."""
        wake = self.instances[index].wake
        if wake != self._due[index]:
            self._due[index] = wake
            if wake < inf:
                heapq.heappush(self._events, (wake, next(self._order), index))

    # -- requests

    def _send(self, sent: _InFlight) -> None:
        request = sent.request
        if sent.instance < 0:
            sent.instance = self._route(request)
            if delay := self._frontend.stream * self.instances[sent.instance].running:
                heapq.heappush(self._events, (self._clock.time + delay, next(self._order), sent))
                return
        self._in_flight[str(sent.index)] = sent
        prompt, params = self._prompt(request), self._sampling(request.output_tokens)
        self.instances[sent.instance].submit(
            Request(str(sent.index), prompt, params, arrival=self._clock.time, stream=False)
        )

    def _route(self, request: SimRequest) -> int:
        tokens = request.input_tokens
        name = self._router.take(tokens, tokens + request.output_tokens)
        return int(name or self._router.take(tokens, 0) or 0)  # any instance refuses a request that is too long

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
        sent = self._in_flight.pop(request_id)
        self._router.ended(str(sent.instance), sent.request.input_tokens)
        if times is None:
            return Answered(sent.index, sent.request, sent.instance, error=error)
        return Answered(
            sent.index,
            sent.request,
            sent.instance,
            times.first_token,
            times.last_token,
            sent.request.output_tokens,
            self.instances[sent.instance].token_times.pop(request_id, ()),
        )
