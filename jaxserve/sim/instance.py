"""SimInstance: one instance in virtual time. Its engine core, scheduler and pages are the real ones."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

import numpy as np

from jaxserve.control.plan import InstancePlan
from jaxserve.core.clock import Clock
from jaxserve.core.errors import RequestError
from jaxserve.core.request import Request, RequestOutput
from jaxserve.core.step_load import Loads
from jaxserve.core.step_shapes import Buckets
from jaxserve.core.work import StepOutput, Work
from jaxserve.engine.core import EngineCore
from jaxserve.sim.cost_model import CostModel
from jaxserve.telemetry import Snapshot

Call = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that was not accepted, and why."""

    request_id: str
    error: str


@dataclass(slots=True)
class _Step:
    """A dispatched step, when it ends, and what is to be done then."""

    work: Work
    end: float
    afterwards: list[Call] = field(default_factory=list)


@dataclass(slots=True)
class _Run:
    """Steps that are known in advance: they decode the same sequences as the two that are dispatched.

    `first` and `second` are when these end. Whenever a step ends, one of `count` further ones begins: `done` have.
    """

    first: float
    second: float
    seconds: float  # of the first further step
    growth: float  # seconds by which each of them is longer than the one before
    count: int
    done: int = 0

    def end(self, number: int) -> float:
        """When step `number` ends, counted from the one that ends next."""
        if number == 0:
            return self.first
        further = number - 1
        return self.second + further * self.seconds + self.growth * (further * (further - 1) / 2)

    def ended(self, now: float) -> int:
        """How many further steps have begun by `now`: as many steps have ended."""
        low, high = self.done, self.count
        while low < high:  # the first that ends later
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.end(middle) <= now else (low, middle)
        return low


class SimInstance:
    """Steps as `StepLoop` does, one ahead of the device; steps that are all alike are taken at once.

    An event is due at `wake`; whoever drives the instance calls `advance` then, and gets what has ended.
    """

    def __init__(
        self,
        core: EngineCore,
        plan: InstancePlan,
        timing: CostModel,
        buckets: Buckets,
        clock: Clock,
        *,
        detailed: bool = False,
    ):
        """`plan` is what runs at the start. `detailed`: keep the times of all tokens, by request."""
        self.core = core
        self.clock = clock
        self.wake = inf
        self.token_times: dict[str, list[float]] = {}
        self._detailed = detailed
        self._timing, self._loads = timing, Loads(buckets)
        self._inbox: list[Request] = []
        self._calls: list[Call] = []
        self._ahead: _Step | None = None  # ends next
        self._behind: _Step | None = None  # dispatched after it
        self._run: _Run | None = None
        self.set_plan(plan)

    # -- from outside, at any time

    def submit(self, request: Request) -> None:
        """A request arrives: the next step to begin may take it in. Mutates."""
        self._inbox.append(request)
        self._interrupt(self.clock.now())

    def call(self, function: Call) -> None:
        """Has a function run between two steps, soon. Mutates."""
        self._calls.append(function)
        self._interrupt(self.clock.now())

    def after_dispatched(self, function: Call) -> None:
        """Runs a function once the steps that have been dispatched are done. Mutates."""
        last = self._behind or self._ahead
        if last is None:
            function()
        else:
            last.afterwards.append(function)

    def set_plan(self, plan: InstancePlan) -> None:
        """Steps take the time of another plan, from the next one to begin on. Mutates."""
        self._steps = self._timing.of(plan)

    def snapshot(self) -> Snapshot:
        """The state after the latest step. Mutates: steps that have ended by now are taken in."""
        if (run := self._run) is not None:
            self._take(run, run.ended(self.clock.now()))
        return self.core.snapshot

    @property
    def idle(self) -> bool:
        return self._ahead is None and self._behind is None and not self._inbox and self.core.idle

    @property
    def running(self) -> int:
        """Sequences that are being answered."""
        return len(self.core.scheduler.running)

    # -- events

    def advance(self) -> Iterator[RequestOutput | Refused]:
        """What happens at `wake`, which is now: a step ends and the next one begins. Yields what is new. Mutates."""
        now = self.clock.now()
        if (run := self._run) is not None:
            self._take(run, run.count)
            self._run = None
        step, self._ahead = self._ahead, None
        if step is not None:
            for function in step.afterwards:
                function()
            yield from self._finish(step, now)
        while True:
            yield from self._take_commands()
            work = self.core.schedule(now)
            self._ahead, self._behind = self._behind, self._dispatch(work, now) if work else None
            if self._ahead is not None or self._behind is None:
                break
            now += self._timing.host  # the device was idle: the host goes on to the next step at once
        if self._ahead is None:
            self.wake = inf
        else:
            self.wake = self._ahead.end
            self._look_ahead()

    def _finish(self, step: _Step, now: float) -> list[RequestOutput]:
        work = step.work
        if self._detailed:
            done = (*work.decodes, *(chunk.sequence for chunk in work.chunks if chunk.last))
            for sequence in done:
                self.token_times.setdefault(sequence.request.id, []).append(now)
        tokens = np.zeros(len(work.decodes) + len(work.chunks), np.int32)
        return self.core.update(work, StepOutput(tokens), now)

    def _take_commands(self) -> Iterator[Refused]:
        while self._calls:  # one may ask for another
            self._calls.pop(0)()
        requests, self._inbox = self._inbox, []
        for request in requests:
            try:
                self.core.add(request)
            except RequestError as error:
                yield Refused(request.id, str(error))

    def _dispatch(self, work: Work, now: float) -> _Step:
        start = now + self._timing.host if self._behind is None else max(self._behind.end, now)
        return _Step(work, start + self._steps.seconds(self._loads.of(work)))

    # -- steps that are all alike

    def _look_ahead(self) -> None:
        """Finds a run of steps like the two that are dispatched, and wakes at its end."""
        ahead, behind, growth = self._ahead, self._behind, self._steps.per_context
        if ahead is None or behind is None or growth is None or ahead.afterwards or behind.afterwards:
            return
        decodes = behind.work.decodes
        if ahead.work.chunks or behind.work.chunks or ahead.work.decodes != decodes:
            return
        scheduler = self.core.scheduler
        if len(decodes) == len(scheduler.running) and (count := scheduler.steady_steps()) > 0:
            growth *= len(decodes)
            seconds = self._steps.seconds(self._loads.of(behind.work)) + growth
            self._run = _Run(ahead.end, behind.end, seconds, growth, count)
            self.wake = self._run.end(count)

    def _take(self, run: _Run, done: int) -> None:
        """Takes in the steps of a run up to `done`. Mutates."""
        assert self._ahead is not None
        assert self._behind is not None
        count = done - run.done
        if count > 0:
            self.core.repeat(count, run.end(done - 1))
            if self._detailed:
                times = [run.end(number) for number in range(run.done, done)]
                for sequence in self._ahead.work.decodes:
                    self.token_times[sequence.request.id] += times
            run.done = done
            self._ahead.end, self._behind.end = run.end(done), run.end(done + 1)

    def _interrupt(self, now: float) -> None:
        """Something is to be taken in: the run ends with the next step, and an idle instance begins."""
        if (run := self._run) is not None:
            run.count = run.ended(now)
            self.wake = run.end(run.count)
        elif self._ahead is None:
            self.wake = now
