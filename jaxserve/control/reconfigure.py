"""The procedure that carries out transitions: the rules for every kind of them, on real and simulated devices.

    stage, while steps go on -> commit, between two steps -> release, when steps no longer use what was replaced

A batch of transitions is committed between the same two steps. The procedure is a generator: it yields waits
(`control.transitions`) to a driver, which is a thread in a real engine and a queue of events in the simulator.
"""

import logging
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Any

from jaxserve.control.costs import CostModel, InstanceCost
from jaxserve.control.ledger import DeviceEntries, DeviceLedgers
from jaxserve.control.plan import InstancePlan, PlanInForce
from jaxserve.control.transitions import (
    BetweenSteps,
    Outcome,
    RunningInstance,
    Sleep,
    StepsEnded,
    StoppedInstance,
    Transition,
    Waits,
)
from jaxserve.core.errors import JaxserveError, MemoryBudgetError, PlanError
from jaxserve.core.precision import assignment_id
from jaxserve.kvcache import PagesInUse
from jaxserve.telemetry import Snapshot

log = logging.getLogger(__name__)

SWAP_BUFFER = "exchange"  # the ledger's entry for what is resident beside a plan while it changes
# Seconds for which a smaller pool waits for pages in use. Not long, because the policy is not asked meanwhile, even if
# a burst of requests arrives.
SHRINK_PATIENCE = 0.3
SHRINK_RETRY = 0.02  # seconds between two attempts

# Called with an outcome, and with the exception behind its error.
Report = Callable[[Outcome, Exception | None], None]


class Cancelled(JaxserveError):
    """A transition that was cut off because the engine is closing."""


@dataclass(frozen=True)
class PlanFacts:
    """The facts of a plan that an engine core is told."""

    plan_fields: Callable[[InstancePlan, int], Snapshot]  # (plan, version) -> the fields of snapshots that follow
    costs: CostModel | None = None

    def of(self, plan: InstancePlan, version: int) -> tuple[str, Snapshot, InstanceCost | None]:
        """Return the arguments of `EngineCore.replan` for a plan of an instance."""
        cost = None if self.costs is None else self.costs.of(plan)
        return assignment_id(plan.layer_precisions), self.plan_fields(plan, version), cost


@dataclass(frozen=True)
class _Committed:
    """A batch that is in force, and whose replaced memory is not free yet."""

    batch: tuple[Transition, ...]
    began: float  # s
    before: InstancePlan  # the plan that it replaced
    fence: Any
    held: Any


