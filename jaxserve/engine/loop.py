"""StepLoop: the engine's heartbeat. While the device computes step n, the host prepares step n+1; the tokens of step n
are fetched after step n+1 has been dispatched.
"""

from jaxserve.core.clock import Clock
from jaxserve.core.request import RequestOutput
from jaxserve.core.work import Executor, PendingStep, Work
from jaxserve.engine.core import EngineCore

Dispatched = tuple[Work, PendingStep, float]  # a step on the device, and when it was dispatched


class StepLoop:
    """Drives one instance. Not thread-safe: one thread calls `step`, `core.add` and `core.abort`."""

    def __init__(self, core: EngineCore, executor: Executor, clock: Clock, *, overlap: bool = True):
        """`overlap=False` fetches each step's tokens before the next one begins."""
        self.core = core
        self.executor = executor
        self.clock = clock
        self.overlap = overlap
        self._pending: Dispatched | None = None

    def step(self) -> list[RequestOutput]:
        """Dispatches the next step and returns what is new of the one before. Mutates."""
        if not self.overlap:
            return self._collect(self._dispatch())
        before, self._pending = self._pending, self._dispatch()
        return self._collect(before)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or on the device."""
        return self.core.idle and self._pending is None

    def _dispatch(self) -> Dispatched | None:
        now = self.clock.now()
        work = self.core.begin(now)
        return (work, self.executor.execute(work), now) if work else None

    def _collect(self, step: Dispatched | None) -> list[RequestOutput]:
        if step is None:
            return []
        work, pending, started = step
        output = pending.fetch()
        now = self.clock.now()
        self.core.metrics.step(work.num_tokens, now - started)
        return self.core.finish(work, output, now)
