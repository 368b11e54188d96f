"""Policies that are combined with "+": who decides first, and that plans stay valid whatever happens."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import Phase, given, settings, strategies as st

from jaxserve.control.controller import home
from jaxserve.control.diff import diff
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.policies import load_policy
from jaxserve.control.policy import PlanProposal, ServiceView
from jaxserve.control.regroup import StructuralChange, structural_change
from jaxserve.control.resources import validate, validate_instance
from jaxserve.core.config import EngineConfig
from jaxserve.sim.cluster import Cluster, resolve_cluster
from jaxserve.sim.shape import ModelShape
from jaxserve.telemetry import Recent, Snapshot, WaitingRoom
from tests.sim.machines import GPU

COMBINATIONS = (
    "param_drop+morph",
    "morph+param_drop",
    "tp_transform+param_drop",
    "param_drop+tp_transform",
    "tp_transform+param_drop+morph",
)
RECENT = Recent(5.0, 0.5, 0.0, 0.0, 0.0, 0, None, None, None, None, 0.5, 0.0)


def cluster(policy: str, elastic: bool) -> Cluster:
    """Return four instances, whose pools take memory page by page (`elastic`) or in segments."""
    config = EngineConfig(
        dp=4, memory_gb=24, policy=policy, max_tp=4 if "tp_transform" in policy else None, max_pp=4, max_num_seqs=64
    )
    shape = replace(ModelShape.load("llama-3-8b"), max_position=2**21)  # so that only memory limits lengths
    return resolve_cluster(config, shape, GPU, elastic=elastic)


CLUSTERS = {(policy, elastic): cluster(policy, elastic) for policy in COMBINATIONS for elastic in (False, True)}


@dataclass
class Combined:
    """A combination whose proposals come into force at once, as the controller would have them carried out."""

    name: str
    elastic: bool = False
    time: float = 0.0
    longest: int = 0  # tokens of the longest request that waits in the waiting room
    seen: dict[str, Snapshot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        built = CLUSTERS[self.name, self.elastic]
        self.resources, self.start = built.resources, built.memory.plan
        self.plan = self.start
        order = range(len(self.start.instances[0].layer_precisions))
        self.policy = load_policy(self.name, self.resources, order)
        self.structure = self.policy.first_structure(self.start)  # type: ignore[attr-defined]
        self.states: dict[str, object] = {}
        self.used = {plan.name for plan in self.start.instances}

    def load(self, name: str, used: float, waiting: int, *, trend: float = 0.0, wait: float = 1.0) -> None:
        """Let an instance use a share of its KV pages, while sequences wait that have a hundred pages each."""
        total = self.plan.instance(name).kv_pages - 1
        self.seen[name] = Snapshot(
            time=self.time,
            kv_pages_total=total,
            kv_pages_used=int(used * total),
            num_running=4,
            num_waiting=waiting,
            waiting_tokens=waiting * 100 * self.resources.page_size,
            oldest_wait=wait if waiting else 0.0,
            recent=replace(RECENT, kv_trend=trend, kv_usage=used, max_kv_usage=used),
        )

    def change_structure(self, after: float = 0.1) -> tuple[PlanProposal, StructuralChange]:
        """Ask about the set of instances, and carry out what is proposed."""
        self.time += after
        room = WaitingRoom(count=int(self.longest > 0), longest=self.longest)
        view = ServiceView(self.time, self.seen, room, lambda name: 0, lambda plan: True, self.used)
        proposal = self.policy.restructure(view, self.plan, self.structure)  # type: ignore[attr-defined]
        change = structural_change(self.plan, proposal.plan, self.resources)
        validate(proposal.plan, self.resources, self.plan.instances)
        self.structure = proposal.state
        regrouped = {plan.name: plan for regroup in change.regroups for plan in regroup.after}
        self.plan = Plan(
            proposal.plan.version,
            tuple(change.finish.get(plan.name) or regrouped.get(plan.name, plan) for plan in proposal.plan.instances),
        )
        validate(self.plan, self.resources)
        self.used |= {plan.name for plan in self.plan.instances}
        self.seen = {name: seen for name, seen in self.seen.items() if name in {p.name for p in self.plan.instances}}
        return proposal, change

    def change_instance(self, name: str) -> InstancePlan:
        """Ask about one instance, and carry out what is proposed."""
        plan = self.plan.instance(name)
        if name not in self.states:
            self.states[name] = self.policy.init(home(plan, self.start, self.resources))
        proposal = self.policy.update(self.seen.get(name, Snapshot(recent=RECENT)), plan, self.states[name])
        validate_instance(proposal.plan, self.resources)
        diff(plan, proposal.plan, self.resources)
        self.states[name] = proposal.state
        self.plan = self.plan.with_instance(proposal.plan)
        return proposal.plan

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The lanes and degrees of all instances."""
        return sorted((plan.lanes, plan.tp) for plan in self.plan.instances)


MOMENT = st.tuples(
    st.sampled_from((0.0, 0.2, 0.5, 0.95, 1.0)),
    st.sampled_from((0, 0, 1, 30)),
    st.sampled_from((-0.05, 0.0, 0.05)),
    st.sampled_from((0.0, 0.3, 20.0)),
)


