"""Instances that merge and split in virtual time: what moves, how long it takes, and that no request suffers."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.bench.options import DatasetOptions, TraceOptions
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.policies import ManualPolicy
from jaxserve.control.regroup import merged_plan
from jaxserve.control.regrouping import Regrouping
from jaxserve.core.config import EngineConfig
from jaxserve.sim.build import BuiltSimulation, build_simulation
from jaxserve.sim.cluster import Cluster, resolve_cluster
from jaxserve.sim.hardware import load_hardware
from jaxserve.sim.options import ClusterOptions
from jaxserve.sim.run import SimExperiment, run_simulation
from jaxserve.sim.shape import ModelShape
from jaxserve.sim.simulation import Answered, SimRequest
from tests.support.thorough import THOROUGH

SHAPE, H20 = ModelShape.load("qwen2.5-32b"), load_hardware("h20")
LONG = 50_000
SHORT = [SimRequest(0.4 * number, 600, 150) for number in range(300)]


def cluster(policy: str = "tp_transform", **options) -> Cluster:
    given = {"dp": 4, "max_tp": 4, "memory_gb": 78, "prefix_caching": False, "policy": policy}
    return resolve_cluster(EngineConfig(**given | options), SHAPE, H20)


def run(requests: Sequence[SimRequest], **options) -> tuple[BuiltSimulation, dict[int, Answered]]:
    """Simulate requests to their end, and return their results by their order of arrival."""
    built = build_simulation(cluster(**options), detailed=True, interval=0.0)
    answers = {}
    for answer in built.simulation.run(sorted(requests, key=lambda request: request.arrival)):
        answers[answer.index] = answer
        if len(answers) == len(requests):
            built.sampler.finish()
    return built, answers


def degrees(built: BuiltSimulation) -> list[list[int]]:
    assert built.control is not None
    return [sorted(plan.tp for plan in each.instances) for each in built.control.sets]


def test_a_long_request_has_instances_merge_and_split_again() -> None:
    requests = [*SHORT, SimRequest(20.0, LONG, 100)]
    built, answers = run(requests)
    assert degrees(built) == [[1, 1, 1, 1], [1, 1, 2], [1, 1, 1, 1]]
    assert [answer.error for answer in answers.values()] == [None] * len(requests)
    (long,) = [answer for answer in answers.values() if answer.request.input_tokens == LONG]
    assert long.instance == "4"
    assert {answer.instance for answer in answers.values()} > {"2", "3", "4", "5", "6"}
    assert [decision.outcome for decision in built.control.decisions] == ["done"] * 3
    assert built.control.settled_since is not None, "the plan at the start is in force again, under other names"


def test_without_the_policy_a_long_request_is_refused() -> None:
    _, answers = run([SimRequest(0.0, LONG, 100), *SHORT[:3]], policy="static", max_tp=None)
    errors = [answer.error for answer in answers.values()]
    assert errors[1:] == [None] * 3
    assert "maximum context length is 35472 tokens" in errors[0]
    assert answers[0].instance is None


def test_every_token_of_a_moved_request_has_one_time() -> None:
    _, answers = run([*SHORT, *(SimRequest(20.0 + 15 * number, LONG, 50) for number in range(4))])
    for answer in answers.values():
        assert len(answer.token_times) == answer.output_tokens == answer.request.output_tokens
        assert list(answer.token_times) == sorted(answer.token_times)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances merge and split at once, however long that takes."""
    monkeypatch.setattr(Regrouping, "gradual", lambda *_: False)


@pytest.mark.usefixtures("at_once")
def test_instances_that_take_no_part_go_on() -> None:
    built, answers = run([*(SimRequest(0.5 * number, 100, 2000) for number in range(8)), SimRequest(20.0, LONG, 1)])
    merge, _ = built.control.pauses
    others = {"0", "1", "2", "3"} - set(merge.instances)
    assert len(others) == 2

    def gap(*, other: bool) -> float:
        """Return the longest time between two tokens of a request around the merge."""
        gaps = (
            after - before
            for answer in answers.values()
            if (answer.instance in others) is other
            for before, after in pairwise(answer.token_times)
            if before <= merge.time + merge.seconds and after >= merge.time
        )
        return max(gaps)

    assert gap(other=True) < merge.seconds < gap(other=False)


@pytest.mark.usefixtures("at_once")
def test_a_merge_stops_for_as_long_as_the_links_take() -> None:
    built, _ = run([*SHORT[:60], SimRequest(20.0, LONG, 1)])
    merge, split = built.control.pauses
    resources, memory = built.control._regrouper._host._resources, H20.links["nvlink"]
    assert merge.seconds > merge.link_bytes / 2 / memory.bandwidth
    assert merge.link_bytes % resources.page_bytes(cluster().memory.plan.instances[0].stages[0]) == 0, "only KV"
    weights = 62e9
    assert split.link_bytes > weights, "each of the two gets the half that it lacks"
    assert split.seconds > split.link_bytes / 2 / memory.bandwidth


def test_long_requests_that_follow_each_other_share_a_merged_instance() -> None:
    built, answers = run([SimRequest(1.0 + 5 * number, LONG, 400) for number in range(8)])
    assert degrees(built) == [[1, 1, 1, 1], [1, 1, 2], [1, 1, 1, 1]]
    assert {answer.instance for answer in answers.values()} == {"4"}


