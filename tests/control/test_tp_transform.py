"""The policy `tp_transform`: instances merge for long requests, and split when these are gone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from jaxserve.control.plan import Plan
from jaxserve.control.plan_edits import PlanEdit, PlanEditor
from jaxserve.control.policies.tp_transform import TransformPolicy, TransformSettings, TransformState
from jaxserve.control.policy import PlanProposal, ServiceView
from jaxserve.control.regroup import structural_change
from jaxserve.control.resources import validate
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.sim.cluster import resolve_cluster
from jaxserve.sim.hardware import load_hardware
from jaxserve.sim.shape import ModelShape
from jaxserve.telemetry import Recent, Snapshot, WaitingRoom

CONFIG = EngineConfig(dp=8, max_tp=4, policy="tp_transform", memory_gb=78, max_num_seqs=32)
SHAPE = replace(ModelShape.load("qwen2.5-32b"), max_position=2**21)  # so that only memory limits lengths
CLUSTER = resolve_cluster(CONFIG, SHAPE, load_hardware("h20"))
RESOURCES, START = CLUSTER.resources, CLUSTER.memory.plan
LENGTHS = {degree: RESOURCES.limits_of(degree).max_len for degree in (1, 2, 4)}
FOR_TWO, FOR_FOUR = LENGTHS[2], LENGTHS[2] + 1


@dataclass
class Policed:
    """A policy with its plan, which comes into force as soon as it is proposed."""

    settings: TransformSettings = field(default_factory=TransformSettings)
    plan: Plan = START
    time: float = 0.0
    loads: dict[str, int] = field(default_factory=dict)  # KV pages in use, by instance
    longest: dict[str, int] = field(default_factory=dict)  # tokens, by instance
    trends: dict[str, float] = field(default_factory=dict)
    queues: dict[str, int] = field(default_factory=dict)
    cold: set[tuple[int, ...]] = field(default_factory=set)  # devices without programs

    def __post_init__(self) -> None:
        self.policy = TransformPolicy(RESOURCES, self.settings)
        self.state: TransformState = self.policy.first_structure(self.plan)
        self.used_names = {plan.name for plan in START.instances}

    def ask(self, need: int = 0, *, after: float = 0.1) -> PlanProposal[TransformState]:
        """Ask the policy some seconds later, while a request of `need` tokens waits, and adopt its proposal."""
        self.time += after
        view = ServiceView(
            self.time,
            {plan.name: self._snapshot(plan.name, plan.kv_pages) for plan in self.plan.instances},
            WaitingRoom(count=int(need > 0), longest=need),
            lambda name: self.longest.get(name, 0),
            lambda plan: plan.stages[0].devices not in self.cold,
            self.used_names,
        )
        proposal = self.policy.restructure(view, self.plan, self.state)
        structural_change(self.plan, proposal.plan, RESOURCES)
        validate(proposal.plan, RESOURCES)
        self.plan, self.state = proposal.plan, proposal.state
        self.used_names |= {plan.name for plan in self.plan.instances}
        return proposal

    def _snapshot(self, name: str, pages: int) -> Snapshot:
        recent = Recent(5.0, 0.0, self.trends.get(name), 0.0, 0.0, 0, None, None, 0.0, 0.0, 0.0, 0.0)
        return Snapshot(
            kv_pages_total=pages - 1,
            kv_pages_used=self.loads.get(name, 0),
            num_waiting=self.queues.get(name, 0),
            recent=recent,
        )

    @property
    def degrees(self) -> list[int]:
        return [plan.tp for plan in self.plan.instances]

    def devices(self, name: str) -> tuple[int, ...]:
        return self.plan.instance(name).stages[0].devices


def merged(need: int = FOR_TWO) -> Policed:
    """Return a policy that has just merged for a long request, which is gone already."""
    policed = Policed()
    policed.ask(need)
    policed.ask()
    return policed


def test_the_least_loaded_buddies_merge_for_a_request_that_none_can_hold() -> None:
    policed = Policed(loads=dict(zip("01234567", (5, 5, 1, 8, 2, 2, 9, 0), strict=True)))
    proposal = policed.ask(FOR_TWO)
    assert policed.degrees == [1, 1, 1, 1, 2, 1, 1]
    assert policed.devices("8") == (4, 5)
    assert proposal.reason == f"a request needs {FOR_TWO} tokens, which instances 4 and 5 can hold together"


def test_a_merged_instance_has_all_the_kv_pages_that_fit() -> None:
    plan = merged().plan.instance("8")
    assert plan.kv_pages == RESOURCES.kv_capacity(plan) > 2 * START.instances[0].kv_pages


def test_four_merge_at_once_if_two_are_not_enough() -> None:
    policed = Policed()
    policed.ask(FOR_FOUR)
    assert policed.degrees == [4, 1, 1, 1, 1]
    assert policed.devices("8") == (0, 2, 1, 3)


def test_uneven_degrees_merge_step_by_step() -> None:
    policed = Policed(loads=dict.fromkeys("4567", 50))
    policed.ask(FOR_TWO)
    policed.longest["8"] = FOR_TWO
    policed.ask(FOR_FOUR)
    assert policed.degrees == [2, 2, 1, 1, 1, 1], "the other pair first"
    policed.ask(FOR_FOUR)
    assert policed.degrees == [4, 1, 1, 1, 1]
    assert policed.devices(policed.plan.instances[0].name) == (0, 2, 1, 3), "as if all had merged at once"


def without(*names: str) -> Policed:
    """Return a policy after operators have removed instances."""
    policed = Policed()
    policed.plan = replace(START, instances=tuple(plan for plan in START.instances if plan.name not in names))
    return policed


def test_others_than_buddies_merge_if_operators_have_removed_one_of_each_pair() -> None:
    policed = without("1", "3", "4", "6")
    policed.ask(FOR_TWO)
    assert policed.devices("8") == (0, 2)
    policed.ask(FOR_FOUR)
    policed.ask(FOR_FOUR)
    assert policed.degrees == [4]


def test_instances_that_operators_have_merged_across_pairs_merge_further() -> None:
    policed = without("4", "5", "6", "7")
    policed.plan = PlanEditor(START, RESOURCES).edited(policed.plan, PlanEdit("merge", ("0", "2")))
    for _ in range(2):
        policed.ask(FOR_FOUR)
    assert policed.degrees == [4]


def test_a_request_that_the_instances_left_cannot_hold_together_merges_none() -> None:
    policed = without("1", "3", "4", "5", "6", "7")
    assert policed.ask(FOR_FOUR).reason.endswith("more than the instances that are left could hold together")
    assert policed.degrees == [1, 1]


def test_an_instance_that_can_hold_the_request_is_not_merged_further() -> None:
    policed = merged()
    proposal = policed.ask(FOR_TWO)
    assert policed.degrees == [2, 1, 1, 1, 1, 1, 1]
    assert proposal.reason == f"a request needs {FOR_TWO} tokens, which instance 8 can hold"


def test_no_merge_before_its_programs_are_compiled() -> None:
    policed = Policed(cold={(0, 1), (2, 3), (4, 5), (6, 7)})
    assert (
        policed.ask(FOR_TWO).reason
        == f"a request needs {FOR_TWO} tokens: the programs to hold it are still being compiled"
    )
    policed.cold.remove((6, 7))
    policed.ask(FOR_TWO)
    assert policed.devices("8") == (6, 7)


def test_what_no_instance_could_hold_changes_nothing() -> None:
    policed = Policed()
    assert "more than any instance could hold" in policed.ask(LENGTHS[4] + 1).reason
    assert policed.plan is START


def test_a_merged_instance_drains_when_no_long_request_has_come_for_a_while() -> None:
    policed = merged()
    policed.ask(after=1.7)
    assert not policed.plan.instance("8").draining
    policed.longest["8"] = FOR_TWO
    policed.ask(after=0.5)
    policed.longest["8"] = LENGTHS[1]
    policed.ask(after=1.9)
    assert not policed.plan.instance("8").draining, "the time counts from the last long request"
    proposal = policed.ask(after=0.2)
    assert policed.plan.instance("8").draining
    assert proposal.reason == "instance 8 has had no long request for 2.1 s and drains"


def test_a_draining_instance_that_gets_a_long_request_takes_all_requests_again() -> None:
    policed = merged()
    policed.loads["8"] = 10_000
    policed.ask(after=3)
    policed.longest["8"] = FOR_TWO
    proposal = policed.ask()
    assert proposal.reason == "instance 8 has a long request again, and takes all requests"
    assert policed.degrees[0] == 2
    assert not policed.plan.instance("8").draining


def drained(need: int = FOR_TWO, **seen: Mapping[str, float]) -> Policed:
    """Return a policy whose merged instance is draining."""
    policed = merged(need)
    for name, values in seen.items():
        setattr(policed, name, dict(values))
    policed.ask(after=3)
    assert policed.plan.instance("8").draining
    return policed


def test_it_splits_into_the_instances_of_the_start() -> None:
    policed = drained(FOR_FOUR)
    policed.ask()
    assert policed.degrees == [1] * 8
    assert [plan.name for plan in policed.plan.instances] == ["9", "10", "11", "12", "4", "5", "6", "7"]
    nameless = [replace(plan, name="") for plan in policed.plan.instances]
    assert sorted(nameless, key=str) == sorted((replace(plan, name="") for plan in START.instances), key=str)


def test_it_splits_when_half_of_its_parts_kv_is_enough() -> None:
    pages = sum(plan.kv_pages - 1 for plan in START.instances[:2])
    policed = drained(loads={"8": pages // 2 + 1})
    assert policed.ask().reason == "instance 8 uses 50% of its parts' KV, splits at 50%"
    policed.loads["8"] = pages // 2
    policed.ask()
    assert policed.degrees == [1] * 8


@pytest.mark.parametrize(("trend", "splits"), [(0.05, False), (-0.05, True)])
def test_it_does_not_split_while_its_usage_rises(trend: float, splits: bool) -> None:
    pages = sum(plan.kv_pages - 1 for plan in START.instances[:2])
    policed = drained(loads={"8": pages // 2}, trends={"8": trend})
    policed.ask()
    assert (policed.degrees == [1] * 8) == splits


def test_it_does_not_split_while_requests_wait_in_it() -> None:
    policed = drained(queues={"8": 3})
    assert policed.ask().reason.endswith("splits at 50%, 3 waiting")
    policed.queues.clear()
    policed.ask()
    assert policed.degrees == [1] * 8


def test_it_splits_no_further_than_the_requests_that_are_left_allow() -> None:
    policed = drained(FOR_FOUR, longest={"8": FOR_TWO})
    policed.ask()
    assert policed.degrees == [2, 2, 1, 1, 1, 1]


def test_a_request_that_waits_comes_before_a_split() -> None:
    policed = drained()
    policed.ask(FOR_FOUR)
    assert policed.degrees == [2, 2, 1, 1, 1, 1]


def test_the_service_may_promise_what_the_largest_merge_holds() -> None:
    policy = TransformPolicy(RESOURCES, TransformSettings())
    assert policy.largest_tp(START) == 4
    assert policy.largest_tp(Plan(1, START.instances[:2])) == 2


@pytest.mark.parametrize("settings", [{"hold": -1.0}, {"release_usage": 0.0}, {"release_horizon": float("nan")}])
def test_settings_out_of_range_are_refused(settings: Mapping[str, float]) -> None:
    with pytest.raises(ConfigError):
        TransformSettings(**settings)


def names(policed: Policed) -> Sequence[str]:
    return [plan.name for plan in policed.plan.instances]


def test_names_are_never_given_again() -> None:
    policed, given = Policed(), set("01234567")
    for _ in range(5):
        policed.ask(FOR_FOUR)
        for _ in range(4):
            before = set(names(policed))
            policed.ask(after=3)
            new = set(names(policed)) - before
            assert not new & given
            given |= new | before
