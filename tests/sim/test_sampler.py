"""Samples over virtual time have the names and values of a server's /metrics."""

from itertools import pairwise

from jaxserve.bench.prometheus import parse
from jaxserve.core.clock import VirtualClock
from jaxserve.sim import sampler as sampling
from jaxserve.sim.build import build_simulation
from jaxserve.sim.sampler import SimSampler, values_of
from jaxserve.sim.simulation import SimRequest
from jaxserve.telemetry import Snapshot
from tests.sim.machines import CPU, GPU, resolved

REQUESTS = [SimRequest(0.5 * number + 0.49, 100, 30) for number in range(20)]


def test_samples_are_named_and_counted_as_on_a_metrics_page() -> None:
    built = build_simulation(resolved(GPU, dp=2), detailed=False, interval=0.5)
    list(built.simulation.run(REQUESTS))
    metrics = parse(built.metrics.render().decode()).values
    sampled = values_of(built.simulation.front.snapshot())
    assert sampled.keys() <= metrics.keys()
    assert sampled["kv_pages_total"] > 0
    gauges = {name: value for name, value in sampled.items() if not name.endswith("_total")}
    assert {name: metrics[name] for name in gauges} == gauges
    assert sampled["generation_tokens_total"] == 20 * 30


def test_a_sample_is_taken_at_every_interval_from_the_start() -> None:
    built = build_simulation(resolved(CPU), detailed=False, interval=0.5)
    ended = list(built.simulation.run(REQUESTS))
    sampled = built.sampler.series()
    last = max(answered.last_token for answered in ended)
    assert sampled["t"] == [0.5 * number for number in range(int(last / 0.5) + 1)]
    assert {len(values) for values in sampled.values()} == {len(sampled["t"])}
    assert max(sampled["num_requests_running"]) > 0
    assert max(sampled["kv_pages_used"]) >= 100 // 16 + 1


def test_looking_changes_nothing() -> None:
    ends = []
    for interval in (0.0, 0.03, 1.0):
        built = build_simulation(resolved(GPU, kv_pages=40, max_model_len=500), detailed=True, interval=interval)
        ends.append([(answered.index, *answered.token_times) for answered in built.simulation.run(REQUESTS)])
    assert ends[0] == ends[1] == ends[2]


def test_a_long_run_keeps_fewer_samples_further_apart(monkeypatch) -> None:
    monkeypatch.setattr(sampling, "MAX_SAMPLES", 10)
    clock = VirtualClock()
    sampler = SimSampler(Still(), clock, 1.0)
    while clock.time < 100:
        sampler.advance()
        clock.time = sampler.next_event()
    times = sampler.series()["t"]
    assert len(times) <= 10
    gaps = {after - before for before, after in pairwise(times)}
    assert gaps == {16.0}
    assert times[0] == 0


class Still:
    """Instances whose snapshot never changes."""

    def snapshot(self) -> Snapshot:
        return Snapshot()


def test_the_order_of_names_does_not_depend_on_that_of_layers() -> None:
    orders = [{"int4": 1, "bfloat16": 7}, {"bfloat16": 7, "int4": 1}]
    first, second = (list(values_of(Snapshot(layers_by_precision=layers))) for layers in orders)
    assert first == second
