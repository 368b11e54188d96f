"""Transitions in virtual time: the real engine core and step loop, on a device that only counts seconds."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.control import (
    InstancePlan,
    Outcome,
    Plan,
    PlanInForce,
    ResizeKVPool,
    Resources,
    SwapPrecision,
    Transition,
)
from jaxserve.control.controller import Controller
from jaxserve.control.diff import diff
from jaxserve.control.policies.fixed import ManualPolicy
from jaxserve.control.reconfigure import SHRINK_PATIENCE, SHRINK_RETRY, PlanFacts
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
from jaxserve.sim.driver import Agenda
from jaxserve.sim.hardware import Link
from jaxserve.sim.links import Priority, SharedLinks
from jaxserve.telemetry import EngineMetrics
from tests.sim.devices import PendingStep, VirtualDevice
from tests.support.control import LAYER, MB, PAGE, entries_of, fields_of, home_plan, ledgers_of, machine

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
        self.occupied: list[float] = []  # s that the device did other work than steps
        self.set_plan(plan)

    def occupy(self, seconds: float) -> None:
        self.occupied.append(seconds)

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
    """Instances on machines of their own, their actuators, and the virtual time of all."""

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
        """Start with ledgers that have `exchange` bytes as a swap buffer, and leave `spare` bytes free.

        `kept` are the precisions in which layers are pinned on the host.
        """
        self.clock = VirtualClock()
        resources: Resources = machine(LAYERS, home_pages=PAGES, in_place=kept)
        self.resources = replace(resources, budget=resources.budget + spare)
        self.home = home_plan(LAYERS, pages=PAGES, dp=dp)
        self.in_force, self.agenda = PlanInForce(self.home), Agenda(self.clock)
        self.instances = [self._instance(number) for number in range(dp)]
        self.links = [SharedLinks({"pcie": Link(bandwidth, 0.0)}) for _ in range(dp)]
        self.ledgers = ledgers_of(self.home, self.resources, exchange)
        self.actuators = {
            plan.name: SimActuator(
                plan.name,
                instance,
                plan,
                self.in_force,
                self.clock,
                self.agenda,
                links,
                "pcie",
                ledgers=self.ledgers,
                entries=lambda plan: entries_of(plan, self.resources, exchange),
                facts=PlanFacts(fields_of),
                compile_seconds=compile_seconds,
                warm=warm,
            )
            for plan, instance, links in zip(self.home.instances, self.instances, self.links, strict=True)
        }
        self.controlled, self.requests = False, 0
        self.outcomes: list[Outcome] = []
        self.ended: list[float] = []  # time (s) of each outcome

    def _instance(self, number: int) -> ServedInstance:
        pages = PagePool(PAGES, caching=False, min_pages=self.resources.min_pages, max_pages=self.resources.max_pages)
        scheduler = Scheduler(SchedulerLimits(4, 4, 16, 16), pages, PageTable(4, 64))
        plan = self.home.instances[number]
        core = EngineCore(scheduler, INFO, None, EngineMetrics("model"), plan_fields=fields_of(plan, 1), index=number)
        return ServedInstance(core, PlannedDevice(self.clock, self.run_until), plan)

    @property
    def plan(self) -> Plan:
        return self.in_force.plan

    @property
    def busy(self) -> bool:
        return any(actuator.busy for actuator in self.actuators.values())

    def entry(self, name: str) -> int:
        """Return the first device's ledger entry."""
        return self.ledgers[0].entries[name]

    def add(self, *, tokens: int, prompt: int = 16, number: int = 0) -> None:
        core = self.instances[number].core
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        core.add(Request(str(self.requests), (1,) * prompt, params, self.clock.time))
        self.requests += 1

    def run_until(self, time: float) -> None:
        """Handle the events up to `time`, and set the clock to it."""
        while (due := self.agenda.next_event()) <= time:
            assert due >= self.clock.time
            self.clock.time = due
            self.agenda.advance()
            self.collect_outcomes()
        self.clock.time = max(self.clock.time, time)

    def start(self, *transitions: Transition) -> None:
        for name, actuator in self.actuators.items():
            if own := [transition for transition in transitions if transition.instance == name]:
                actuator.start(own)
        self.collect_outcomes()

    def collect_outcomes(self) -> None:
        """Collect the outcomes of all actuators, unless a controller does."""
        for device in range(len(self.instances)):
            assert self.ledgers[device].used <= self.ledgers[device].budget
        if self.controlled:
            return
        outcomes = [outcome for actuator in self.actuators.values() for outcome in actuator.poll()]
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
        assert not self.busy
        return [outcome.seconds for outcome in self.outcomes]

    def transitions_to(self, target: Plan) -> tuple[Transition, ...]:
        return diff(self.plan.instances[0], target.instances[0], self.resources)

    def swap(self, layer: int, precision: str, *, before: str = "bfloat16", instance: int = 0) -> SwapPrecision:
        sizes, seconds = (LAYER[before], LAYER[precision]), LAYER[precision] / self.resources.copy_rate
        return SwapPrecision(str(instance), f"layers.{layer}", before, precision, (instance,), *sizes, seconds)

    def resize(self, after: int, *, before: int = PAGES, instance: int = 0) -> ResizeKVPool:
        change = (after - before) * PAGE
        return ResizeKVPool(str(instance), before, after, change, max(0, -change) / self.resources.copy_rate)


