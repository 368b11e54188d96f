"""One instance in virtual time, with the real engine core, scheduler and KV pages."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from jaxserve.control.plan import InstancePlan
from jaxserve.core.clock import Clock
from jaxserve.core.errors import RequestError
from jaxserve.core.request import RequestOutput
from jaxserve.core.step_load import Loads
from jaxserve.core.step_shapes import Buckets
from jaxserve.core.work import StepOutput, Work, steps_in_flight
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.core import EngineCore
from jaxserve.engine.directory import Entry
from jaxserve.sim.cost_model import TrueCostModel, TruePipelineCost
from jaxserve.sim.host_work import HostWork
from jaxserve.sim.pipeline import Pipeline
from jaxserve.telemetry import Snapshot

Call = Callable[[], None]


def _do_nothing() -> None:
    """Be called when an instance stops that has stopped already."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused request and the error that says why."""

    request_id: str
    error: str


@dataclass(slots=True)
class _Step:
    """A dispatched step."""

    work: Work
    end: float  # s
    calls_at_end: list[Call] = field(default_factory=list)


@dataclass(slots=True)
class _SteadyRun:
    """Steps that are known in advance: they decode the sequences of the two dispatched steps and nothing else.

    The two dispatched steps end at `first_end` and `second_end`. `count` further steps follow; whenever a step ends,
    one of these begins. `done` of them have begun.
    """

    first_end: float
    second_end: float
    seconds: float  # of the first further step
    growth: float  # s by which each further step is longer than the step before it
    count: int
    done: int = 0

    def end(self, index: int) -> float:
        """Return the end (s) of step `index`, where step 0 is the dispatched step that ends first."""
        if index == 0:
            return self.first_end
        further = index - 1
        return self.second_end + further * self.seconds + self.growth * (further * (further - 1) / 2)

    def begun_by(self, now: float) -> int:
        """Return the number of further steps that have begun by `now`, which is the number of steps that have ended."""
        low, high = self.done, self.count
        # Finds the first step that ends after `now`.
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.end(middle) <= now else (low, middle)
        return low


