"""The step loop of one instance, with as many steps in flight as the instance has stages, and one more.

With one stage, the host prepares step n+1 while the device computes step n. The tokens of step n are fetched after
step n+1 has been dispatched. If a row of step n+1 may only sample what the tokens of step n allow, as with a grammar,
then the sampling of step n+1 is dispatched after these were fetched, while the device computes its logits.

The stages of a pipeline compute different steps at the same time, its microbatches, and one more waits for the first
stage. No sequence has two tokens in flight there: every step begins with tokens that the host knows
(`scheduler.pipelined`).
"""

import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from jaxserve.core.clock import Clock
from jaxserve.core.request import Request, RequestOutput
from jaxserve.core.work import Executor, PendingStep, Work, steps_in_flight
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
        stages: int = 1,
        log: InstanceLog | None = None,
    ):
        """`overlap=False`: fetch each step's tokens before the next step is scheduled. `log`: a log of all steps.

        `stages`: the stages of the instance. With several of them, the core's scheduler must form microbatches.
        """
        self.core = core
        self.executor = executor
        self.clock = clock
        self.overlap = overlap
        self.stages = stages
        self.log = log
        # Makes the owner of the loop run `run_calls` or `step` soon. The owner sets it.
        self.wake: Callback = self.run_calls
        self._calls: queue.SimpleQueue[Callback] = queue.SimpleQueue()
        self._depth = steps_in_flight(stages, overlap=overlap)
        self._steps: deque[_Dispatched] = deque()  # on the device, the oldest first
        self.stalled = False
        """True if no step is on the device because no request can go on, as while KV pages are on their way."""

    def add(self, request: Request, info: ModelInfo | None = None, *, accepted: bool = False) -> None:
        """Accept a request, as `EngineCore.add`. Raise `RequestError` or `QueueFull` if it is refused."""
        self.core.add(request, info, accepted=accepted)
        if self.log is not None:
            self.log.accepted(request)

    def step(self) -> list[RequestOutput]:
        """Dispatch the next step. If nothing more can be in flight, return the outputs of the oldest step."""
        self.run_calls()
        newest = self._dispatch()
        self.stalled = newest is None and not self._steps
        outputs: list[RequestOutput] = []
        if newest is None or len(self._steps) == self._depth:
            outputs = self._collect()
        if newest is not None and newest.work.sampled_late:
            newest.pending.sample()
        return outputs

    def drain(self) -> list[RequestOutput]:
        """End the steps on the device without dispatching another one, and return their outputs."""
        outputs: list[RequestOutput] = []
        while self._steps:
            outputs += self._collect()
        return outputs

    def abandon(self) -> list[RequestOutput]:
        """Forget the steps on the device after one of them has failed. No step follows.

        All tokens that are not known are sampled again wherever the requests go on. Return the outputs of requests that
        cannot go on.
        """
        steps, self._steps = self._steps, deque()
        for function in chain.from_iterable(step.afterwards for step in steps):
            function()
        return self.core.abandon(self.clock.now())

    @property
    def idle(self) -> bool:
        """True if no request is queued or running and no step is on the device."""
        return not self._steps and self.core.idle

    @property
    def in_flight(self) -> bool:
        """True if a step is on the device."""
        return bool(self._steps)

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
        """Run the waiting functions. Call between two steps, in the thread that steps.

        Functions that are passed to `call` meanwhile run between the next two steps.
        """
        for _ in range(self._calls.qsize()):
            self._calls.get()()

    def after_dispatched(self, function: Callback) -> None:
        """Run a function once all dispatched steps have ended. Call between two steps."""
        if self._steps:
            self._steps[-1].afterwards.append(function)
        else:
            function()

    def _dispatch(self) -> _Dispatched | None:
        now = self.clock.now()
        work = self.core.schedule(now)
        if not work:
            return None
        step = _Dispatched(work, self.executor.execute(work), now)
        self._steps.append(step)
        if self.log is not None:
            self.log.dispatched(work, now, self.clock.now())
        return step

    def _collect(self) -> list[RequestOutput]:
        """End the oldest step on the device, if there is one, and return its outputs."""
        if not self._steps:
            return []
        step = self._steps.popleft()
        output = step.pending.fetch()
        for function in step.afterwards:
            function()
        now = self.clock.now()
        self.core.metrics.step(step.work.num_tokens, now - step.started)
        outputs = self.core.update(step.work, output, now)
        if self.log is not None:
            self.log.ended(step.work, now, outputs)
        return outputs
