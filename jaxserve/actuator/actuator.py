"""The actuator of one instance on real devices: a thread that drives the procedure of `control.reconfigure`.

Copies are made in this thread while steps go on. Commits run between two steps in the instance's own thread.
"""

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from jaxserve.actuator.procedure_thread import ProcedureThread
from jaxserve.actuator.throttle import Throttle
from jaxserve.control.ledger import DeviceEntries, DeviceLedgers
from jaxserve.control.plan import InstancePlan, PlanInForce
from jaxserve.control.reconfigure import Cancelled, PlanFacts, Reconfiguration
from jaxserve.control.transitions import BetweenSteps, Outcome, StepsEnded, Transition, Waits
from jaxserve.engine.core import EngineCore
from jaxserve.engine.loop import StepLoop
from jaxserve.executor.blocks import LoadedBlock
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.pools import Growth, free
from jaxserve.telemetry import EngineMetrics


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

    def hold_layer(self, block: str, precisions: Sequence[str]) -> Waits[None]:
        yield from ()
        for precision in precisions:
            self.executor.hold(block, precision)

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

    def exchange_layer(self, block: str, precision: str, seconds: float) -> None:
        self.executor.exchange(block, precision)

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
        self._thread = ProcedureThread(f"jaxserve-actuator-{name}", self._wait)
        throttle = Throttle(pace, copy_share, lambda: not steps.idle, self._thread.closing.wait)
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
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    @property
    def busy(self) -> bool:
        """True while a transition has not ended. Once it is False, `poll` returns all outcomes."""
        return self._thread.busy

    def start(self, transitions: Sequence[Transition]) -> None:
        """Begin to carry out transitions in order, and return at once. May be called from any thread."""
        report = partial(report_to, self._metrics, self._outcomes)
        self._thread.start(self._reconfiguration.carry_out(tuple(transitions), report))

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
        self._thread.close()

    def _wait(self, wait: BetweenSteps | StepsEnded) -> Future[None] | None:
        match wait:
            case BetweenSteps():
                return between_steps(self._steps, wait.function, self._thread)
            case StepsEnded():
                return self._thread.result(wait.fence)


def between_steps(steps: StepLoop, function: Callable[[], None], thread: ProcedureThread) -> Future[None]:
    """Have an instance call a function between two steps. Return a fence, or raise what the function raised."""
    (fence,) = each_between_steps([(steps, function)], thread)
    return fence


def each_between_steps(
    calls: Sequence[tuple[StepLoop, Callable[[], None]]], thread: ProcedureThread
) -> list[Future[None]]:
    """Have each instance call its function between two steps, in any order, and wait for all as `between_steps`."""
    asked = [_ask(steps, function) for steps, function in calls]
    fences, error = [], None
    for done in asked:
        try:
            fences.append(_fence(done, thread))
        except Exception as failure:
            error = error or failure
    if error is not None:
        raise error
    return fences


def _ask(steps: StepLoop, function: Callable[[], None]) -> Future[Future[None]]:
    """Ask an instance to call a function between two steps. Return the future of the fence."""
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
        steps.after_dispatched(lambda: fence.set_result(None))
        done.set_result(fence)

    steps.call(run)
    return done


def _fence(done: Future[Future[None]], thread: ProcedureThread) -> Future[None]:
    try:
        return thread.result(done)
    except Cancelled:
        if done.cancel():
            raise
        return done.result()  # the function runs already


def report_to(
    metrics: EngineMetrics, outcomes: queue.SimpleQueue[Outcome], outcome: Outcome, failure: Exception | None
) -> None:
    """Count an outcome, and keep it for the controller."""
    state = "failed" if failure else "done"
    metrics.transition(type(outcome.transition).__name__, state, outcome.seconds)
    outcomes.put(outcome)
