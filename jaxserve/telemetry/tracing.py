"""OpenTelemetry traces of requests, sent to a collector over OTLP (HTTP, protobuf).

A request is a span `llm_request`, whose parent is named by the W3C header `traceparent`, with a span for each phase:
`queue`, `prefill` and `decode`. Attributes are those of OpenTelemetry's conventions for generative AI, and those that
vLLM adds to them. OpenTelemetry is only imported if a tracer is made.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from jaxserve.core.errors import ConfigError
from jaxserve.core.request import FinishReason, Request, RequestMetrics

log = logging.getLogger(__name__)

PACKAGES = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"  # the extra otlp
TRACES_PATH = "/v1/traces"
MAX_WAITING = 4096  # ended requests that wait to become spans; more are dropped
CLOSE_SECONDS = 2.0  # for sending the last spans
NANOSECONDS = 1e9


@dataclass(frozen=True)
class EndedRequest:
    """A request that has ended, and what it did. Times are seconds of the engine's clock."""

    request: Request
    times: RequestMetrics
    now: float  # at the end
    reason: FinishReason
    reasons: Sequence[str]  # by answer
    output_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache

    def phases(self) -> list[tuple[str, float, float]]:
        """Return the name, start and end of each phase that the request reached. The last one ends with the request."""
        times = self.times
        starts = {"queue": times.arrival, "prefill": times.first_scheduled, "decode": times.first_token}
        reached = {name: start for name, start in starts.items() if start is not None}
        last = self.now if times.last_token is None else times.last_token
        ends = [*list(reached.values())[1:], last]
        return [(name, start, end) for (name, start), end in zip(reached.items(), ends, strict=True)]


class RequestTracer:
    """A tracer of requests. Engines call it with each request that has ended, which only costs putting it in a queue.

    A thread makes the spans, and one of OpenTelemetry sends them. While the collector cannot be reached, the oldest
    spans are dropped.
    """

    def __init__(self, endpoint: str, model: str):
        """Send traces to the collector at `endpoint`, a URL. `model` is the name of the model for clients.

        Raise `ConfigError` if `endpoint` is not such a URL or OpenTelemetry is not installed.
        """
        url = _traces_url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"traces need OpenTelemetry, which is not installed ({error}): pip install {PACKAGES} (--otlp-endpoint)"
            ) from error
        # While the collector is down, a line for each batch that is lost is enough.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self._exporter = OTLPSpanExporter(endpoint=url)
        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "jaxserve")})
        # At the process's exit nothing is left to be sent: `close` has been called.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._spans = _Spans(self._provider.get_tracer("jaxserve"), model)
        self._waiting: queue.Queue[tuple[EndedRequest, float] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="jaxserve-traces", daemon=True)
        self._thread.start()

    def __call__(self, ended: EndedRequest) -> None:
        """Trace a request that ends now. Never blocks: if too many wait, the request is not traced."""
        try:
            self._waiting.put_nowait((ended, time.time() - ended.now))
        except queue.Full:
            log.debug("request %s is not traced: %d others wait", ended.request.id, MAX_WAITING)

    def close(self) -> None:
        """Send the last spans for at most `CLOSE_SECONDS`, and end. May be called several times."""
        deadline = time.monotonic() + CLOSE_SECONDS
        try:
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            log.debug("the last requests are not traced")
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call] # it would try again to reach the collector

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._spans.make(*item)
            except Exception:
                log.exception("request %s was not traced", item[0].request.id)
        self._provider.shutdown()


class _Spans:
    """The spans of ended requests."""

    def __init__(self, tracer: Any, model: str):
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer, self._model = tracer, model
        self._kind, self._error = SpanKind.SERVER, Status(StatusCode.ERROR)
        self._in_context: Callable[[Any], Any] = set_span_in_context
        self._parent: Callable[[Mapping[str, str]], Any] = TraceContextTextMapPropagator().extract

    def make(self, ended: EndedRequest, offset: float) -> None:
        """Make the spans of a request. `offset`: seconds from the engine's clock to the time since the epoch."""

        def at(moment: float) -> int:
            return int((moment + offset) * NANOSECONDS)

        trace = ended.request.trace
        span = self._tracer.start_span(
            "llm_request",
            context=None if trace is None else self._parent(trace.headers),
            kind=self._kind,
            attributes=attributes(ended, self._model),
            start_time=at(ended.times.arrival),
        )
        if ended.reason is FinishReason.ERROR:
            span.set_status(self._error)
        within = self._in_context(span)
        for name, start, end in ended.phases():
            self._tracer.start_span(name, context=within, start_time=at(start)).end(at(end))
        span.end(at(ended.now))


def attributes(ended: EndedRequest, model: str) -> dict[str, Any]:
    """Return the attributes of a request's span."""
    request, times, now = ended.request, ended.times, ended.now
    params, prompt_tokens = request.params, len(request.prompt_token_ids)
    values = {
        "gen_ai.operation.name": None if request.trace is None else request.trace.operation,
        "gen_ai.provider.name": "jaxserve",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.id": request.id,
        "gen_ai.response.finish_reasons": list(ended.reasons),
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": ended.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": ended.cached_tokens,
        # vLLM's names for the same
        "gen_ai.usage.prompt_tokens": prompt_tokens,
        "gen_ai.usage.completion_tokens": ended.output_tokens,
        "gen_ai.latency.time_in_queue": _seconds(times.arrival, times.first_scheduled),
        "gen_ai.latency.time_to_first_token": _seconds(times.arrival, times.first_token),
        "gen_ai.latency.time_in_model_prefill": _seconds(times.first_scheduled, times.first_token),
        "gen_ai.latency.time_in_model_decode": _seconds(times.first_token, times.last_token),
        "gen_ai.latency.time_in_model_inference": _seconds(times.first_scheduled, times.last_token),
        "gen_ai.latency.e2e": now - times.arrival,
    }
    if not request.embed:
        values |= {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
        }
    return {name: value for name, value in values.items() if value is not None}


def _seconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _traces_url(endpoint: str) -> str:
    """Return the URL to which traces are posted. Raise `ConfigError` if `endpoint` is not an HTTP URL."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"otlp_endpoint is {endpoint!r}: it must be the URL of a collector that takes OTLP over HTTP, such as "
            "http://127.0.0.1:4318 (--otlp-endpoint)"
        )
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + TRACES_PATH
