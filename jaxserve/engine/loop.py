"""StepLoop: the engine's heartbeat. While the device computes step n, the host prepares step n+1; the tokens of step n
are fetched after step n+1 has been dispatched.
"""

import queue
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxserve.core.clock import Clock
from jaxserve.core.request import Request, RequestOutput
from jaxserve.core.work import Executor, PendingStep, Work
from jaxserve.engine.core import EngineCore
from jaxserve.engine.step_log import InstanceLog

Callback = Callable[[], None]


@dataclass
class _Dispatched:
    """A step on the device, when it was dispatched, and what is to be done once it has ended."""

    work: Work
    pending: PendingStep
    started: float
    afterwards: list[Callback] = field(default_factory=list)


class StepLoop:
    """Drives one instance. Not thread-safe but for `call`: one thread at a time calls `step`, `add` and so on."""

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        clock: Clock,
        *,
        overlap: bool = True,
        log: InstanceLog | None = None,
    ):
        """`overlap=False` fetches each step's tokens before the next one begins. `log` is told what happens."""
        self.core = core
        self.executor = executor
        self.clock = clock
        self.overlap = overlap
        self.log = log
        self.wake: Callback = self.run_calls  # what drives the loop sets it: it has `run_calls` or `step` run soon
        self._calls: queue.SimpleQueue[Callback] = queue.SimpleQueue()
        self._pending: _Dispatched | None = None

    def add(self, request: Request) -> None:
        """Accepts a request, or raises as `EngineCore.add`. Mutates."""
        self.core.add(request)
        if self.log is not None:
            self.log.accepted(request)

    def step(self) -> list[RequestOutput]:
        """Dispatches the next step and returns what is new of the one before. Mutates."""
        self.run_calls()
        if not self.overlap:
            return self._collect(self._dispatch())
        before, self._pending = self._pending, self._dispatch()
        return self._collect(before)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or on the device."""
        return self.core.idle and self._pending is None

    @property
    def in_flight(self) -> bool:
        """Whether a step is on the device."""
        return self._pending is not None

    # -- between steps

    def call(self, function: Callback) -> None:
        """Has a function run between two steps, in the thread that steps, soon. From any thread."""
        self._calls.put(function)
        self.wake()

    @property
    def has_calls(self) -> bool:
        """Whether functions wait to be run."""
        return not self._calls.empty()

    def run_calls(self) -> None:
        """Runs the functions that wait. Between two steps, in the thread that steps."""
        while self.has_calls:
            self._calls.get()()

    def after_dispatched(self, function: Callback) -> None:
        """Runs a function once the steps that have been dispatched are done; between two steps. Mutates."""
        if self._pending is None:
            function()
        else:
            self._pending.afterwards.append(function)

    def _dispatch(self) -> _Dispatched | None:
        now = self.clock.now()
        work = self.core.schedule(now)
        if not work:
            return None
        step = _Dispatched(work, self.executor.execute(work), now)
        if self.log is not None:
            self.log.dispatched(work, now, self.clock.now())
        return step

    def _collect(self, step: _Dispatched | None) -> list[RequestOutput]:
        if step is None:
            return []
        output = step.pending.fetch()
        for function in step.afterwards:
            function()
        now = self.clock.now()
        self.core.metrics.step(step.work.num_tokens, now - step.started)
        outputs = self.core.update(step.work, output, now)
        if self.log is not None:
            self.log.ended(step.work, now, outputs)
        return outputs
