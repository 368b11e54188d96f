"""The actuator of one simulated instance, which drives the procedure of `control.reconfigure` in virtual time."""

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from math import inf
from typing import Any, Protocol

from jaxserve.control.ledger import DeviceEntries, DeviceLedgers
from jaxserve.control.plan import InstancePlan, PlanInForce
from jaxserve.control.reconfigure import PlanFacts, Reconfiguration
from jaxserve.control.transitions import BetweenSteps, Outcome, Sleep, StepsEnded, Transition, Waits
from jaxserve.core.clock import Clock
from jaxserve.core.errors import JaxserveError
from jaxserve.engine.core import EngineCore
from jaxserve.sim.links import Priority, SharedLinks, Transfer

Signature = tuple[str, str]  # (block kind, precision): blocks with equal signatures share an executable
Layer = tuple[str, str]  # (block, precision): a variant of a layer


class Agenda:
    """Functions to call at times of a virtual clock, in the order of their times."""

    def __init__(self, clock: Clock):
        self._clock, self._order = clock, count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def add(self, time: float, function: Callable[[], None]) -> None:
        """Have a function called at a time (s); now, if that has passed."""
        heapq.heappush(self._events, (max(time, self._clock.now()), next(self._order), function))

    def next_event(self) -> float:
        """Return when the next function is due (s); infinity if there is none."""
        return self._events[0][0] if self._events else inf

    def advance(self) -> None:
        """Call the functions that are due."""
        while self._events and self._events[0][0] <= self._clock.now():
            heapq.heappop(self._events)[2]()


class ActuatedInstance(Protocol):
    """A simulated instance as its transitions see it: engine core, step boundaries and plan."""

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


class _Fence:
    """A moment at which steps have ended, for which at most one function waits."""

    def __init__(self) -> None:
        self.passed = False
        self.then: Callable[[], None] | None = None

    def passes(self) -> None:
        self.passed = True
        if self.then is not None:
            self.then()