# -- how long it takes


def test_a_swap_takes_the_seconds_that_were_estimated() -> None:
    world = World()
    assert world.carry_out(world.swap(1, "int8")) == pytest.approx([0.010])  # 10 MB at 1000 MB/s
    assert world.plan.instances[0].layer_precisions == ("bfloat16", "int8", "bfloat16", "bfloat16")
    assert world.instances[0].plans[-1][1] == world.plan.instances[0]
    assert world.instances[0].core.snapshot.plan_version == world.plan.version == 2
    assert world.instances[0].core.salt == "0-0:bfloat16,1-1:int8,2-3:bfloat16"


def test_it_takes_what_its_bytes_take_on_a_slower_link() -> None:
    world = World(bandwidth=100 * MB)
    assert world.carry_out(world.swap(1, "int8"), world.swap(2, "int4")) == pytest.approx([0.100, 0.050])


def test_a_layer_that_is_kept_is_used_at_once_and_gives_all_of_the_one_before() -> None:
    world = World(bandwidth=100 * MB, exchange=0, kept=("int8", "int4"))
    world.links[0].start(0.0, "pcie", 30 * MB, Priority.WEIGHTS)
    small = world.home.with_precisions("0", {"layers.1": "int4"})
    assert world.carry_out(*world.transitions_to(small.with_kv_pages("0", PAGES + 40))) == [0.0, 0.0]
    assert (world.entry("weights"), world.entry("kv")) == (3 * LAYER["bfloat16"], (PAGES + 40) * PAGE)
    assert world.carry_out(*world.transitions_to(world.home)) == pytest.approx([0.0, 0.2]), "20 MB at 100 MB/s"
    assert world.ledgers[0].used == world.ledgers[0].budget


def test_layers_that_are_kept_change_between_the_same_two_steps() -> None:
    world = World(bandwidth=100 * MB, exchange=0, kept=("int4",))
    small = world.home.with_precisions("0", {"layers.1": "int4", "layers.2": "int4"})
    assert world.carry_out(*world.transitions_to(small)) == [0.0, 0.0]
    assert world.carry_out(*world.transitions_to(world.home)) == pytest.approx([0.4, 0.4]), "2 x 20 MB at 100 MB/s"
    assert [plan.layer_precisions.count("int4") for _, plan in world.instances[0].plans] == [0, 2, 0]


def test_other_transfers_on_the_link_come_first_or_have_their_share() -> None:
    world = World(bandwidth=100 * MB)
    world.links[0].start(0.0, "pcie", 30 * MB, Priority.KV)
    assert world.carry_out(world.swap(1, "int8")) == pytest.approx([0.400])
    world.links[0].start(world.clock.time, "pcie", 30 * MB, Priority.WEIGHTS)
    assert world.carry_out(world.swap(2, "int8")) == pytest.approx([0.200])


def test_a_transfer_that_starts_later_delays_it_too() -> None:
    world = World(bandwidth=100 * MB)
    world.start(world.swap(1, "int8"))
    world.run_until(0.05)
    world.links[0].start(0.05, "pcie", 20 * MB, Priority.ACTIVATIONS)
    world.run_until(10.0)
    assert world.ended == pytest.approx([0.300])


def test_links_that_another_part_drives_are_no_obstacle() -> None:
    world = World(bandwidth=100 * MB)
    world.start(world.swap(1, "int8"))
    other = world.links[0].start(0.0, "pcie", 10 * MB, Priority.KV)
    for time in (0.1, 0.2):
        world.links[0].advance(time)
        world.run_until(time)
    assert other.end == pytest.approx(0.1)
    world.run_until(1.0)
    assert world.ended == pytest.approx([0.2])