@settings(max_examples=12 if THOROUGH else 3, deadline=None)
@given(seed=st.integers(0, 10_000), phases=st.integers(1, 3))
def test_merges_are_no_more_than_phases_of_long_requests(seed: int, phases: int) -> None:
    rng = np.random.default_rng(seed)
    short = [
        SimRequest(float(at), int(rng.integers(10, 3000)), int(rng.integers(1, 300))) for at in rng.uniform(0, 600, 300)
    ]
    long = [
        SimRequest(200.0 * phase + float(rng.uniform(0, 40)), LONG, int(rng.integers(1, 200)))
        for phase in range(phases)
        for _ in range(int(rng.integers(1, 5)))
    ]
    built, answers = run([*short, *long])
    assert all(answer.error is None for answer in answers.values())
    merges = sum(len(after) < len(before) for before, after in zip(degrees(built), degrees(built)[1:], strict=False))
    assert 1 <= merges <= len(long)
    assert merges <= 2 * phases + 1
    assert degrees(built)[-1] == [1, 1, 1, 1]


def test_the_same_requests_give_the_same_result_twice() -> None:
    requests = [*SHORT, *(SimRequest(20.0 + 15 * number, LONG, 50) for number in range(4))]
    first, second = (run(requests)[1] for _ in range(2))
    assert first == second


def test_it_composes_with_morph() -> None:
    crowd = [SimRequest(10 + 0.02 * number, 1500, 150) for number in range(300)]
    built, answers = run([*crowd, SimRequest(14.0, LONG, 50)], policy="tp_transform+morph", slo_ttft=1.0)
    assert all(answer.error is None for answer in answers.values())
    done = [decision for decision in built.control.decisions if decision.outcome == "done"]
    assert any("-> int4" in text for decision in done for text in decision.transitions)
    assert [1, 1, 2] in degrees(built)
    assert degrees(built)[-1] == [1, 1, 1, 1]
    assert built.control.settled_since is not None


def regrouped(plans: Sequence[tuple[InstancePlan, ...]], requests: Sequence[SimRequest]) -> list[Answered]:
    """Simulate requests while an operator sets plans, one every 3 s."""
    built = build_simulation(cluster("manual"), detailed=True, interval=0.0)
    control = built.control
    assert control is not None
    for number, instances in enumerate(plans):
        policy = ManualPolicy(Plan(1, instances))
        control._agenda.add(3.0 * (number + 1), lambda policy=policy: control._controller.set_policy(policy))
    return list(built.simulation.run(requests))


def test_instances_are_added_and_removed_under_load() -> None:
    start = cluster("manual").memory.plan.instances
    answers = regrouped([start[:2], start[1:2], start], SHORT[:60])
    assert [answer.error for answer in answers] == [None] * 60
    assert all(len(answer.token_times) == 150 for answer in answers)


@pytest.mark.parametrize("largest", [2, 4])
def test_an_operator_merges_and_splits(largest: int) -> None:
    start = cluster("manual").memory.plan.instances
    pair = merged_plan(start[:2], "10")
    other = merged_plan(start[2:], "11")
    plans = [(pair, *start[2:]), (pair, other)]
    if largest == 4:
        plans.append((merged_plan((pair, other), "12"),))
    answers = regrouped([*plans, start], SHORT[:60])
    assert [answer.error for answer in answers] == [None] * 60


def test_layer_by_layer_no_pause_is_longer_than_a_step() -> None:
    requests = [*SHORT[:60], SimRequest(20.0, LONG, 1)]
    built, answers = run(requests)
    pauses = built.control.pauses
    assert len(pauses) > 20
    assert all(pause.seconds < 0.02 for pause in pauses)
    assert {pause.instances for pause in pauses[1:]} == {("4",)}, "the merged one serves while its layers change"
    for answer in answers.values():
        assert len(answer.token_times) == answer.request.output_tokens


def test_the_result_has_the_pauses_and_the_time_with_each_set_of_instances(tmp_path: Path) -> None:
    lines = ["arrival_s,input_tokens,output_tokens", *(f"{second},500,50" for second in range(30)), f"30,{LONG},20"]
    (tmp_path / "trace.csv").write_text("\n".join(lines) + "\n")
    experiment = SimExperiment(
        ClusterOptions("qwen2.5-32b", hardware="h20", cluster="4", max_tp=4, memory_gb=78, policy="tp_transform"),
        DatasetOptions(dataset="trace"),
        trace=TraceOptions(trace=tmp_path / "trace.csv"),
    )
    regroups = run_simulation(experiment, [])["regroups"]
    assert regroups["count"] == 2 <= len(regroups["pauses"])
    seconds = regroups["seconds_by_instances"]
    assert list(seconds) == ["4x1", "2x1 + 1x2"]
    assert seconds["4x1"] == pytest.approx(30, abs=1)
    assert len(regroups["pauses"][0]["instances"]) == 2


def test_a_split_waits_for_a_request_that_no_part_could_hold() -> None:
    start = cluster("manual").memory.plan.instances
    pair = merged_plan(start[:2], "10")
    pair = pair.with_kv_pages(cluster("manual").resources.kv_capacity(pair))
    late = [SimRequest(3.5, LONG, 300), *(SimRequest(4.0 + request.arrival, 600, 150) for request in SHORT[:20])]
    answers = {answer.index: answer for answer in regrouped([(pair, *start[2:]), start], late)}
    assert [answers[number].error for number in range(21)] == [None] * 21
    assert answers[0].instance == "10"
