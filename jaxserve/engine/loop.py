"""The step loop of one instance, with one step in flight.

While the device computes step n, the host prepares step n+1. The tokens of step n are fetched after step n+1 has been
dispatched. If a row of step n+1 may only sample what the tokens of step n allow, as with a grammar, then the sampling
of step n+1 is dispatched after these were fetched, while the device computes its logits.
"""

import queue
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxserve.core.clock import Clock
from jaxserve.core.request import Request, RequestOutput
from jaxserve.core.work import Executor, PendingStep, Work
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.core import EngineCore
from jaxserve.engine.step_log import InstanceLog

Callback = Callable[[], None]


@dataclass
class _Dispatched:
    """A step on the device, the time of its dispatch, and functions to call when it has ended."""

    work: Work
    pending: PendingStep
    started: float
    afterwards: list[Callback] = field(default_factory=list)


class StepLoop:
    """A loop that drives one instance. One thread at a time may use it, but `call` is thread-safe."""

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        clock: Clock,
        *,
        overlap: bool = True,
        log: InstanceLog | None = None,
    ):
        """`overlap=False`: fetch each step's tokens before the next step is scheduled. `log`: a log of all steps."""
        self.core = core
        self.executor = executor
        self.clock = clock
        self.overlap = overlap
        self.log = log
        # Makes the owner of the loop run `run_calls` or `step` soon. The owner sets it.
        self.wake: Callback = self.run_calls
        self._calls: queue.SimpleQueue[Callback] = queue.SimpleQueue()
        self._pending: _Dispatched | None = None

    def add(self, request: Request, info: ModelInfo | None = None, *, accepted: bool = False) -> None:
        """Accept a request, as `EngineCore.add`. Raise `RequestError` or `QueueFull` if it is refused."""
        self.core.add(request, info, accepted=accepted)
        if self.log is not None:
            self.log.accepted(request)

    def step(self) -> list[RequestOutput]:
        """Dispatch the next step, and return the outputs of the step before it."""
        self.run_calls()
        if not self.overlap:
            return self._collect(self._dispatch())
        before, self._pending = self._pending, self._dispatch()
        outputs = self._collect(before)
        if self._pending is not None and self._pending.work.sampled_late:
            self._pending.pending.sample()
        return outputs

    def drain(self) -> list[RequestOutput]:
        """End the step on the device without dispatching another one, and return its outputs."""
        before, self._pending = self._pending, None
        return self._collect(before)

    @property
    def idle(self) -> bool:
        """True if no request is queued or running and no step is on the device."""
        return self.core.idle and self._pending is None

    @property
    def in_flight(self) -> bool:
        """True if a step is on the device."""
        return self._pending is not None

    # -- between steps

    def call(self, function: Callback) -> None:
        """Have the thread that steps run a function soon, between two steps. Call from any thread."""
        self._calls.put(function)
        self.wake()

    @property
    def has_calls(self) -> bool:
        """True if functions passed to `call` wait to run."""
        return not self._calls.empty()

    def run_calls(self) -> None:
        """Run the waiting functions. Call between two steps, in the thread that steps."""
        while self.has_calls:
            self._calls.get()()

    def after_dispatched(self, function: Callback) -> None:
        """Run a function once all dispatched steps have ended. Call between two steps."""
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
