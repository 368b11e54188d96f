"""The policy that drops replicated layers: when it does, what it proposes, and when layers return."""

from dataclasses import dataclass, field, replace

import pytest

from jaxserve.control.plan import Plan
from jaxserve.control.policies.param_drop import DropSettings, DropState, ParamDropPolicy
from jaxserve.control.policy import PlanProposal, ServiceView
from jaxserve.control.regroup import Kind, kind_of, structural_change
from jaxserve.control.resources import validate
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.sim.cluster import resolve_cluster
from jaxserve.sim.shape import ModelShape
from jaxserve.telemetry import Recent, Snapshot, WaitingRoom
from tests.sim.machines import GPU

MEMORY = resolve_cluster(
    EngineConfig(dp=4, memory_gb=24, policy="param_drop"), ModelShape.load("llama-3-8b"), GPU
).memory
START, RESOURCES = MEMORY.plan, MEMORY.limits
PAGES = START.instances[0].kv_pages - 1
SIZE = RESOURCES.page_size
RECENT = Recent(5.0, 0.5, 0.0, 0.0, 0.0, 0, None, None, None, None, 0.5, 0.0)


@dataclass
class Policed:
    """A policy whose proposals come into force at once."""

    plan: Plan = START
    time: float = 0.0
    seen: dict[str, Snapshot] = field(default_factory=dict)
    warm: bool = True

    def __post_init__(self) -> None:
        self.policy = ParamDropPolicy(RESOURCES, DropSettings())
        self.state: DropState = self.policy.first_structure(self.plan)
        self.names = {plan.name for plan in START.instances}

    def load(self, used: float, lacking: int = 0, *, trend: float = 0.0, wait: float = 1.0) -> None:
        """Let instances use a share of the KV pages that they had at the start, while prompts of `lacking` pages wait.

        All instances together have `used * PAGES` pages each in use.
        """
        for plan in self.plan.instances:
            pages = int(used * PAGES * plan.lanes)
            total = plan.kv_pages - 1
            waits = bool(lacking) and plan is self.plan.instances[0]
            self.seen[plan.name] = Snapshot(
                kv_pages_total=total,
                kv_pages_used=min(pages, total),
                num_waiting=int(waits),
                waiting_tokens=lacking * SIZE if waits else 0,
                oldest_wait=wait if waits else 0.0,
                recent=replace(RECENT, kv_trend=trend, kv_usage=min(pages, total) / total),
            )

    def ask(self, after: float = 0.1) -> PlanProposal[DropState]:
        self.time += after
        view = ServiceView(self.time, self.seen, WaitingRoom(), lambda name: 0, lambda plan: self.warm, self.names)
        proposal = self.policy.restructure(view, self.plan, self.state)
        structural_change(self.plan, proposal.plan, RESOURCES)
        validate(proposal.plan, RESOURCES)
        self.plan, self.state = proposal.plan, proposal.state
        self.names |= {plan.name for plan in self.plan.instances}
        return proposal

    @property
    def lanes(self) -> list[int]:
        return sorted(plan.lanes for plan in self.plan.instances)


def gain(lanes: int) -> int:
    policed = Policed()
    whole = policed.policy._grouped(START.instances[:lanes], "x", START.instances[0])
    return whole.kv_pages - lanes * START.instances[0].kv_pages


def dropped(lacking: int) -> Policed:
    policed = Policed()
    policed.load(1.0, lacking)
    policed.ask()
    return policed


def test_no_layer_is_dropped_while_pages_are_free_or_nothing_waits() -> None:
    for used, lacking in ((1.0, 0), (0.5, 10), (0.0, 10)):
        policed = Policed()
        policed.load(used, lacking)
        assert policed.ask().plan is START


