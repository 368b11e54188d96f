"""Transitions in virtual time: the real engine core and step loop, on a device that only counts seconds."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.control import (
    DeviceLedgers,
    InstancePlan,
    Ledger,
    Outcome,
    Plan,
    ResizeKVPool,
    Resources,
    SwapPrecision,
    Transition,
)
from jaxserve.control.controller import Controller
from jaxserve.control.diff import apply, diff
from jaxserve.control.policies.fixed import ManualPolicy
from jaxserve.control.transitions import SHRINK_PATIENCE, SHRINK_RETRY
from jaxserve.core.clock import VirtualClock
from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.work import Work
from jaxserve.engine.client import ModelInfo
from jaxserve.engine.core import EngineCore
from jaxserve.engine.loop import StepLoop
from jaxserve.kvcache import PagePool, PageTable
from jaxserve.scheduler import Scheduler, SchedulerLimits
from jaxserve.sim.actuator import SimActuator
from jaxserve.sim.hardware import Link
from jaxserve.sim.links import Priority, SharedLinks
from jaxserve.telemetry import EngineMetrics, Snapshot
from tests.sim.devices import PendingStep, VirtualDevice
from tests.support.control import LAYER, MB, PAGE, home_plan, machine

LAYERS, PAGES = 4, 101
STEP = 0.1  # s
INFO = ModelInfo("model", max_model_len=256, vocab_size=1000, hidden_size=64, created=0)


class PlannedDevice(VirtualDevice):
    """A device with steps of `STEP` seconds, which records the plan of each step."""

    def __init__(self, clock: VirtualClock, wait_until: Callable[[float], None]):
        super().__init__(clock, lambda work: STEP, wait_until)
        self.plan: InstancePlan | None = None
        self.steps: list[tuple[float, InstancePlan]] = []  # the end (s) and the plan of each step

    def execute(self, work: Work) -> PendingStep:
        assert self.plan is not None
        pending = super().execute(work)
        self.steps.append((pending.end, self.plan))
        return pending


class ServedInstance:
    """An instance with a real `StepLoop`, which runs calls at once while no step is in progress."""

    def __init__(self, core: EngineCore, device: PlannedDevice, plan: InstancePlan):
        self.core, self.device = core, device
        self.loop = StepLoop(core, device, device.clock)
        self.loop.wake = self.run_calls
        self.stepping = False
        self.tokens: dict[str, int] = {}  # number of generated tokens by request
        self.plans: list[tuple[float, InstancePlan]] = []
        self.set_plan(plan)

    def call(self, function: Callable[[], None]) -> None:
        self.loop.call(function)

    def after_dispatched(self, function: Callable[[], None]) -> None:
        self.loop.after_dispatched(function)

    def set_plan(self, plan: InstancePlan) -> None:
        self.device.plan = plan
        self.plans.append((self.device.clock.time, plan))

    def run_calls(self) -> None:
        if not self.stepping:
            self.loop.run_calls()

    def step(self) -> None:
        self.stepping = True
        for output in self.loop.step():
            self.tokens[output.request_id] = self.tokens.get(output.request_id, 0) + len(output.outputs[0].token_ids)
        self.stepping = False
        if self.loop.idle:
            self.run_calls()


class World:
    """Instances on one machine, their actuator, and the virtual time of both."""

    def __init__(
        self,
        *,
        dp: int = 1,
        bandwidth: float = 10_000 * MB,
        compile_seconds: float = 0.0,
        warm: Sequence[tuple[str, str]] = (("layers", "int8"), ("layers", "int4")),
        exchange: int = LAYER["int8"],
        spare: int = 0,
        kept: tuple[str, ...] = (),
    ):
        """Start with a ledger that reserves `exchange` bytes as a swap buffer and leaves `spare` bytes free.

        `kept` are the precisions in which layers are pinned on the host.
        """
        self.clock = VirtualClock()
        self.resources: Resources = machine(LAYERS, home_pages=PAGES, in_place=kept)
        self.home = home_plan(LAYERS, pages=PAGES, dp=dp)
        self.links = SharedLinks({"pcie": Link(bandwidth, 0.0)})
        self.instances = [self._instance(number) for number in range(dp)]
        self.buffer = {"exchange": exchange} if exchange else {}
        used = exchange + sum(self.entries(self.home).values())
        self.ledgers = DeviceLedgers({device: Ledger(used + spare) for device in range(dp)})
        for number, instance in enumerate(self.home.instances):
            self.ledgers.update(str(number), self.device_entries(instance))
        self.actuator = SimActuator(
            self.home,
            self.instances,
            self.clock,
            self.links,
            ["pcie"] * dp,
            ledgers=self.ledgers,
            entries=self.device_entries,
            plan_fields=self.plan_fields,
            compile_seconds=compile_seconds,
            warm=warm,
        )
        self.controlled, self.requests = False, 0
        self.outcomes: list[Outcome] = []
        self.ended: list[float] = []  # time (s) of each outcome

    def _instance(self, number: int) -> ServedInstance:
        pages = PagePool(PAGES, caching=False, min_pages=self.resources.min_pages, max_pages=self.resources.max_pages)
        scheduler = Scheduler(SchedulerLimits(4, 4, 16, 16), pages, PageTable(4, 64))
        plan_fields = self.plan_fields(self.home, number)
        core = EngineCore(scheduler, INFO, None, EngineMetrics("model"), plan_fields=plan_fields, index=number)
        return ServedInstance(core, PlannedDevice(self.clock, self.run_until), self.home.instances[number])

    @property
    def ledger(self) -> Ledger:
        """The ledger of the fullest device."""
        return self.ledgers.fullest

    def device_entries(self, instance: InstancePlan) -> dict[int, dict[str, int]]:
        (stage,) = instance.stages
        return {stage.devices[0]: self.entries(Plan(0, (instance,))) | self.buffer}

    def entries(self, plan: Plan) -> dict[str, int]:
        """Return the entries of the first instance without the swap buffer."""
        entries = self.resources.stage_entries(plan.instances[0].stages[0])
        return {name: entries[name] for name in ("weights", "kv")}

    def plan_fields(self, plan: Plan, number: int) -> Snapshot:
        return Snapshot(plan_version=plan.version, kv_pages_total=plan.instances[number].kv_pages - 1)

    def add(self, *, tokens: int, prompt: int = 16, number: int = 0) -> None:
        core = self.instances[number].core
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        core.add(Request(str(self.requests), (1,) * prompt, params, self.clock.time))
        self.requests += 1

    def run_until(self, time: float) -> None:
        """Handle the actuator's events up to `time`, and set the clock to it."""
        while (due := self.actuator.next_event()) <= time:
            assert due >= self.clock.time
            self.clock.time = due
            self.actuator.advance(due)
            self.collect_outcomes()
        self.clock.time = max(self.clock.time, time)

    def start(self, *transitions: Transition) -> None:
        self.actuator.start(transitions)
        self.collect_outcomes()

    def collect_outcomes(self) -> None:
        """Collect the actuator's outcomes, unless a controller does."""
        assert self.ledger.used <= self.ledger.budget
        if self.controlled:
            return
        outcomes = self.actuator.poll()
        self.outcomes += outcomes
        self.ended += [self.clock.time] * len(outcomes)

    def serve(self, number: int = 0, *, steps: int = 10_000) -> None:
        """Step until the instance is idle, at most `steps` times."""
        instance = self.instances[number]
        while steps and not instance.loop.idle:
            instance.step()
            self.run_until(self.clock.time)
            steps -= 1

    def carry_out(self, *transitions: Transition) -> list[float]:
        """Carry transitions out while no step runs, and return the seconds of each."""
        self.outcomes, self.ended = [], []
        self.start(*transitions)
        self.run_until(self.clock.time + 1000.0)
        assert not self.actuator.busy
        return [outcome.seconds for outcome in self.outcomes]

    def transitions_to(self, target: Plan) -> tuple[Transition, ...]:
        return diff(self.actuator.plan, target, self.resources)

    def swap(self, layer: int, precision: str, *, before: str = "bfloat16", instance: int = 0) -> SwapPrecision:
        change = LAYER[before] - LAYER[precision]
        bytes_ = max(0, change), max(0, -change), LAYER[precision]
        seconds = LAYER[precision] / self.resources.copy_rate
        return SwapPrecision(instance, f"layers.{layer}", before, precision, *bytes_, seconds)

    def resize(self, after: int, *, before: int = PAGES, instance: int = 0) -> ResizeKVPool:
        change = (after - before) * PAGE
        seconds = max(0, -change) / self.resources.copy_rate
        return ResizeKVPool(instance, before, after, max(0, -change), max(0, change), max(0, change), seconds)


