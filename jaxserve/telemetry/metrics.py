"""Prometheus metrics of one engine: those of vLLM under the prefix `jaxserve_`, so that dashboards need only new names.

Values are plain integers and lists, which become Prometheus samples only when they are scraped. The step loop thus pays
for additions, and not for looking up labels.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.core.request import FinishReason
from jaxserve.telemetry.histogram import Histogram, one_two_five
from jaxserve.telemetry.snapshot import Snapshot, combine

PREFIX = "jaxserve_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TIME_BOUNDS = one_two_five(1e-3, 1000.0)  # seconds
TOKEN_BOUNDS = one_two_five(1, 100_000)
STEP_TOKEN_BOUNDS = tuple(2**power for power in range(15))
COUNT_BOUNDS = (1, 2, 5, 10, 20, 50)
STEP_BOUNDS = one_two_five(1e-4, 10.0)  # seconds

GAUGES = {
    "num_requests_running": "Sequences being computed.",
    "num_requests_waiting": "Sequences waiting to be computed.",
    "num_tokens_waiting": "Prompt tokens of the waiting sequences.",
    "kv_cache_usage_perc": "Share of the KV pages in use; 1 is 100 percent.",
    "kv_pages_total": "KV pages of the pool.",
    "kv_pages_used": "KV pages held by sequences.",
    "kv_bytes": "Bytes of the KV pools.",
    "weight_bytes": "Bytes of the resident weights.",
    "plan_version": "Version of the plan in force.",
}
COUNTERS = {
    "num_preemptions": "Sequences preempted.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "prompt_tokens": "Prompt tokens computed or found in the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "non_finite_outputs": "Requests ended because the model computed NaN or infinity for them.",
}
LABELLED_COUNTERS = {  # name: (labels, help)
    "request_success": (("finished_reason",), "Finished requests by reason."),
    "admission_rejections": (("reason",), "Requests refused at admission by reason."),
    "compilations": (("tier",), "Executables compiled by tier."),
    "transitions": (("kind", "outcome"), "Plan transitions by kind and outcome."),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": (TIME_BOUNDS, "Seconds from arrival to the first token."),
    "inter_token_latency_seconds": (STEP_BOUNDS, "Seconds between two tokens of a sequence."),
    "request_time_per_output_token_seconds": (STEP_BOUNDS, "Mean seconds per token after the first."),
    "e2e_request_latency_seconds": (TIME_BOUNDS, "Seconds from arrival to the end of a request."),
    "request_queue_time_seconds": (TIME_BOUNDS, "Seconds from arrival to the first step."),
    "request_prompt_tokens": (TOKEN_BOUNDS, "Prompt tokens of a request."),
    "request_prefill_time_seconds": (TIME_BOUNDS, "Seconds from the first step to the first token."),
    "request_decode_time_seconds": (TIME_BOUNDS, "Seconds from the first token to the last."),
    "request_inference_time_seconds": (TIME_BOUNDS, "Seconds from the first step to the last token."),
    "request_generation_tokens": (TOKEN_BOUNDS, "Generated tokens of a request."),
    "request_max_num_generation_tokens": (TOKEN_BOUNDS, "Tokens of the longest answer of a request."),
    "request_params_n": (COUNT_BOUNDS, "Answers that a request asked for."),
    "request_params_max_tokens": (TOKEN_BOUNDS, "Value of max_tokens of a request that set it."),
    "iteration_tokens": (STEP_TOKEN_BOUNDS, "Tokens of a step."),
    "iteration_seconds": (STEP_BOUNDS, "Seconds of a step."),
}
ALIASES = {"iteration_tokens": ("iteration_tokens_total",)}  # names of histograms in vLLM's dashboards


def gauges(snapshot: Snapshot) -> dict[str, float]:
    """Return the values of `GAUGES` for a snapshot."""
    return {
        "num_requests_running": snapshot.num_running,
        "num_requests_waiting": snapshot.num_waiting,
        "num_tokens_waiting": snapshot.waiting_tokens,
        "kv_cache_usage_perc": snapshot.kv_usage,
        "kv_pages_total": snapshot.kv_pages_total,
        "kv_pages_used": snapshot.kv_pages_used,
        "kv_bytes": snapshot.kv_bytes,
        "weight_bytes": snapshot.weight_bytes,
        "plan_version": snapshot.plan_version,
    }


class EngineMetrics(Collector):
    """Metrics of one engine in a registry of their own. Every method may be called from any thread."""

    def __init__(self, model_name: str, cache_config: Mapping[str, object] | None = None):
        """`cache_config` has the labels of `cache_config_info`, to which the number of pages is added."""
        self.model_name = model_name
        self._cache_config = {name: str(value) for name, value in (cache_config or {}).items()}
        self._snapshots: dict[int, Callable[[], Snapshot]] = {0: Snapshot}
        self._lock = threading.Lock()
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._labelled: dict[str, dict[tuple[str, ...], int]] = {name: {} for name in LABELLED_COUNTERS}
        self._labelled["request_success"] = {(reason.value,): 0 for reason in FinishReason}
        self._histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self._transition_seconds: dict[str, Histogram] = {}
        self._first_token = self._histograms["time_to_first_token_seconds"]
        self._inter_token = self._histograms["inter_token_latency_seconds"]
        self._step_tokens = self._histograms["iteration_tokens"]
        self._step_seconds = self._histograms["iteration_seconds"]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    # -- called by the engine

    def follow(self, snapshot: Callable[[], Snapshot], instance: int = 0) -> None:
        """Let the gauges show what `snapshot` returns when they are scraped, combined over all instances."""
        self._snapshots[instance] = snapshot

    def prompt_tokens(self, count: int) -> None:
        """Count the prompt tokens of a request whose prompt is complete."""
        self._add("prompt_tokens", count)

    def generated_tokens(self, count: int) -> None:
        """Count tokens generated by a step."""
        self._add("generation_tokens", count)

    def first_token(self, seconds: float) -> None:
        """Record the time from a sequence's arrival to its first token."""
        self._first_token.observe(seconds)

    def inter_token(self, seconds: Mapping[float, int]) -> None:
        """Record a step's times between two tokens of a sequence, given as seconds -> number of sequences."""
        self._inter_token.observe_all(seconds)

    def step(self, num_tokens: int, seconds: float) -> None:
        """Record that a step computed `num_tokens` in `seconds`."""
        self._step_tokens.observe(num_tokens)
        self._step_seconds.observe(seconds)

    def finished(
        self,
        reason: FinishReason | str,
        *,
        e2e: float,
        queue: float | None,
        prompt_tokens: int,
        generated: int,
        tpot: float | None,
        prefill: float | None = None,
        decode: float | None = None,
        longest: int | None = None,
        n: int = 1,
        max_tokens: int | None = None,
    ) -> None:
        """Record the end of a request. Times are seconds, and None if the request did not get so far.

        `e2e` is the time since the arrival, `queue` from the arrival to the first step, `prefill` from there to the
        first token, `decode` from there to the last token, and `tpot` the mean per token after the first. `longest` is
        the number of tokens of the longest of `n` answers (None: `generated`).
        """
        self._add_labelled("request_success", FinishReason(reason).value)
        observed = {
            "e2e_request_latency_seconds": e2e,
            "request_queue_time_seconds": queue,
            "request_prefill_time_seconds": prefill,
            "request_decode_time_seconds": decode,
            "request_inference_time_seconds": None if prefill is None else prefill + (decode or 0.0),
            "request_prompt_tokens": prompt_tokens,
            "request_generation_tokens": generated,
            "request_max_num_generation_tokens": generated if longest is None else longest,
            "request_params_n": n,
            "request_params_max_tokens": max_tokens,
            "request_time_per_output_token_seconds": tpot,
        }
        for name, value in observed.items():
            if value is not None:
                self._histograms[name].observe(value)

    def preempted(self, count: int = 1) -> None:
        """Count sequences that were preempted: they lost their pages and wait again."""
        self._add("num_preemptions", count)

    def prefix_cache(self, queried: int, hits: int) -> None:
        """Count prompt tokens looked up (`queried`) and found (`hits`) in the prefix cache."""
        self._add("prefix_cache_queries", queried)
        self._add("prefix_cache_hits", hits)

    def not_finite(self) -> None:
        """Count a request that ended because the model computed NaN or infinity for it."""
        self._add("non_finite_outputs", 1)

    def rejected(self, reason: str) -> None:
        """Count a request that was refused at admission, with a reason such as "queue_full" or "invalid"."""
        self._add_labelled("admission_rejections", reason)

    def compiled(self, tier: str) -> None:
        """Count an executable that was compiled for a tier ("block" or "fused")."""
        self._add_labelled("compilations", tier)

    def transition(self, kind: str, outcome: str, seconds: float) -> None:
        """Record the end of a plan transition, with its class as `kind` and "done" or "failed" as `outcome`."""
        self._add_labelled("transitions", kind, outcome)
        with self._lock:
            histogram = self._transition_seconds.setdefault(kind, Histogram(TIME_BOUNDS))
        histogram.observe(seconds)

    # -- scraped

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format (`CONTENT_TYPE`)."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics, as Prometheus' collector protocol requires."""
        yield from self._collect_gauges()
        yield from self._collect_counters()
        yield from self._collect_histograms()

    def _add(self, name: str, count: int) -> None:
        with self._lock:
            self._counters[name] += count

    def _add_labelled(self, name: str, *labels: str) -> None:
        with self._lock:
            values = self._labelled[name]
            values[labels] = values.get(labels, 0) + 1

    def _collect_gauges(self) -> Iterator[Metric]:
        snapshot = combine([latest() for latest in self._snapshots.values()])
        values = gauges(snapshot)
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self.model_name], values[name])
            yield gauge
        layers = GaugeMetricFamily(
            PREFIX + "layers_by_precision", "Decoder layers by precision.", labels=["model_name", "precision"]
        )
        for precision, count in snapshot.layers_by_precision.items():
            layers.add_metric([self.model_name, precision], count)
        yield layers
        labels = {"model_name": self.model_name, **self._cache_config, "num_gpu_blocks": str(snapshot.kv_pages_total)}
        cache = GaugeMetricFamily(PREFIX + "cache_config_info", "How the KV cache is set up.", labels=list(labels))
        cache.add_metric(list(labels.values()), 1)
        yield cache

    def _collect_counters(self) -> Iterator[Metric]:
        with self._lock:
            counters = dict(self._counters)
            labelled = {name: dict(values) for name, values in self._labelled.items()}
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self.model_name], counters[name])
            yield counter
        for name, (labels, text) in LABELLED_COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name", *labels])
            for values, count in labelled[name].items():
                counter.add_metric([self.model_name, *values], count)
            yield counter

    def _collect_histograms(self) -> Iterator[Metric]:
        for name, (_, text) in HISTOGRAMS.items():
            for shown in (name, *ALIASES.get(name, ())):
                family = HistogramMetricFamily(PREFIX + shown, text, labels=["model_name"])
                family.add_metric([self.model_name], *self._histograms[name].state())
                yield family
        with self._lock:
            transitions = dict(self._transition_seconds)
        family = HistogramMetricFamily(
            PREFIX + "transition_seconds", "Seconds of a plan transition.", labels=["model_name", "kind"]
        )
        for kind, histogram in transitions.items():
            family.add_metric([self.model_name, kind], *histogram.state())
        yield family