def test_layers_are_dropped_for_a_sequence_that_does_not_fit_into_the_free_pages() -> None:
    policed = Policed()
    policed.load(0.7, PAGES // 2)
    policed.ask()
    assert policed.lanes == [1, 1, 2]


def test_neighbours_share_their_layers_first_where_pages_are_lacking() -> None:
    policed = Policed()
    policed.load(1.0, 0)
    seen = policed.seen["2"]
    policed.seen["2"] = replace(seen, num_waiting=1, waiting_tokens=100 * SIZE, oldest_wait=1.0)
    proposal = policed.ask()
    (group,) = (plan for plan in proposal.plan.instances if plan.lanes > 1)
    assert group.devices == {2, 3}


def test_layers_need_not_change_before_they_are_dropped_or_while_a_group_has_pages() -> None:
    policed = Policed()
    policed.load(0.8)
    assert set(policed.ask().keeps) == {"0", "1", "2", "3"}
    policed.load(0.2)
    assert not policed.ask().keeps, "there is no want of pages"
    policed = dropped(100)
    policed.load(0.8)
    (group,) = (plan.name for plan in policed.plan.instances if plan.lanes > 1)
    assert group in policed.ask().keeps


def test_no_layer_is_dropped_for_a_wait_of_a_moment() -> None:
    policed = Policed()
    policed.load(1.0, 100, wait=0.01)
    assert policed.ask().plan is START


def test_two_instances_share_their_layers_if_that_frees_enough() -> None:
    policed = dropped(100)
    assert policed.lanes == [1, 1, 2]
    (group,) = [plan for plan in policed.plan.instances if plan.lanes == 2]
    assert [len(stage.blocks) for stage in group.stages] == [17, 17]
    assert group.kv_pages >= 1.5 * 2 * START.instances[0].kv_pages
    assert kind_of(START.instances[:2], (group,)) is Kind.DROP


def test_more_instances_share_their_layers_if_more_is_lacking() -> None:
    assert dropped(gain(2) + 1).lanes == [2, 2]
    assert dropped(2 * gain(2) + 10).lanes == [4]


def test_groups_share_their_layers_further() -> None:
    policed = dropped(gain(2) + 1)
    for _ in range(2):
        policed.load(4.0, 20 * PAGES)
        policed.ask()
    assert policed.lanes == [4]


def test_what_is_still_lacking_is_said() -> None:
    policed = Policed()
    policed.load(1.0, 100 * PAGES)
    assert "are still lacking, and sequences are preempted" in policed.ask().reason
    policed.load(10.0, 100 * PAGES)
    assert policed.ask().reason.endswith("no layers are left to drop: sequences are preempted")


def test_no_group_is_made_whose_programs_are_not_compiled() -> None:
    policed = Policed(warm=False)
    policed.load(1.0, 100)
    proposal = policed.ask()
    assert proposal.plan is START
    assert proposal.reason.endswith("the programs of groups are still being compiled")


def test_layers_return_when_the_members_own_pages_suffice_for_long() -> None:
    policed = dropped(gain(2) + 1)
    policed.load(0.4)
    policed.ask()
    assert policed.ask(4.0).reason == ""
    policed.ask(1.1)
    assert policed.lanes == [1, 1, 2]
    policed.load(0.4)
    policed.ask()
    assert policed.lanes == [1, 1, 1, 1]
    assert {plan.devices for plan in policed.plan.instances} == {plan.devices for plan in START.instances}
    assert {plan.kv_pages for plan in policed.plan.instances} == {PAGES + 1}


@pytest.mark.parametrize(("used", "trend", "lacking"), [(0.55, 0.0, 0), (0.4, 0.1, 0), (0.4, 0.0, PAGES)])
def test_layers_do_not_return_while_usage_is_high_or_rises_or_much_waits(
    used: float, trend: float, lacking: int
) -> None:
    policed = dropped(100)
    policed.load(used, lacking, trend=trend)
    policed.ask()
    policed.ask(60)
    assert policed.lanes == [1, 1, 2]


def test_layers_return_although_a_short_sequence_waits_for_its_turn() -> None:
    policed = dropped(100)
    policed.load(0.4, 1)
    policed.ask()
    policed.ask(5.1)
    assert policed.lanes == [1, 1, 1, 1]


def test_layers_return_although_requests_come_and_go() -> None:
    policed = dropped(100)
    for tick in range(80):
        policed.load(0.2, trend=0.02 if tick % 20 < 10 else -0.02)
        policed.ask()
    assert policed.lanes == [1, 1, 1, 1]


@pytest.mark.parametrize("setting", [{"drop_usage": 0.0}, {"release_usage": 1.5}, {"hold": -1}, {"drop_wait": -0.1}])
def test_settings_are_checked(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="it must be"):
        DropSettings(**setting)