# -- how long it takes


def test_a_swap_takes_the_seconds_that_were_estimated() -> None:
    world = World()
    assert world.carry_out(world.swap(1, "int8")) == pytest.approx([0.010])  # 10 MB at 1000 MB/s
    assert world.actuator.plan.instances[0].layer_precisions == ("bfloat16", "int8", "bfloat16", "bfloat16")
    assert world.instances[0].plans[-1][1] == world.actuator.plan.instances[0]
    assert world.instances[0].core.snapshot.plan_version == world.actuator.plan.version == 2
    assert world.instances[0].core.salt == "0-0:bfloat16,1-1:int8,2-3:bfloat16"


def test_it_takes_what_its_bytes_take_on_a_slower_link() -> None:
    world = World(bandwidth=100 * MB)
    assert world.carry_out(world.swap(1, "int8"), world.swap(2, "int4")) == pytest.approx([0.100, 0.050])


def test_a_layer_that_is_kept_is_used_at_once_and_gives_all_of_the_one_before() -> None:
    world = World(bandwidth=100 * MB, exchange=0, kept=("int8", "int4"))
    world.links.start(0.0, "pcie", 30 * MB, Priority.WEIGHTS)
    small = world.home.with_precisions("0", {"layers.1": "int4"})
    assert world.carry_out(*world.transitions_to(small.with_kv_pages("0", PAGES + 40))) == [0.0, 0.0]
    assert world.ledger.entries == {"weights": 3 * LAYER["bfloat16"], "kv": (PAGES + 40) * PAGE}
    assert world.carry_out(*world.transitions_to(world.home)) == pytest.approx([0.0, 0.2]), "20 MB at 100 MB/s"
    assert world.ledger.used == world.ledger.budget


