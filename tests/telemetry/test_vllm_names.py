"""Metrics can be shown under vLLM's names, with vLLM's types and labels and the values of jaxserve's own."""

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.telemetry import EngineMetrics, Snapshot

ENGINE = {"model_name", "engine"}
# As vllm/v1/metrics/loggers.py defines them: names (counters without the suffix _total) with their labels.
GAUGES = {
    "num_requests_running": ENGINE,
    "num_requests_waiting": ENGINE,
    "num_requests_waiting_by_reason": ENGINE | {"reason"},
    "kv_cache_usage_perc": ENGINE,
    "gpu_cache_usage_perc": ENGINE,  # until 0.10
}
COUNTERS = {
    "num_preemptions": ENGINE,
    "prefix_cache_queries": ENGINE,
    "prefix_cache_hits": ENGINE,
    "gpu_prefix_cache_queries": ENGINE,  # until 0.10
    "gpu_prefix_cache_hits": ENGINE,  # until 0.10
    "prompt_tokens": ENGINE,
    "prompt_tokens_cached": ENGINE,
    "generation_tokens": ENGINE,
    "request_success": ENGINE | {"finished_reason"},
    "corrupted_requests": ENGINE,
}
HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",  # until 0.11
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_prefill_kv_computed_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "iteration_tokens_total",
}


def page(prefix: str) -> dict[str, Metric]:
    """Return the families of an engine that has served a request."""
    metrics = EngineMetrics("tiny", lambda pages: {"block_size": 16, "num_gpu_blocks": pages}, prefix)
    instance = metrics.instance()
    instance.follow(lambda: Snapshot(num_running=3, kv_pages_total=8, kv_pages_used=2, layers_by_precision={"int4": 2}))
    instance.prompt_tokens(7)
    instance.generated_tokens(40)
    instance.inter_token({0.01: 3, 0.02: 36})
    instance.prefix_cache(7, 4)
    instance.step(33, 0.012)
    instance.finished("length", e2e=2.0, queue=0.5, prompt_tokens=7, generated=40, tpot=0.03)
    return {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}


@pytest.fixture(scope="module")
def both():
    return page("both")


def test_names_types_and_labels_are_those_of_vllm(both):
    shown = {name.removeprefix("vllm:"): family for name, family in both.items() if name.startswith("vllm:")}
    assert shown.keys() == GAUGES.keys() | COUNTERS.keys() | HISTOGRAMS | {"cache_config_info"}
    for kind, expected in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", dict.fromkeys(HISTOGRAMS, ENGINE))):
        for name, labels in expected.items():
            assert shown[name].type == kind, name
            assert {frozenset(s.labels.keys() - {"le"}) for s in shown[name].samples} == {frozenset(labels)}, name


def test_cache_is_described_by_the_labels_of_vllm(both):
    (sample,) = both["vllm:cache_config_info"].samples
    assert sample.labels == {"engine": "0", "block_size": "16", "num_gpu_blocks": "8"}
    assert sample.value == 1
    (own,) = both["jaxserve_cache_config_info"].samples
    assert own.labels == sample.labels | {"model_name": "tiny"}


def test_values_are_the_same_under_both_names(both):
    for name, family in both.items():
        own = both.get(name.replace("vllm:", "jaxserve_"))
        if name.startswith("vllm:") and own is not None and not name.endswith("_info"):
            assert [(s.labels, s.value) for s in family.samples] == [(s.labels, s.value) for s in own.samples]


@pytest.mark.parametrize(
    ("earlier", "own"),
    [
        ("gpu_cache_usage_perc", "kv_cache_usage_perc"),
        ("gpu_prefix_cache_hits", "prefix_cache_hits"),
        ("time_per_output_token_seconds", "inter_token_latency_seconds"),
        ("iteration_tokens_total", "iteration_tokens"),
    ],
)
def test_earlier_names_have_the_values_of_the_present_ones(both, earlier, own):
    values = [sample.value for sample in both[f"vllm:{earlier}"].samples]
    assert values == [sample.value for sample in both[f"jaxserve_{own}"].samples]
    assert any(values)


def test_each_metric_has_one_prefix_unless_both_are_chosen(both):
    own, vllm = page("jaxserve"), page("vllm")
    assert all(name.startswith("jaxserve_") for name in own)
    assert {name for name in both if name.startswith("jaxserve_")} == own.keys()
    assert {name for name in both if name.startswith("vllm:")} == {name for name in vllm if name.startswith("vllm:")}
    assert "jaxserve_num_requests_running" not in vllm
    assert "jaxserve_layers_by_precision" in vllm  # vLLM has no such metric