@pytest.mark.parametrize("name", COMBINATIONS)
@settings(max_examples=12, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_plans_stay_valid_whatever_the_load_does(name: str, data: st.DataObject) -> None:
    combined = Combined(name, data.draw(st.booleans()))
    for _ in range(12):
        combined.time += data.draw(st.sampled_from((0.1, 1.0, 6.0, 30.0)))
        combined.longest = data.draw(st.sampled_from((0, 0, combined.resources.max_len + 1)))
        for plan in combined.plan.instances:
            used, waiting, trend, wait = data.draw(MOMENT)
            combined.load(plan.name, used, waiting, trend=trend, wait=wait)
        combined.change_structure()
        for plan in combined.plan.instances:
            combined.change_instance(plan.name)


def swapped(combined: Combined, name: str, *layers: int) -> None:
    """Let an instance have some layers in int4, and the KV pages that then fit, as morph does under pressure."""
    plan = combined.plan.instance(name).with_precisions({f"layers.{layer}": "int4" for layer in layers})
    combined.plan = combined.plan.with_instance(plan.with_kv_pages(combined.resources.kv_capacity(plan)))


def in_burst(combined: Combined, *, longest: int = 0) -> list[str]:
    """Let pages run out on all instances while sequences wait on the first, and return the regroups that follow."""
    for plan in combined.plan.instances:
        combined.load(plan.name, 1.0, 30 if plan is combined.plan.instances[0] else 0)
    combined.longest = longest
    return [str(regroup) for regroup in combined.change_structure()[1].regroups]


def calm(combined: Combined, seconds: float) -> list[str]:
    """Let instances hold next to nothing for some time, and return the regroups at its end."""
    combined.longest = 0
    for after in (0.1, seconds):
        for plan in combined.plan.instances:
            combined.load(plan.name, 0.01, 0)
        regroups = combined.change_structure(after)[1].regroups
    return [str(regroup) for regroup in regroups]


def group_of(combined: Combined) -> InstancePlan:
    (group,) = (plan for plan in combined.plan.instances if plan.lanes > 1)
    return group


def changed(plan: InstancePlan) -> list[int]:
    return [layer for layer, precision in enumerate(plan.layer_precisions) if precision == "int4"]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("tp_transform+param_drop", "instance 2 and 3 -> 4 (devices 2, 3)"),
        ("param_drop+tp_transform", "instance 0 and 1 -> 4 (stages on devices 0, 1)"),
    ],
)
def test_the_first_policy_that_wants_other_instances_has_them(name: str, first: str) -> None:
    combined = Combined(name)
    assert in_burst(combined, longest=combined.resources.max_len + 1) == [first]


def test_a_merged_instance_drops_no_layers_and_a_group_does_not_merge() -> None:
    combined = Combined("tp_transform+param_drop")
    long = combined.resources.max_len + 1
    for name in ("0", "1", "2", "3"):
        combined.load(name, 0.0, 0)
    combined.longest = long
    combined.change_structure()
    assert combined.shapes == [(1, 1), (1, 1), (1, 2)]
    assert in_burst(combined, longest=long) == ["instance 2 and 3 -> 5 (stages on devices 2, 3)"]
    assert in_burst(combined, longest=combined.resources.limits_of(2).max_len + 1) == []
    assert combined.shapes == [(1, 2), (2, 1)]


def test_a_member_with_swapped_layers_is_dropped_and_restored_with_its_precisions() -> None:
    combined = Combined("param_drop+morph")
    swapped(combined, "0", 0, 1, 31)
    swapped(combined, "1", 2, 30)
    assert in_burst(combined) == ["instance 0 and 1 -> 4 (stages on devices 0, 1)"]
    assert changed(group_of(combined)) == [0, 1, 30], "each device keeps its layers as they are"
    assert calm(combined, 6.0) == ["instance 4 -> 5 (devices 0) and 6 (devices 1)"]
    assert [changed(combined.plan.instance(name)) for name in "56"] == [[0, 1, 30]] * 2


def test_morph_changes_the_layers_of_a_group_and_returns_them_after_the_restore() -> None:
    combined = Combined("param_drop+morph")
    in_burst(combined)
    name, pages = group_of(combined).name, group_of(combined).kv_pages
    for _ in range(10):
        combined.time += 1
        combined.load(name, 1.0, 30, wait=20.0)
        combined.change_instance(name)
    group = group_of(combined)
    assert changed(group) == list(range(32))
    assert group.kv_pages > pages
    calm(combined, 6.0)
    assert combined.shapes == [(1, 1)] * 4, "a group is restored whatever precisions its layers have"
    for _ in range(60):
        combined.time += 6
        for plan in combined.plan.instances:
            combined.load(plan.name, 0.01, 0)
            combined.change_instance(plan.name)
    assert not any(map(changed, combined.plan.instances))


def test_a_group_is_restored_while_its_layers_are_swapped_and_then_has_the_pages_of_the_start() -> None:
    combined = Combined("param_drop+morph")
    swapped(combined, "0", *range(32))
    in_burst(combined)
    for _ in range(2):  # one group after the other
        calm(combined, 6.0)
    assert {plan.kv_pages for plan in combined.plan.instances} == {combined.start.instances[0].kv_pages}
