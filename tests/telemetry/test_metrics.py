"""Metrics report what happened, under the names that dashboards know."""

import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.core.request import FinishReason
from jaxserve.telemetry import ControlState, EngineMetrics, KVCapacity, Quality, Snapshot, WaitingRoom
from jaxserve.telemetry.histogram import Histogram, one_two_five

NAMES = {  # vLLM's set, and ours
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "admission_rejections",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "cache_config_info",
    "iteration_tokens",
    "num_requests_waiting_by_reason",
    "prompt_tokens_cached",
    "request_prefill_kv_computed_tokens",
    "kv_capacity_tokens",
    "kv_capacity_max_tokens",
    "kv_capacity_max_seconds",
    "quality_loss_ratio",
    "quality_loss_nats",
    "quality_floor_ratio",
    "quality_measured",
    "decisions",
    "plan_version",
    "layers_by_precision",
    "kv_pages_total",
    "weight_bytes",
    "kv_bytes",
    "transitions",
    "transition_seconds",
    "compilations",
}


def scrape(metrics: EngineMetrics) -> dict[tuple, float]:
    """Return samples by name without prefix, and labels without the model's name and instance 0."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            shown = {name: value for name, value in sample.labels.items() if (name, value) != ("engine", "0")}
            del shown["model_name"]
            found[(sample.name.removeprefix("jaxserve_"), *sorted(shown.items()))] = sample.value
    return found


@pytest.fixture
def metrics():
    return EngineMetrics("tiny")


@pytest.fixture
def instance(metrics):
    return metrics.instance()


def test_metrics_page_has_every_name(metrics):
    families = {f.name.removeprefix("jaxserve_") for f in text_string_to_metric_families(metrics.render().decode())}
    assert families >= NAMES


def test_gauges_follow_the_snapshot(metrics, instance):
    latest = Snapshot()
    instance.follow(lambda: latest)
    latest = Snapshot(
        num_running=3,
        num_waiting=5,
        num_deferred=2,
        waiting_tokens=70,
        kv_pages_total=8,
        kv_pages_used=2,
        plan_version=4,
        layers_by_precision={"bfloat16": 5, "int4": 1},
        weight_bytes=1000,
        kv_bytes=500,
    )
    samples = scrape(metrics)
    assert samples[("num_requests_running",)] == 3
    assert samples[("num_requests_waiting",)] == 5
    assert samples[("num_requests_waiting_by_reason", ("reason", "capacity"))] == 3
    assert samples[("num_requests_waiting_by_reason", ("reason", "deferred"))] == 2
    assert samples[("num_tokens_waiting",)] == 70
    assert samples[("kv_cache_usage_perc",)] == 0.25
    assert samples[("kv_pages_total",)] == 8
    assert samples[("plan_version",)] == 4
    assert samples[("layers_by_precision", ("precision", "int4"))] == 1
    assert samples[("weight_bytes",)] == 1000
    assert samples[("kv_bytes",)] == 500


def test_kv_usage_of_an_empty_pool_is_zero():
    assert Snapshot().kv_usage == 0


def test_counters_add_up_over_snapshots(metrics, instance):
    for _ in range(2):
        instance.prompt_tokens(10, cached=4)
        instance.generated_tokens(3)
        instance.prefix_cache(100, 64)
        instance.preempted()
        metrics.rejected("queue_full")
        metrics.compiled("fused")
        metrics.transition("SwapPrecision", "done", 0.5)
    samples = scrape(metrics)
    assert samples[("prompt_tokens_total",)] == 20
    assert samples[("prompt_tokens_cached_total",)] == 8
    assert samples[("generation_tokens_total",)] == 6
    assert samples[("prefix_cache_queries_total",)] == 200
    assert samples[("prefix_cache_hits_total",)] == 128
    assert samples[("num_preemptions_total",)] == 2
    assert samples[("admission_rejections_total", ("reason", "queue_full"))] == 2
    assert samples[("compilations_total", ("tier", "fused"))] == 2
    assert samples[("transitions_total", ("kind", "SwapPrecision"), ("outcome", "done"))] == 2
    assert samples[("transition_seconds_sum", ("kind", "SwapPrecision"))] == 1.0


def test_finished_request_updates_its_counters_and_histograms(metrics, instance):
    instance.finished("length", e2e=2.0, queue=0.5, prompt_tokens=7, generated=40, tpot=0.03)
    samples = scrape(metrics)
    assert samples[("request_success_total", ("finished_reason", "length"))] == 1
    assert samples[("e2e_request_latency_seconds_sum",)] == 2.0
    assert samples[("request_queue_time_seconds_sum",)] == 0.5
    assert samples[("request_prompt_tokens_sum",)] == 7
    assert samples[("request_generation_tokens_sum",)] == 40
    assert samples[("request_time_per_output_token_seconds_bucket", ("le", "0.02"))] == 0
    assert samples[("request_time_per_output_token_seconds_bucket", ("le", "0.05"))] == 1


def test_finished_request_counts_each_of_its_answers(metrics, instance):
    instance.finished(
        "stop",
        e2e=4.0,
        queue=0.5,
        prompt_tokens=7,
        generated=40,
        tpot=0.03,
        prefill=0.25,
        decode=3.0,
        computed=5,
        longest=30,
        n=2,
        max_tokens=100,
    )
    samples = scrape(metrics)
    assert samples[("request_prefill_time_seconds_sum",)] == 0.25
    assert samples[("request_decode_time_seconds_sum",)] == 3.0
    assert samples[("request_inference_time_seconds_sum",)] == 3.25
    assert samples[("request_prefill_kv_computed_tokens_sum",)] == 5
    assert samples[("request_max_num_generation_tokens_sum",)] == 30
    assert samples[("request_params_n_sum",)] == 2
    assert samples[("request_params_max_tokens_sum",)] == 100


def test_cache_configuration_is_exported():
    metrics = EngineMetrics("tiny", lambda pages: {"block_size": 16, "num_gpu_blocks": pages})
    metrics.instance().follow(lambda: Snapshot(kv_pages_total=8))
    assert scrape(metrics)[("cache_config_info", ("block_size", "16"), ("num_gpu_blocks", "8"))] == 1


def test_request_that_never_ran_is_counted_without_times(metrics, instance):
    instance.finished(FinishReason.ABORT, e2e=1.0, queue=None, prompt_tokens=7, generated=0, tpot=None)
    samples = scrape(metrics)
    assert samples[("request_success_total", ("finished_reason", "abort"))] == 1
    assert samples[("request_queue_time_seconds_count",)] == 0
    assert samples[("request_inference_time_seconds_count",)] == 0
    assert samples[("request_params_max_tokens_count",)] == 0
    assert samples[("request_prefill_kv_computed_tokens_count",)] == 0
    assert samples[("request_time_per_output_token_seconds_count",)] == 0


def test_finish_reasons_are_exported_before_they_occur(metrics, instance):
    samples = scrape(metrics)
    assert [samples[("request_success_total", ("finished_reason", r.value))] for r in FinishReason] == [0, 0, 0, 0]


def test_unknown_finish_reason_raises(instance):
    with pytest.raises(ValueError, match="tired"):
        instance.finished("tired", e2e=1.0, queue=None, prompt_tokens=1, generated=0, tpot=None)


def test_step_updates_its_counter_and_histograms(metrics, instance):
    instance.step(33, 0.012)
    instance.inter_token({0.01: 1, 0.02: 1, 3.0: 1})
    instance.first_token(0.2)
    samples = scrape(metrics)
    assert samples[("iteration_tokens_bucket", ("le", "32.0"))] == 0
    assert samples[("iteration_tokens_bucket", ("le", "64.0"))] == 1
    assert samples[("inter_token_latency_seconds_count",)] == 3
    assert samples[("inter_token_latency_seconds_sum",)] == pytest.approx(3.03)
    assert samples[("time_to_first_token_seconds_bucket", ("le", "0.2"))] == 1  # bounds are inclusive


def test_counters_lose_nothing_between_threads(metrics, instance):
    def work() -> None:
        for _ in range(2000):
            instance.generated_tokens(1)
            instance.inter_token({0.01: 1, 0.02: 1})
            metrics.rejected("queue_full")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    samples = scrape(metrics)
    assert samples[("generation_tokens_total",)] == 8000
    assert samples[("inter_token_latency_seconds_count",)] == 16000
    assert samples[("admission_rejections_total", ("reason", "queue_full"))] == 8000


def test_instances_have_series_of_their_own(metrics, instance):
    other = metrics.instance("1")
    instance.generated_tokens(5)
    other.generated_tokens(7)
    other.follow(lambda: Snapshot(num_running=3))
    samples = scrape(metrics)
    assert samples[("generation_tokens_total",)] == 5
    assert samples[("generation_tokens_total", ("engine", "1"))] == 7
    assert samples[("num_requests_running",)] == 0
    assert samples[("num_requests_running", ("engine", "1"))] == 3


def test_instance_that_ends_loses_its_gauges_and_keeps_its_counters(metrics, instance):
    instance.generated_tokens(5)
    instance.end()
    samples = scrape(metrics)
    assert samples[("generation_tokens_total",)] == 5
    assert ("num_requests_running",) not in samples
    assert not any(name == "instance_info" for name, *_ in samples)
    instance.follow(lambda: Snapshot(num_running=2))  # its end is undone
    assert scrape(metrics)[("num_requests_running",)] == 2


def test_instance_that_comes_goes_on_with_the_counters_of_one_that_has_ended(metrics, instance):
    other = metrics.instance("1")
    instance.generated_tokens(5)
    instance.end()
    merged = metrics.instance("2")
    merged.generated_tokens(2)
    assert (merged.number, other.number, metrics.instance("3").number) == (0, 1, 2)
    samples = scrape(metrics)
    assert samples[("generation_tokens_total",)] == 7
    assert samples[("instance_info", ("name", "2"))] == 1
    assert samples[("instance_info", ("engine", "1"), ("name", "1"))] == 1


def test_series_do_not_grow_with_the_instances_that_have_come_and_gone(metrics):
    for number in range(20):
        metrics.instance(str(number)).end()
    sizes = {len(metrics.render())}
    for number in range(20, 40):
        metrics.instance(str(number)).end()
        sizes.add(len(metrics.render()))
    assert len(sizes) == 1


def test_waiting_room_is_shown(metrics):
    metrics.follow_waiting_room(lambda: WaitingRoom(9.0, 2, 150, longest=110, oldest_wait=1.5))
    samples = scrape(metrics)
    assert samples[("waiting_room_requests",)] == 2
    assert samples[("waiting_room_tokens",)] == 150
    assert samples[("waiting_room_longest_tokens",)] == 110
    assert samples[("waiting_room_oldest_seconds",)] == 1.5


def test_control_plane_adds_its_capacities_and_decisions(metrics, instance):
    metrics.instance("1")
    capacities = {"1": KVCapacity(320, 320, 0.0), "0": KVCapacity(320, 640, 0.5)}
    metrics.follow_control(lambda: ControlState(capacities, {("morph", "done"): 3}, Quality(0.012, 0.04, None, True)))
    samples = scrape(metrics)
    assert samples[("quality_loss_ratio",)] == 0.012
    assert samples[("quality_loss_nats",)] == 0.04
    assert samples[("quality_measured",)] == 1
    assert ("quality_floor_ratio",) not in samples
    assert samples[("kv_capacity_tokens",)] == 320
    assert samples[("kv_capacity_max_tokens",)] == 640
    assert samples[("kv_capacity_max_seconds",)] == 0.5
    assert samples[("kv_capacity_max_tokens", ("engine", "1"))] == 320
    assert samples[("decisions_total", ("outcome", "done"), ("policy", "morph"))] == 3


def test_two_engines_have_separate_metrics(metrics, instance):
    EngineMetrics("tiny").instance().generated_tokens(5)
    assert scrape(metrics)[("generation_tokens_total",)] == 0


def test_histogram_is_cumulative():
    histogram = Histogram([1, 2, 5])
    histogram.observe_all(dict.fromkeys((0.5, 1, 1.5, 5, 100), 1))
    assert histogram.state() == ([("1.0", 2), ("2.0", 3), ("5.0", 4), ("+Inf", 5)], 108)


def test_one_two_five_gives_bounds_up_to_the_last():
    assert one_two_five(0.01, 2.0) == (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
    assert one_two_five(1, 10) == (1, 2, 5, 10)
