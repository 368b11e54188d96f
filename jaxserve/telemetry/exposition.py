"""The page of metrics in Prometheus' text format or in OpenMetrics, under the names of jaxserve, of vLLM or of both.

Everything is counted once: a metric with several names is only written several times.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8, generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from jaxserve.core.config import MetricsPrefix
from jaxserve.telemetry.control_state import KVCapacity, Quality
from jaxserve.telemetry.definitions import (
    BUILD_INFO,
    CAPACITY_GAUGES,
    COUNTERS,
    ENGINE_COUNTERS,
    GAUGES,
    HISTOGRAMS,
    HTTP_REQUESTS,
    HTTP_SECONDS,
    INFO,
    INSTANCE_INFO,
    LABELLED_GAUGES,
    QUALITY_GAUGES,
    SUCCESS,
    TRANSITION_SECONDS,
    VLLM_BARE_NAMES,
    VLLM_NAMES,
    WAITING_ROOM_GAUGES,
)
from jaxserve.telemetry.snapshot import Snapshot, WaitingRoom

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"

Labels = tuple[str, ...]
State = tuple[Sequence[tuple[str, float]], float]  # of a histogram: cumulative buckets, and the sum


@dataclass(frozen=True)
class InstanceFigures:
    """The values of an instance at one moment, by the names of `definitions`."""

    name: str
    snapshot: Snapshot | None  # None: it has ended
    counters: Mapping[str, int]
    success: Mapping[str, int]  # by the reason of the end
    histograms: Mapping[str, State]


@dataclass(frozen=True)
class EngineFigures:
    """The values of an engine at one moment."""

    model_name: str
    cache_config: Callable[[int], Mapping[str, object]]  # labels of the KV cache, from its number of pages
    instances: Sequence[InstanceFigures]  # by number
    waiting_room: WaitingRoom
    counters: Mapping[str, Mapping[tuple[str, ...], float]]
    transition_seconds: Mapping[str, State]  # by kind
    capacities: Mapping[str, KVCapacity]  # by instance; {} if they are unknown
    quality: Quality | None  # None without a control plane
    build: Mapping[str, str]  # labels of `BUILD_INFO`


@dataclass(frozen=True)
class HttpFigures:
    """The values of an HTTP server at one moment, by the values of their labels."""

    requests: Mapping[Labels, float]
    seconds: Mapping[Labels, State]


@dataclass(frozen=True)
class _Series:
    """The samples of one metric: label values with the arguments that its kind of family takes."""

    kind: type[Any]
    name: str
    help: str
    labels: tuple[str, ...]
    samples: Iterable[tuple[tuple[str, ...], tuple[Any, ...]]]

    def family(self, name: str) -> Metric:
        """Return the samples under a name."""
        family: Metric = self.kind(name, self.help, labels=self.labels)
        for labels, arguments in self.samples:
            family.add_metric(labels, *arguments)  # type: ignore[attr-defined]
        return family


def render(
    engine: EngineFigures | None,
    http: HttpFigures | None = None,
    *,
    prefix: MetricsPrefix = "jaxserve",
    openmetrics: bool = False,
) -> bytes:
    """Return the page of metrics of an engine, of an HTTP server with its process, or of both."""
    registry = CollectorRegistry(auto_describe=False)
    if engine is not None:
        registry.register(_Page(engine, prefix))
    if http is not None:
        registry.register(_HttpPage(http, prefix))
        ProcessCollector(registry=registry)
    if openmetrics:
        # With that escaping the colons of vLLM's names stay.
        return generate_openmetrics(registry, escaping=ALLOWUTF8)  # type: ignore[no-untyped-call, no-any-return]
    return generate_latest(registry)


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


def labelled_gauges(snapshot: Snapshot) -> dict[str, Mapping[str, float]]:
    """Return the values of `LABELLED_GAUGES` for a snapshot, by the values of their labels."""
    capacity = snapshot.num_waiting - snapshot.num_deferred
    return {
        "num_requests_waiting_by_reason": {"capacity": capacity, "deferred": snapshot.num_deferred},
        "layers_by_precision": snapshot.layers_by_precision,
    }


def names(name: str, prefix: MetricsPrefix) -> list[str]:
    """Return the names under which a metric is shown."""
    own, vllm = f"jaxserve_{name}", [f"vllm:{known}" for known in VLLM_NAMES.get(name, ())]
    if name in VLLM_BARE_NAMES:
        vllm = [name]
    if prefix == "jaxserve":
        return [own]
    return vllm or [own] if prefix == "vllm" else [own, *vllm]


class _Page(Collector):
    """A collector of all families of a page."""

    def __init__(self, figures: EngineFigures, prefix: MetricsPrefix):
        self._figures, self._prefix = figures, prefix
        self._instances = [((figures.model_name, str(i)), values) for i, values in enumerate(figures.instances)]
        self._present = [
            (labels, values.name, values.snapshot) for labels, values in self._instances if values.snapshot is not None
        ]

    def collect(self) -> Iterable[Metric]:
        for series in (*self._gauges(), *self._counters(), *self._histograms()):
            for name in names(series.name, self._prefix):
                yield series.family(name)
        for name in names(INFO[0], self._prefix):
            yield self._info(name)
        for name in names(BUILD_INFO[0], self._prefix):
            family = GaugeMetricFamily(name, BUILD_INFO[1])
            family.add_sample(name, {"model_name": self._figures.model_name, **self._figures.build}, 1)
            yield family

    def _of_instances(
        self, kind: type[Any], name: str, text: str, samples: Iterable[tuple[Labels, tuple[Any, ...]]]
    ) -> _Series:
        """Return a metric with one sample for each instance, made from its labels and the arguments of the sample."""
        return _Series(kind, name, text, ("model_name", "engine"), samples)

    def _by_label(
        self, kind: type[Any], name: str, label: str, text: str, values: Iterable[tuple[Labels, Mapping[str, float]]]
    ) -> _Series:
        """Return a metric with samples for each instance by the values of a label."""
        samples = [((*labels, key), (value,)) for labels, by_key in values for key, value in by_key.items()]
        return _Series(kind, name, text, ("model_name", "engine", label), samples)

    def _gauges(self) -> Iterator[_Series]:
        shown = [(labels, gauges(snapshot)) for labels, _, snapshot in self._present]
        for name, text in GAUGES.items():
            samples = [(labels, (values[name],)) for labels, values in shown]
            yield self._of_instances(GaugeMetricFamily, name, text, samples)
        for name, (label, text) in LABELLED_GAUGES.items():
            labelled = [(labels, labelled_gauges(snapshot)[name]) for labels, _, snapshot in self._present]
            yield self._by_label(GaugeMetricFamily, name, label, text, labelled)
        for name, text in CAPACITY_GAUGES.items():
            field, capacities = name.removeprefix("kv_capacity_"), self._figures.capacities
            samples = [
                (labels, (getattr(capacities[instance], field),))
                for labels, instance, _ in self._present
                if instance in capacities
            ]
            yield self._of_instances(GaugeMetricFamily, name, text, samples)
        for name, (field, text) in WAITING_ROOM_GAUGES.items():
            value = getattr(self._figures.waiting_room, field)
            yield _Series(GaugeMetricFamily, name, text, ("model_name",), [((self._figures.model_name,), (value,))])
        for name, (field, text) in QUALITY_GAUGES.items():
            value = getattr(self._figures.quality, field, None)
            known = [] if value is None else [((self._figures.model_name,), (float(value),))]
            yield _Series(GaugeMetricFamily, name, text, ("model_name",), known)
        name, label, text = INSTANCE_INFO
        named = [(labels, {instance: 1.0}) for labels, instance, _ in self._present]
        yield self._by_label(GaugeMetricFamily, name, label, text, named)

    def _counters(self) -> Iterator[_Series]:
        for name, text in COUNTERS.items():
            counted = [(labels, (figures.counters[name],)) for labels, figures in self._instances]
            yield self._of_instances(CounterMetricFamily, name, text, counted)
        name, label, text = SUCCESS
        ended = [(labels, figures.success) for labels, figures in self._instances]
        yield self._by_label(CounterMetricFamily, name, label, text, ended)
        model = self._figures.model_name
        for name, (labels, text) in ENGINE_COUNTERS.items():
            samples = [((model, *values), (count,)) for values, count in self._figures.counters[name].items()]
            yield _Series(CounterMetricFamily, name, text, ("model_name", *labels), samples)

    def _histograms(self) -> Iterator[_Series]:
        for name, (_, text) in HISTOGRAMS.items():
            states = [(labels, figures.histograms[name]) for labels, figures in self._instances]
            yield self._of_instances(HistogramMetricFamily, name, text, states)
        name, text = TRANSITION_SECONDS
        model = self._figures.model_name
        samples = [((model, kind), state) for kind, state in self._figures.transition_seconds.items()]
        yield _Series(HistogramMetricFamily, name, text, ("model_name", "kind"), samples)

    def _info(self, name: str) -> Metric:
        """Return the metric whose labels describe the KV cache. vLLM's has no label for the model."""
        model = {} if name.startswith("vllm:") else {"model_name": self._figures.model_name}
        family = GaugeMetricFamily(name, INFO[1])
        for (_, engine), _, snapshot in self._present:
            cache = self._figures.cache_config(snapshot.kv_pages_total)
            labels = model | {"engine": engine} | {label: str(value) for label, value in cache.items()}
            family.add_sample(name, labels, 1)
        return family


class _HttpPage(Collector):
    """A collector of the families of an HTTP server."""

    def __init__(self, figures: HttpFigures, prefix: MetricsPrefix):
        self._figures, self._prefix = figures, prefix

    def collect(self) -> Iterable[Metric]:
        counted = [(values, (count,)) for values, count in self._figures.requests.items()]
        requests, seconds = HTTP_REQUESTS, HTTP_SECONDS
        for series in (
            _Series(CounterMetricFamily, requests[0], requests[2], requests[1], counted),
            _Series(HistogramMetricFamily, seconds[0], seconds[2], seconds[1], self._figures.seconds.items()),
        ):
            for shown in names(series.name, self._prefix):
                yield series.family(shown)
