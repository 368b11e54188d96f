"""Policies that are combined with "+": who decides first, and that plans stay valid whatever happens."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings, strategies as st

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
    return resolve_cluster(config, ModelShape.load("llama-3-8b"), GPU, elastic=elastic)


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
        for plan in regrouped.values():
            validate_instance(plan, self.resources)
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
@settings(max_examples=12)
@given(data=st.data())
def test_plans_stay_valid_whatever_the_load_does(name: str, data: st.DataObject) -> None:
    combined = Combined(name, data.draw(st.booleans()))
    for _ in range(12):
        combined.time += data.draw(st.sampled_from((0.1, 1.0, 6.0, 30.0)))
        combined.longest = data.draw(st.sampled_from((0, 0, 0, combined.resources.max_len + 1)))
        for plan in combined.plan.instances:
            used, waiting, trend, wait = data.draw(MOMENT)
            combined.load(plan.name, used, waiting, trend=trend, wait=wait)
        combined.change_structure()
        for plan in combined.plan.instances:
            combined.change_instance(plan.name)
