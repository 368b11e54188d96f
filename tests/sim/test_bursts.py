"""The experiment with bursts: its calibration, and the systems that jaxserve does not have."""

from collections.abc import Sequence

import numpy as np
import pytest

from bench.sim.amoeba import served
from bench.sim.burst_runs import (
    DEVICES,
    PROVISION,
    Outcome,
    Setting,
    System,
    calibrated,
    cluster_of,
    kv_tokens,
    memory_for,
    outcome,
    overloads,
)
from bench.sim.burst_traces import generated, scaled, with_lengths
from bench.sim.migration import with_migration
from bench.sim.swapping import SwappingScheduler, connect, swapping
from jaxserve.scheduler.routing import Router
from jaxserve.sim.build import BuiltSimulation, build_simulation
from jaxserve.sim.hardware import Link
from jaxserve.sim.simulation import Answered, Frontend, SimRequest

PAGE_SECONDS = 1e-4


def crowd(count: int = 60 * DEVICES) -> list[SimRequest]:
    """Return requests that together hold more pages than there are, of unequal lengths."""
    return [
        SimRequest(number / (4 * DEVICES), 300 + 37 * (number % 23), 150 + 61 * (number % 11))
        for number in range(count)
    ]


def tight() -> BuiltSimulation:
    return build_simulation(cluster_of(33.8, longest=4000), detailed=False, interval=0.0)


def swapped() -> tuple[BuiltSimulation, list[Answered]]:
    with swapping(PAGE_SECONDS):
        built = tight()
    connect(built)
    return built, served(built, crowd())


def computed(built: BuiltSimulation) -> int:
    """Return the tokens of prompts and of sequences that began again which all instances have computed."""
    return built.simulation.front.snapshot().prefill_tokens


def test_a_setting_has_room_for_the_average_demand_and_not_for_the_largest() -> None:
    trace = with_lengths(generated(np.random.default_rng(0), 120.0), "burstgpt", np.random.default_rng(1))
    setting = calibrated(trace, rng=np.random.default_rng(2), longest=4000)
    assert setting.facts["KV over the average demand"] == pytest.approx(PROVISION, rel=0.05)
    assert setting.facts["largest demand over KV"] > 1
    assert setting.facts["busiest 10 s compute"] < 1
    assert len(setting.overloads) >= 1


def test_the_memory_has_room_for_as_many_tokens_as_it_is_for() -> None:
    assert kv_tokens(cluster_of(memory_for(30_000))) == pytest.approx(30_000, rel=0.02)


def test_a_scaled_trace_has_the_pattern_of_the_original() -> None:
    trace = generated(np.random.default_rng(0), 400.0)
    more = scaled(trace, 3.5, np.random.default_rng(1))
    shares = [np.histogram(each.arrival_s, np.arange(0, 420, 20))[0] / len(each) for each in (trace, more)]
    assert len(more) == pytest.approx(3.5 * len(trace), rel=0.01)
    assert np.abs(shares[0] - shares[1]).max() < 0.02


def test_overloads_with_a_short_gap_are_one() -> None:
    demand = np.zeros(300)
    demand[[10, 11, 30, 200]] = 2.0
    assert overloads(demand, 1, gap=60.0) == [(10, 31), (200, 201)]


def test_swapped_sequences_are_not_computed_again() -> None:
    recomputing, (built, answers) = tight(), swapped()
    served(recomputing, crowd())
    assert recomputing.simulation.front.snapshot().preemptions > 0
    assert built.simulation.front.snapshot().preemptions > 0
    assert computed(recomputing) > computed(built) == sum(request.input_tokens for request in crowd())
    assert len(answers) == len(crowd())
    assert all(answer.error is None for answer in answers)
    for instance in built.simulation.front.instances.values():
        scheduler = instance.core.scheduler
        assert isinstance(scheduler, SwappingScheduler)
        assert scheduler.swapped_pages > 0
        assert scheduler.pages.used == 0


def test_requests_move_from_full_instances_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Router, "choose", lambda router, needed: "0")
    (built, migration), alone = with_migration(tight(), Link(1e10, 1e-5), 3 << 20, Frontend()), tight()
    requests = crowd(100)
    answers, waited = served(built, requests), served(alone, requests)
    assert migration.moved > 0
    assert migration.moved_waiting > 0
    assert [answer.error for answer in answers] == [None] * len(requests)
    assert len({answer.instance for answer in answers}) == DEVICES
    assert p99(answers) < p99(waited) / 2
    assert all(instance.core.scheduler.pages.used == 0 for instance in built.simulation.front.instances.values())


def p99(answers: Sequence[Answered]) -> float:
    return float(np.percentile([answer.first_token - answer.request.arrival for answer in answers], 99))


def test_memory_that_never_runs_out_preempts_nothing() -> None:
    setting = Setting(crowd(), 33.8, longest=4000)
    assert outcome(System(plenty=True), setting).preempted == 0
    assert outcome(System(), setting).preempted > 0


def test_a_refused_request_waits_for_ever() -> None:
    ones = np.ones(99)
    found = Outcome(ones, ones.astype(int), ones, ones, 3 * ones, ones.astype(int), 3, 0, (), (), (), True)
    assert found.percentile_ttft(50) == 1
    assert found.percentile_ttft(99) == np.inf
    assert found.within(1, 1) == 99 / 102


def test_how_long_after_an_overload_layers_are_back() -> None:
    ones, sets = np.ones(2), ((0.0, True), (10.0, False), (25.0, True))
    found = Outcome(ones, ones.astype(int), ones, ones, 40 * ones, ones.astype(int), 0, 0, (), sets, (), True)
    assert (found.whole_after(20.0), found.whole_after(5.0), found.whole_after(30.0)) == (5.0, 0.0, 0.0)
    assert (found.dropped_after(4.0), found.dropped_after(11.0)) == (6.0, None)
    assert found.grouped() == 15 / 40
