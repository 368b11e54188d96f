"""SimActuator: carries transitions out, batch after batch, in virtual time, with the phases of the real one.

    prepare, while steps go on -> commit, between two steps -> free, when the steps dispatched before have ended

What is a thread there is a generator here, which goes on when an event is due.
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from math import inf
from typing import Protocol

from jaxserve.control.diff import apply
from jaxserve.control.ledger import Ledger
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.transitions import (
    SHRINK_PATIENCE,
    SHRINK_RETRY,
    Outcome,
    ResizeKVPool,
    SwapPrecision,
    Transition,
    batches,
)
from jaxserve.core.clock import Clock
from jaxserve.core.errors import JaxserveError
from jaxserve.core.precision import assignment_id
from jaxserve.engine.core import EngineCore
from jaxserve.kvcache import PagesInUse
from jaxserve.sim.links import Priority, SharedLinks
from jaxserve.telemetry import Snapshot

EXCHANGE = "exchange"  # the ledger's entry for the smaller one of two variants of a layer that are there at once
Signature = tuple[str, str]  # (block kind, precision): blocks of the same one share an executable
Due = Callable[[], float]  # when to go on; a time that has passed is now


class Instance(Protocol):
    """What transitions change of one instance of the plan."""

    @property
    def core(self) -> EngineCore: ...

    def call(self, function: Callable[[], None]) -> None:
        """Has a function run between two steps, soon. Mutates."""
        ...

    def after_dispatched(self, function: Callable[[], None]) -> None:
        """Runs a function once the steps that have been dispatched are done; asked between two steps. Mutates."""
        ...

    def set_plan(self, plan: InstancePlan) -> None:
        """Steps take the time of another plan, from the next one to begin on. Mutates."""
        ...


class SimActuator:
    """The `control.Actuator` of virtual time: `advance` is to be called when `next_event` is due."""

    def __init__(
        self,
        plan: Plan,
        instances: Sequence[Instance],
        clock: Clock,
        links: SharedLinks,
        pcie: Sequence[str],
        *,
        ledger: Ledger,
        entries: Callable[[Plan], Mapping[str, int]],
        plan_fields: Callable[[Plan, int], Snapshot],
        compile_seconds: float = 0.0,
        warm: Collection[Signature] = (),
    ):
        """`plan` is the one in force; `pcie` names the link over which each instance gets weights from its host, where
        the devices of a stage have one each. `entries` are the bytes of a plan in the ledger, by name; `plan_fields`
        gives the fields of an instance's snapshots that follow from a plan. A signature takes `compile_seconds` in each
        instance that has not had it: neither in `plan`, nor since, nor in `warm`.
        """
        self._plan = plan
        self._instances, self._pcie = tuple(instances), tuple(pcie)
        self._clock, self._links = clock, links
        self._ledger, self._entries, self._plan_fields = ledger, entries, plan_fields
        self._compile_seconds = compile_seconds
        running = ({_signature(block.block, block.precision) for block in i.blocks} for i in plan.instances)
        self._compiled = [signatures.union(warm) for signatures in running]
        self._outcomes: list[Outcome] = []
        self._work: Generator[Due, None, None] | None = None
        self._due: Due = _never

    @property
    def busy(self) -> bool:
        """Whether a transition is still to end. When not, `poll` has all outcomes."""
        return self._work is not None

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._plan

    def start(self, transitions: Sequence[Transition]) -> None:
        """Begins to carry transitions out, in order; returns at once. Mutates."""
        assert not self.busy
        self._work = self._run(tuple(transitions))
        self._go_on()

    def poll(self) -> Sequence[Outcome]:
        """What has ended since the last call, in order. Mutates."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # -- events

    def next_event(self) -> float:
        """When `advance` is due, as things stand: steps of instances and other transfers may change it."""
        due = self._due()
        return due if due == inf else max(due, self._clock.now())

    def advance(self, now: float) -> None:
        """Goes on as far as it can at `now`, which the clock shows. Mutates: the links too."""
        self._links.advance(now)
        self._go_on()

    def _go_on(self) -> None:
        due = next(self._work, None) if self._work is not None else None
        if due is None:
            self._work = None
        self._due = due or _never

    # -- the thread

    def _run(self, transitions: Sequence[Transition]) -> Generator[Due, None, None]:
        for batch in batches(transitions):
            begin = self._clock.now()
            error: str | None = None
            try:
                yield from self._carry_out(batch)
            except (JaxserveError, ValueError) as failure:  # no room in the ledger, pages in use; any other is a bug
                error = f"{type(failure).__name__}: {failure}"
            seconds = self._clock.now() - begin
            self._outcomes += [Outcome(transition, error, seconds) for transition in (batch[:1] if error else batch)]
            if error is not None:
                break

    def _carry_out(self, batch: Sequence[Transition]) -> Generator[Due, None, None]:
        after = apply(self._plan, batch)
        instance = self._instances[batch[0].instance]
        match batch:
            case (ResizeKVPool() as transition,) if transition.after >= transition.before:
                self._ledger.check(self._entries(after))
                yield from self._between_steps(instance, lambda freed: self._grow(instance, transition, after, freed))
            case (ResizeKVPool() as transition,):
                yield from self._reduce(instance, transition, after)
            case _:
                yield from self._exchange(instance, [swap for swap in batch if isinstance(swap, SwapPrecision)], after)
        self._ledger.update(self._entries(after))

    def _exchange(self, instance: Instance, swaps: Sequence[SwapPrecision], after: Plan) -> Generator[Due, None, None]:
        number, needed = swaps[0].instance, any(swap.bytes_needed for swap in swaps)
        self._check_exchange(
            max(swap.peak_bytes - swap.bytes_needed for swap in swaps), after if needed else self._plan
        )
        self._ledger.update(self._entries(after if needed else self._plan))
        try:
            for swap in swaps:
                yield from self._prepare(swap)
            yield from self._between_steps(instance, lambda freed: self._swap(instance, number, after, freed))
        finally:
            self._ledger.update(self._entries(self._plan))

    def _check_exchange(self, smaller: int, larger: Plan) -> None:
        """Raises `MemoryBudgetError` where there is no room for both variants at once: for the larger one among the
        weights, and for the smaller one's bytes beside them.
        """
        beside = {EXCHANGE: max(self._ledger.entries.get(EXCHANGE, 0), smaller)}
        self._ledger.check(beside | dict(self._entries(larger)))

    def _prepare(self, transition: SwapPrecision) -> Generator[Due, None, None]:
        """Copies a layer's variant, no faster than was estimated, and compiles what is new to the instance."""
        begin, number = self._clock.now(), transition.instance
        transfer = self._links.start(begin, self._pcie[number], transition.peak_bytes, Priority.WEIGHTS)
        while transfer.end is None:
            yield lambda: self._links.next_event() if transfer.end is None else transfer.end
        ready = max(transfer.end, begin + transition.seconds)
        signature = _signature(transition.block, transition.after)
        if signature not in self._compiled[number]:
            self._compiled[number].add(signature)
            ready += self._compile_seconds
        yield from self._until(ready)

    def _reduce(self, instance: Instance, transition: ResizeKVPool, after: Plan) -> Generator[Due, None, None]:
        """Takes pages away once so many are not in use; as the other actuator, it waits a little for that."""
        end = self._clock.now() + SHRINK_PATIENCE
        while True:
            try:
                yield from self._between_steps(instance, lambda freed: self._shrink(instance, transition, after, freed))
                return
            except PagesInUse:
                if self._clock.now() >= end:
                    raise
            yield from self._until(self._clock.now() + SHRINK_RETRY)

    def _between_steps(self, instance: Instance, commit: Callable[[Future[float]], None]) -> Generator[Due, None, None]:
        """Has `commit` run between two steps, and waits until the time that it settles its future with: when the memory
        of what was replaced is free. Raises what it raised.
        """
        freed: Future[float] = Future()

        def run() -> None:
            try:
                commit(freed)
            except Exception as error:
                freed.set_exception(error)

        instance.call(run)
        while not freed.done():
            yield lambda: self._clock.now() if freed.done() else inf
        yield from self._until(freed.result())

    def _until(self, time: float) -> Generator[Due, None, None]:
        while self._clock.now() < time:
            yield lambda: time

    # -- between two steps, called by the instance

    def _swap(self, instance: Instance, number: int, after: Plan, freed: Future[float]) -> None:
        self._put_in_force(instance, number, after)
        instance.after_dispatched(lambda: freed.set_result(self._clock.now()))

    def _grow(self, instance: Instance, transition: ResizeKVPool, after: Plan, freed: Future[float]) -> None:
        instance.core.scheduler.grow(transition.after - transition.before)
        self._put_in_force(instance, transition.instance, after)
        freed.set_result(self._clock.now())

    def _shrink(self, instance: Instance, transition: ResizeKVPool, after: Plan, freed: Future[float]) -> None:
        count, moves = transition.before - transition.after, dict[int, int]()

        def move() -> None:
            end = self._clock.now() + transition.seconds * len(moves) / count
            instance.after_dispatched(lambda: freed.set_result(end))

        instance.core.scheduler.shrink(count, moves.update)
        self._put_in_force(instance, transition.instance, after)
        # Pages move after the steps that are dispatched; the one after them has the memory given back by its end.
        instance.after_dispatched(move)

    def _put_in_force(self, instance: Instance, number: int, after: Plan) -> None:
        self._plan, own = after, after.instances[number]
        instance.set_plan(own)
        instance.core.replan(assignment_id(own.layer_precisions), self._plan_fields(after, number))


def _signature(block: str, precision: str) -> Signature:
    return block.partition(".")[0], precision


def _never() -> float:
    return inf