class SimDevice:
    """A simulated instance as its transitions see it (`control.transitions.RunningInstance`).

    Layers are names, and pools need no segments.
    """

    def __init__(
        self,
        instance: ActuatedInstance,
        plan: InstancePlan,
        clock: Clock,
        links: SharedLinks,
        link: str,
        compile_seconds: float,
        warm: Collection[Signature],
    ):
        self.instance, self._clock = instance, clock
        self._links, self._link = links, link
        self._layers: dict[str, Layer] = {block.block: (block.block, block.precision) for block in plan.blocks}
        self._compile_seconds = compile_seconds
        self._compiled = {_signature(*layer) for layer in self._layers.values()}.union(warm)

    @property
    def core(self) -> EngineCore:
        return self.instance.core

    def use(self, plan: InstancePlan) -> None:
        self.instance.set_plan(plan)

    def prepare_layer(self, block: str, precision: str, size: int, seconds: float) -> Waits[Layer]:
        """Copy a layer's variant, no faster than estimated, and compile its signature if the instance lacks it."""
        begin = self._clock.now()
        transfer = self._links.start(begin, self._link, size, Priority.WEIGHTS)
        while transfer.end is None:
            yield transfer
        ready = max(transfer.end, begin + seconds)
        if (signature := _signature(block, precision)) not in self._compiled:
            self._compiled.add(signature)
            ready += self._compile_seconds
        yield Sleep(ready)
        return block, precision

    def prepare_segments(self, pages: int) -> Waits[None]:
        yield from ()

    def free_layers(self, layers: Sequence[Layer]) -> None:
        pass

    def free_segments(self, segments: None) -> None:
        pass

    def pages_moved(self, moves: Mapping[int, int], seconds: float) -> Waits[None]:
        """Wait for a step that begins after the commit, because the device moves the pages before it."""
        yield Sleep(self._clock.now() + seconds)
        yield StepsEnded((yield BetweenSteps(lambda: None)))

    def replace_layers(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        replaced = [self._layers[block] for block, _ in layers]
        self._layers.update({layer[0]: layer for layer in layers})
        return replaced

    def extend_pools(self, segments: None) -> None:
        pass

    def shrink_pools(self, moves: Mapping[int, int], pages: int) -> None:
        pass


class SimActuator:
    """An actuator (`control.Actuator`) of one simulated instance."""

    def __init__(
        self,
        name: str,
        instance: ActuatedInstance,
        in_force: PlanInForce,
        clock: Clock,
        agenda: Agenda,
        links: SharedLinks,
        link: str,
        *,
        ledgers: DeviceLedgers,
        entries: Callable[[InstancePlan], DeviceEntries],
        facts: PlanFacts,
        compile_seconds: float = 0.0,
        batch_seconds: float = 0.0,
        warm: Collection[Signature] = (),
    ):
        """Carry out transitions of the instance called `name`; whoever owns the `agenda` advances it.

        `link` is the one of `links` over which weights come from the host to every device of a stage. `entries`
        returns the ledgers' bytes of a plan, and `facts` are what the engine core is told of it. Compiling takes
        `compile_seconds` for each signature that is new to the instance: that is neither in its plan nor in `warm`, and
        was not compiled since. Before each commit the host works for `batch_seconds`.
        """
        self._clock, self._agenda, self._links = clock, agenda, links
        self._batch_seconds = batch_seconds
        plan = in_force.instance(name)
        self.device = SimDevice(instance, plan, clock, links, link, compile_seconds, warm)
        self._reconfiguration = Reconfiguration(
            name=name,
            instance=self.device,
            in_force=in_force,
            ledgers=ledgers,
            entries=entries,
            facts=facts,
            now=clock.now,
        )
        self._outcomes: list[Outcome] = []
        self._procedure: Waits[None] | None = None

    @property
    def busy(self) -> bool:
        """True while a transition has not ended. When false, `poll` returns all remaining outcomes."""
        return self._procedure is not None

    def start(self, transitions: Sequence[Transition]) -> None:
        """Begin to carry out `transitions` in order, and return at once."""
        assert not self.busy
        self._procedure = self._reconfiguration.carry_out(transitions, self._report)
        self._go_on(None)

    def poll(self) -> Sequence[Outcome]:
        """Return the outcomes since the last call, in order."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # -- the driver

    def _report(self, outcome: Outcome, failure: Exception | None) -> None:
        if failure is not None and not isinstance(failure, JaxserveError | ValueError):
            raise failure  # a fault of the simulator, and not of the plan
        self._outcomes.append(outcome)

    def _go_on(self, value: Any, error: Exception | None = None) -> None:
        """Run the procedure until it waits for something that has not happened yet."""
        assert self._procedure is not None
        try:
            wait = self._procedure.send(value) if error is None else self._procedure.throw(error)
        except StopIteration:
            self._procedure = None
            return
        match wait:
            case Sleep():
                self._agenda.add(wait.until, lambda: self._go_on(None))
            case BetweenSteps():
                self._between_steps(wait.function)
            case StepsEnded():
                fence: _Fence = wait.fence
                if fence.passed:
                    self._soon(None)
                else:
                    fence.then = lambda: self._soon(None)
            case Transfer():
                self._agenda.add(self._links.next_event(), self._transferred)

    def _transferred(self) -> None:
        self._links.advance(self._clock.now())
        self._go_on(None)

    def _between_steps(self, function: Callable[[], None]) -> None:
        instance = self.device.instance

        def run() -> None:
            try:
                function()
            except Exception as error:
                self._soon(None, error)
                return
            fence = _Fence()
            instance.after_dispatched(fence.passes)
            self._soon(fence)

        self._agenda.add(self._clock.now() + self._batch_seconds, lambda: instance.call(run))

    def _soon(self, value: Any, error: Exception | None = None) -> None:
        """Go on after the present event, which is one of the instance's."""
        self._agenda.add(self._clock.now(), lambda: self._go_on(value, error))


def _signature(block: str, precision: str) -> Signature:
    return block.partition(".")[0], precision
