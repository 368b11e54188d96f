"""Fakes for tests of control: a machine, an instance without a device and its actuator, and a fluid engine."""

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from jaxserve.control import (
    DeviceLedgers,
    InstancePlan,
    Ledger,
    Outcome,
    Plan,
    PlanInForce,
    Resources,
    SizeTable,
    SwapPrecision,
    Transition,
    block_chain,
    parallel_plan,
)
from jaxserve.control.costs import CostModel, InstanceCost
from jaxserve.control.policies import MorphSettings
from jaxserve.control.reconfigure import SWAP_BUFFER, Cancelled, PlanFacts, Reconfiguration
from jaxserve.control.transitions import BetweenSteps, Sleep, StepsEnded, Waits
from jaxserve.core.block_names import is_layer
from jaxserve.core.errors import JaxserveError
from jaxserve.core.step_load import StepLoad
from jaxserve.core.step_shapes import Buckets
from jaxserve.kvcache import PagePool, PageTable
from jaxserve.scheduler import Scheduler, SchedulerLimits
from jaxserve.telemetry import TIME_BOUNDS, Recent, Snapshot

MB = 1_000_000
LAYER = {"bfloat16": 20 * MB, "int8": 10 * MB, "int4": 5 * MB}
PAGE = MB // 2  # of all layers
TO_INT4 = MorphSettings(entry_interval=0.5, most_layers=0.75, rest="")  # three quarters of the layers, and no further


def machine(
    layers: int = 16,
    *,
    home_pages: int = 401,
    max_pages: int = 2000,
    pp: int = 1,
    segments: tuple[int, ...] = (),
    in_place: tuple[str, ...] = (),
    max_num_seqs: int = 256,
    costs: CostModel | None = None,
) -> Resources:
    """Return devices on which `home_pages` pages fit next to layers in full precision, spread evenly over stages.

    Without `costs`, the times of steps are unknown.
    """
    each, page = layers // pp, PAGE // layers
    first = ("embed", *(f"layers.{each * stage}" for stage in range(1, pp)))
    return Resources(
        budget=100 * MB + each * LAYER["bfloat16"] + home_pages * each * page,
        sizes=SizeTable(
            layers={(f"layers.{n}", precision): size for n in range(layers) for precision, size in LAYER.items()},
            fixed=dict.fromkeys(first, 100 * MB),
            pages={f"layers.{n}": page for n in range(layers)},
            in_place=in_place,
        ),
        min_pages=17,
        max_pages=max_pages,
        copy_rate=1000 * MB,
        segments=segments,
        costs=costs,
        shapes=Buckets(max_num_seqs, max_tiles=64, tile=32, min_rows=1, widths=(1,)),
    )


def home_plan(layers: int = 16, *, pages: int = 401, pp: int = 1, dp: int = 1) -> Plan:
    chain = block_chain("bfloat16", ["bfloat16"] * layers, "bfloat16")
    return parallel_plan(chain, kv_pages=pages, tp=1, pp=pp, dp=dp, devices=pp * dp)


def snapshot(time: float = 0.0, *, recent: Recent | None = None, pages: int = 400, **values: object) -> Snapshot:
    """Return a snapshot whose recent past is empty unless `recent` is given."""
    past = Recent(5.0, 0.0, 0.0, 0.0, 0.0, 0, None, None, 0.0, 0.0, 0.0, 0.0) if recent is None else recent
    return Snapshot(time=time, recent=past, kv_pages_total=pages, **values)  # type: ignore[arg-type]


class Broken(JaxserveError):
    """A failure that a test wants."""


@dataclass
class FakeCore:
    """The part of an engine core that transitions change, with the real scheduler."""

    scheduler: Scheduler
    plan_fields: Snapshot
    salt: str = ""
    cost: InstanceCost | None = None

    def replan(self, salt: str, plan_fields: Snapshot, cost: InstanceCost | None = None) -> None:
        self.salt, self.plan_fields, self.cost = salt, plan_fields, cost


@dataclass(eq=False)
class Layer:
    """A variant of a layer in the memory of a fake instance."""

    block: str
    precision: str