def test_a_signature_is_compiled_once_in_each_instance() -> None:
    world = World(dp=2, compile_seconds=3.0, warm=[("layers", "int4")])
    first = [world.carry_out(swap)[0] for swap in (world.swap(0, "int8"), world.swap(1, "int8"), world.swap(2, "int4"))]
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
    assert world.entry("kv") == 151 * PAGE
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
    assert instance.plans[-1] == (pytest.approx(0.01), world.plan.instances[0])
    assert (world.entry("weights"), world.outcomes) == (full, [])
    instance.step()  # the second step begins, until 0.2, and the first one ends
    world.run_until(0.1)
    assert (world.entry("weights"), world.ended) == (full - 10 * MB, [0.1])
    instance.step()  # the third step begins, until 0.3; the second swap is prepared meanwhile, and waits
    assert (world.clock.time, world.plan.version) == (0.2, 2)
    instance.step()  # the second swap is committed before the fourth step, and freed when the third step has ended
    assert (world.clock.time, world.plan.version) == (pytest.approx(0.3), 3)
    assert world.entry("weights") == full - 10 * MB
    world.run_until(world.clock.time)
    assert world.entry("weights") == full - 20 * MB
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
    world.run_until(0.0)
    assert scheduler.pages.num_pages == 100, "at once"
    kv = world.entry("kv")
    instance.step()
    world.run_until(0.1)
    assert (world.entry("kv"), world.busy) == (kv, True), "the step dispatched before has ended"
    instance.step()
    world.run_until(0.2)
    assert (world.entry("kv"), world.busy) == (kv - PAGE, False)


def test_any_number_of_transitions_may_end_at_the_same_time() -> None:
    world = World(spare=10 * PAGE)
    world.carry_out(*[world.resize(111), world.resize(PAGES, before=111)] * 2000)
    assert world.ended == [0.0] * 4000


# -- failures


def unchanged(world: World) -> bool:
    """Return whether everything is as at the start, with no transition or transfer in progress."""
    (instance,) = world.instances
    home = {"weights": LAYERS * LAYER["bfloat16"], "kv": PAGES * PAGE}
    return (
        world.plan == world.home
        and instance.plans[-1][1] == world.home.instances[0]
        and instance.core.scheduler.pages.num_pages == PAGES
        and world.ledgers[0].entries.items() >= home.items()
        and not world.busy
        and world.links[0].next_event() == world.agenda.next_event() == float("inf")
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
    assert (world.busy, world.outcomes, pages.num_pages) == (True, [], PAGES)
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


def test_steps_wait_for_the_copy_where_a_variant_has_no_room_beside_the_layer_in_use() -> None:
    world = World(exchange=0, spare=LAYER["int4"])
    world.carry_out(world.swap(0, "int8"))
    assert world.outcomes[0].error is None
    (instance,) = world.instances
    assert instance.occupied == pytest.approx([0.010])  # 10 MB at 1000 MB/s
    world.carry_out(world.swap(1, "int4"))
    assert world.outcomes[0].error is None
    assert len(instance.occupied) == 1, "this one has room"
    assert [block.precision for block in world.plan.instances[0].blocks[1:3]] == ["int8", "int4"]


def test_a_transition_that_does_not_start_from_the_plan_fails() -> None:
    world = World()
    world.carry_out(world.swap(0, "int4", before="int8"))
    assert world.outcomes[0].error == "PlanError: layers.0 of instance 0 is bfloat16: the change starts from int8"
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
    while plans or world.busy or not instance.loop.idle:
        if plans and not world.busy:
            assert world.plan.instances == plan.instances
            precisions, pages = plans.pop(0)
            changes = {f"layers.{layer}": precision for layer, precision in enumerate(precisions)}
            target = plan.with_precisions("0", changes).with_kv_pages("0", pages)
            world.outcomes, pending = [], world.transitions_to(target)
            world.start(*pending)
        if instance.loop.idle:
            world.run_until(world.clock.time + 1.0)
        world.serve(steps=1)
        if not world.busy:
            done = [outcome.transition for outcome in world.outcomes if outcome.error is None]
            assert done == list(pending[: len(done)])
            assert len(world.outcomes) == len(pending) or world.outcomes[-1].error is not None
            for transition in done:
                plan = replace(plan.with_instance(transition.apply(plan.instances[0])), version=plan.version + 1)
            world.outcomes, pending = [], ()
            assert world.plan == plan
            assert world.ledgers[0].entries.items() >= entries_of(plan.instances[0], world.resources)[0].items()
            assert instance.core.scheduler.pages.num_pages == plan.instances[0].kv_pages
            assert instance.core.snapshot.plan_version == plan.version
    assert [instance.tokens[str(number)] for number in range(requests)] == tokens
    assert instance.core.scheduler.pages.used == 0


def test_a_controller_carries_out_a_plan_and_back() -> None:
    world = World()
    target = world.home.with_precisions("0", dict.fromkeys(("layers.0", "layers.1"), "int4")).with_kv_pages("0", 140)
    world.controlled = True
    controller = Controller(world.in_force, ManualPolicy(target), world.resources, world.actuators)
    world.add(tokens=40)
    for policy in (ManualPolicy(target), ManualPolicy(world.home)):
        controller.set_policy(policy)
        for _ in range(20):
            controller.tick(world.clock.time, {"0": world.instances[0].core.snapshot})
            world.serve(steps=1)
            world.run_until(world.clock.time + 0.01)
        assert policy.target is not None
        assert controller.plan.instances == policy.target.instances == world.plan.instances
        assert controller.plan.version == world.plan.version
    assert [decision.outcome for decision in controller.decisions] == ["done", "done"]