class SimInstance:
    """An instance of a simulation, which keeps as many steps in flight as `StepLoop` does.

    The next event is due at `wake`. The event loop calls `advance` at that time, which yields the new outputs. A steady
    run of decode steps is one event instead of one for each step.
    """

    def __init__(
        self,
        core: EngineCore,
        plan: InstancePlan,
        cost_model: TrueCostModel,
        buckets: Buckets,
        clock: Clock,
        *,
        token_times: dict[str, list[float]] | None = None,
        host_work: HostWork | None = None,
    ):
        """Start with `plan` in force. The times of all tokens are added to `token_times` by request, if it is given."""
        self.core = core
        self.clock = clock
        self.plan = plan
        self.wake = inf
        # Called when a request or a call has changed `wake`. The event loop sets it.
        self.on_wake: Callable[[], None] = lambda: None
        # Returns the limits on requests as they are now; None: as they were at the start. The owner may set it.
        self.info: Callable[[], ModelInfo | None] = lambda: None
        self._token_times = token_times
        self._cost_model, self._loads = cost_model, Loads(buckets)
        self._host_work = host_work
        self._inbox: list[Entry[Any]] = []
        self._calls: list[Call] = []
        self._when_stopped: Call | None = None  # called when the last dispatched step has ended; None: not stopping
        self._steps: deque[_Step] = deque()  # the dispatched steps, the one that ends first at the beginning
        self._occupied = 0.0  # the time until which the device does other work than steps
        self._sent = 0.0  # the time until which the device sends KV pages
        self._depth = steps_in_flight(len(plan.stages))
        self.pipeline = Pipeline(len(plan.stages)) if len(plan.stages) > 1 else None
        self._run: _SteadyRun | None = None
        self.set_plan(plan)

    # -- from outside, at any time

    def submit(self, entry: Entry[Any]) -> None:
        """Accept a request, which the next step to begin may admit."""
        self._inbox.append(entry)
        self._interrupt(self.clock.now())

    def stop(self, then: Call) -> None:
        """Begin no further step until `go_on`, and call `then` when all dispatched steps have ended."""
        self._when_stopped = then
        self._interrupt(self.clock.now())

    def go_on(self) -> None:
        """Begin steps again."""
        self._when_stopped = None
        self._interrupt(self.clock.now())

    @property
    def stopping(self) -> bool:
        """True between `stop` and `go_on`."""
        return self._when_stopped is not None

    def call(self, function: Call) -> None:
        """Run `function` between two steps, as soon as possible."""
        self._calls.append(function)
        self._interrupt(self.clock.now())

    def after_dispatched(self, function: Call) -> None:
        """Run `function` when all dispatched steps have ended."""
        if self._steps:
            self._steps[-1].calls_at_end.append(function)
        else:
            function()

    def occupy(self, seconds: float) -> None:
        """Let the devices do other work after the dispatched steps. To be called between two steps."""
        now = self.clock.now()
        if self.pipeline is not None:
            self.pipeline.occupy(now, seconds)
        else:
            self._occupied = max(now, self._occupied, *(step.end for step in self._steps)) + seconds

    def send_pages(self, seconds: float) -> float:
        """Send KV pages after the dispatched steps, which takes this long, and return when they have left (s).

        To be called between two steps. What later steps of a pipeline send waits for them.
        """
        now = self.clock.now()
        if self.pipeline is not None:
            return self.pipeline.send(now, seconds)
        self._sent = max(now, self._sent, *(step.end for step in self._steps)) + seconds
        return self._sent

    def set_plan(self, plan: InstancePlan) -> None:
        """Use the step times of `plan` from the next step on."""
        self.plan = plan
        self._step_cost = self._cost_model.of(plan)

    def snapshot(self) -> Snapshot:
        """Return the state after the last step that has ended. Completes the steps of a steady run up to now."""
        if (run := self._run) is not None:
            self._complete(run, run.begun_by(self.clock.now()))
        return self.core.snapshot

    @property
    def idle(self) -> bool:
        return not self._steps and not self._inbox and self.core.idle

    @property
    def running(self) -> int:
        """The number of running sequences."""
        return len(self.core.scheduler.running)

    # -- events

    def advance(self) -> Iterator[RequestOutput | Refused]:
        """End a step and begin the next one, at the time `wake`. Yield the new outputs and refusals."""
        now = self.clock.now()
        if (run := self._run) is not None:
            self._complete(run, run.count)
            self._run = None
        if self._steps:
            step = self._steps.popleft()
            for function in step.calls_at_end:
                function()
            yield from self._finish(step, now)
        if self._when_stopped is not None and not self._steps:
            then, self._when_stopped = self._when_stopped, _do_nothing
            then()
        while self._when_stopped is None:
            yield from self._run_calls_and_add_requests()
            work = self.core.schedule(now)
            if work:
                self._steps.append(self._dispatch(work, now))
            if not work or len(self._steps) == self._depth:
                break
            # Stages were idle: the host begins the next step at once.
            now += self._cost_model.host
        if not self._steps:
            self.wake = inf
        else:
            self.wake = self._steps[0].end
            if not self.stopping:
                self._find_steady_run()

    def _finish(self, step: _Step, now: float) -> list[RequestOutput]:
        work = step.work
        if self._token_times is not None:
            done = (*work.decodes, *(chunk.sequence for chunk in work.chunks if chunk.last))
            for sequence in done:
                if not sequence.num_known_inflight:  # otherwise the token will be sampled again
                    self._token_times.setdefault(sequence.request.id, []).append(now)
        tokens = np.zeros(len(work.decodes) + len(work.chunks), np.int32)
        return self.core.update(work, StepOutput(tokens), now)

    def _run_calls_and_add_requests(self) -> Iterator[Refused]:
        # A call may add another call.
        while self._calls:
            self._calls.pop(0)()
        entries, self._inbox = self._inbox, []
        for entry in entries:
            try:
                if entry.state is None:
                    self.core.add(entry.request, self.info(), accepted=entry.accepted)
                else:
                    self.core.attach([entry.state], None, self.clock.now())
            except RequestError as error:
                yield Refused(entry.request.id, str(error))
            entry.pending, entry.accepted, entry.state = False, True, None

    def _dispatch(self, work: Work, now: float) -> _Step:
        load = self._loads.of(work)
        start = now if self._steps else now + self._cost_model.host
        if self.pipeline is not None:
            assert isinstance(self._step_cost, TruePipelineCost)
            return _Step(work, self.pipeline.dispatch(start, self._step_cost.stages(load))[-1].end)
        if self._steps:
            host = self._host_work.seconds(self.plan, load, now) if self._host_work else 0.0
            start = max(self._steps[-1].end, now + host)
        return _Step(work, max(start, self._occupied) + self._step_cost.seconds(load))

    # -- steady runs of decode steps

    def _find_steady_run(self) -> None:
        """Find the steps that repeat the two dispatched ones, and set `wake` to the end of the last one."""
        growth = self._step_cost.per_context
        if len(self._steps) != 2 or growth is None:
            return
        first, second = self._steps
        if first.calls_at_end or second.calls_at_end:
            return
        decodes = second.work.decodes
        if first.work.chunks or second.work.chunks or first.work.decodes != decodes:
            return
        scheduler = self.core.scheduler
        if len(decodes) == len(scheduler.running) and (count := scheduler.steady_steps()) > 0:
            load = self._loads.of(second.work)
            growth *= len(decodes)
            seconds = self._step_cost.seconds(load) + growth
            if (work := self._host_work) is not None:
                now = self.clock.now()
                if not work.is_settled(self.plan, load, now):
                    return
                host = work.seconds(self.plan, load, now)
                if host > seconds:  # steps last as long as the host's work, until they take longer
                    count = min(count, int((host - seconds) / growth))
                    seconds, growth = host, 0.0
                if not count:
                    return
            self._run = _SteadyRun(first.end, second.end, seconds, growth, count)
            self.wake = self._run.end(count)

    def _complete(self, run: _SteadyRun, done: int) -> None:
        """Complete the steps of a steady run up to `done`: their tokens, and the ends of the two in flight."""
        first, second = self._steps
        count = done - run.done
        if count > 0:
            self.core.repeat(count, run.end(done - 1))
            if self._token_times is not None:
                times = [run.end(index) for index in range(run.done, done)]
                for sequence in first.work.decodes:
                    self._token_times[sequence.request.id] += times
            run.done = done
            first.end, second.end = run.end(done), run.end(done + 1)

    def _interrupt(self, now: float) -> None:
        """Wake for a new request or call: at the next end of a step, or now if the instance is idle."""
        if (run := self._run) is not None:
            run.count = run.begun_by(now)
            self.wake = run.end(run.count)
        elif not self._steps:
            self.wake = now
        self.on_wake()