class FakeInstance:
    """An instance without a device (`control.transitions.RunningInstance`), which knows what its memory holds.

    Before each action, `before` is called with a text that says what is done. It may raise. Its steps run under `plan`.
    """

    def __init__(
        self, plan: InstancePlan, resources: Resources, now: Callable[[], float], before: Callable[[str], None]
    ):
        pages = PagePool(plan.kv_pages, caching=False, min_pages=resources.min_pages, max_pages=resources.max_pages)
        scheduler = Scheduler(SchedulerLimits(4, 4, 16, 16), pages, PageTable(4, 64))
        self.core = FakeCore(scheduler, Snapshot(kv_pages_total=plan.kv_pages - 1))
        self.plan = plan
        self.layers = {block.block: Layer(block.block, block.precision) for block in plan.blocks}
        self.resident = set(self.layers.values())
        self.pool_pages = plan.kv_pages  # that take memory
        self._resources, self._now, self._before = resources, now, before

    def resident_bytes(self) -> dict[int, int]:
        """Return the bytes of layers and KV pages by device."""
        sizes = {}
        for stage in self.plan.stages:
            blocks = {block.block for block in stage.blocks if is_layer(block.block)}
            layers = (layer for layer in self.resident if layer.block in blocks)
            layer_bytes = sum(self._resources.bytes_taken(layer.block, layer.precision) for layer in layers)
            sizes |= dict.fromkeys(stage.devices, layer_bytes + self._resources.page_bytes(stage) * self.pool_pages)
        return sizes

    def use(self, plan: InstancePlan) -> None:
        self.plan = plan
        self._before("use the plan")

    def prepare_layer(self, block: str, precision: str, size: int, seconds: float) -> Waits[Layer]:
        self._before(f"prepare {block} {precision}")
        layer = Layer(block, precision)
        self.resident.add(layer)
        try:
            yield Sleep(self._now() + seconds)
            self._before(f"compile {block} {precision}")
        except BaseException:
            self.resident.remove(layer)
            raise
        return layer

    def prepare_segments(self, pages: int) -> Waits[int]:
        yield from ()
        self._before(f"prepare {pages} pages")
        before, self.pool_pages = self.pool_pages, pages
        return before

    def free_layers(self, layers: Sequence[Layer]) -> None:
        for layer in layers:
            if layer is not self.layers[layer.block]:
                self.resident.remove(layer)
        self._before("free layers")

    def free_segments(self, segments: int) -> None:
        self.pool_pages = segments
        self._before("free segments")

    def pages_moved(self, moves: Mapping[int, int], seconds: float) -> Waits[None]:
        yield Sleep(self._now() + seconds)
        self.pool_pages = self.core.scheduler.pages.num_pages
        self._before("free pages")

    def replace_layers(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        self._before("replace layers")
        replaced = [self.layers[layer.block] for layer in layers]
        self.layers |= {layer.block: layer for layer in layers}
        return replaced

    def hold_layer(self, block: str, precisions: Sequence[str]) -> Waits[None]:
        yield from ()
        self._before(f"hold {block} {' '.join(precisions)}")

    def exchange_layer(self, block: str, precision: str, seconds: float) -> None:
        old, new = self.layers[block], Layer(block, precision)
        self.resident.remove(old)
        self.resident.add(new)
        self.layers[block] = new
        try:
            self._before(f"exchange {block} {precision}")
        except BaseException:
            self.resident.symmetric_difference_update((old, new))
            self.layers[block] = old
            raise

    def extend_pools(self, segments: int) -> None:
        self._before("extend pools")

    def shrink_pools(self, moves: Mapping[int, int], pages: int) -> None:
        self._before("shrink pools")


def ledgers_of(plan: Plan, resources: Resources, swap_buffer: int = LAYER["int8"]) -> DeviceLedgers:
    """Return the ledgers of all devices, in which the plan is booked. The swap buffer is a part of `fixed`."""
    devices = [device for instance in plan.instances for stage in instance.stages for device in stage.devices]
    ledgers = DeviceLedgers({device: Ledger(resources.budget) for device in devices})
    for instance in plan.instances:
        ledgers.update(instance.name, entries_of(instance, resources, swap_buffer))
    return ledgers


def entries_of(plan: InstancePlan, resources: Resources, swap_buffer: int = LAYER["int8"]) -> dict[int, dict[str, int]]:
    """Return the ledger entries of an instance's plan by device."""
    return {
        device: entries | {"fixed": entries["fixed"] - swap_buffer, SWAP_BUFFER: swap_buffer}
        for device, entries in resources.device_entries(plan).items()
    }


def fields_of(plan: InstancePlan, version: int) -> Snapshot:
    """Return the fields of a snapshot that follow from a plan."""
    return Snapshot(plan_version=version, kv_pages_total=plan.kv_pages - 1)


class VirtualActuator:
    """An actuator of a `FakeInstance`, which drives the procedure in a virtual time that is moved by hand (`now`).

    Commits wait for the end of a step, and memory is freed at the end of the next one; with `step` 0 both are at once.
    Transitions for which `error_of` returns an error are not committed. After `cancel`, no step runs any more.
    """

    def __init__(
        self,
        in_force: PlanInForce,
        error_of: Callable[[Transition], str | None] = lambda _: None,
        *,
        name: str = "0",
        resources: Resources | None = None,
        ledgers: DeviceLedgers | None = None,
        step: float = 0.0,
        before: Callable[[str], None] = lambda action: None,
        swap_buffer: int = LAYER["int8"],
    ):
        plan, self.resources = in_force.instance(name), resources or machine(len(in_force.instance(name).blocks) - 2)
        self.now, self.in_force, self.error_of = 0.0, in_force, error_of
        self.started: list[Sequence[Transition]] = []
        self.failures: list[Exception] = []
        self.instance = FakeInstance(plan, self.resources, lambda: self._time, before)
        self.ledgers = ledgers or ledgers_of(Plan(1, (plan,)), self.resources, swap_buffer)
        self.waits = 0  # that the procedure has had
        self._reconfiguration = Reconfiguration(
            name=name,
            instance=self.instance,
            in_force=in_force,
            ledgers=self.ledgers,
            entries=lambda plan: entries_of(plan, self.resources, swap_buffer),
            facts=PlanFacts(fields_of),
            now=lambda: self._time,
        )
        self._step, self._cancelled = step, False
        self._time = self._due = 0.0  # of the procedure, and of the end of what it waits for
        self._procedure: Waits[None] | None = None
        self._wait: Any = None
        self._uncommitted: deque[Transition] = deque()
        self._outcomes: list[Outcome] = []

    @property
    def busy(self) -> bool:
        self.advance()
        return self._procedure is not None

    def start(self, transitions: Sequence[Transition]) -> None:
        assert not self.busy
        self.started.append(transitions)
        self._uncommitted = deque(transitions)
        self._time = self._due = self.now if self.now < math.inf else self._time
        self._wait, self._procedure = None, self._reconfiguration.carry_out(transitions, self._report)
        self.advance()

    def poll(self) -> Sequence[Outcome]:
        self.advance()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def cancel(self) -> None:
        """Let every later wait for steps raise `Cancelled`."""
        self._cancelled = True

    def next_event(self) -> float:
        """Return when the procedure goes on; infinity if none runs."""
        return math.inf if self._procedure is None else self._due

    def advance(self) -> None:
        """Let the procedure go on with whatever has happened until `now`."""
        while self._procedure is not None and self._due <= self.now:
            self._time = self._due
            try:
                value, error = self._waited(), None
            except Exception as failure:
                value, error = None, failure
            try:
                procedure = self._procedure
                self._wait = procedure.send(value) if error is None else procedure.throw(error)
            except StopIteration:
                self._procedure = None
                return
            self.waits += 1
            self._due = self._end_of(self._wait)

    def _waited(self) -> float | None:
        """Return the value of the wait that has ended."""
        match self._wait:
            case BetweenSteps() | StepsEnded() if self._cancelled:
                raise Cancelled("the engine is closing")
            case BetweenSteps():
                if error := self.error_of(self._uncommitted[0]):
                    raise Broken(error)
                version = self.in_force.version
                self._wait.function()
                committed = self.in_force.version - version
                self._uncommitted = deque(islice(self._uncommitted, committed, None))
                return self._next_boundary()
        return None

    def _end_of(self, wait: Any) -> float:
        match wait:
            case Sleep():
                return max(wait.until, self._time)
            case BetweenSteps():
                return self._next_boundary()
            case _:
                return max(wait.fence, self._time)

    def _next_boundary(self) -> float:
        """Return when the step that runs now ends."""
        return (math.floor(self._time / self._step) + 1) * self._step if self._step else self._time

    def _report(self, outcome: Outcome, failure: Exception | None) -> None:
        self._outcomes.append(outcome)
        if failure is not None:
            self.failures.append(failure)


def actuators_of(
    in_force: PlanInForce, error_of: Callable[[Transition], str | None] = lambda _: None, **options: Any
) -> dict[str, VirtualActuator]:
    """Return an actuator for each instance of a plan."""
    names = [instance.name for instance in in_force.plan.instances]
    return {name: VirtualActuator(in_force, error_of, name=name, **options) for name in names}


Factor = Callable[[str, int], float]  # (precision, tokens of a step) -> time as a multiple of that in full precision


@dataclass(frozen=True)
class FakeCosts:
    """A cost model in which a layer's time is a multiple of that in full precision, however many tokens a step has."""

    factor: Factor
    step: float = 0.05  # s in full precision

    def of(self, instance: InstancePlan) -> "FakeCost":
        return FakeCost(self, instance)


class FakeCost:
    """The fake times of the steps of one plan."""

    def __init__(self, costs: FakeCosts, instance: InstancePlan):
        self._costs = costs
        self._layers = Counter(instance.layer_precisions)

    def seconds(self, load: StepLoad) -> float:
        factor = self._costs.factor
        total = sum(count * factor(precision, load.tokens) for precision, count in self._layers.items())
        return self._costs.step * total / self._layers.total()


def costs_of(speedup: float) -> FakeCosts:
    """Return the costs of steps that are `speedup` times as fast if all layers have fewer bits."""
    return FakeCosts(lambda precision, _: 1.0 if precision == "bfloat16" else 1 / speedup)


@dataclass
class Fluid:
    """An engine as a fluid: sequences arrive at a rate, wait for pages and slots, run, and leave.

    If all layers have fewer bits, all of it is `speedup` times as fast. The cost model that policies believe may expect
    another factor.
    """

    max_seqs: int = 64
    pages_each: int = 10
    seconds_each: float = 5.0  # of service in full precision
    tokens_each: int = 100
    prompt_each: int = 50  # tokens
    speedup: float = 1.6
    believed: float | None = None  # the speedup that is expected; None: the true one
    queue: deque[list[float]] = field(default_factory=deque)  # [time of arrival, sequences]
    waiting: float = 0.0
    running: float = 0.0
    started: float = 0.0
    finished: float = 0.0
    busy: float = 0.0  # s
    expected: float = 0.0  # s
    ttft: list[float] = field(default_factory=lambda: [0.0] * (len(TIME_BOUNDS) + 1))  # sequences, by time

    def costs(self) -> FakeCosts:
        """Return the costs that policies believe."""
        return costs_of(self.speedup if self.believed is None else self.believed)

    def capacity(self, pages: int) -> float:
        """Return the sequences per second that full precision can serve with `pages` pages."""
        return min(self.max_seqs, (pages - 1) / self.pages_each) / self.seconds_each

    def step(self, now: float, seconds: float, rate: float, instance: InstancePlan) -> Snapshot:
        """Advance the state by `seconds`, and return the snapshot afterwards."""
        self._serve(seconds, instance)
        if rate > 0:
            self.queue.append([now, rate * seconds])
            self.waiting += rate * seconds
        self._admit(now, instance)
        waits = bool(self.queue) and self.waiting >= 0.5
        return Snapshot(
            time=now,
            num_running=round(self.running),
            num_waiting=max(1, round(self.waiting)) if waits else 0,
            waiting_tokens=round(self.waiting * self.prompt_each) if waits else 0,
            oldest_wait=now - self.queue[0][0] if waits else 0.0,
            kv_pages_total=instance.kv_pages - 1,
            kv_pages_used=min(instance.kv_pages - 1, round(self.running * self.pages_each)),
            finished=int(self.finished),
            generated_tokens=int(self.finished * self.tokens_each),
            prefill_tokens=int(self.started * self.prompt_each),
            first_tokens=tuple(map(int, self.ttft)),
            busy_seconds=self.busy,
            expected_seconds=self.expected,
        )

    def _serve(self, seconds: float, instance: InstancePlan) -> None:
        speed, believed = self._speed(self.speedup, instance), self._speed(self.believed or self.speedup, instance)
        done = min(self.running, self.running / self.seconds_each * speed * seconds)
        if self.running >= 0.5:
            self.busy += seconds
            self.expected += seconds * speed / believed
        self.running -= done
        self.finished += done

    def _speed(self, speedup: float, instance: InstancePlan) -> float:
        share = sum(p != "bfloat16" for p in instance.layer_precisions) / len(instance.layer_precisions)
        return 1 / (1 + (1 / speedup - 1) * share)

    def _admit(self, now: float, instance: InstancePlan) -> None:
        slots = self.max_seqs if instance.max_num_seqs is None else min(self.max_seqs, instance.max_num_seqs)
        room = max(0.0, min(slots, (instance.kv_pages - 1) / self.pages_each) - self.running)
        while self.queue and room > 0:
            taken = min(room, self.queue[0][1])
            self.ttft[bisect_left(TIME_BOUNDS, now - self.queue[0][0])] += taken
            self.queue[0][1] -= taken
            self.started, self.running = self.started + taken, self.running + taken
            self.waiting, room = max(0.0, self.waiting - taken), room - taken
            if self.queue[0][1] <= 1e-9:
                self.queue.popleft()


def swaps(transitions: Sequence[Transition], precision: str) -> list[str]:
    """Return the blocks that change to a precision."""
    return [t.block for t in transitions if isinstance(t, SwapPrecision) and t.after == precision]
