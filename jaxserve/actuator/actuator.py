"""The actuator for real devices, which carries out transitions of the plan in its own thread, batch after batch.

A batch is first prepared while steps go on: for example, variants of layers are copied next to those in use. Then it is
committed between two steps of its instance, in the instance's thread: the executor and the scheduler switch to the new
layers or pools, and from the next step on the new plan is in force. Replaced arrays are freed when the steps that use
them have ended. Only then does the ledger release their memory for the next batch. A batch that fails in any phase
changes nothing.
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

CLOSING_CHECK_S = 0.2  # how often the thread checks, while it waits for a step, whether the actuator is closing


@dataclass(frozen=True)
class RunningInstance:
    """A running instance of the plan: the parts of it that transitions change."""

    steps: StepLoop
    executor: BlockExecutor


class Cancelled(JaxserveError):
    """A transition that was cut off because the actuator was closed."""


class PlanActuator:
    """An actuator (`control.Actuator`) for real devices."""

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
        """`plan` is in force now. `entries(plan)` returns the plan's bytes in the ledger, by name.

        `plan_fields(plan, index)` returns the fields of an instance's snapshots that follow from a plan. While steps
        run, copies take at most `copy_rate` bytes/s and a share `copy_share` of a core.
        """
        self._plan = plan
        self._instances = tuple(instances)
        self._source, self._metrics = source, metrics
        self._copy_rate, self._copy_share = copy_rate, copy_share
        self._ledger, self._entries, self._plan_fields = ledger, entries, plan_fields
        self._waiting: queue.SimpleQueue[Sequence[Transition] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._unfinished = 0  # calls of `start` whose transitions have not ended
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxserve-actuator", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while a transition has not ended. Once it is False, `poll` returns all outcomes."""
        with self._lock:
            return self._unfinished > 0

    @property
    def plan(self) -> Plan:
        """Plan in force."""
        return self._plan

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
        """End the thread, and drop transitions that have not ended. Call it when no instance runs steps any more.

        May be called several times.
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
                self._unfinished -= 1

    def _attempt(self, batch: Sequence[Transition]) -> list[Outcome]:
        """Carry out a batch. Return the outcomes of all its transitions, or of the first one if the batch failed."""
        begin = time.monotonic()
        error: str | None = None
        try:
            self._carry_out(batch)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            # Expected failures: pages that are in use (a ValueError), no room in the ledger, a changed checkpoint.
            unexpected = not isinstance(failure, JaxserveError | ValueError)
            names = "; ".join(map(str, batch))
            log.warning("plan %d stays in force: %s: %s", self._plan.version, names, error, exc_info=unexpected)
        seconds = time.monotonic() - begin
        finished = batch[:1] if error else batch
        for transition in finished:
            self._metrics.transition(type(transition).__name__, "failed" if error else "done", seconds)
        return [Outcome(transition, error, seconds) for transition in finished]

    def _carry_out(self, batch: Sequence[Transition]) -> None:
        after = apply(self._plan, batch)
        instance = self._instances[batch[0].instance]
        match batch:
            case (ResizeKVPool() as transition,) if transition.after >= transition.before:
                self._grow_pools(instance, transition, after)
            case (ResizeKVPool() as transition,):
                self._shrink_pools(instance, transition, after)
            case _:
                self._swap_layers(instance, [swap for swap in batch if isinstance(swap, SwapPrecision)], after)

    def _swap_layers(self, instance: RunningInstance, swaps: Sequence[SwapPrecision], after: Plan) -> None:
        """Prepare variants of layers, and replace those in use by them between two steps.

        Until then both variants are resident. The ledger books the larger one of every layer as weights, and the swap
        buffer has room for the smaller variant of one layer.
        """
        index, needed = swaps[0].instance, any(swap.bytes_needed for swap in swaps)
        throttle = self._throttle(instance)
        self._ledger.update(self._entries(after if needed else self._plan))
        names = {swap.block for swap in swaps}
        replaced = [block for block in instance.executor.blocks if block.block in names]
        prepared: list[LoadedBlock] = []

        def free_unused() -> None:
            for block in (*replaced, *prepared):
                if all(used is not block for used in instance.executor.blocks):
                    block.free()
                    throttle.worked()

        try:
            for swap in swaps:
                prepared.append(self._prepare(instance, throttle, swap.block, swap.after))
            self._between_steps(instance, lambda done: self._commit_swap(instance, index, prepared, after, done))
        except BaseException:
            free_unused()
            self._ledger.update(self._entries(self._plan))
            raise
        self._end(free_unused, after)

    def _grow_pools(self, instance: RunningInstance, transition: ResizeKVPool, after: Plan) -> None:
        """Allocate the segments that the pools lack for the new number of pages, and append them between two steps."""
        self._ledger.update(self._entries(after))
        growth: Growth = []
        try:
            growth = instance.executor.pools.prepare(transition.after)
            self._between_steps(instance, lambda done: self._commit_growth(instance, transition, growth, after, done))
        except BaseException:
            free(growth)
            self._ledger.update(self._entries(self._plan))
            raise

    def _shrink_pools(self, instance: RunningInstance, transition: ResizeKVPool, after: Plan) -> None:
        """Take pages away as soon as enough of them are free; raise `PagesInUse` after `SHRINK_PATIENCE` seconds.

        Enough were free when the plan was decided. Sequences may have taken some since, and others soon return theirs.
        """
        end = time.monotonic() + SHRINK_PATIENCE
        while True:
            try:
                return self._between_steps(
                    instance, lambda done: self._commit_shrink(instance, transition, after, done)
                )
            except PagesInUse:
                if time.monotonic() >= end:
                    raise
            self._closing.wait(SHRINK_RETRY)

    def _throttle(self, instance: RunningInstance) -> Throttle:
        """Return a throttle for this thread's work while the instance runs steps: copies, and Python code."""
        steps = instance.steps
        return Throttle(self._copy_rate, self._copy_share, lambda: not steps.idle, self._closing.wait)

    def _prepare(self, instance: RunningInstance, throttle: Throttle, block: str, precision: str) -> LoadedBlock:
        """Copy a variant of a layer to the devices, next to the one in use."""
        throttle.worked()
        parameters = self._source.parameters(block, precision, between=throttle.worked)
        return instance.executor.prepare(block, parameters, precision, copied=throttle.copied)

    def _between_steps(self, instance: RunningInstance, commit: Callable[[Future[None]], None]) -> None:
        """Have the instance call `commit` between two steps, and wait until `commit` has completed its future.

        Raise what `commit` raised. Raise `Cancelled` if the actuator is closed meanwhile. As no further step runs then,
        the change may have been committed (the plan in force shows it) although its future never completes.
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
                return done.result(CLOSING_CHECK_S)
            except NotYet:
                if self._closing.is_set():
                    done.cancel()
                    raise Cancelled("the engine is closing") from None

    # -- between two steps, in the instance's thread: each commit succeeds as a whole or changes nothing

    def _commit_swap(
        self, instance: RunningInstance, index: int, prepared: Sequence[LoadedBlock], after: Plan, done: Future[None]
    ) -> None:
        executor = instance.executor
        with ExitStack() as undo:
            undo.callback(executor.replace, executor.replace(prepared))
            self._replan(instance, index, after, undo)
            undo.pop_all()
        self._plan = after
        instance.steps.after_dispatched(lambda: done.set_result(None))

    def _commit_growth(
        self, instance: RunningInstance, transition: ResizeKVPool, growth: Growth, after: Plan, done: Future[None]
    ) -> None:
        scheduler, count = instance.steps.core.scheduler, transition.after - transition.before
        with ExitStack() as undo:
            scheduler.grow(count)
            # The new pages hold nothing yet, so that none needs to be moved.
            undo.callback(scheduler.shrink, count, lambda moves: None)
            self._replan(instance, transition.instance, after, undo)
            instance.executor.pools.extend(growth)
            undo.pop_all()
        self._plan = after
        done.set_result(None)

    def _commit_shrink(
        self, instance: RunningInstance, transition: ResizeKVPool, after: Plan, done: Future[None]
    ) -> None:
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
            # Last, because moved pages cannot be moved back.
            steps.core.scheduler.shrink(transition.before - transition.after, move)
            undo.pop_all()
        self._plan = after
        # The device frees the memory after the steps that are already dispatched, and before the step that follows.
        steps.after_dispatched(lambda: steps.after_dispatched(ended))

    def _replan(self, instance: RunningInstance, index: int, after: Plan, undo: ExitStack) -> None:
        """Give the engine core what follows from the new plan, and add a callback to `undo` that reverts it."""
        core = instance.steps.core
        undo.callback(core.replan, core.salt, core.plan_fields)
        core.replan(assignment_id(after.instances[index].layer_precisions), self._plan_fields(after, index))

    def _end(self, free: Callable[[], None], after: Plan) -> None:
        """Free replaced arrays, which no step uses any more, and release their memory in the ledger.

        The new plan is in force already. If freeing fails, the error is logged and the transition counts as done.
        """
        try:
            free()
            self._ledger.update(self._entries(after))
        except Exception:
            log.exception("plan %d is in force, but the arrays that it replaced may not have been freed", after.version)
