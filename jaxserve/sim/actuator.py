"""The actuator of one simulated instance, which drives the procedure of `control.reconfigure` in virtual time."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

from jaxserve.control.ledger import DeviceEntries, DeviceLedgers
from jaxserve.control.plan import InstancePlan, PlanInForce
from jaxserve.control.reconfigure import PlanFacts, Reconfiguration
from jaxserve.control.transitions import BetweenSteps, Outcome, Sleep, StepsEnded, Transition, Waits
from jaxserve.core.clock import Clock
from jaxserve.core.errors import JaxserveError
from jaxserve.engine.core import EngineCore
from jaxserve.sim.driver import Agenda, Fence, ProcedureDriver
from jaxserve.sim.links import Priority, SharedLinks

Signature = tuple[str, str]  # (block kind, precision): blocks with equal signatures share an executable
Layer = tuple[str, str]  # (block, precision): a variant of a layer


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

    def occupy(self, seconds: float) -> None:
        """Let the devices do other work after the dispatched steps. To be called between two steps."""
        ...

    def set_plan(self, plan: InstancePlan) -> None:
        """Use the step times of `plan` from the next step on."""
        ...


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
        yield Sleep(max(transfer.end, begin + seconds) + self._seconds_to_compile(block, precision))
        return block, precision

    def hold_layer(self, block: str, precisions: Sequence[str]) -> Waits[None]:
        yield from ()

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

    def exchange_layer(self, block: str, precision: str, seconds: float) -> None:
        self._layers[block] = block, precision
        self.instance.occupy(seconds + self._seconds_to_compile(block, precision))

    def extend_pools(self, segments: None) -> None:
        pass

    def shrink_pools(self, moves: Mapping[int, int], pages: int) -> None:
        pass

    def _seconds_to_compile(self, block: str, precision: str) -> float:
        """Return the time (s) to compile a layer's signature, which the instance then has."""
        if (signature := _signature(block, precision)) in self._compiled:
            return 0.0
        self._compiled.add(signature)
        return self._compile_seconds


class SimActuator:
    """An actuator (`control.Actuator`) of one simulated instance."""

    def __init__(
        self,
        name: str,
        instance: ActuatedInstance,
        plan: InstancePlan,
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
        """Carry out transitions of the instance called `name`, which begins with `plan`.

        Whoever owns the `agenda` advances it.

        `link` is the one of `links` over which weights come from the host to every device of a stage. `entries`
        returns the ledgers' bytes of a plan, and `facts` are what the engine core is told of it. Compiling takes
        `compile_seconds` for each signature that is new to the instance: that is neither in its plan nor in `warm`, and
        was not compiled since. Before each commit the host works for `batch_seconds`.
        """
        self._clock, self._agenda, self._links = clock, agenda, links
        self._batch_seconds = batch_seconds
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
        self._driver = ProcedureDriver(clock, agenda, links, self._between_steps)
        self._outcomes: list[Outcome] = []

    @property
    def busy(self) -> bool:
        """True while a transition has not ended. When false, `poll` returns all remaining outcomes."""
        return self._driver.busy

    def start(self, transitions: Sequence[Transition]) -> None:
        """Begin to carry out `transitions` in order, and return at once."""
        self._driver.start(self._reconfiguration.carry_out(transitions, partial(report_to, self._outcomes)))

    def poll(self) -> Sequence[Outcome]:
        """Return the outcomes since the last call, in order."""
        outcomes, self._outcomes[:] = list(self._outcomes), []
        return outcomes

    def _between_steps(self, wait: BetweenSteps) -> None:
        instance = self.device.instance

        def run() -> None:
            try:
                wait.function()
            except Exception as error:
                self._driver.soon(None, error)
                return
            fence = Fence()
            instance.after_dispatched(fence.passes)
            self._driver.soon(fence)

        self._agenda.add(self._clock.now() + self._batch_seconds, lambda: instance.call(run))


def report_to(outcomes: list[Outcome], outcome: Outcome, failure: Exception | None) -> None:
    """Append an outcome. Raise its failure if that is a fault of the simulator, and not of the plan."""
    if failure is not None and not isinstance(failure, JaxserveError | ValueError):
        raise failure
    outcomes.append(outcome)


def _signature(block: str, precision: str) -> Signature:
    return block.partition(".")[0], precision
