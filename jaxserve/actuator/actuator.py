"""The actuator of one instance on real devices: a thread that drives the procedure of `control.reconfigure`.

Copies are made in this thread while steps go on. Commits run between two steps in the instance's own thread.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError as NotYet
from typing import Any

from jaxserve.actuator.throttle import Throttle
from jaxserve.control.ledger import DeviceEntries, DeviceLedgers
from jaxserve.control.plan import InstancePlan, PlanInForce
from jaxserve.control.reconfigure import Cancelled, PlanFacts, Reconfiguration
from jaxserve.control.transitions import BetweenSteps, Outcome, Sleep, StepsEnded, Transition, Waits
from jaxserve.engine.core import EngineCore
from jaxserve.engine.loop import StepLoop
from jaxserve.executor.blocks import LoadedBlock
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.pools import Growth, free
from jaxserve.telemetry import EngineMetrics

CLOSING_CHECK_S = 0.2  # how often the thread checks, while it waits for a step, whether the actuator is closing


class DeviceInstance:
    """An instance on real devices, as its transitions see it (`control.transitions.RunningInstance`)."""

    def __init__(self, steps: StepLoop, executor: BlockExecutor, throttle: Throttle):
        """`throttle` limits the copies and the Python code of the actuator's thread while steps run."""
        self.steps, self.executor = steps, executor
        self._throttle = throttle

    @property
    def core(self) -> EngineCore:
        return self.steps.core

    def use(self, plan: InstancePlan) -> None:
        """Do nothing: steps follow the layers and pages that the instance has."""

    def prepare_layer(self, block: str, precision: str, size: int, seconds: float) -> Waits[LoadedBlock]:
        yield from ()
        throttle = self._throttle
        throttle.worked()
        return self.executor.prepare(block, precision, between=throttle.worked, copied=throttle.copied)

    def prepare_segments(self, pages: int) -> Waits[Growth]:
        yield from ()
        return self.executor.pools.prepare(pages)

    def free_layers(self, layers: Sequence[LoadedBlock]) -> None:
        for layer in layers:
            if all(used is not layer for used in self.executor.blocks):
                layer.free()
                self._throttle.worked()

    def free_segments(self, segments: Growth) -> None:
        free(segments)

    def pages_moved(self, moves: Mapping[int, int], seconds: float) -> Waits[None]:
        """Wait for a step that begins after the commit, because the device moves the pages before it."""

        def wait_if_idle() -> None:
            if not self.steps.in_flight:
                self.executor.wait_for_pools()

        yield StepsEnded((yield BetweenSteps(wait_if_idle)))

    def replace_layers(self, layers: Sequence[LoadedBlock]) -> Sequence[LoadedBlock]:
        return self.executor.replace(layers)

    def extend_pools(self, segments: Growth) -> None:
        self.executor.pools.extend(segments)

    def shrink_pools(self, moves: Mapping[int, int], pages: int) -> None:
        self.executor.shrink_pools(moves, pages)


class PlanActuator:
    """An actuator (`control.Actuator`) of one instance on real devices, with a thread of its own."""

    def __init__(
        self,
        name: str,
        steps: StepLoop,
        executor: BlockExecutor,
        metrics: EngineMetrics,
        in_force: PlanInForce,
        *,
        ledgers: DeviceLedgers,
        entries: Callable[[InstancePlan], DeviceEntries],
        facts: PlanFacts,
        pace: float,
        copy_share: float,
    ):
        """`name` is the instance's name in the plan. `entries(plan)` returns the bytes of its plan in the ledgers.

        `facts` are what the engine core is told of it. While steps run, copies take at most `pace` bytes/s and a
        share `copy_share` of a core.
        """
        self._steps, self._metrics = steps, metrics
        self._closing = threading.Event()
        throttle = Throttle(pace, copy_share, lambda: not steps.idle, self._closing.wait)
        self.instance = DeviceInstance(steps, executor, throttle)
        self._reconfiguration = Reconfiguration(
            name=name,
            instance=self.instance,
            in_force=in_force,
            ledgers=ledgers,
            entries=entries,
            facts=facts,
            now=time.monotonic,
        )
        self._waiting: queue.SimpleQueue[Sequence[Transition] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._unfinished = 0  # calls of `start` whose transitions have not ended
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"jaxserve-actuator-{name}", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while a transition has not ended. Once it is False, `poll` returns all outcomes."""
        with self._lock:
            return self._unfinished > 0

    def start(self, transitions: Sequence[Transition]) -> None:
        """Begin to carry out transitions in order, and return at once. May be called from any thread."""
        with self._lock:
            self._unfinished += 1
        self._waiting.put(tuple(transitions))

    def poll(self) -> Sequence[Outcome]:
        """Return the outcomes of transitions that have ended since the last call, in order."""
        outcomes = []
        while not self._outcomes.empty():
            outcomes.append(self._outcomes.get())
        return outcomes

    def close(self) -> None:
        """End the thread, and drop transitions that have not ended. Call it when the instance runs no steps any more.

        May be called several times.
        """
        self._closing.set()
        self._waiting.put(None)
        self._thread.join()

    # -- the thread

    def _run(self) -> None:
        while (transitions := self._waiting.get()) is not None:
            self._drive(self._reconfiguration.carry_out(transitions, self._report))
            with self._lock:
                self._unfinished -= 1

    def _report(self, outcome: Outcome, failure: Exception | None) -> None:
        state = "failed" if failure else "done"
        self._metrics.transition(type(outcome.transition).__name__, state, outcome.seconds)
        self._outcomes.put(outcome)

    def _drive(self, procedure: Waits[None]) -> None:
        """Run the procedure to its end, and wait in this thread for whatever it yields."""
        value: Any = None
        error: Exception | None = None
        while True:
            try:
                wait = procedure.send(value) if error is None else procedure.throw(error)
            except StopIteration:
                return
            value = error = None
            try:
                value = self._wait(wait)
            except Exception as failure:
                error = failure

    def _wait(self, wait: Sleep | BetweenSteps | StepsEnded) -> Any:
        match wait:
            case Sleep():
                self._closing.wait(max(0.0, wait.until - time.monotonic()))
                return None
            case BetweenSteps():
                return self._between_steps(wait.function)
            case StepsEnded():
                return self._result(wait.fence)

    def _between_steps(self, function: Callable[[], None]) -> Future[None]:
        """Have the instance call a function between two steps. Return a fence, or raise what the function raised."""
        done: Future[Future[None]] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                function()
            except Exception as error:
                done.set_exception(error)
                return
            fence: Future[None] = Future()
            self._steps.after_dispatched(lambda: fence.set_result(None))
            done.set_result(fence)

        self._steps.call(run)
        try:
            return self._result(done)
        except Cancelled:
            if done.cancel():
                raise
            return done.result()  # the function runs already

    def _result(self, future: Future) -> Any:
        """Wait for a future of the instance's thread. Raise `Cancelled` if the actuator is closed meanwhile.

        No further step runs then, so that the future may never complete.
        """
        while True:
            try:
                return future.result(CLOSING_CHECK_S)
            except NotYet:
                if self._closing.is_set():
                    raise Cancelled("the engine is closing") from None
