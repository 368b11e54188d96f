"""The procedure that carries out transitions: batches, memory, failures, waits and outcomes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.control import InstancePlan, LimitSequences, Plan, PlanInForce
from jaxserve.control.diff import diff
from jaxserve.control.reconfigure import SHRINK_PATIENCE, SHRINK_RETRY
from tests.support.control import LAYER, MB, PAGE, Broken, VirtualActuator, home_plan, ledgers_of, machine

LAYERS, PAGES = 16, 401
STEP = 0.1  # s


class World(VirtualActuator):
    """One instance, its actuator and its virtual time, with a log of actions. It checks the memory at every action."""

    def __init__(
        self,
        *,
        layers: int = LAYERS,
        pp: int = 1,
        step: float = 0.0,
        swap_buffer: int = LAYER["int8"],
        spare: int = 0,
        in_place: tuple[str, ...] = (),
        fails: Callable[[str], bool] = lambda action: False,
    ):
        """Leave `spare` bytes of every device free. Actions for which `fails` returns true raise."""
        resources = machine(layers, home_pages=PAGES, pp=pp, in_place=in_place)
        resources = replace(resources, budget=resources.budget + spare)
        self.home = home_plan(layers, pages=PAGES, pp=pp).instances[0]
        self.actions: list[tuple[float, str]] = []
        self.fails = fails
        super().__init__(
            PlanInForce(Plan(1, (self.home,))),
            resources=resources,
            step=step,
            before=self.act,
            swap_buffer=swap_buffer,
            ledgers=ledgers_of(Plan(1, (self.home,)), resources, swap_buffer),
        )

    @property
    def plan(self) -> InstancePlan:
        return self.in_force.instance("0")

    def act(self, action: str) -> None:
        self.check_memory()
        self.actions.append((self._time, action))
        if self.fails(action):
            raise Broken(action)

    def check_memory(self) -> None:
        """Check that what is resident is booked, and that no more is booked than there is."""
        for device, resident in self.instance.resident_bytes().items():
            ledger = self.ledgers[device]
            assert resident + ledger.entries["fixed"] <= ledger.used <= ledger.budget

    def check_rest(self) -> None:
        """Check that ledger, plan in force and instance agree, and that nothing else is resident."""
        self.check_memory()
        plan, instance = self.plan, self.instance
        assert not self.busy
        assert instance.plan == plan
        assert [(layer.block, layer.precision) for layer in instance.layers.values()] == [
            (block.block, block.precision) for block in plan.blocks
        ]
        assert instance.resident == set(instance.layers.values())
        assert instance.core.scheduler.pages.num_pages == instance.pool_pages == plan.kv_pages
        assert instance.core.scheduler.max_running == min(4, plan.max_num_seqs or 4)
        assert instance.core.plan_fields.plan_version == (0 if self.in_force.version == 1 else self.in_force.version)
        for device, resident in instance.resident_bytes().items():
            ledger = self.ledgers[device]
            assert ledger.used == resident + ledger.entries["fixed"] + ledger.entries["exchange"]
            assert ledger.entries["fixed"] + ledger.entries["exchange"] == 100 * MB

    def carry_out(self, target: InstancePlan, seconds: float = 1000.0) -> list[str | None]:
        """Carry out the transitions to a plan, and return the error of each outcome."""
        transitions = diff(self.plan, target, self.resources)
        self.start(transitions)
        self.pass_time(seconds)
        outcomes = self.poll()
        assert [outcome.transition for outcome in outcomes] == list(transitions[: len(outcomes)])
        return [outcome.error for outcome in outcomes]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.advance()

    def batches(self) -> list[int]:
        """Return how many layers each batch staged before it was committed."""
        sizes = [0]
        for _, action in self.actions:
            if action.startswith("prepare layers"):
                sizes[-1] += 1
            elif action == "replace layers":
                sizes.append(0)
        return sizes[:-1]


def to(plan: InstancePlan, precision: str, layers: int = LAYERS) -> InstancePlan:
    return plan.with_precisions({f"layers.{n}": precision for n in range(layers)})


# -- batches


def test_batches_grow_with_the_room_that_the_batches_before_freed() -> None:
    world = World()
    assert world.carry_out(to(world.home, "int8")) == [None] * LAYERS
    world.check_rest()
    # There is room for one layer, and for one more with each that is free. Those that are pending take some of it.
    assert world.batches() == [1, 1, 1, 2, 2, 4, 4, 1]


def test_first_batch_leaves_half_of_the_room_for_the_next_one() -> None:
    world = World(swap_buffer=4 * LAYER["int8"])
    world.carry_out(to(world.home, "int8"))
    assert world.batches()[:2] == [2, 2]


def test_all_layers_change_at_once_if_all_fit() -> None:
    world = World(swap_buffer=LAYERS * LAYER["int4"])
    world.carry_out(to(world.home, "int4"))
    assert world.batches() == [LAYERS]


def test_layers_used_in_place_change_at_once() -> None:
    world = World(in_place=("int8", "int4"), swap_buffer=0)
    some = to(world.home, "int8").with_kv_pages(PAGES + 100)
    assert world.carry_out(some) == [None] * (LAYERS + 1)
    assert world.batches() == [LAYERS]
    world.carry_out(to(some, "int4"))
    assert world.batches() == [LAYERS, LAYERS]
    world.check_rest()


def test_layers_that_free_memory_never_change_with_those_that_need_it() -> None:
    world = World(swap_buffer=100 * LAYER["int8"])
    world.carry_out(world.home.with_precisions({"layers.1": "int4", "layers.2": "int4"}))
    world.actions.clear()
    world.carry_out(world.home.with_precisions({"layers.3": "int8", "layers.4": "int8"}))
    assert world.batches() == [2, 2]
    prepared = [action for _, action in world.actions if action.startswith("prepare")]
    assert prepared == [f"prepare layers.{n}" for n in ("3 int8", "4 int8", "1 bfloat16", "2 bfloat16")]


def test_next_batch_is_staged_while_the_last_ones_steps_end() -> None:
    world = World(step=STEP, swap_buffer=2 * LAYER["int8"])
    world.carry_out(to(world.home, "int8", 4))
    assert world.batches() == [1, 1, 2]
    times = {action: time for time, action in world.actions if action.startswith("prepare")}
    commits = [time for time, action in world.actions if action == "replace layers"]
    freed = [time for time, action in world.actions if action == "free layers"]
    assert commits == pytest.approx([0.1, 0.3, 0.5])
    assert freed == pytest.approx([0.2, 0.4, 0.6])
    assert times["prepare layers.1 int8"] == pytest.approx(0.1), "when the first one was committed, and not yet free"
    assert times["prepare layers.2 int8"] == pytest.approx(0.3)


def test_pools_change_only_when_replaced_layers_are_free() -> None:
    world = World(step=STEP)
    world.carry_out(to(world.home, "int4", 2).with_kv_pages(PAGES + 60))
    texts = [action for _, action in world.actions]
    assert texts.index("free layers") < texts.index(f"prepare {PAGES + 60} pages")
    world.check_rest()


def test_nothing_is_staged_twice() -> None:
    world = World(step=STEP)
    world.carry_out(to(world.home, "int8").with_kv_pages(PAGES + 300))
    prepared = [action for _, action in world.actions if action.startswith("prepare")]
    assert len(prepared) == len(set(prepared)) == LAYERS + 1


def test_outcomes_are_in_order_and_those_of_a_batch_are_equally_long() -> None:
    world = World(step=STEP, swap_buffer=4 * LAYER["int8"])
    world.start(diff(world.home, to(world.home, "int8", 6), world.resources))
    world.pass_time(10)
    outcomes = world.poll()
    assert [outcome.transition.block for outcome in outcomes] == [f"layers.{n}" for n in range(6)]
    assert outcomes[0].seconds == outcomes[1].seconds == pytest.approx(2 * STEP)


# -- kinds of transitions


def test_limit_on_sequences_changes_without_memory() -> None:
    world = World()
    assert world.carry_out(world.home.with_max_num_seqs(2)) == [None]
    assert world.instance.core.scheduler.max_running == 2
    world.check_rest()
    assert world.carry_out(world.home.with_max_num_seqs(None)) == [None]
    assert world.instance.core.scheduler.max_running == 4


def test_core_is_told_the_version_if_another_instance_commits_at_the_same_time() -> None:
    world = World()
    other = replace(world.home, name="1")

    def act(action: str) -> None:
        if action == "replace layers":
            world.in_force.commit(other, 1)

    world.instance._before = act
    assert world.carry_out(to(world.home, "int8", 1)) == [None]
    assert world.instance.core.plan_fields.plan_version == world.in_force.version == 3


def test_limit_on_sequences_stays_if_the_commit_fails() -> None:
    world = World()
    world.start([LimitSequences("0", None, 2), LimitSequences("0", 3, 1)])
    errors = [outcome.error for outcome in world.poll()]
    assert errors == [None, "PlanError: instance 0 runs at most 2 sequences: the change starts from 3 sequences"]
    world.check_rest()


def test_smaller_pool_waits_for_pages_in_use() -> None:
    world = World()
    pages = world.instance.core.scheduler.pages
    held = pages.allocate(PAGES - 11)
    world.start(diff(world.home, world.home.with_kv_pages(100), world.resources))
    world.pass_time(SHRINK_PATIENCE / 2)
    assert (world.busy, world.poll(), pages.num_pages) == (True, [], PAGES)
    pages.release(held)
    world.pass_time(SHRINK_RETRY)
    (outcome,) = world.poll()
    assert outcome.error is None
    world.check_rest()


def test_smaller_pool_gives_up_when_its_patience_ends() -> None:
    world = World()
    world.instance.core.scheduler.pages.allocate(PAGES - 11)
    assert world.carry_out(to(world.home, "int8", 1).with_kv_pages(100), SHRINK_PATIENCE - SHRINK_RETRY / 2) == []
    world.pass_time(2 * SHRINK_RETRY)
    (outcome,) = world.poll()
    assert outcome.error == f"PagesInUse: {PAGES} pages cannot shrink by 301: only 10 are not in use"
    assert outcome.seconds == pytest.approx(SHRINK_PATIENCE, abs=SHRINK_RETRY)
    assert world.plan == world.home, "the rest was dropped"
    world.check_rest()


def test_memory_of_moved_pages_is_free_when_they_have_been_moved() -> None:
    world = World(step=STEP)
    pages = world.instance.core.scheduler.pages
    held = pages.allocate(PAGES - 1)
    pages.release(held[:-10])  # so that all pages in use have to move
    world.start(diff(world.home, world.home.with_kv_pages(PAGES - 100), world.resources))
    world.pass_time(2 * STEP)
    assert (pages.num_pages, world.ledgers[0].entries["kv"]) == (PAGES - 100, PAGES * PAGE)
    world.pass_time(10 * PAGE / world.resources.copy_rate)
    assert world.poll()[0].error is None
    world.check_rest()


def test_batch_that_the_ledger_has_no_room_for_is_not_begun() -> None:
    world = World(swap_buffer=0)
    (error,) = world.carry_out(world.home.with_kv_pages(PAGES + 1))
    assert error is not None
    assert error.startswith("MemoryBudgetError: device 0: ")
    assert world.actions == []
    world.check_rest()


def test_layer_is_freed_first_where_there_is_no_room_for_its_variant() -> None:
    world = World(swap_buffer=0, spare=LAYER["int4"])
    assert world.carry_out(to(world.home, "int4", 1)) == [None]
    assert "replace layers" in [action for _, action in world.actions], "there is room for this one"
    world.carry_out(world.home)
    world.actions.clear()
    assert world.carry_out(to(world.home, "int8", 1)) == [None]
    assert [action for _, action in world.actions] == [
        "hold layers.0 bfloat16 int8",
        "use the plan",
        "exchange layers.0 int8",
        "free layers",
    ]
    world.check_rest()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_one_layer_makes_room_for_the_others_on_both_ways(precision: str) -> None:
    world = World(swap_buffer=0)
    target = to(world.home, precision)
    target = target.with_kv_pages(world.resources.kv_capacity(target))
    for plan in (target, world.home):
        world.actions.clear()
        assert set(world.carry_out(plan)) == {None}
        assert world.plan == plan
        assert [action.split()[0] for _, action in world.actions].count("exchange") == 1
        world.check_rest()


@pytest.mark.parametrize("fault", ["hold layers.0 bfloat16 int8", "use the plan", "exchange layers.0 int8"])
def test_layer_that_is_freed_first_comes_back_if_the_change_fails(fault: str) -> None:
    world, faults = World(step=STEP, swap_buffer=0), iter([True])
    world.fails = lambda action: action == fault and next(faults, False)
    assert world.carry_out(to(world.home, "int8", 3)) == [f"Broken: {fault}"]
    assert world.plan == world.home
    world.check_rest()
    assert world.carry_out(to(world.home, "int8", 3)) == [None] * 3
    world.check_rest()


def test_layers_of_both_stages_have_their_own_room() -> None:
    world = World(layers=4, pp=2)
    assert world.carry_out(to(world.home, "int8", 4)) == [None] * 4
    world.check_rest()


# -- failures


@pytest.mark.parametrize(
    ("fault", "in_force"),
    [
        ("prepare layers.2 int8", 2),
        ("compile layers.2 int8", 2),
        ("prepare 431 pages", 16),
        ("extend pools", 16),
    ],
)
def test_failure_keeps_what_is_committed_and_changes_nothing_else(fault: str, in_force: int) -> None:
    world = World(step=STEP, fails=lambda action: action == fault)
    target = to(world.home, "int8").with_kv_pages(431)
    assert world.carry_out(target) == [None] * in_force + [f"Broken: {fault}"]
    assert world.plan == to(world.home, "int8", in_force)
    world.check_rest()
    world.fails = lambda action: False
    assert set(world.carry_out(target)) == {None}
    assert world.plan == target
    world.check_rest()


@pytest.mark.parametrize("fault", ["use the plan", "replace layers", "shrink pools"])
def test_failure_between_two_steps_is_undone(fault: str) -> None:
    world, faults = World(step=STEP), iter([True])
    world.fails = lambda action: action == fault and next(faults, False)
    small = to(world.home, "int8", 3).with_kv_pages(300)
    target = small if fault == "shrink pools" else to(world.home, "int8", 3)
    assert world.carry_out(target) == [f"Broken: {fault}"]
    assert world.plan == world.home
    world.check_rest()
    assert world.carry_out(target) == [None] * (4 if target is small else 3)
    world.check_rest()


@pytest.mark.parametrize("fault", ["free layers", "free pages"])
def test_failure_to_free_is_no_failed_transition(fault: str) -> None:
    world, faults = World(step=STEP), iter([True])
    world.fails = lambda action: action == fault and next(faults, False)
    target = to(world.home, "int8", 3).with_kv_pages(300)
    assert world.carry_out(target) == [None] * 4
    assert world.plan == target
    world.carry_out(world.home)
    world.check_rest()


def test_transition_that_does_not_start_from_the_plan_fails() -> None:
    world = World()
    first, *others = diff(to(world.home, "int4"), world.home, world.resources)
    world.start([first, *others])
    (outcome,) = world.poll()
    assert outcome.error == "PlanError: layers.0 of instance 0 is bfloat16: the change starts from int4"
    world.check_rest()


def count_waits(target: InstancePlan) -> int:
    world = World(step=STEP, layers=4)
    world.carry_out(target)
    return world.waits


TARGET = to(home_plan(4, pages=PAGES).instances[0], "int8", 4).with_kv_pages(PAGES - 50).with_max_num_seqs(2)


@pytest.mark.parametrize("number", range(count_waits(TARGET) + 1))
def test_cancel_in_any_wait_leaves_all_consistent(number: int) -> None:
    world = World(step=STEP, layers=4)
    world.start(diff(world.home, TARGET, world.resources))
    while world.busy and world.waits < number:
        world.now = world.next_event()
        world.advance()
    world.cancel()
    world.pass_time(1000)
    errors = [outcome.error for outcome in world.poll()]
    assert errors[:-1] == [None] * len(errors[:-1])
    assert world.plan == TARGET or errors[-1] == "Cancelled: the engine is closing"
    done = len(errors) if world.plan == TARGET else len(errors) - 1
    assert world.in_force.version == 1 + done, "what is in force is never told as cancelled"
    world.check_rest()


# -- as a whole

precisions = st.lists(st.sampled_from(sorted(LAYER)), min_size=6, max_size=6)
wanted = st.tuples(precisions, st.integers(20, 1000), st.none() | st.integers(1, 5))


@st.composite
def faults(draw: st.DrawFn) -> Callable[[str], bool]:
    """Return a function that lets some actions fail. None follows soon after another: what undoes cannot fail."""
    failing = set()
    at = 0
    for gap in draw(st.lists(st.integers(8, 60), max_size=6)):
        at += gap
        failing.add(at)
    actions = iter(range(10**9))
    return lambda action: next(actions) in failing and not action.startswith("free")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(wanted, min_size=1, max_size=5),
    st.sampled_from([0.0, 0.003, STEP]),
    st.sampled_from([0, LAYER["int8"], 3 * LAYER["int8"], 100 * LAYER["int8"]]),
    st.sampled_from([0, 25 * PAGE, 1000 * PAGE]),
    st.sampled_from([(), ("int4",), ("int8", "int4")]),
    st.sampled_from([1, 2]),
    st.integers(0, 100),
    faults(),
)
def test_any_plans_room_and_failures(
    plans: list[tuple[list[str], int, int | None]],
    step: float,
    swap_buffer: int,
    spare: int,
    in_place: tuple[str, ...],
    pp: int,
    used: int,
    fails: Callable[[str], bool],
) -> None:
    """The ledger is never exceeded and never below what is resident, and whatever failed has changed nothing."""
    world = World(
        layers=6,
        pp=pp,
        step=step,
        swap_buffer=min(swap_buffer, 100_000_000),
        spare=spare,
        in_place=in_place,
        fails=fails,
    )
    world.instance.core.scheduler.pages.allocate(used)
    for names, pages, limit in plans:
        target = world.plan.with_precisions({f"layers.{n}": name for n, name in enumerate(names)})
        pages = max(world.resources.min_pages, min(pages, world.resources.kv_capacity(target)))
        target = target.with_kv_pages(pages).with_max_num_seqs(limit)
        before, version = world.plan, world.in_force.version
        transitions = diff(before, target, world.resources)
        errors = world.carry_out(target)
        done = [t for t, error in zip(transitions, errors, strict=False) if error is None]
        assert len(done) == len(transitions) or errors[-1] is not None
        for transition in done:
            before = transition.apply(before)
        assert world.plan == before
        assert world.in_force.version == version + len(done)
        world.check_rest()


def test_action_order_of_a_whole_change() -> None:
    """The order that all drivers share."""
    world = World(step=STEP, layers=2)
    world.carry_out(to(world.home, "int4", 2).with_kv_pages(PAGES + 30).with_max_num_seqs(3))
    assert [action for _, action in world.actions] == [
        "use the plan",  # the limit
        "prepare layers.0 int4",
        "compile layers.0 int4",
        "prepare layers.1 int4",
        "compile layers.1 int4",
        "use the plan",
        "replace layers",
        "free layers",
        "prepare 431 pages",
        "use the plan",
        "extend pools",
    ]
