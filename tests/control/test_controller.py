"""The controller: when it asks policies, what it starts and records, and that its plan in force is always right."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.control import Plan, Policy, Proposal, ResizeKVPool, SwapPrecision, Transition, chain
from jaxserve.control.controller import DECISIONS, HISTORY, Backoff, Controller
from jaxserve.control.diff import apply
from jaxserve.control.policies import ManualPolicy, StaticPolicy
from jaxserve.core.errors import PlanError
from jaxserve.telemetry import Snapshot
from tests.support.control import PAGE, VirtualActuator, home_plan, machine

HOME, MACHINE = home_plan(), machine()
TARGET = HOME.with_precisions(0, {"layers.3": "int4", "layers.7": "int4"}).with_kv_pages(0, 461)
IDLE = Snapshot(kv_pages_total=400)


@dataclass(frozen=True)
class Counting:
    """A policy that wants the same plan, and whose state counts how often it was asked."""

    name: str = "counting"

    def init(self, plan: Plan) -> int:
        return 0

    def update(self, snapshots: Sequence[Snapshot], plan: Plan, state: int) -> Proposal[int]:
        return Proposal(plan, state + 1, f"asked {state + 1} times")


class DrivenController:
    """A controller whose time is moved by hand."""

    def __init__(self, policy: Policy, actuator: VirtualActuator | None = None, *, tick: float = 0.1):
        self.actuator = VirtualActuator() if actuator is None else actuator
        self.controller = Controller(HOME, policy, MACHINE, self.actuator, tick=tick, backoff=Backoff(1.0, 2.0, 8.0))
        self.snapshot = IDLE

    def run(self, start: float, seconds: float, step: float = 0.05) -> None:
        for number in range(round(seconds / step)):
            self.actuator.now = start + number * step
            self.controller.tick(self.actuator.now, [self.snapshot])


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
    driven = DrivenController(ManualPolicy(TARGET.with_precisions(0, {"layers.9": "int8"})), tick=0.005)
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
        chain(Counting(), ManualPolicy(HOME.with_precisions(0, {f"layers.{n}": "int8" for n in range(16)})))
    )
    driven.run(0, 0.15)
    assert driven.controller.busy
    assert driven.controller.decisions[0].reason == "asked 1 times; the operator's plan"
    driven.run(0.15, 1.05)
    assert driven.controller.note == "asked 11 times", "at 0, and from 0.2 on, when 16 layers have taken 0.16 s"
    assert len(driven.actuator.started) == 1


def test_plan_beyond_the_budget_is_rejected_and_retried_with_backoff() -> None:
    driven = DrivenController(ManualPolicy(HOME.with_kv_pages(0, 402)))
    driven.run(0, 16)
    assert not driven.actuator.started
    assert driven.controller.plan == HOME
    times = [decision.time for decision in driven.controller.decisions]
    assert times == pytest.approx([0, 1, 3, 7, 15], abs=0.5)
    outcome = driven.controller.decisions[-1].outcome
    assert outcome.startswith("rejected: device 0 needs 0.621 GB (weights 0.320, kv 0.201, fixed 0.100), 0.5 MB more")


def test_failing_policy_leaves_the_plan_and_is_asked_again() -> None:
    class FailingPolicy(Counting):
        def update(self, snapshots: Sequence[Snapshot], plan: Plan, state: int) -> Proposal[int]:
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
        def update(self, snapshots: Sequence[Snapshot], plan: Plan, state: int) -> Proposal[int]:
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
        (HOME.with_kv_pages(0, 402), None, {0}),  # does not fit
    ],
)
def test_policy_state_advances_only_for_decisions_carried_out(
    target: Plan, error: str | None, states: set[int]
) -> None:
    seen = set()

    class Deciding(Counting):
        def update(self, snapshots: Sequence[Snapshot], plan: Plan, state: int) -> Proposal[int]:
            seen.add(state)
            return Proposal(target, 1)

    DrivenController(Deciding(), VirtualActuator(lambda _: error)).run(0, 5)
    assert seen == states


def test_replaced_policy_takes_over_at_once_from_the_first_plan() -> None:
    driven = DrivenController(ManualPolicy(TARGET))
    driven.run(0, 1)
    driven.controller.set_policy(StaticPolicy())
    driven.run(1, 1)
    assert driven.controller.plan.instances == HOME.instances
    assert [d.policy for d in driven.controller.decisions] == ["manual", "static"]
    assert driven.controller.decisions[-1].reason == "back to the plan at the start"


def test_note_is_cleared_by_a_decision_and_by_a_new_policy() -> None:
    @dataclass(frozen=True)
    class Waiting(Counting):
        """A policy that wants `target` when it is asked for the third time."""

        target: Plan = TARGET

        def update(self, snapshots: Sequence[Snapshot], plan: Plan, state: int) -> Proposal[int]:
            return Proposal(plan if state < 2 else self.target, state + 1, f"asked {state} times before")

    for target in (TARGET, HOME.with_kv_pages(0, 402)):  # the second one does not fit
        driven = DrivenController(Waiting(target=target), tick=0.05)
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
    driven = DrivenController(ManualPolicy(HOME.with_kv_pages(0, 101)))
    driven.snapshot = replace(IDLE, kv_pages_used=101, num_running=3)
    driven.run(0, 5)
    assert driven.controller.note == "waiting: instance 0 holds 101 > 100 KV pages"
    assert not driven.controller.decisions
    driven.snapshot = replace(IDLE, kv_pages_used=100, num_running=3)
    driven.run(5, 5)
    assert driven.controller.plan.instances[0].kv_pages == 101


def test_failed_transition_keeps_committed_ones_and_the_policy_is_asked_again() -> None:
    errors = iter([None, "no memory"])
    driven = DrivenController(ManualPolicy(TARGET), VirtualActuator(lambda _: next(errors, None)))
    driven.run(0, 0.5)
    controller = driven.controller
    (decision,) = controller.decisions
    assert decision.outcome == ("failed: instance 0: layers.7 bfloat16 -> int4 (frees 15.0 MB, about 5 ms): no memory")
    assert controller.plan == HOME.with_precisions(0, {"layers.3": "int4"})
    assert not controller.busy
    driven.run(0.5, 2)
    assert controller.plan == replace(TARGET, version=4)
    assert [str(t).split(" (")[0] for t in driven.actuator.started[1]] == [
        "instance 0: layers.7 bfloat16 -> int4",
        "instance 0: KV 401 -> 461 pages",
    ]


def test_backoff_grows_with_each_failure_to_a_maximum_and_a_success_ends_it() -> None:
    broken = [True]
    driven = DrivenController(ManualPolicy(TARGET), VirtualActuator(lambda _: "broken" if broken[0] else None))
    driven.run(0, 34)
    times = [decision.time for decision in driven.controller.decisions]
    assert times == pytest.approx([0, 1, 3, 7, 15, 23, 31], abs=1)
    broken[0] = False
    driven.run(34, 8)
    assert driven.controller.plan.instances == TARGET.instances
    assert driven.controller.failures.count == 0


def test_transitions_dropped_by_the_actuator_count_as_failed() -> None:
    class Forgetful(VirtualActuator):
        def start(self, transitions: Sequence[Transition]) -> None:
            super().start(transitions[:1])

    driven = DrivenController(ManualPolicy(TARGET), Forgetful())
    driven.run(0, 0.5)
    assert driven.controller.decisions[-1].outcome.endswith("was dropped")
    assert driven.controller.plan == HOME.with_precisions(0, {"layers.3": "int4"})


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([None, None, "no memory", "cancelled"]), max_size=40), st.data())
def test_plan_in_force_equals_committed_transitions_under_any_failures(
    errors: list[str | None], data: st.DataObject
) -> None:
    remaining, committed = iter(errors), []

    def error_of(transition: Transition) -> str | None:
        error = next(remaining, None)
        if error is None:
            committed.append(transition)
        return error

    layers = st.dictionaries(st.integers(0, 15), st.sampled_from(["int4", "int8", "bfloat16"]))
    driven = DrivenController(StaticPolicy(), VirtualActuator(error_of), tick=0.05)
    for number in range(4):
        precisions = {f"layers.{layer}": p for layer, p in data.draw(layers).items()}
        target = HOME.with_precisions(0, precisions)
        target = target.with_kv_pages(0, MACHINE.kv_capacity(target.instances[0]))
        driven.controller.set_policy(ManualPolicy(target))
        for step in range(200):
            driven.run(number * 1000 + step * 0.07, 0.07, 0.07)
            assert driven.controller.plan == apply(HOME, committed)
    driven.run(10_000, 300, 0.5)
    assert driven.controller.plan.instances == target.instances, "when nothing fails any more the target is reached"
    assert {d.outcome.partition(":")[0] for d in driven.controller.decisions} <= {"done", "failed"}


def test_chained_policy_starts_from_the_previous_policys_plan() -> None:
    layer = ManualPolicy(HOME.with_precisions(0, {"layers.3": "int4"}))

    class MorePages(Counting):
        def update(self, snapshots: Sequence[Snapshot], plan: Plan, state: int) -> Proposal[int]:
            pages = MACHINE.kv_capacity(plan.instances[0])
            return Proposal(plan.with_kv_pages(0, pages), state + 1, f"room for {pages}")

    both = chain(layer, MorePages("pages"))
    assert both.name == "manual + pages"
    proposal = both.update([IDLE], HOME, both.init(HOME))
    assert proposal.plan.instances[0].precision("layers.3") == "int4"
    assert proposal.plan.instances[0].kv_pages == 431
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
        controller.check(HOME.with_kv_pages(0, 402))
    with pytest.raises(PlanError, match="instances"):
        controller.check(home_plan(dp=2))


def test_target_plan_is_reached_by_swaps_and_resizes_only() -> None:
    driven = DrivenController(ManualPolicy(TARGET))
    driven.run(0, 1)
    kinds = [type(t) for t in driven.actuator.started[0]]
    assert kinds == [SwapPrecision, SwapPrecision, ResizeKVPool]
