"""The requests of a simulation are those that `bench` would send, made one by one."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxserve.bench.options import ArrivalOptions, DatasetOptions, TraceOptions
from jaxserve.bench.traces.trace import Trace
from jaxserve.bench.vocabulary import Vocabulary
from jaxserve.bench.workload_builder import build_workload
from jaxserve.core.errors import ConfigError
from jaxserve.sim.workload import SimWorkload, sim_workload


def lines(*rows: str) -> str:
    return "\n".join(("arrival_s,input_tokens,output_tokens", *rows)) + "\n"


@pytest.mark.parametrize(
    "options",
    [
        {"synthetic": "azure-conv", "duration": 30.0, "rate": 3.0},
        {"synthetic": "burstgpt", "duration": 30.0, "rate": 3.0, "thin": 0.5, "stretch": 2.0, "clip_lengths": "100/20"},
    ],
)
def test_a_trace_gives_the_requests_that_bench_sends(options) -> None:
    dataset, trace = DatasetOptions(dataset="trace", seed=3), TraceOptions(**options)
    vocabulary = Vocabulary.load(None)
    sent = build_workload(dataset, ArrivalOptions(), trace, vocabulary, as_text=False)
    simulated = sim_workload(DatasetOptions(seed=3), ArrivalOptions(), trace)
    requests = list(simulated.requests())
    assert [(r.arrival, r.input_tokens, r.output_tokens) for r in requests] == [
        (r.arrival_s, r.sample.input_tokens, r.sample.output_tokens) for r in sent.requests
    ]
    assert len(requests) == len(simulated) > 10
    assert simulated.description == sent.description


def test_random_requests_have_the_lengths_that_bench_draws() -> None:
    dataset = DatasetOptions(num_prompts=50, input_len="lognormal:60,30", output_len="uniform:3,9", seed=1)
    when = ArrivalOptions(request_rate=5.0, burstiness=0.5)
    sent = build_workload(dataset, when, TraceOptions(), Vocabulary.load(None), as_text=False)
    simulated = sim_workload(dataset, when, TraceOptions())
    requests = list(simulated.requests())
    assert [(r.input_tokens, r.output_tokens) for r in requests] == [
        (r.sample.input_tokens, r.sample.output_tokens) for r in sent.requests
    ]
    assert requests[-1].arrival == pytest.approx(50 / 5.0)
    assert simulated.description == sent.description
    assert all(request.prompt is None for request in requests)


def test_no_tokens_in_a_trace_are_one_to_serve(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(lines("0,0,0", "1,5,0"))
    requests = list(sim_workload(DatasetOptions(), ArrivalOptions(), TraceOptions(tmp_path / "t.csv")).requests())
    assert [(r.input_tokens, r.output_tokens) for r in requests] == [(1, 1), (5, 1)]


def test_prompts_share_the_blocks_that_the_trace_says() -> None:
    ids = ((7, 10**18), (7, 10**18, 3), (7, 5), (7,))
    trace = Trace.of("t", [0, 1, 2, 3], [8, 11, 8, 9], [1] * 4, hash_ids=ids, block_tokens=4)
    prompts = [request.prompt for request in SimWorkload(trace, {}).requests()]
    assert [len(prompt) for prompt in prompts] == [8, 11, 8, 9]
    assert prompts[0] == prompts[1][:8]
    assert prompts[0][:4] == prompts[2][:4] == prompts[3][:4]
    assert not set(prompts[0][4:]) & set(prompts[2][4:])
    assert not set(prompts[3][4:]) & set(
        prompts[0] + prompts[1] + prompts[2]
    )  # tokens after the shared blocks are the request's own


def test_a_prefix_is_shared_by_all_random_prompts() -> None:
    dataset = DatasetOptions(num_prompts=3, input_len="4", prefix_len=6)
    workload = sim_workload(dataset, ArrivalOptions(), TraceOptions())
    first, second, third = (request.prompt for request in workload.requests())
    assert workload.shares
    assert first[:6] == second[:6] == third[:6]
    assert len({*first[6:], *second[6:], *third[6:]}) == 3


def test_distinct_prompts_are_told_apart() -> None:
    workload = sim_workload(DatasetOptions(num_prompts=3, input_len="4"), ArrivalOptions(), TraceOptions())
    prompts = [r.prompt for r in SimWorkload(workload.trace, {}, distinct=True).requests()]
    assert len({token for prompt in prompts for token in prompt}) == 3


def test_requests_never_lie_in_memory_together() -> None:
    count = 60_000
    trace = Trace.of("t", np.arange(count), np.full(count, 500), np.full(count, 100))
    tracemalloc.start()
    requests = SimWorkload(trace, {}).requests()
    assert isinstance(requests, Iterator)
    before = tracemalloc.get_traced_memory()[0]
    assert sum(1 for _ in requests) == count
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < 2_000_000  # bytes; all requests as objects would take over 6 MB


@pytest.mark.parametrize(
    ("dataset", "trace", "message"),
    [
        ({"dataset": "sharegpt"}, {}, "--dataset is 'sharegpt': a simulation has no prompts"),
        ({"num_prompts": 0}, {}, "number of prompts is 0: it must be at least 1"),
        ({"num_prompts": 5}, {"synthetic": "azure-conv"}, "--num-prompts does not apply to a trace"),
        ({"dataset": "trace"}, {}, "give the file of a trace"),
    ],
)
def test_what_cannot_be_simulated_is_refused(dataset, trace, message) -> None:
    with pytest.raises(ConfigError, match=message):
        sim_workload(DatasetOptions(**dataset), ArrivalOptions(), TraceOptions(**trace))
