"""The controller: when it asks policies, what it starts and records, and that its plan in force is always right."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.control import (
    InstancePlan,
    Plan,
    PlanInForce,
    Policy,
    Proposal,
    ResizeKVPool,
    SwapPrecision,
    Transition,
    chain,
)
from jaxserve.control.controller import DECISIONS, HISTORY, Backoff, Controller
from jaxserve.control.policies import ManualPolicy, StaticPolicy
from jaxserve.control.record import Decision
from jaxserve.core.errors import PlanError
from jaxserve.telemetry import Snapshot
from tests.support.control import PAGE, VirtualActuator, actuators_of, home_plan, machine

HOME, MACHINE = home_plan(), machine()
TARGET = HOME.with_precisions("0", {"layers.3": "int4", "layers.7": "int4"}).with_kv_pages("0", 461)
IDLE = Snapshot(kv_pages_total=400)


@dataclass(frozen=True)
class Counting:
    """A policy that wants the same plan, and whose state counts how often it was asked."""

    name: str = "counting"

    def init(self, plan: InstancePlan) -> int:
        return 0

    def update(self, snapshot: Snapshot, plan: InstancePlan, state: int) -> Proposal[int]:
        return Proposal(plan, state + 1, f"asked {state + 1} times")


class DrivenController:
    """A controller whose time is moved by hand."""

    def __init__(
        self,
        policy: Policy,
        error_of: Callable[[Transition], str | None] = lambda _: None,
        *,
        home: Plan = HOME,
        tick: float = 0.1,
        actuators: Callable[..., Mapping[str, VirtualActuator]] = actuators_of,
        **options: Any,
    ):
        """`options` are those of the actuators."""
        self.in_force = PlanInForce(home)
        self.actuators = actuators(self.in_force, error_of, **options)
        backoff = Backoff(1.0, 2.0, 8.0)
        self.controller = Controller(self.in_force, policy, MACHINE, self.actuators, tick=tick, backoff=backoff)
        self.snapshot = IDLE

    @property
    def actuator(self) -> VirtualActuator:
        (actuator,) = self.actuators.values()
        return actuator

    def run(self, start: float, seconds: float, step: float = 0.05) -> None:
        for number in range(round(seconds / step)):
            now = start + number * step
            for actuator in self.actuators.values():
                actuator.now = now
            self.controller.tick(now, dict.fromkeys(self.actuators, self.snapshot))


def test_plan_is_carried_out_and_logged() -> None:
    driven = DrivenController(ManualPolicy(TARGET))
    driven.run(0, 0.05)
    controller = driven.controller
    assert controller.busy
    assert controller.target == replace(TARGET, version=4)
    assert [d.outcome for d in controller.decisions] == ["started"]
    driven.run(0.05, 1)
    assert controller.plan == replace(TARGET, version=4)
    assert not controller.busy
    assert controller.target is None
    (decision,) = controller.decisions
    assert (decision.outcome, decision.policy, decision.reason) == ("done", "manual", "the operator's plan")
    assert (decision.before_version, decision.target_version, decision.time) == (1, 4, 0.0)
    assert decision.transitions[-1] == "instance 0: KV 401 -> 461 pages (needs 30.0 MB)"
    assert len(decision.transitions) == 3


def test_plan_in_force_follows_each_committed_transition() -> None:
    driven = DrivenController(ManualPolicy(TARGET.with_precisions("0", {"layers.9": "int8"})), tick=0.005)
    versions = []
    for number in range(20):
        driven.run(number * 0.0051, 0.0051, 0.0051)
        versions.append(driven.controller.plan.version)
    assert versions == sorted(versions)
    assert set(versions) == {1, 2, 3, 5}, "each swap to int4 takes 5 ms, that to int8 10 ms, the pool no time"


def test_policy_is_asked_once_per_tick() -> None:
    driven = DrivenController(Counting(), tick=0.125)
    driven.run(0, 12.5, 0.0625)
    assert driven.controller.note == "asked 100 times"
    assert not driven.controller.decisions


def test_policy_is_not_asked_while_the_actuator_is_busy() -> None:
    driven = DrivenController(
        chain(Counting(), ManualPolicy(HOME.with_precisions("0", {f"layers.{n}": "int8" for n in range(16)})))
    )
    driven.run(0, 0.15)
    assert driven.controller.busy
    assert driven.controller.decisions[0].reason == "asked 1 times; the operator's plan"
    driven.run(0.15, 1.05)
    assert driven.controller.note == "asked 11 times", "at 0, and from 0.2 on, when 16 layers have taken 0.16 s"
    assert len(driven.actuator.started) == 1


def test_plan_beyond_the_budget_is_rejected_and_retried_with_backoff() -> None:
    driven = DrivenController(ManualPolicy(HOME.with_kv_pages("0", 402)))
    driven.run(0, 16)
    assert not driven.actuator.started
    assert driven.controller.plan == HOME
    times = [decision.time for decision in driven.controller.decisions]
    assert times == pytest.approx([0, 1, 3, 7, 15], abs=0.5)
    outcome = driven.controller.decisions[-1].outcome
    assert outcome.startswith("rejected: device 0 needs 0.621 GB (weights 0.320, kv 0.201, fixed 0.100), 0.5 MB more")


def test_failing_policy_leaves_the_plan_and_is_asked_again() -> None:
    class FailingPolicy(Counting):
        def update(self, snapshot: Snapshot, plan: InstancePlan, state: int) -> Proposal[int]:
            raise KeyError("threshold")

    driven = DrivenController(FailingPolicy())
    driven.run(0, 2)
    outcomes = [(d.reason, d.outcome) for d in driven.controller.decisions]
    assert outcomes == [("the policy failed", "rejected: KeyError: 'threshold'")] * 2
    driven.controller.set_policy(ManualPolicy(TARGET))
    driven.run(2, 1)
    assert driven.controller.plan.instances == TARGET.instances


def test_policy_result_that_is_not_a_proposal_is_rejected() -> None:
    class Silent(Counting):
        def update(self, snapshot: Snapshot, plan: InstancePlan, state: int) -> Proposal[int]:
            return None  # type: ignore[return-value]

    driven = DrivenController(Silent())
    driven.run(0, 2)
    assert len(driven.controller.decisions) == 2
    assert driven.controller.decisions[0].outcome.startswith("rejected: AttributeError: ")


@pytest.mark.parametrize(
    ("target", "error", "states"),
    [
        (TARGET, None, {0, 1}),
        (TARGET, "no memory", {0}),
        (HOME.with_kv_pages("0", 402), None, {0}),  # does not fit
    ],
)
def test_policy_state_advances_only_for_decisions_carried_out(
    target: Plan, error: str | None, states: set[int]
) -> None:
    seen = set()

    class Deciding(Counting):
        def update(self, snapshot: Snapshot, plan: InstancePlan, state: int) -> Proposal[int]:
            seen.add(state)
            return Proposal(target.instance(plan.name), 1)

    DrivenController(Deciding(), lambda _: error).run(0, 5)
    assert seen == states


def test_ended_decisions_are_counted_by_policy_and_outcome() -> None:
    none = {("manual", outcome): 0 for outcome in ("done", "failed", "rejected")}
    for target, error, outcome in ((TARGET, None, "done"), (TARGET, "no memory", "failed")):
        driven = DrivenController(ManualPolicy(target), lambda _, error=error: error)
        driven.run(0, 0.05)
        assert driven.controller.ended == none, "it has only been started"
        driven.run(0.05, 0.9)
        assert driven.controller.ended == none | {("manual", outcome): 1}
    driven = DrivenController(ManualPolicy(HOME.with_kv_pages("0", 402)))
    driven.run(0, 0.5)
    assert driven.controller.ended == none | {("manual", "rejected"): 1}


def test_replaced_policy_takes_over_at_once_from_the_first_plan() -> None:
    driven = DrivenController(ManualPolicy(TARGET))
    driven.run(0, 1)
    driven.controller.set_policy(StaticPolicy())
    driven.run(1, 1)
    assert driven.controller.plan.instances == HOME.instances
    assert [d.policy for d in driven.controller.decisions] == ["manual", "static"]
    assert driven.controller.decisions[-1].reason == "back to the plan at the start"


def test_note_is_cleared_by_a_decision_and_by_a_new_policy() -> None:
    class Waiting(ManualPolicy):
        """A policy that wants its target when it is asked for the third time."""

        def init(self, plan: InstancePlan) -> int:
            return 0

        def update(self, snapshot: Snapshot, plan: InstancePlan, state: int) -> Proposal[int]:
            wanted = plan if state < 2 else self.target.instance(plan.name)
            return Proposal(wanted, state + 1, f"asked {state} times before")

    for target in (TARGET, HOME.with_kv_pages("0", 402)):  # the second one does not fit
        driven = DrivenController(Waiting(target), tick=0.05)
        driven.run(0, 0.1)
        assert driven.controller.note == "asked 1 times before"
        driven.run(0.1, 0.05)
        assert driven.controller.note == ""
        assert len(driven.controller.decisions) == 1
    driven = DrivenController(Counting())
    driven.run(0, 1)
    driven.controller.set_policy(StaticPolicy())
    assert driven.controller.note == ""


def test_operators_policy_change_is_logged_and_running_decision_keeps_its_outcome() -> None:
    driven = DrivenController(ManualPolicy(TARGET))
    driven.run(0, 0.05)
    driven.controller.change_policy(0.05, StaticPolicy(), "policy manual -> static")
    driven.controller.change_policy(0.06, Counting(), "policy static -> counting")
    driven.run(0.07, 1)
    log = [(d.time, d.policy, d.outcome, len(d.transitions)) for d in driven.controller.decisions]
    assert log == [(0.0, "manual", "done", 3), (0.05, "static", "done", 0), (0.06, "counting", "done", 0)]
    assert driven.controller.decisions[1].reason == "by the operator: policy manual -> static"
    assert driven.controller.plan.instances == TARGET.instances, "what has been started is finished"


def test_outcome_of_a_forgotten_decision_changes_no_other_decision() -> None:
    driven = DrivenController(ManualPolicy(TARGET))
    driven.run(0, 0.05)
    for _ in range(DECISIONS):
        driven.controller.change_policy(0.05, Counting(), "nothing")
    driven.run(0.07, 1)
    assert {(d.policy, d.outcome) for d in driven.controller.decisions} == {("counting", "done")}
    assert not driven.controller.busy


def test_shrink_waits_until_used_pages_fit() -> None:
    driven = DrivenController(ManualPolicy(HOME.with_kv_pages("0", 101)))
    driven.snapshot = replace(IDLE, kv_pages_used=101, num_running=3)
    driven.run(0, 5)
    assert driven.controller.note == "waiting: 101 KV pages in use > 100"
    assert not driven.controller.decisions
    driven.snapshot = replace(IDLE, kv_pages_used=100, num_running=3)
    driven.run(5, 5)
    assert driven.controller.plan.instances[0].kv_pages == 101


def test_failed_transition_keeps_committed_ones_and_the_policy_is_asked_again() -> None:
    errors = iter([None, "no memory"])
    driven = DrivenController(ManualPolicy(TARGET), lambda _: next(errors, None))
    driven.run(0, 0.5)
    controller = driven.controller
    (decision,) = controller.decisions
    assert decision.outcome == "failed: instance 0: KV 401 -> 461 pages (needs 30.0 MB): Broken: no memory"
    assert controller.plan == replace(TARGET.with_kv_pages("0", 401), version=3)
    assert not controller.busy
    driven.run(0.5, 2)
    assert controller.plan == replace(TARGET, version=4)
    assert [str(t) for t in driven.actuator.started[1]] == ["instance 0: KV 401 -> 461 pages (needs 30.0 MB)"]


def test_backoff_grows_with_each_failure_to_a_maximum_and_a_success_ends_it() -> None:
    broken = [True]
    driven = DrivenController(ManualPolicy(TARGET), lambda _: "broken" if broken[0] else None)
    driven.run(0, 34)
    times = [decision.time for decision in driven.controller.decisions]
    assert times == pytest.approx([0, 1, 3, 7, 15, 23, 31], abs=1)
    broken[0] = False
    driven.run(34, 8)
    assert driven.controller.plan.instances == TARGET.instances
    assert driven.controller.failures("0").count == 0


def test_transitions_dropped_by_the_actuator_count_as_failed() -> None:
    class Forgetful(VirtualActuator):
        def start(self, transitions: Sequence[Transition]) -> None:
            super().start(transitions[:1])

    driven = DrivenController(
        ManualPolicy(TARGET), actuators=lambda in_force, error_of: {"0": Forgetful(in_force, error_of)}
    )
    driven.run(0, 0.5)
    assert driven.controller.decisions[-1].outcome.endswith("was dropped")
    assert driven.controller.plan == HOME.with_precisions("0", {"layers.3": "int4"})


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([None, None, "no memory", "broken"]), max_size=40), st.data())
def test_decisions_tell_what_is_in_force_under_any_failures(errors: list[str | None], data: st.DataObject) -> None:
    remaining = iter(errors)
    layers = st.dictionaries(st.integers(0, 15), st.sampled_from(["int4", "int8", "bfloat16"]))
    driven = DrivenController(StaticPolicy(), lambda _: next(remaining, None), tick=0.05)
    controller = driven.controller
    for number in range(4):
        precisions = {f"layers.{layer}": p for layer, p in data.draw(layers).items()}
        target = HOME.with_precisions("0", precisions)
        target = target.with_kv_pages("0", MACHINE.kv_capacity(target.instances[0]))
        controller.set_policy(ManualPolicy(target))
        for step in range(40):
            driven.run(number * 100 + step * 0.07, 0.07, 0.07)
            in_force, state = controller.plan, controller.decisions[-1].outcome if controller.decisions else "done"
            assert driven.actuator.instance.plan == in_force.instances[0]
            assert controller.busy == (controller.target is not None) == (state == "started")
            if controller.target is not None:
                assert controller.target == replace(target, version=controller.decisions[-1].target_version)
    driven.run(1000, 300, 0.5)
    assert controller.plan.instances == target.instances, "when nothing fails any more the target is reached"
    assert {d.outcome.partition(":")[0] for d in controller.decisions} <= {"done", "failed"}
    assert controller.plan.version - 1 == sum(
        len(d.transitions) for d in controller.decisions if d.outcome == "done"
    ) + sum(committed_before_failure(d) for d in controller.decisions if d.outcome != "done")


def committed_before_failure(decision: Decision) -> int:
    """Return how many transitions of a failed decision are in force: those before the one that its outcome names."""
    return next(n for n, text in enumerate(decision.transitions) if decision.outcome.startswith(f"failed: {text}: "))


def test_chained_policy_starts_from_the_previous_policys_plan() -> None:
    layer = ManualPolicy(HOME.with_precisions("0", {"layers.3": "int4"}))

    class MorePages(Counting):
        def update(self, snapshot: Snapshot, plan: InstancePlan, state: int) -> Proposal[int]:
            pages = MACHINE.kv_capacity(plan)
            return Proposal(plan.with_kv_pages(pages), state + 1, f"room for {pages}")

    both = chain(layer, MorePages("pages"))
    assert both.name == "manual + pages"
    home = HOME.instances[0]
    proposal = both.update(IDLE, home, both.init(home))
    assert proposal.plan.precision("layers.3") == "int4"
    assert proposal.plan.kv_pages == 431
    assert proposal.state == (None, 1)
    assert proposal.reason == "the operator's plan; room for 431"


def test_history_keeps_one_sample_per_second_for_fifteen_minutes() -> None:
    driven = DrivenController(ManualPolicy(TARGET))
    driven.snapshot = Snapshot(
        kv_pages_total=460,
        kv_pages_used=46,
        num_running=2,
        num_waiting=1,
        weight_bytes=290,
        kv_bytes=461 * PAGE + 70,
        gaps=10,
        gap_seconds=0.5,
    )
    driven.run(0, 1000, 0.5)
    history = driven.controller.history
    assert len(history) == HISTORY
    assert {round(b.time - a.time, 6) for a, b in zip(history, list(history)[1:], strict=False)} == {1.0}
    latest = history[-1]
    assert latest.precisions == {"bfloat16": 14, "int4": 2}
    assert (latest.kv_used_bytes, latest.kv_free_bytes, latest.kv_rounding_bytes) == (46 * PAGE, 415 * PAGE, 70)
    assert (latest.weight_bytes, latest.running, latest.waiting) == (290, 2, 1)
    assert latest.kv_usage == pytest.approx(0.1)


def test_check_of_an_invalid_plan_raises_with_the_reason() -> None:
    controller = DrivenController(StaticPolicy()).controller
    controller.check(TARGET)
    with pytest.raises(PlanError, match="budget"):
        controller.check(HOME.with_kv_pages("0", 402))
    with pytest.raises(PlanError, match="instances"):
        controller.check(home_plan(dp=2))


def test_target_plan_is_reached_by_swaps_and_resizes_only() -> None:
    driven = DrivenController(ManualPolicy(TARGET))
    driven.run(0, 1)
    kinds = [type(t) for t in driven.actuator.started[0]]
    assert kinds == [SwapPrecision, SwapPrecision, ResizeKVPool]


# -- several instances

MANY = home_plan(dp=100)
ALL_TARGETS = Plan(
    1,
    tuple(
        replace(
            TARGET.instances[0],
            stages=(replace(TARGET.instances[0].stages[0], devices=i.stages[0].devices),),
            name=i.name,
        )
        for i in MANY.instances
    ),
)


def first(plan: Plan, count: int) -> Plan:
    """Return a plan of the first instances only."""
    return replace(plan, instances=plan.instances[:count])


def test_instance_whose_transitions_always_fail_holds_up_no_other() -> None:
    driven = DrivenController(
        ManualPolicy(first(ALL_TARGETS, 2)),
        lambda transition: "broken" if transition.instance == "1" else None,
        home=first(MANY, 2),
    )
    driven.run(0, 10)
    controller = driven.controller
    assert controller.plan.instances == (ALL_TARGETS.instances[0], MANY.instances[1])
    assert controller.failures("0").count == 0
    times = [d.time for d in controller.decisions if d.instance == "1"]
    assert times == pytest.approx([0, 1, 3, 7], abs=0.5), "its own back-off"
    controller.set_policy(StaticPolicy())
    driven.run(10, 0.5)
    assert controller.plan.instances == first(MANY, 2).instances, "the other one is asked at once"
    assert [(d.instance, d.outcome) for d in controller.decisions][-1] == ("0", "done")
    assert controller.decisions[-1].reason == "instance 0: back to the plan at the start"


def test_slow_instance_holds_up_no_other() -> None:
    def actuators(in_force: PlanInForce, error_of: Callable[[Transition], str | None]) -> dict[str, VirtualActuator]:
        steps = {"0": 20.0, "1": 0.0}  # s
        return {name: VirtualActuator(in_force, error_of, name=name, step=step) for name, step in steps.items()}

    driven = DrivenController(ManualPolicy(first(ALL_TARGETS, 2)), home=first(MANY, 2), actuators=actuators)
    driven.run(0, 1)
    controller = driven.controller
    assert controller.busy
    assert controller.plan.instances == (MANY.instances[0], ALL_TARGETS.instances[1])
    assert controller.target is not None
    assert controller.target.instances == first(ALL_TARGETS, 2).instances
    controller.set_policy(StaticPolicy())
    driven.run(1, 1)
    assert controller.plan.instances == first(MANY, 2).instances, "the second one was asked meanwhile, and went back"
    driven.run(2, 500, 0.5)
    assert controller.plan.instances == first(MANY, 2).instances
    assert not controller.busy


def test_hundred_instances_change_at_once() -> None:
    driven = DrivenController(ManualPolicy(ALL_TARGETS), home=MANY)
    driven.run(0, 0.05)
    target = driven.controller.target
    assert target == replace(ALL_TARGETS, version=301)
    driven.run(0.05, 0.1)
    assert driven.controller.plan == target
    assert [(d.instance, d.outcome) for d in driven.controller.decisions] == [
        (instance.name, "done") for instance in MANY.instances
    ]
    assert all(len(actuator.started) == 1 for actuator in driven.actuators.values())


def test_policy_that_raises_for_one_instance_leaves_the_others() -> None:
    class Picky(ManualPolicy):
        def update(self, snapshot: Snapshot, plan: InstancePlan, state: None) -> Proposal[None]:
            if plan.name == "0":
                raise KeyError("threshold")
            return super().update(snapshot, plan, state)

    driven = DrivenController(Picky(first(ALL_TARGETS, 2)), home=first(MANY, 2))
    driven.run(0, 0.5)
    assert driven.controller.plan.instances == (MANY.instances[0], ALL_TARGETS.instances[1])
    assert [(d.instance, d.outcome.partition(":")[0]) for d in driven.controller.decisions] == [
        ("0", "rejected"),
        ("1", "done"),
    ]


def test_notes_are_by_instance() -> None:
    driven = DrivenController(Counting(), home=first(MANY, 2))
    driven.run(0, 0.05)
    assert driven.controller.notes == {"0": "asked 1 times", "1": "asked 1 times"}
    assert driven.controller.note == "instance 0: asked 1 times; instance 1: asked 1 times"


def test_policy_that_blocks_holds_up_no_operator_and_its_late_answer_is_dropped() -> None:
    asked, goes_on = threading.Event(), threading.Event()

    class Blocking(ManualPolicy):
        def update(self, snapshot: Snapshot, plan: InstancePlan, state: None) -> Proposal[None]:
            asked.set()
            assert goes_on.wait(60)
            return super().update(snapshot, plan, state)

    driven = DrivenController(Blocking(TARGET))
    thread = threading.Thread(target=driven.run, args=(0, 0.05))
    thread.start()
    assert asked.wait(60)
    try:
        assert driven.controller.latest_decisions(10) == []
        driven.controller.change_policy(0.0, Counting(), "policy manual -> counting")
        assert [d.policy for d in driven.controller.latest_decisions(10)] == ["counting"]
    finally:
        goes_on.set()
        thread.join()
    assert driven.controller.plan == HOME
    assert not driven.actuator.started
    assert driven.controller.note == "", "the answer was that of the policy before"
    driven.run(1, 0.05)
    assert driven.controller.note == "asked 1 times"
