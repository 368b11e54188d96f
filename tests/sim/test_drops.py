"""Instances that drop layers in virtual time: what a burst gains, and that all layers return."""

from collections.abc import Sequence

import numpy as np
import pytest

from jaxserve.control.plan import Plan
from jaxserve.control.resources import validate
from jaxserve.core.config import EngineConfig
from jaxserve.sim.build import BuiltSimulation, build_simulation
from jaxserve.sim.cluster import Cluster, resolve_cluster
from jaxserve.sim.hardware import load_hardware
from jaxserve.sim.pipeline import Pipeline, StageTime
from jaxserve.sim.shape import ModelShape
from jaxserve.sim.simulation import Answered, SimRequest

SHAPE, A800 = ModelShape.load("qwen2.5-14b"), load_hardware("a800")


def cluster(policy: str, instances: int, **options) -> Cluster:
    given = {"dp": instances, "memory_gb": 36, "max_num_batched_tokens": 2048, "prefix_caching": False}
    if "param_drop" in policy:
        given["max_pp"] = instances
    return resolve_cluster(EngineConfig(**given | options, policy=policy), SHAPE, A800)


def burst(instances: int) -> list[SimRequest]:
    """Return more requests than the pages of the instances hold at once, beside a few others."""
    calm = [SimRequest(0.5 * number, 600, 150) for number in range(100)]
    crowd = [SimRequest(5 + number / (8 * instances), 900, 400) for number in range(70 * instances)]
    return sorted([*calm, *crowd], key=lambda request: request.arrival)


def run(policy: str, instances: int, **options) -> tuple[BuiltSimulation, list[Answered]]:
    """Simulate the burst to its end, and return the results in the order of arrival."""
    requests = burst(instances)
    built = build_simulation(cluster(policy, instances, **options), detailed=True, interval=0.0)
    answers = []
    for answer in built.simulation.run(requests):
        answers.append(answer)
        if len(answers) == len(requests):
            built.sampler.finish()
    return built, sorted(answers, key=lambda answer: answer.index)


def p99_ttft(answers: Sequence[Answered]) -> float:
    return float(np.percentile([answer.first_token - answer.request.arrival for answer in answers], 99))


def preemptions(built: BuiltSimulation) -> int:
    return built.simulation.front.snapshot().preemptions


@pytest.mark.parametrize("instances", [2, 4])
def test_a_burst_has_instances_drop_layers_and_restore_them(instances: int) -> None:
    static, waited = run("static", instances)
    built, answers = run("param_drop", instances)
    assert [answer.error for answer in answers] == [None] * len(waited)
    assert all(len(answer.token_times) == answer.request.output_tokens for answer in answers)
    assert preemptions(built) < preemptions(static)
    assert p99_ttft(answers) < p99_ttft(waited) / 2
    sets = [[len(plan.stages) for plan in each.instances] for each in built.control.sets]
    assert max(map(max, sets)) >= 2
    assert sets[-1] == [1] * instances
    assert built.control.settled_since is not None


def test_pages_cross_links_while_the_group_serves() -> None:
    built, answers = run("param_drop", 2)
    dropped = built.control.sets[1].time
    chunks = [chunk for chunk in built.control.chunks if chunk.instance == "2"]
    last = max(chunk.end for chunk in chunks)
    times = [time for answer in answers for time in answer.token_times]
    assert sum(dropped < time < last for time in times) > 100
    own = cluster("param_drop", 2).memory.plan.instances[0]
    kv = own.kv_pages * cluster("param_drop", 2).resources.page_bytes(own.stages[0])  # of one member
    assert 0.8 * kv < sum(chunk.link_bytes for chunk in chunks) <= kv, "each sends one half of what it has"


def test_the_same_requests_give_the_same_result_twice() -> None:
    assert run("param_drop", 2)[1] == run("param_drop", 2)[1]


@pytest.mark.parametrize("policy", ["param_drop+morph", "tp_transform+param_drop"])
def test_it_composes_with_other_policies(policy: str) -> None:
    options = {"max_tp": 2} if "tp_transform" in policy else {"slo_ttft": 1.0}
    built, answers = run(policy, 2, **options)
    assert all(answer.error is None for answer in answers)
    resources = cluster(policy, 2, **options).resources
    for each in built.control.sets:
        validate(Plan(1, each.instances), resources)
    assert all(decision.outcome == "done" for decision in built.control.decisions)
    assert len(built.control.sets[-1].instances) == 2


def test_results_wait_for_pages_that_their_stage_sends() -> None:
    pipeline, step = Pipeline(2), [StageTime(1.0, 0.1), StageTime(1.0, 0.0)]
    pipeline.dispatch(0.0, step)
    assert pipeline.send(0.5, 3.0) == pytest.approx(2.1 + 3.0), "after the step that each stage has been given"
    late = pipeline.dispatch(1.0, step)
    assert late[1].start == pytest.approx(1.0 + 3.0 + 0.1)