def test_layers_that_are_kept_change_between_the_same_two_steps() -> None:
    world = World(bandwidth=100 * MB, exchange=0, kept=("int4",))
    small = world.home.with_precisions("0", {"layers.1": "int4", "layers.2": "int4"})
    assert world.carry_out(*world.transitions_to(small)) == [0.0, 0.0]
    assert world.carry_out(*world.transitions_to(world.home)) == pytest.approx([0.4, 0.4]), "2 x 20 MB at 100 MB/s"
    assert [plan.layer_precisions.count("int4") for _, plan in world.instances[0].plans] == [0, 2, 0]


def test_other_transfers_on_the_link_come_first_or_have_their_share() -> None:
    world = World(bandwidth=100 * MB)
    world.links.start(0.0, "pcie", 30 * MB, Priority.KV)
    assert world.carry_out(world.swap(1, "int8")) == pytest.approx([0.400])
    world.links.start(world.clock.time, "pcie", 30 * MB, Priority.WEIGHTS)
    assert world.carry_out(world.swap(2, "int8")) == pytest.approx([0.200])


def test_a_transfer_that_starts_later_delays_it_too() -> None:
    world = World(bandwidth=100 * MB)
    world.start(world.swap(1, "int8"))
    world.run_until(0.05)
    world.links.start(0.05, "pcie", 20 * MB, Priority.ACTIVATIONS)
    world.run_until(10.0)
    assert world.ended == pytest.approx([0.300])


