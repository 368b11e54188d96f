"""The figures of small runs, computed by hand."""

import json
import math

import numpy as np
import pytest

from jaxserve.bench.metrics import peak_concurrency, peak_tokens_per_s, statistics, summarize
from jaxserve.bench.record import RequestRecord


def record(due_s: float, chunks_s: list[float], tokens: int | None = None, **more) -> RequestRecord:
    """Return a completed request, unless `more` says otherwise."""
    made = RequestRecord(0, due_s, due_s, input_tokens=10, sent_s=due_s, chunk_times_s=chunks_s, status=200)
    made.end_s = chunks_s[-1] if chunks_s else due_s
    made.output_tokens = len(chunks_s) if tokens is None else tokens
    for name, value in more.items():
        setattr(made, name, value)
    return made


FAST = record(0.0, [0.1, 0.15, 0.2])  # TTFT 100 ms, TPOT 50, E2EL 200
SLOW = record(1.0, [1.5, 1.6, 1.9])  # 500, 200, 900
SINGLE = record(2.0, [2.3])  # 300, none, 300
FAILED = record(3.0, [3.1], error="connection reset")
REFUSED = record(3.5, [], error="HTTP 503", status=503)
UNFINISHED = record(3.8, [3.9], end_s=None)
RUN = [FAST, SLOW, SINGLE, FAILED, REFUSED, UNFINISHED]


def test_counts_and_throughputs():
    summary = summarize(RUN, 4.0)
    assert (summary["completed"], summary["failed"], summary["unfinished"], summary["duration"]) == (3, 2, 1, 4.0)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (30, 7)
    assert summary["request_throughput"] == 3 / 4
    assert summary["output_throughput"] == 7 / 4
    assert summary["total_token_throughput"] == 37 / 4


@pytest.mark.parametrize(
    ("name", "values_ms"),
    [("ttft", [100, 500, 300]), ("tpot", [50, 200]), ("itl", [50, 50, 100, 300]), ("e2el", [200, 900, 300])],
)
def test_latencies_are_those_of_completed_requests(name, values_ms):
    summary = summarize(RUN, 4.0)
    assert summary[f"mean_{name}_ms"] == pytest.approx(np.mean(values_ms))
    assert summary[f"median_{name}_ms"] == pytest.approx(np.median(values_ms))
    assert summary[f"std_{name}_ms"] == pytest.approx(np.std(values_ms))
    assert summary[f"max_{name}_ms"] == pytest.approx(max(values_ms))
    for percentile in (90, 95, 99):
        assert summary[f"p{percentile}_{name}_ms"] == pytest.approx(np.percentile(values_ms, percentile))


def test_tpot_counts_tokens_and_not_chunks():
    assert record(0.0, [1.0, 2.0], tokens=5).tpot_s == pytest.approx(1 / 4)


def test_percentiles_are_named_as_they_were_asked_for():
    assert {"p50_ttft_ms", "p99.9_ttft_ms"} <= statistics("ttft", [0.1], percentiles=(50, 99.9)).keys()
    assert "p90_ttft_ms" not in statistics("ttft", [0.1], percentiles=(50, 99.9))


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ({"ttft": 300.001}, 2),
        ({"ttft": 1}, 0),
        ({"tpot": 60}, 2),  # an answer of one token has no token to be late
        ({"ttft": 200, "tpot": 60}, 1),
        ({"e2el": 1000}, 3),
    ],
)
def test_goodput_counts_requests_that_meet_all_objectives(objectives, good):
    summary = summarize(RUN, 4.0, goodput=objectives)
    assert summary["request_goodput"] == summary["goodput"] == good / 4.0
    assert summary["slo_attainment"] == good / 5  # failed ones have met none
    assert summary["slo_violation_rate"] == pytest.approx(1 - good / 5)


def test_objective_is_met_at_its_limit():
    assert summarize([record(0.0, [0.125])], 1.0, goodput={"ttft": 125})["slo_attainment"] == 1.0


def test_without_objectives_there_is_no_goodput():
    summary = summarize(RUN, 4.0)
    assert all(summary[key] is None for key in ("request_goodput", "goodput", "slo_attainment", "slo_violation_rate"))


@pytest.mark.parametrize("records", [[], [REFUSED], [UNFINISHED]])
def test_figures_without_measurements_are_none(records):
    summary = summarize(records, 0.0, goodput={"ttft": 100})
    json.dumps(summary, allow_nan=False)
    assert summary["mean_ttft_ms"] is summary["p99_e2el_ms"] is summary["request_throughput"] is None
    assert summary["slo_violation_rate"] == (1.0 if records == [REFUSED] else None)


def test_every_figure_is_a_plain_number():
    summary = summarize(RUN, 4.0, goodput={"ttft": 100})
    assert all(type(value) in (int, float) and math.isfinite(value) for value in summary.values())


def test_peak_of_tokens_is_in_the_busiest_second_from_the_first_sending():
    one = record(10.0, [10.2, 10.9, 11.1, 11.2])
    other = record(10.5, [11.3, 11.9, 12.0])
    assert peak_tokens_per_s([one, other]) == 4  # from 11 to 12


def test_tokens_that_share_a_chunk_all_count_towards_the_peak():
    assert peak_tokens_per_s([record(0.0, [0.1, 0.2], tokens=10)]) == 10


def test_peak_of_concurrency_is_exact():
    first, second, third = record(0.0, [1.0]), record(1.0, [2.0]), record(1.5, [1.8])
    assert peak_concurrency([first, second]) == 1  # one ends when the other starts
    assert peak_concurrency([first, second, third]) == 2
    assert peak_concurrency([UNFINISHED, record(9.0, [9.1])]) == 2
    assert peak_concurrency([RequestRecord(0, 0.0, 0.0, 1)]) == 0
