"""Figures from a few numbers of each request equal those from all token times, where they can."""

import numpy as np
import pytest

from jaxserve.bench.metrics import statistics, summarize
from jaxserve.bench.traces.trace import Trace
from jaxserve.sim.request_columns import MAX_REASONS, OTHERS, RequestColumns, weighted_statistics
from jaxserve.sim.run import record_of
from jaxserve.sim.simulation import Answered, SimRequest

SEEN_BY_TOKEN = ("itl", "max_output_tokens")  # in the keys of figures that need every token


def answers(count: int, *, even: bool, seed: int = 0) -> tuple[Trace, list[Answered]]:
    """Return results of a trace, some of them refusals, with even or uneven token times."""
    rng = np.random.default_rng(seed)
    arrivals = np.sort(rng.uniform(0, 20, count))
    inputs, outputs = rng.integers(1, 100, count), rng.integers(1, 30, count)
    trace, ended = Trace.of("t", arrivals, inputs, outputs), []
    for number in range(count):
        request = SimRequest(float(arrivals[number]), int(inputs[number]), int(outputs[number]))
        if rng.random() < 0.1:
            ended.append(Answered(number, request, None, error=f"too many: {number % 3}"))
            continue
        gaps = np.full(request.output_tokens, 0.05) if even else rng.exponential(0.05, request.output_tokens)
        times = (request.arrival + rng.uniform(0.01, 1) + np.cumsum(gaps)).tolist()
        ended.append(Answered(number, request, "0", times[0], times[-1], len(times), times))
    return trace, ended


def both(trace: Trace, ended: list[Answered], **options) -> tuple[dict, dict]:
    columns = RequestColumns(trace)
    for answered in ended:
        columns.take(answered)
    records = [record_of(answered) for answered in ended]
    duration = max(record.end_s for record in records) - records[0].arrival_s
    return columns.summary(**options), summarize(records, duration, **options)


@pytest.mark.parametrize("even", [True, False])
def test_figures_are_those_from_all_tokens(even) -> None:
    options = {"goodput": {"ttft": 600, "tpot": 50.5, "e2el": 1900}, "percentiles": (50.0, 99.9)}
    few, whole = both(*answers(500, even=even), **options)
    assert few.keys() == whole.keys()
    for key, value in whole.items():
        if not any(name in key for name in SEEN_BY_TOKEN):
            assert few[key] == pytest.approx(value), key
    assert few["mean_itl_ms"] == pytest.approx(whole["mean_itl_ms"])
    assert 0 < few["slo_attainment"] < 1
    assert few["max_output_tokens_per_s"] == pytest.approx(whole["max_output_tokens_per_s"], rel=0.1)
    if even:
        for key in ("median_itl_ms", "p99.9_itl_ms", "max_itl_ms"):
            assert few[key] == pytest.approx(whole[key]), key


def test_without_answers_there_is_nothing_to_tell() -> None:
    trace, _ = answers(3, even=True)
    few = RequestColumns(trace).summary(goodput={"ttft": 1.0})
    assert few["unfinished"] == 3
    assert few["completed"] == few["failed"] == few["duration"] == 0
    assert few["mean_ttft_ms"] is few["mean_itl_ms"] is few["max_output_tokens_per_s"] is few["goodput"] is None


def test_answers_of_one_token_have_no_gaps() -> None:
    trace = Trace.of("t", [0.0], [5], [1])
    columns = RequestColumns(trace)
    columns.take(Answered(0, SimRequest(0.0, 5, 1), "0", 0.5, 0.5, 1))
    summary = columns.summary()
    assert summary["mean_ttft_ms"] == summary["mean_e2el_ms"] == 500
    assert summary["mean_tpot_ms"] is summary["max_itl_ms"] is None
    assert summary["max_output_tokens_per_s"] == 1


def test_reasons_of_failures_are_counted_and_few() -> None:
    columns = RequestColumns(Trace.of("t", np.arange(100.0), [5] * 100, [1] * 100))
    for number in range(100):
        columns.take(Answered(number, SimRequest(float(number), 5, 1), None, error=f"reason {number // 2}"))
    assert columns.reasons["reason 0"] == 2
    assert len(columns.reasons) == MAX_REASONS + 1
    assert sum(columns.reasons.values()) == 100
    assert columns.reasons[OTHERS] == 100 - 2 * MAX_REASONS


def test_weighted_statistics_are_those_of_the_repeated_values() -> None:
    rng = np.random.default_rng(0)
    values, weights = rng.random(200), rng.integers(0, 9, 200)
    weighted = weighted_statistics("itl", values, weights, (1.0, 90.0))
    repeated = statistics("itl", np.repeat(values, weights).tolist(), (1.0, 90.0))
    assert weighted == pytest.approx(repeated, rel=0.02)
    assert weighted["mean_itl_ms"] == pytest.approx(repeated["mean_itl_ms"])
    assert weighted["max_itl_ms"] == repeated["max_itl_ms"]