def test_links_that_another_part_drives_are_no_obstacle() -> None:
    world = World(bandwidth=100 * MB)
    world.start(world.swap(1, "int8"))
    other = world.links.start(0.0, "pcie", 10 * MB, Priority.KV)
    for time in (0.1, 0.2):
        world.clock.time = time
        world.links.advance(time)
    assert other.end == pytest.approx(0.1)
    assert world.actuator.next_event() == 0.2
    world.run_until(1.0)
    assert world.ended == pytest.approx([0.2])


def test_a_signature_is_compiled_once_in_each_instance() -> None:
    world = World(dp=2, compile_seconds=3.0, warm=[("layers", "int4")])
    first = world.carry_out(world.swap(0, "int8"), world.swap(1, "int8"), world.swap(2, "int4"))
    assert first == pytest.approx([3.010, 0.010, 0.005])
    assert world.carry_out(world.swap(0, "bfloat16", before="int8")) == pytest.approx([0.020]), "it ran at the start"
    assert world.carry_out(world.swap(0, "int8")) == pytest.approx([0.010])
    assert world.carry_out(world.swap(0, "int8", instance=1)) == pytest.approx([3.010])


def test_it_is_compiled_when_it_has_been_copied() -> None:
    world = World(bandwidth=10 * MB, compile_seconds=3.0, warm=())
    assert world.carry_out(world.swap(0, "int8")) == pytest.approx([4.0])


def test_a_pool_grows_in_no_time() -> None:
    world = World(spare=50 * PAGE)
    assert world.carry_out(world.resize(151)) == [0.0]
    assert world.instances[0].core.scheduler.pages.num_pages == 151
    assert world.ledger.entries["kv"] == 151 * PAGE
    assert world.instances[0].core.snapshot.kv_pages_total == 150


def test_a_pool_shrinks_in_the_time_that_the_pages_take_which_have_to_move() -> None:
    world = World()
    pages = world.instances[0].core.scheduler.pages
    assert world.carry_out(world.resize(91)) == [0.0], "no page is in use"
    held = pages.allocate(90)
    pages.release(held[:70])  # the last 20 pages remain in use, and 10 of them have to move
    assert world.carry_out(world.resize(51, before=91)) == pytest.approx([20 * PAGE / (1000 * MB)])
    pages.release(range(1, 21))
    assert world.carry_out(world.resize(41, before=51)) == [0.0]


# -- order of commits and releases


def test_it_is_committed_between_two_steps_and_frees_its_memory_when_those_dispatched_before_have_ended() -> None:
    world = World()
    (instance,), full = world.instances, LAYERS * LAYER["bfloat16"]
    world.add(tokens=10)
    instance.step()  # the first step is on the device until 0.1
    world.start(world.swap(1, "int8"), world.swap(2, "int8"))
    world.run_until(0.05)
    assert instance.plans[-1] == (pytest.approx(0.01), world.actuator.plan.instances[0])
    assert (world.ledger.entries["weights"], world.outcomes) == (full, [])
    instance.step()  # the second step begins, until 0.2, and the first one ends
    world.run_until(0.1)
    assert (world.ledger.entries["weights"], world.ended) == (full - 10 * MB, [0.1])
    instance.step()  # the third step begins, until 0.3; the second swap is prepared meanwhile, and waits
    assert (world.clock.time, world.actuator.plan.version) == (0.2, 2)
    instance.step()  # the second swap is committed before the fourth step, and freed when the third step has ended
    assert (world.clock.time, world.actuator.plan.version) == (pytest.approx(0.3), 3)
    assert world.ledger.entries["weights"] == full - 10 * MB
    world.run_until(world.clock.time)
    assert world.ledger.entries["weights"] == full - 20 * MB
    assert world.ended == pytest.approx([0.1, 0.3])
    assert [o.seconds for o in world.outcomes] == pytest.approx([0.1, 0.2])
    quantised = [plan.layer_precisions.count("int8") for _, plan in instance.device.steps]
    assert quantised == [0, 1, 1, 2]


