"""Requests are traced: a real server and engine send spans over HTTP to a collector."""

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from jaxserve.build import build_async_engine
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.request import FinishReason, Request, RequestMetrics
from jaxserve.core.sampling import SamplingParams
from jaxserve.telemetry.tracing import EndedRequest, RequestTracer
from tests.server.collector import Collector, collecting
from tests.server.serving import serving

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
OPTIONS = {"load_format": "dummy", "warmup": False, "max_num_seqs": 4, "kv_pages": 60, "served_model_name": "tiny"}
SERVER = 2  # the kind of a span


@pytest.fixture(scope="module")
def asked(random_model) -> Iterator[tuple[Collector, float, float]]:
    """Ask a traced server, close it, and yield its collector with the time before and after."""
    with collecting() as collector:
        engine = build_async_engine(EngineConfig(model=random_model, otlp_endpoint=collector.url, **OPTIONS))
        before = time.time()
        with serving(engine) as address, httpx.Client(base_url=address.url, timeout=60) as http:
            body = {"prompt": "abcdefgh", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
            http.post("/v1/completions", json=body, headers=SAMPLED).raise_for_status()
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "n": 2, "ignore_eos": True}
            http.post("/v1/chat/completions", json=chat).raise_for_status()
            http.post("/v1/embeddings", json={"input": "abc"}).raise_for_status()
            http.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
            http.post("/v1/completions", json=body, headers={"traceparent": "nonsense"}).raise_for_status()
            with http.stream("POST", "/v1/completions", json=body | {"max_tokens": 400, "stream": True}) as answer:
                next(answer.iter_lines())  # and go away
            while engine.snapshot().num_running:
                time.sleep(0.01)
        asyncio.run(engine.shutdown())
        yield collector, before, time.time()


def spans(collector: Collector, operation: str) -> list:
    found = collector.named("llm_request")
    return [span for span in found if span.attributes["gen_ai.operation.name"] == operation]


def test_span_belongs_to_the_trace_of_the_request(asked):
    (span,) = [span for span in asked[0].named("llm_request") if span.trace_id == TRACE]
    assert span.parent_id == PARENT
    assert span.kind == SERVER
    assert span.service == "jaxserve"
    assert asked[0].paths[0] == "/v1/traces"
    assert not span.failed


def test_attributes_are_those_of_the_conventions_and_of_vllm(asked):
    (span,) = [span for span in asked[0].named("llm_request") if span.trace_id == TRACE]
    latencies = {name: span.attributes.pop(name) for name in list(span.attributes) if ".latency." in name}
    assert span.attributes.pop("gen_ai.request.id").startswith("cmpl-")
    assert span.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "jaxserve",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.n": 1,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 8,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.prompt_tokens": 8,
        "gen_ai.usage.completion_tokens": 5,
    }
    queue, prefill, decode = (
        latencies[f"gen_ai.latency.time_in_{phase}"] for phase in ("queue", "model_prefill", "model_decode")
    )
    assert latencies["gen_ai.latency.time_to_first_token"] == pytest.approx(queue + prefill)
    assert latencies["gen_ai.latency.time_in_model_inference"] == pytest.approx(prefill + decode)
    assert latencies["gen_ai.latency.e2e"] == pytest.approx(span.end - span.start, abs=1e-3)


def test_phases_follow_each_other_within_the_request(asked):
    collector, before, after = asked
    for span in [*spans(collector, "chat"), *spans(collector, "text_completion")]:
        phases = collector.children(span)
        queue, prefill, decode = (phases[name] for name in ("queue", "prefill", "decode"))
        assert {phase.trace_id for phase in phases.values()} == {span.trace_id}
        assert before < span.start == queue.start <= queue.end == prefill.start
        assert prefill.end == decode.start <= decode.end <= span.end < after


def test_answers_of_a_request_share_a_span(asked):
    (span,) = spans(asked[0], "chat")
    assert span.parent_id == ""
    assert span.attributes["gen_ai.request.n"] == 2
    assert span.attributes["gen_ai.usage.output_tokens"] == 6
    assert span.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]


def test_embedding_has_no_decode(asked):
    (span,) = spans(asked[0], "embeddings")
    assert asked[0].children(span).keys() == {"queue", "prefill"}
    assert span.attributes["gen_ai.usage.output_tokens"] == 0
    assert "gen_ai.request.max_tokens" not in span.attributes


def test_aborted_request_is_traced(asked):
    aborted = [s for s in asked[0].named("llm_request") if s.attributes["gen_ai.response.finish_reasons"] == ["abort"]]
    (span,) = aborted
    assert 0 < span.attributes["gen_ai.usage.output_tokens"] < 400


def test_sampling_of_the_parent_decides_and_a_malformed_parent_is_ignored(asked):
    completions = spans(asked[0], "text_completion")
    assert len(completions) == 3, "one was not sampled"
    assert sum(span.trace_id == TRACE for span in completions) == 1


# -- without a collector


def ended(number: int) -> EndedRequest:
    request = Request(str(number), (1, 2, 3), SamplingParams(max_tokens=2), arrival=0.0)
    return EndedRequest(request, RequestMetrics(0.0, 0.1, 0.2, 0.3, 0.3), 0.3, FinishReason.ERROR, ["error"], 2, 0)


@pytest.fixture
def nobody() -> str:
    """The URL of a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_collector_that_is_down_holds_up_nothing(nobody, caplog):
    with caplog.at_level(logging.INFO):
        tracer = RequestTracer(nobody, "tiny")
        for number in range(20_000):  # more than all queues hold
            tracer(ended(number))
        tracer.close()
        tracer.close()
    assert len(caplog.records) < 10


def test_request_with_an_error_has_a_failed_span():
    with collecting() as collector:
        tracer = RequestTracer(f"{collector.url}/v1/traces", "tiny")
        tracer(ended(1))
        tracer.close()
    (span,) = collector.named("llm_request")
    assert span.failed
    assert span.attributes["gen_ai.latency.time_to_first_token"] == 0.2
    assert span.end == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "grpc://127.0.0.1:4317", "http://", ""])
def test_endpoint_must_be_an_http_url(endpoint):
    with pytest.raises(ConfigError, match="such as http://127"):
        RequestTracer(endpoint, "tiny")


def test_missing_package_is_named_in_one_line(monkeypatch, random_model, capsys):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk") as caught:
        build_async_engine(EngineConfig(model=random_model, otlp_endpoint="http://127.0.0.1:4318", **OPTIONS))
    assert "\n" not in str(caught.value)