@dataclass(frozen=True)
class Reconfiguration:
    """The procedure for one instance."""

    name: str
    instance: RunningInstance
    in_force: PlanInForce
    ledgers: DeviceLedgers
    entries: Callable[[InstancePlan], DeviceEntries]  # the plan's bytes, by device and name
    facts: PlanFacts
    now: Callable[[], float]  # s

    def carry_out(self, transitions: Sequence[Transition], report: Report) -> Waits[None]:
        """Carry out transitions in order, and report the outcome of each. After one that fails the rest is dropped."""
        remaining = deque(transitions)
        pending: _Committed | None = None
        while remaining or pending:
            batch = self._next_batch(remaining, pending)
            if pending and not batch:
                yield from self._finish(pending, report)
                pending = None
                continue
            began = self.now()
            try:
                self._book(batch, pending)
                staged = yield from type(batch[0]).stage(batch, self.instance)
                if pending:
                    yield from self._finish(pending, report, also=batch)
                    pending = None
                pending = yield from self._commit(batch, began, staged)
            except Exception as error:
                if pending:
                    yield from self._finish(pending, report)
                self._release_memory()
                _log_failure(batch, error)
                report(Outcome(batch[0], f"{type(error).__name__}: {error}", self.now() - began), error)
                return
            for _ in batch:
                remaining.popleft()

    # -- batches

    def _next_batch(self, remaining: Sequence[Transition], pending: _Committed | None) -> tuple[Transition, ...]:
        """Return the transitions to stage next; none if none remain, or if what is pending must be released first.

        A batch takes as much as fits into the memory. If not all fit, it leaves half of the room, so that the next
        batch can be staged while this one waits for steps to end. A transition that does not fit by itself is carried
        out in less room, if it can be.
        """
        if not remaining or (pending and not remaining[0].joins(pending.batch[0])):
            return ()
        first, joining = remaining[0], [remaining[0]]
        for transition in list(remaining)[1:]:
            if not transition.joins(first):
                break
            joining.append(transition)
        if self._fits(joining, pending):
            return tuple(joining)
        counts = range(1, len(joining) + 1)
        fitting = bisect_left(counts, True, key=lambda count: not self._fits(joining[:count], pending))
        if pending:
            return tuple(joining[:fitting])
        if not fitting and (in_less_room := first.in_less_room()):
            return (in_less_room,)
        return tuple(joining[: max(1, (fitting + 1) // 2)])

    def _fits(self, batch: Sequence[Transition], pending: _Committed | None) -> bool:
        try:
            self.ledgers.check(self.name, self._needs(batch, pending))
        except (MemoryBudgetError, PlanError):
            return False
        return True

    def _book(self, batch: Sequence[Transition], pending: _Committed | None) -> None:
        """Book the memory that a batch needs while it is carried out."""
        self.ledgers.update(self.name, self._needs(batch, pending))

    def _needs(self, batch: Sequence[Transition], pending: _Committed | None) -> DeviceEntries:
        """Return the entries while a batch is carried out: those of the larger of the plans before and after it.

        In addition, the batch and the pending one have the smaller variants of their layers resident. The swap buffer
        holds these as far as they fit into it. Raise `PlanError` if the batch does not start from the plan in force.
        """
        now = self.in_force.instance(self.name)
        if any(transition.bytes_needed for transition in batch):
            larger = _after(now, batch)
        else:
            larger = pending.before if pending else now
        beside: Counter[int] = Counter()
        for transition in (*batch, *(pending.batch if pending else ())):
            beside.update(transition.bytes_beside)
        entries = {device: dict(sizes) for device, sizes in self.entries(larger).items()}
        for device, size in beside.items():
            if size > entries[device].get(SWAP_BUFFER, 0):
                entries[device][SWAP_BUFFER] = size
        return entries

    def _release_memory(self) -> None:
        self.ledgers.update(self.name, self.entries(self.in_force.instance(self.name)))

    # -- commit and release

    def _commit(self, batch: tuple[Transition, ...], began: float, staged: Any) -> Waits[_Committed]:
        """Commit a batch between two steps, and wait for pages in use for a while."""
        before, patience_ends = self.in_force.instance(self.name), self.now() + SHRINK_PATIENCE
        held: Any = None

        def commit_now() -> None:
            nonlocal held
            held = commit(self.name, self.instance, self.in_force, self.facts, batch, staged)

        while True:
            try:
                fence = yield BetweenSteps(commit_now)
                return _Committed(batch, began, before, fence, held)
            except PagesInUse:
                # Enough pages were free when the plan was decided. Sequences have taken some since; others end soon.
                if self.now() >= patience_ends:
                    type(batch[0]).discard(batch, self.instance, staged)
                    raise
            except Exception:
                type(batch[0]).discard(batch, self.instance, staged)
                raise
            yield Sleep(self.now() + SHRINK_RETRY)

    def _finish(self, done: _Committed, report: Report, also: Sequence[Transition] = ()) -> Waits[None]:
        """Wait until the replaced memory is free, release it in the ledger, and report the outcomes.

        `also` is a batch that has been staged meanwhile. The new plan is in force already. If freeing fails, the error
        is logged and the transitions count as done.
        """
        try:
            try:
                yield StepsEnded(done.fence)
            except Cancelled:
                log.info("the engine is closing before the steps have ended that use replaced memory")
            yield from type(done.batch[0]).release(done.batch, self.instance, done.held)
            if also:
                self._book(also, None)
            else:
                self._release_memory()
        except Exception:
            log.exception("%s is in force, but what it replaced may not have been freed", _names(done.batch))
        seconds = self.now() - done.began
        for transition in done.batch:
            report(Outcome(transition, None, seconds), None)


def commit(
    name: str,
    instance: StoppedInstance,
    in_force: PlanInForce,
    facts: PlanFacts,
    batch: Sequence[Transition],
    staged: Any,
) -> Any:
    """Put a batch in force between two steps, as a whole, or change nothing and raise.

    Return what the kind's `release` needs.
    """
    before = in_force.instance(name)
    after = _after(before, batch)
    core = instance.core
    expected = in_force.version + len(batch)
    with ExitStack() as undo:
        undo.callback(instance.use, before)
        undo.callback(core.replan, core.salt, core.plan_fields, core.cost)
        core.replan(*facts.of(after, expected))
        instance.use(after)
        held = type(batch[0]).commit(batch, instance, staged, undo)
        undo.pop_all()
    version = in_force.commit(after, len(batch))
    if version != expected:  # other instances have changed meanwhile, for which nobody waits
        core.replan(*facts.of(after, version))
    return held


def _after(plan: InstancePlan, batch: Sequence[Transition]) -> InstancePlan:
    return reduce(lambda plan, transition: transition.apply(plan), batch, plan)


def _names(batch: Sequence[Transition]) -> str:
    return "; ".join(map(str, batch))


def _log_failure(batch: Sequence[Transition], error: Exception) -> None:
    """Log why a batch failed, with a traceback if that is not one of the expected reasons.

    Expected are pages in use (a `ValueError`), no room in the ledger, a changed checkpoint, and an engine that closes.
    """
    unexpected = not isinstance(error, JaxserveError | ValueError)
    log.warning("the plan stays in force: %s: %s: %s", _names(batch), type(error).__name__, error, exc_info=unexpected)