def test_pages_move_after_the_steps_on_the_device_and_come_back_after_the_one_behind_them() -> None:
    world = World()
    world.add(tokens=30)
    (instance,) = world.instances
    scheduler = instance.core.scheduler
    scheduler.pages.allocate(90)  # so that the request's page is the 91st, and has to move
    instance.step()
    world.start(world.resize(100))
    assert scheduler.pages.num_pages == 100, "at once"
    kv = world.ledger.entries["kv"]
    instance.step()
    world.run_until(0.1)
    assert (world.ledger.entries["kv"], world.actuator.busy) == (kv, True), "the step dispatched before has ended"
    instance.step()
    world.run_until(0.2)
    assert (world.ledger.entries["kv"], world.actuator.busy) == (kv - PAGE, False)


def test_any_number_of_transitions_may_end_at_the_same_time() -> None:
    world = World(spare=10 * PAGE)
    world.carry_out(*[world.resize(111), world.resize(PAGES, before=111)] * 2000)
    assert world.ended == [0.0] * 4000


# -- failures


def unchanged(world: World) -> bool:
    """Return whether everything is as at the start, with no transition or transfer in progress."""
    (instance,) = world.instances
    return (
        world.actuator.plan == world.home
        and instance.plans[-1][1] == world.home.instances[0]
        and instance.core.scheduler.pages.num_pages == PAGES
        and {name: world.ledger.entries[name] for name in ("weights", "kv")} == world.entries(world.home)
        and not world.actuator.busy
        and world.links.next_event() == world.actuator.next_event() == float("inf")
    )


def test_pages_in_use_keep_the_old_plan_and_the_rest_is_dropped() -> None:
    world = World()
    world.instances[0].core.scheduler.pages.allocate(95)
    world.carry_out(world.resize(51), world.swap(0, "int8"))
    (outcome,) = world.outcomes
    assert outcome.transition == world.resize(51)
    assert outcome.error == "PagesInUse: 101 pages cannot shrink by 50: only 5 are not in use"
    assert outcome.seconds == pytest.approx(SHRINK_PATIENCE, abs=SHRINK_RETRY)
    assert unchanged(world)
    assert world.carry_out(world.swap(0, "int8")) == pytest.approx([0.010]), "it may try again"


def test_a_smaller_pool_waits_a_little_for_pages_in_use() -> None:
    world = World()
    pages = world.instances[0].core.scheduler.pages
    taken = pages.allocate(95)
    world.start(world.resize(51))
    world.run_until(SHRINK_PATIENCE / 2)
    assert (world.actuator.busy, world.outcomes, pages.num_pages) == (True, [], PAGES)
    pages.release(taken)
    world.run_until(SHRINK_PATIENCE)
    (outcome,) = world.outcomes
    assert (outcome.error, pages.num_pages) == (None, 51)
    assert outcome.seconds == pytest.approx(SHRINK_PATIENCE / 2, abs=2 * SHRINK_RETRY)


def test_what_the_ledger_has_no_room_for_is_not_begun() -> None:
    world = World()
    assert world.carry_out(world.resize(PAGES + 1)) == [0.0]
    (outcome,) = world.outcomes
    assert outcome.error is not None
    assert outcome.error.startswith("MemoryBudgetError: ")
    assert unchanged(world)


def test_a_layer_needs_its_room_only_where_the_one_in_use_leaves_it() -> None:
    world = World(spare=10 * PAGE)
    world.carry_out(world.swap(0, "int4"), world.resize(PAGES + 40), world.swap(0, "bfloat16", before="int4"))
    assert [outcome.error is None for outcome in world.outcomes] == [True, True, False], "pages took its place"
    world.carry_out(world.resize(PAGES + 10, before=PAGES + 40), world.swap(0, "bfloat16", before="int4"))
    assert [outcome.error for outcome in world.outcomes] == [None, None]


