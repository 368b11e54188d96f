"""The control of the set of instances: alignment, regroups, finish, and what happens if one of them fails."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from jaxserve.control import InstancePlan, Outcome, Plan, PlanInForce
from jaxserve.control.controller import Backoff, Controller
from jaxserve.control.policies import ManualPolicy, StaticPolicy
from jaxserve.control.policy import PlanProposal, Policy, Proposal, ServiceView, chain
from jaxserve.control.regroup import Regroup, merged_plan
from jaxserve.core.errors import PlanError
from jaxserve.telemetry import Snapshot, WaitingRoom
from tests.support.control import VirtualActuator, home_plan, machine

MACHINE = replace(machine(max_pages=4000), budget=10**10)  # memory is no limit here
FOUR = home_plan(dp=4)
IDLE = Snapshot(kv_pages_total=400)
MERGED = merged_plan([FOUR.instance("0"), FOUR.instance("1")], "4")
WITH_MERGED = Plan(1, (MERGED, FOUR.instance("2"), FOUR.instance("3")))


class FakeRegrouper:
    """A `RegroupActuator` that puts plans in force at once, unless `error` is set."""

    def __init__(self, in_force: PlanInForce, actuators: dict[str, VirtualActuator]):
        self.started: list[Regroup] = []
        self.error: str | None = None
        self.cold: set[tuple[int, ...]] = set()  # devices without programs
        self.busy = False
        self.exchanging = frozenset[str]()
        self._in_force, self._actuators = in_force, actuators
        self._outcomes: list[Outcome] = []

    def start(self, regroups: Sequence[Regroup]) -> None:
        for regroup in regroups:
            self.started.append(regroup)
            self._outcomes.append(Outcome(regroup, self.error, 0.1))
            if self.error is not None:
                return
            self._in_force.regroup(regroup.before, regroup.after)
            for plan in regroup.after:
                self._actuators[plan.name] = VirtualActuator(self._in_force, name=plan.name, resources=MACHINE)

    def poll(self) -> Sequence[Outcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    @property
    def failed(self) -> dict[str, BaseException]:
        return {}

    def is_warm(self, plan: InstancePlan) -> bool:
        return plan.stages[0].devices not in self.cold


class Service:
    """A controller of several instances whose time is moved by hand."""

    def __init__(self, policy: Policy, start: Plan = FOUR):
        self.in_force = PlanInForce(start)
        self.actuators = {
            i.name: VirtualActuator(self.in_force, name=i.name, resources=MACHINE) for i in start.instances
        }
        self.regrouper = FakeRegrouper(self.in_force, self.actuators)
        self.controller = Controller(
            self.in_force, policy, MACHINE, self.actuators, regrouper=self.regrouper, backoff=Backoff(1.0, 2.0, 8.0)
        )
        self.waiting = WaitingRoom()
        self.longest: dict[str, int] = {}  # tokens of the longest sequence, by instance
        self.now = 0.0

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            for actuator in self.actuators.values():
                actuator.now = self.now
            snapshots = {plan.name: replace(IDLE, time=self.now) for plan in self.in_force.plan.instances}
            self.controller.tick(self.now, snapshots, self.waiting, lambda name: self.longest.get(name, 0))

    @property
    def outcomes(self) -> list[str]:
        return [decision.outcome for decision in self.controller.decisions]

    @property
    def instances(self) -> tuple[InstancePlan, ...]:
        return self.controller.plan.instances


def test_operators_merge_and_split_instances() -> None:
    service = Service(ManualPolicy(WITH_MERGED))
    service.run(1)
    assert service.instances == WITH_MERGED.instances
    (decision,) = service.controller.decisions
    assert (decision.outcome, decision.reason) == ("done", "the operator's plan")
    assert decision.transitions == ("instance 0 and 1 -> 4 (devices 0, 1)",)
    service.controller.set_policy(ManualPolicy(FOUR))
    service.run(1)
    assert service.instances == FOUR.instances
    assert service.outcomes == ["done", "done"]
    assert not service.controller.busy


def test_instances_stay_until_their_kv_pages_have_come() -> None:
    service = Service(ManualPolicy(FOUR))
    service.regrouper.exchanging = frozenset({"1"})
    service.run(0.2)
    assert service.controller.busy
    service.controller.set_policy(ManualPolicy(WITH_MERGED))
    service.run(1)
    assert service.instances == FOUR.instances
    assert "waits for KV pages of instance 1, which are on their way" in service.controller.note
    service.regrouper.exchanging = frozenset()
    service.run(1)
    assert service.instances == WITH_MERGED.instances
    assert not service.controller.busy


def test_the_plan_of_an_instance_stays_until_its_kv_pages_have_come() -> None:
    wanted = FOUR.with_precisions("1", {"layers.3": "int4"}).with_precisions("2", {"layers.3": "int4"})
    service = Service(ManualPolicy(FOUR))
    service.regrouper.exchanging = frozenset({"1"})
    service.run(0.1)
    service.controller.set_policy(ManualPolicy(wanted))
    service.run(1)
    precisions = {plan.name: plan.precision("layers.3") for plan in service.instances}
    assert precisions["2"] == "int4" != precisions["1"]
    service.regrouper.exchanging = frozenset()
    service.run(1)
    assert service.instances == wanted.instances


def test_members_agree_on_precisions_before_they_merge() -> None:
    service = Service(ManualPolicy(WITH_MERGED), FOUR.with_precisions("1", {"layers.3": "int4"}))
    service.run(2)
    assert service.instances == WITH_MERGED.instances
    (decision,) = service.controller.decisions
    assert decision.transitions[0].startswith("instance 1: layers.3 int4 -> bfloat16")
    assert decision.outcome == "done"


def test_aligned_members_get_their_plans_back_if_the_regroup_fails() -> None:
    start = FOUR.with_precisions("1", {"layers.3": "int4"}).with_kv_pages("0", 300)
    service = Service(ManualPolicy(WITH_MERGED), start)
    service.regrouper.error = "broken"
    service.run(0.9)
    assert len(service.regrouper.started) == 1
    assert service.instances == start.instances
    assert service.outcomes == ["failed: instance 0 and 1 -> 4 (devices 0, 1): broken"]


def test_a_merged_instance_gets_its_further_pages_afterwards() -> None:
    wanted = Plan(1, (MERGED.with_kv_pages(860), *FOUR.instances[2:]))
    service = Service(ManualPolicy(wanted))
    service.run(2)
    assert service.instances == wanted.instances
    assert service.regrouper.started[0].after == (MERGED,)
    assert service.outcomes == ["done"]


def test_a_regroup_that_fails_leaves_the_plan_and_is_tried_again_later() -> None:
    service = Service(ManualPolicy(WITH_MERGED))
    service.regrouper.error = "broken"
    service.run(0.8)
    assert service.instances == FOUR.instances
    assert service.outcomes == ["failed: instance 0 and 1 -> 4 (devices 0, 1): broken"]
    assert not service.controller.busy
    service.regrouper.error = None
    service.run(2)
    assert service.instances == WITH_MERGED.instances


def test_a_member_that_cannot_be_aligned_fails_the_change() -> None:
    start = FOUR.with_precisions("1", {"layers.3": "int4"})
    service = Service(ManualPolicy(WITH_MERGED), start)
    service.actuators["1"].error_of = lambda transition: "no memory"
    service.run(0.8)
    assert service.instances == start.instances
    assert service.outcomes[0].startswith("failed: instance 1: layers.3 int4 -> bfloat16")
    assert service.regrouper.started == []


def test_a_change_waits_for_programs() -> None:
    service = Service(ManualPolicy(WITH_MERGED))
    service.regrouper.cold.add((0, 1))
    service.controller.check(WITH_MERGED)
    service.run(0.5)
    assert service.controller.note == "the operator's plan: waits for the programs of devices 0, 1"
    assert service.outcomes == []
    service.regrouper.cold.clear()
    service.run(0.3)
    assert service.instances == WITH_MERGED.instances
    assert service.outcomes == ["done"]
    assert service.controller.note == ""


def test_a_change_waits_for_requests_that_no_instance_could_hold() -> None:
    limit = MACHINE.limits_of(1).max_len
    service = Service(ManualPolicy(Plan(1, FOUR.instances[:3])))
    service.longest["3"] = limit + 1
    service.run(0.5)
    expected = (
        f"the operator's plan: waits for the end of a request of {limit + 1} tokens, which no instance could hold"
    )
    assert (service.controller.note, service.outcomes) == (expected, [])
    service.longest["3"] = limit
    service.run(0.3)
    assert service.instances == FOUR.instances[:3]


def test_the_programs_of_all_instances_that_wait_are_asked_for() -> None:
    both = Plan(1, (MERGED, merged_plan([FOUR.instance("2"), FOUR.instance("3")], "5")))
    service = Service(ManualPolicy(both))
    service.regrouper.cold = {(0, 1), (2, 3)}
    service.run(0.2)
    assert service.controller.note.endswith("waits for the programs of devices 0, 1, 2, 3")


def test_a_policy_may_change_its_mind_while_programs_are_compiled() -> None:
    service = Service(ManualPolicy(WITH_MERGED))
    service.regrouper.cold.add((0, 1))
    service.run(0.5)
    service.controller.set_policy(ManualPolicy(Plan(1, FOUR.instances[:3])))
    service.run(0.5)
    assert service.instances == FOUR.instances[:3]


def test_followers_of_the_plan_learn_of_another_policy_too() -> None:
    service, policies = Service(ManualPolicy()), []
    service.in_force.follow(lambda: policies.append(service.controller.policy.name))
    service.controller.set_policy(StaticPolicy())
    assert policies == ["static"]


def test_instances_are_added_and_removed() -> None:
    service = Service(ManualPolicy(Plan(1, FOUR.instances[:2])))
    service.run(1)
    assert service.instances == FOUR.instances[:2]
    assert [str(regroup) for regroup in service.regrouper.started] == ["remove instance 2", "remove instance 3"]
    service.controller.set_policy(StaticPolicy())
    service.run(1)
    assert set(service.instances) == set(FOUR.instances), "static returns to the instances of the start"


def test_draining_is_part_of_the_plan() -> None:
    service = Service(ManualPolicy(FOUR.with_instance(FOUR.instance("2").with_draining(True))))
    service.run(1)
    assert service.controller.plan.instance("2").draining
    assert service.outcomes == ["done"]


@dataclass(frozen=True)
class Counting:
    """A policy that counts how often it was asked about an instance."""

    name: str = "counting"

    def init(self, plan: InstancePlan) -> int:
        return 0

    def update(self, snapshot: Snapshot, plan: InstancePlan, state: int) -> Proposal[int]:
        return Proposal(plan, state + 1, f"asked {state + 1} times")


@dataclass(frozen=True)
class MergeAt:
    """A policy that merges two instances at a time."""

    time: float
    name: str = "merge"

    def init(self, plan: InstancePlan) -> None:
        return None

    def update(self, snapshot: Snapshot, plan: InstancePlan, state: None) -> Proposal[None]:
        return Proposal(plan, None)

    def first_structure(self, plan: Plan) -> None:
        return None

    def restructure(self, view: ServiceView, plan: Plan, state: None) -> PlanProposal[None]:
        wanted = WITH_MERGED if view.time >= self.time and len(plan.instances) == 4 else plan
        return PlanProposal(wanted, None, "it is time")

    def largest_tp(self, plan: Plan) -> int:
        return 2


def test_new_instances_are_controlled_from_their_first_state() -> None:
    service = Service(chain(Counting(), MergeAt(0.55)))
    service.run(0.5)
    before = service.controller.notes["2"]
    service.run(1)
    assert service.instances == WITH_MERGED.instances
    assert set(service.controller.notes) == {"2", "3", "4"}
    asked = {name: int(note.split()[1]) for name, note in service.controller.notes.items()}
    assert asked["2"] > int(before.split()[1]), "instances that take no part go on"
    assert asked["4"] < asked["2"]


def test_the_operators_check_names_what_is_wrong() -> None:
    service = Service(StaticPolicy())
    twice = Plan(1, (FOUR.instance("0"), replace(FOUR.instance("0"), name="9")))
    with pytest.raises(PlanError, match="instances 0 and 9 are both on device 0"):
        service.controller.check(twice)


def test_a_policy_that_raises_changes_nothing() -> None:
    @dataclass(frozen=True)
    class Broken(MergeAt):
        def restructure(self, view: ServiceView, plan: Plan, state: None) -> PlanProposal[None]:
            raise ValueError("oops")

    service = Service(Broken(0.0))
    service.run(0.5)
    assert service.instances == FOUR.instances
    assert service.outcomes == ["rejected: ValueError: oops"]
