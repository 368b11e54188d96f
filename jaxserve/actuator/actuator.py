"""PlanActuator: carries transitions out, one batch after the other, in a thread of its own.

Each has two phases. What it needs is prepared while steps go on: layers' variants are copied beside the rows in use. It
is committed between two steps of its instance, in that instance's thread: references are exchanged, and from the next
step on the plan after it is in force. What it replaced is freed when the steps that use it have ended; only then does
the ledger let the next batch have the memory. A batch that fails in any phase leaves everything as it was.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError as NotYet
from contextlib import ExitStack
from dataclasses import dataclass

from jaxserve.actuator.copying import LayerSource, Throttle
from jaxserve.control.diff import apply
from jaxserve.control.ledger import Ledger
from jaxserve.control.plan import Plan
from jaxserve.control.transitions import (
    SHRINK_PATIENCE,
    SHRINK_RETRY,
    Outcome,
    ResizeKVPool,
    SwapPrecision,
    Transition,
    batches,
)
from jaxserve.core.errors import JaxserveError
from jaxserve.core.precision import assignment_id
from jaxserve.engine.loop import StepLoop
from jaxserve.executor.blocks import LoadedBlock
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.pools import Growth, free
from jaxserve.kvcache import PagesInUse
from jaxserve.telemetry import EngineMetrics, Snapshot

log = logging.getLogger(__name__)

LOOK_AGAIN = 0.2  # seconds after which a thread that waits for a step looks whether it is to end


@dataclass(frozen=True)
class RunningInstance:
    """What transitions change of one instance of the plan."""

    steps: StepLoop
    executor: BlockExecutor


class Cancelled(JaxserveError):
    """The actuator was closed before the transition had ended."""


class PlanActuator:
    """The `control.Actuator` of real devices."""

    def __init__(
        self,
        plan: Plan,
        instances: Sequence[RunningInstance],
        source: LayerSource,
        metrics: EngineMetrics,
        *,
        ledger: Ledger,
        entries: Callable[[Plan], Mapping[str, int]],
        plan_fields: Callable[[Plan, int], Snapshot],
        copy_rate: float,
        copy_share: float,
    ):
        """`plan` is the one in force. `entries` are the bytes of a plan in the ledger, by name; `plan_fields` gives the
        fields of an instance's snapshots that follow from a plan. Copies beside running steps take `copy_rate` bytes/s
        and `copy_share` of a core, at most.
        """
        self._plan = plan
        self._instances = tuple(instances)
        self._source, self._metrics = source, metrics
        self._copy_rate, self._copy_share = copy_rate, copy_share
        self._ledger, self._entries, self._plan_fields = ledger, entries, plan_fields
        self._waiting: queue.SimpleQueue[Sequence[Transition] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._under_way = 0  # sequences of transitions that were started and have not ended
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxserve-actuator", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a transition is still to end. When not, `poll` has all outcomes."""
        with self._lock:
            return self._under_way > 0

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._plan

    def start(self, transitions: Sequence[Transition]) -> None:
        """Begins to carry transitions out, in order; returns at once. From any thread. Mutates."""
        with self._lock:
            self._under_way += 1
        self._waiting.put(tuple(transitions))

    def poll(self) -> Sequence[Outcome]:
        """What has ended since the last call, in order. Mutates."""
        outcomes = []
        while not self._outcomes.empty():
            outcomes.append(self._outcomes.get())
        return outcomes

    def close(self) -> None:
        """Ends the thread; to be called when no loop steps any more. A transition that has not ended is dropped.
        Idempotent. Mutates.
        """
        self._closing.set()
        self._waiting.put(None)
        self._thread.join()

    # -- the thread

    def _run(self) -> None:
        while (transitions := self._waiting.get()) is not None:
            for batch in batches(transitions):
                outcomes = self._attempt(batch)
                for outcome in outcomes:
                    self._outcomes.put(outcome)
                if outcomes[-1].error is not None:
                    break
            with self._lock:
                self._under_way -= 1

    def _attempt(self, batch: Sequence[Transition]) -> list[Outcome]:
        """All of a batch, or the failure of its first transition, with which the others are dropped."""
        begin = time.monotonic()
        error: str | None = None
        try:
            self._carry_out(batch)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            unexpected = not isinstance(failure, JaxserveError | ValueError)  # pages in use, no room in the ledger
            names = "; ".join(map(str, batch))
            log.warning("plan %d stays in force: %s: %s", self._plan.version, names, error, exc_info=unexpected)
        seconds = time.monotonic() - begin
        ended = batch[:1] if error else batch
        for transition in ended:
            self._metrics.transition(type(transition).__name__, "failed" if error else "done", seconds)
        return [Outcome(transition, error, seconds) for transition in ended]

    def _carry_out(self, batch: Sequence[Transition]) -> None:
        after = apply(self._plan, batch)
        instance = self._instances[batch[0].instance]
        match batch:
            case (ResizeKVPool() as transition,) if transition.after >= transition.before:
                self._extend(instance, transition, after)
            case (ResizeKVPool() as transition,):
                self._reduce(instance, transition, after)
            case _:
                self._exchange(instance, [swap for swap in batch if isinstance(swap, SwapPrecision)], after)

    def _exchange(self, instance: RunningInstance, swaps: Sequence[SwapPrecision], after: Plan) -> None:
        """Prepares layers' variants and puts them in the place of those in use.

        While there are both, the ledger has the larger ones among the weights, and room for the smaller one of one.
        """
        number, needed = swaps[0].instance, any(swap.bytes_needed for swap in swaps)
        throttle = self._throttle(instance)
        self._ledger.update(self._entries(after if needed else self._plan))
        blocks = {swap.block for swap in swaps}
        replaced, prepared = [row for row in instance.executor.blocks if row.block in blocks], list[LoadedBlock]()

        def drop() -> None:
            for row in (*replaced, *prepared):
                if all(other is not row for other in instance.executor.blocks):
                    row.free()
                    throttle.worked()

        try:
            for swap in swaps:
                prepared.append(self._prepare(instance, throttle, swap.block, swap.after))
            self._between_steps(instance, lambda done: self._swap(instance, number, prepared, after, done))
        except BaseException:
            drop()
            self._ledger.update(self._entries(self._plan))
            raise
        self._end(drop, after)

    def _extend(self, instance: RunningInstance, transition: ResizeKVPool, after: Plan) -> None:
        """Makes what pools of so many pages need beside what they have, and puts it behind that."""
        self._ledger.update(self._entries(after))
        growth: Growth = []
        try:
            growth = instance.executor.pools.prepare(transition.after)
            self._between_steps(instance, lambda done: self._grow(instance, transition, growth, after, done))
        except BaseException:
            free(growth)
            self._ledger.update(self._entries(self._plan))
            raise

    def _reduce(self, instance: RunningInstance, transition: ResizeKVPool, after: Plan) -> None:
        """Takes pages away once so many are not in use. They were when that was decided; since then some may have been
        handed out, and under load as many come back soon.
        """
        end = time.monotonic() + SHRINK_PATIENCE
        while True:
            try:
                return self._between_steps(instance, lambda done: self._shrink(instance, transition, after, done))
            except PagesInUse:
                if time.monotonic() >= end:
                    raise
            self._closing.wait(SHRINK_RETRY)

    def _throttle(self, instance: RunningInstance) -> Throttle:
        """For this thread's work beside the instance's steps: copies, and what Python does for layers without any."""
        steps = instance.steps
        return Throttle(self._copy_rate, self._copy_share, lambda: not steps.idle, self._closing.wait)

    def _prepare(self, instance: RunningInstance, throttle: Throttle, block: str, precision: str) -> LoadedBlock:
        """Copies a layer's variant to the devices beside the row in use."""
        throttle.worked()
        parameters = self._source.parameters(block, precision, between=throttle.worked)
        return instance.executor.prepare(block, parameters, precision, copied=throttle.copied)

    def _between_steps(self, instance: RunningInstance, commit: Callable[[Future[None]], None]) -> None:
        """Has `commit` run between two steps, and waits until it has settled its future. Raises what it raised, and
        `Cancelled` if the actuator is closed before that: no step follows then, so that it may have been committed
        (the plan in force says so) and never be told that the steps before have ended.
        """
        done: Future[None] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                commit(done)
            except Exception as error:
                done.set_exception(error)

        instance.steps.call(run)
        while True:
            try:
                return done.result(LOOK_AGAIN)
            except NotYet:
                if self._closing.is_set():
                    done.cancel()
                    raise Cancelled("the engine is closing") from None

    # -- between two steps, in the instance's thread: in force at once, or everything is as it was

    def _swap(
        self, instance: RunningInstance, number: int, rows: Sequence[LoadedBlock], after: Plan, done: Future[None]
    ) -> None:
        executor = instance.executor
        with ExitStack() as undo:
            undo.callback(executor.replace, executor.replace(rows))
            self._replan(instance, number, after, undo)
            undo.pop_all()
        self._plan = after
        instance.steps.after_dispatched(lambda: done.set_result(None))

    def _grow(
        self, instance: RunningInstance, transition: ResizeKVPool, growth: Growth, after: Plan, done: Future[None]
    ) -> None:
        scheduler, count = instance.steps.core.scheduler, transition.after - transition.before
        with ExitStack() as undo:
            scheduler.grow(count)
            undo.callback(scheduler.shrink, count, lambda moves: None)  # they hold nothing yet
            self._replan(instance, transition.instance, after, undo)
            instance.executor.pools.extend(growth)
            undo.pop_all()
        self._plan = after
        done.set_result(None)

    def _shrink(self, instance: RunningInstance, transition: ResizeKVPool, after: Plan, done: Future[None]) -> None:
        def move(moves: Mapping[int, int]) -> None:
            instance.executor.shrink_pools(moves, transition.after)

        def wait() -> None:
            if not steps.in_flight:
                instance.executor.wait_for_pools()

        def ended() -> None:
            self._end(wait, after)
            done.set_result(None)

        steps = instance.steps
        with ExitStack() as undo:
            self._replan(instance, transition.instance, after, undo)
            steps.core.scheduler.shrink(transition.before - transition.after, move)  # last: it cannot be undone
            undo.pop_all()
        self._plan = after
        # The device gives the memory back after the steps that are dispatched, and before the one after them.
        steps.after_dispatched(lambda: steps.after_dispatched(ended))

    def _replan(self, instance: RunningInstance, number: int, after: Plan, undo: ExitStack) -> None:
        """Tells the core what follows from the plan after. `undo` gets what takes it back."""
        core = instance.steps.core
        salt, plan_fields = assignment_id(after.instances[number].layer_precisions), self._plan_fields(after, number)
        undo.callback(core.replan, core.salt, core.plan_fields)
        core.replan(salt, plan_fields)

    def _end(self, free: Callable[[], None], after: Plan) -> None:
        """No step uses what has been replaced any more: frees it, and lets the next transition have the memory.

        The plan after is in force, so that the transition has not failed even where this does.
        """
        try:
            free()
            self._ledger.update(self._entries(after))
        except Exception:
            log.exception("plan %d is in force, but what was replaced may not be freed", after.version)
