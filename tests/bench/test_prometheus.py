"""Metrics pages: one number per series, whatever the engine."""

import math

import pytest

from jaxserve.bench.prometheus import Histogram, parse
from jaxserve.core.request import FinishReason
from jaxserve.telemetry import EngineMetrics, Snapshot

VLLM = """
# TYPE python_info gauge
python_info{version="3.12"} 1.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 4.0
vllm:request_success_total{engine="1",finished_reason="stop",model_name="m"} 5.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 6.0
# TYPE vllm:request_success_created gauge
vllm:request_success_created{engine="0",finished_reason="stop",model_name="m"} 1.7e9
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16"} 1.0
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 3.0
vllm:request_queue_time_seconds_bucket{engine="0",le="+Inf",model_name="m"} 4.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 2.0
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 4.0
vllm:request_queue_time_seconds_bucket{engine="1",le="0.3",model_name="m"} 1.0
vllm:request_queue_time_seconds_bucket{engine="1",le="+Inf",model_name="m"} 1.0
vllm:request_queue_time_seconds_sum{engine="1",model_name="m"} 0.1
vllm:request_queue_time_seconds_count{engine="1",model_name="m"} 1.0
"""


def test_values_of_instances_are_added():
    scrape = parse(VLLM)
    assert scrape.values == {
        "num_requests_running": 5.0,
        "kv_cache_usage_perc": 0.375,
        'request_success_total{finished_reason="stop"}': 9.0,
        'request_success_total{finished_reason="length"}': 6.0,
    }
    queue = scrape.histograms["request_queue_time_seconds"]
    assert queue.buckets == {0.3: 4.0, math.inf: 5.0}
    assert queue.mean == pytest.approx(2.1 / 5)


def test_values_parsed_without_histograms_are_the_same():
    assert parse(VLLM, histograms=False).values == parse(VLLM).values
    assert parse(VLLM, histograms=False).histograms == {}


def test_jaxserve_metrics_lose_their_prefix():
    metrics = EngineMetrics("m")
    state = Snapshot(num_running=2, kv_pages_total=8, plan_version=3, layers_by_precision={"bfloat16": 4})
    metrics.instance().follow(lambda: state)
    metrics.instance().finished(FinishReason.STOP, e2e=1.0, queue=0.25, prompt_tokens=4, generated=2, tpot=0.1)
    scrape = parse(metrics.render().decode())
    assert scrape.values["num_requests_running"] == 2
    assert scrape.values["kv_pages_total"] == 8
    assert scrape.values["plan_version"] == 3
    assert scrape.values['layers_by_precision{precision="bfloat16"}'] == 4
    assert scrape.values['request_success_total{finished_reason="stop"}'] == 1
    assert scrape.histograms["request_queue_time_seconds"].mean == 0.25


def test_series_under_two_prefixes_are_read_once():
    metrics = EngineMetrics("m", prefix="both")
    metrics.instance().generated_tokens(5)
    metrics.instance().finished(FinishReason.STOP, e2e=1.0, queue=0.25, prompt_tokens=4, generated=2, tpot=0.1)
    scrape = parse(metrics.render().decode())
    assert scrape.values["generation_tokens_total"] == 5
    assert scrape.values['request_success_total{finished_reason="stop"}'] == 1
    assert scrape.histograms["request_queue_time_seconds"].count == 1


def test_sum_and_count_of_step_seconds_are_series():
    metrics = EngineMetrics("m")
    metrics.instance().step(4, 0.25)
    metrics.instance().step(4, 0.5)
    values = parse(metrics.render().decode(), histograms=False).values
    assert (values["iteration_seconds_sum"], values["iteration_seconds_count"]) == (0.75, 2)


def test_metrics_of_another_server_keep_their_names():
    assert parse("# TYPE llamacpp:requests gauge\nllamacpp:requests 3\n").values == {"llamacpp:requests": 3.0}


def test_highest_plan_version_is_kept():
    series = 'jaxserve_plan_version{instance="0"} 2\njaxserve_plan_version{instance="1"} 5\n'
    assert parse("# TYPE jaxserve_plan_version gauge\n" + series).values == {"plan_version": 5.0}


def test_text_that_is_not_metrics_raises():
    with pytest.raises(ValueError):  # noqa: PT011 - of the library's choice
        parse("<html>not found</html>")


def test_quantiles_are_interpolated_within_buckets():
    histogram = Histogram({1.0: 2.0, 2.0: 6.0, 4.0: 8.0, math.inf: 10.0}, total=20.0)
    assert histogram.quantile(0.1) == pytest.approx(0.5)
    assert histogram.quantile(0.2) == pytest.approx(1.0)
    assert histogram.quantile(0.5) == pytest.approx(1.75)
    assert histogram.quantile(0.8) == pytest.approx(4.0)
    assert histogram.quantile(0.99) == 4.0  # nothing is known beyond the last bound
    assert (histogram.count, histogram.mean) == (10.0, 2.0)


def test_histogram_difference_holds_the_observations_between():
    before = Histogram({1.0: 2.0, math.inf: 3.0}, total=9.0)
    after = Histogram({1.0: 2.0, math.inf: 5.0}, total=13.0)
    assert (after - before).count == 2
    assert (after - before).mean == 2.0
    assert (after - after).mean is (after - after).quantile(0.5) is None
