"""The simulator's actuator: carries transitions out in virtual time, batch after batch, in the real actuator's phases.

    prepare, while steps go on -> commit, between two steps -> free, when all steps dispatched before have ended

The real actuator is a thread. This one is a generator that is resumed when an event is due.
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

SWAP_BUFFER = "exchange"  # the ledger's entry: bytes for the smaller of two variants of one layer during a swap
Signature = tuple[str, str]  # (block kind, precision): blocks with equal signatures share an executable
Due = Callable[[], float]  # returns the time (s) at which to resume; a past time means now


class ActuatedInstance(Protocol):
    """An instance as transitions see it: its engine core, its step boundaries and its plan."""

    @property
    def core(self) -> EngineCore: ...

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` between two steps, as soon as possible."""
        ...

    def after_dispatched(self, function: Callable[[], None]) -> None:
        """Run `function` when all dispatched steps have ended. To be called between two steps."""
        ...

    def set_plan(self, plan: InstancePlan) -> None:
        """Use the step times of `plan` from the next step on."""
        ...


class SimActuator:
    """An actuator in virtual time (`control.Actuator`): call `advance` when `next_event` is due."""

    def __init__(
        self,
        plan: Plan,
        instances: Sequence[ActuatedInstance],
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
        """Start with `plan` in force.

        `pcie` names for each instance the link over which weights come from its host; every device of a stage has its
        own host link. `entries` returns the ledger's bytes of a plan, by name. `plan_fields` returns the fields of an
        instance's snapshots that follow from a plan. Compiling takes `compile_seconds` for each signature that is new
        to an instance: that is neither in `plan` nor in `warm`, and was not compiled since.
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
        self._due: Due = _no_event

    @property
    def busy(self) -> bool:
        """True while a transition has not ended. When false, `poll` returns all remaining outcomes."""
        return self._work is not None

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._plan

    def start(self, transitions: Sequence[Transition]) -> None:
        """Begin to carry out `transitions` in order, and return at once."""
        assert not self.busy
        self._work = self._run(tuple(transitions))
        self._resume()

    def poll(self) -> Sequence[Outcome]:
        """Return the outcomes since the last call, in order."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # -- events

    def next_event(self) -> float:
        """Return when `advance` is due (s). Steps of instances and other transfers may change it."""
        due = self._due()
        return due if due == inf else max(due, self._clock.now())

    def advance(self, now: float) -> None:
        """Advance the links and the transitions to `now`, the clock's time."""
        self._links.advance(now)
        self._resume()

    def _resume(self) -> None:
        due = next(self._work, None) if self._work is not None else None
        if due is None:
            self._work = None
        self._due = due or _no_event

    # -- the generator in the place of the real actuator's thread

    def _run(self, transitions: Sequence[Transition]) -> Generator[Due, None, None]:
        for batch in batches(transitions):
            begin = self._clock.now()
            error: str | None = None
            try:
                yield from self._carry_out(batch)
            # No room in the ledger, or pages in use. Any other exception is a bug.
            except (JaxserveError, ValueError) as failure:
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
                yield from self._shrink_when_unused(instance, transition, after)
            case _:
                swaps = [swap for swap in batch if isinstance(swap, SwapPrecision)]
                yield from self._swap_layers(instance, swaps, after)
        self._ledger.update(self._entries(after))

    def _swap_layers(
        self, instance: ActuatedInstance, swaps: Sequence[SwapPrecision], after: Plan
    ) -> Generator[Due, None, None]:
        index = swaps[0].instance
        larger = after if any(swap.bytes_needed for swap in swaps) else self._plan
        self._check_room_for_both(max(swap.peak_bytes - swap.bytes_needed for swap in swaps), larger)
        self._ledger.update(self._entries(larger))
        try:
            for swap in swaps:
                yield from self._prepare(swap)
            yield from self._between_steps(instance, lambda freed: self._swap(instance, index, after, freed))
        finally:
            self._ledger.update(self._entries(self._plan))

    def _check_room_for_both(self, smaller_bytes: int, larger: Plan) -> None:
        """Raise `MemoryBudgetError` if both variants of a layer do not fit at once.

        The weights of the plan `larger` contain the larger variant. The swap buffer must hold `smaller_bytes`.
        """
        buffer = {SWAP_BUFFER: max(self._ledger.entries.get(SWAP_BUFFER, 0), smaller_bytes)}
        self._ledger.check(buffer | dict(self._entries(larger)))

    def _prepare(self, transition: SwapPrecision) -> Generator[Due, None, None]:
        """Copy a layer's variant, no faster than estimated, and compile its signature if the instance lacks it."""
        begin, index = self._clock.now(), transition.instance
        transfer = self._links.start(begin, self._pcie[index], transition.peak_bytes, Priority.WEIGHTS)
        while transfer.end is None:
            yield lambda: self._links.next_event() if transfer.end is None else transfer.end
        ready = max(transfer.end, begin + transition.seconds)
        signature = _signature(transition.block, transition.after)
        if signature not in self._compiled[index]:
            self._compiled[index].add(signature)
            ready += self._compile_seconds
        yield from self._wait_until(ready)

    def _shrink_when_unused(
        self, instance: ActuatedInstance, transition: ResizeKVPool, after: Plan
    ) -> Generator[Due, None, None]:
        """Shrink the KV pool, retrying for `SHRINK_PATIENCE` seconds while too many pages are in use."""
        end = self._clock.now() + SHRINK_PATIENCE
        while True:
            try:
                yield from self._between_steps(instance, lambda freed: self._shrink(instance, transition, after, freed))
                return
            except PagesInUse:
                if self._clock.now() >= end:
                    raise
            yield from self._wait_until(self._clock.now() + SHRINK_RETRY)

    def _between_steps(
        self, instance: ActuatedInstance, commit: Callable[[Future[float]], None]
    ) -> Generator[Due, None, None]:
        """Run `commit` between two steps, and wait until the replaced memory is free.

        `commit` sets its future to that time. An exception in `commit` is raised here.
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
        yield from self._wait_until(freed.result())

    def _wait_until(self, time: float) -> Generator[Due, None, None]:
        while self._clock.now() < time:
            yield lambda: time

    # -- between two steps, called by the instance

    def _swap(self, instance: ActuatedInstance, index: int, after: Plan, freed: Future[float]) -> None:
        self._put_in_force(instance, index, after)
        instance.after_dispatched(lambda: freed.set_result(self._clock.now()))

    def _grow(self, instance: ActuatedInstance, transition: ResizeKVPool, after: Plan, freed: Future[float]) -> None:
        instance.core.scheduler.grow(transition.after - transition.before)
        self._put_in_force(instance, transition.instance, after)
        freed.set_result(self._clock.now())

    def _shrink(self, instance: ActuatedInstance, transition: ResizeKVPool, after: Plan, freed: Future[float]) -> None:
        count, moves = transition.before - transition.after, dict[int, int]()

        def move() -> None:
            end = self._clock.now() + transition.seconds * len(moves) / count
            instance.after_dispatched(lambda: freed.set_result(end))

        instance.core.scheduler.shrink(count, moves.update)
        self._put_in_force(instance, transition.instance, after)
        # Pages move after the dispatched steps; the memory is free when the move has ended.
        instance.after_dispatched(move)

    def _put_in_force(self, instance: ActuatedInstance, index: int, after: Plan) -> None:
        self._plan, own = after, after.instances[index]
        instance.set_plan(own)
        instance.core.replan(assignment_id(own.layer_precisions), self._plan_fields(after, index))


def _signature(block: str, precision: str) -> Signature:
    return block.partition(".")[0], precision


def _no_event() -> float:
    return inf