def test_a_variant_needs_room_beside_the_layer_in_use() -> None:
    world = World(exchange=0, spare=LAYER["int4"])
    world.carry_out(world.swap(0, "int8"))
    assert world.outcomes[0].error is not None
    assert unchanged(world)
    world.carry_out(world.swap(0, "int4"))
    assert world.outcomes[0].error is None


def test_a_transition_that_does_not_start_from_the_plan_fails() -> None:
    world = World()
    world.carry_out(world.swap(0, "int4", before="int8"))
    assert world.outcomes[0].error == "PlanError: layers.0 of plan 1 is bfloat16: the change starts from int8"
    assert unchanged(world)


def test_a_bug_is_not_an_outcome() -> None:
    world = World()
    world.start(world.swap(0, "int8"))
    world.instances[0].core.replan = lambda *_: 1 / 0  # type: ignore[assignment, return-value, method-assign]
    with pytest.raises(ZeroDivisionError):
        world.run_until(1.0)


# -- as a whole

targets = st.lists(
    st.tuples(st.tuples(*[st.sampled_from(sorted(LAYER))] * LAYERS), st.integers(20, 130)), min_size=1, max_size=6
)


@settings(max_examples=40)
@given(targets, st.integers(0, 8), st.sampled_from([20 * MB, 500 * MB, 10_000 * MB]), st.integers(0, 2**16))
def test_any_sequence_of_plans_under_load(wanted: list, requests: int, bandwidth: float, seed: int) -> None:
    """The plan in force is that of the ended transitions, the ledger is never exceeded, and requests get all tokens."""
    world, rng = World(bandwidth=bandwidth), np.random.default_rng(seed)
    (instance,) = world.instances
    tokens = rng.integers(1, 100, requests).tolist()
    for count in tokens:
        world.add(tokens=count, prompt=int(rng.integers(1, 150)))
    plan, plans = world.home, list(wanted)
    while plans or world.actuator.busy or not instance.loop.idle:
        if plans and not world.actuator.busy:
            assert world.actuator.plan.instances == plan.instances
            precisions, pages = plans.pop(0)
            changes = {f"layers.{layer}": precision for layer, precision in enumerate(precisions)}
            target = plan.with_precisions("0", changes).with_kv_pages("0", pages)
            world.outcomes, pending = [], world.transitions_to(target)
            world.start(*pending)
        if instance.loop.idle:
            world.run_until(world.clock.time + 1.0)
        world.serve(steps=1)
        if not world.actuator.busy:
            done = [outcome.transition for outcome in world.outcomes if outcome.error is None]
            assert done == list(pending[: len(done)])
            assert len(world.outcomes) == len(pending) or world.outcomes[-1].error is not None
            plan = apply(plan, done)
            world.outcomes, pending = [], ()
            assert world.actuator.plan == plan
            assert world.ledger.entries.items() >= world.entries(plan).items()
            assert instance.core.scheduler.pages.num_pages == plan.instances[0].kv_pages
            assert instance.core.snapshot.plan_version == plan.version
    assert [instance.tokens[str(number)] for number in range(requests)] == tokens
    assert instance.core.scheduler.pages.used == 0


def test_a_controller_carries_out_a_plan_and_back() -> None:
    world = World()
    target = world.home.with_precisions("0", dict.fromkeys(("layers.0", "layers.1"), "int4")).with_kv_pages("0", 140)
    world.controlled = True
    controller = Controller(world.home, ManualPolicy(target), world.resources, world.actuator)
    world.add(tokens=40)
    for policy in (ManualPolicy(target), ManualPolicy(world.home)):
        controller.set_policy(policy)
        for _ in range(20):
            controller.tick(world.clock.time, [world.instances[0].core.snapshot])
            world.serve(steps=1)
            world.run_until(world.clock.time + 0.01)
        assert policy.target is not None
        assert controller.plan.instances == policy.target.instances == world.actuator.plan.instances
        assert controller.plan.version == world.actuator.plan.version
    assert [decision.outcome for decision in controller.decisions] == ["done", "done"]
