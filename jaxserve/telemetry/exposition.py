"""The page of metrics in Prometheus' text format, under the names of jaxserve, of vLLM or of both.

Everything is counted once: a metric with several names is only written several times.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.core.config import MetricsPrefix
from jaxserve.telemetry.control_state import KVCapacity
from jaxserve.telemetry.definitions import (
    CAPACITY_GAUGES,
    COUNTERS,
    ENGINE_COUNTERS,
    GAUGES,
    HISTOGRAMS,
    INFO,
    LABELLED_GAUGES,
    SUCCESS,
    TRANSITION_SECONDS,
    VLLM_NAMES,
)
from jaxserve.telemetry.snapshot import Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

State = tuple[Sequence[tuple[str, float]], float]  # of a histogram: cumulative buckets, and the sum


@dataclass(frozen=True)
class InstanceFigures:
    """The values of an instance at one moment, by the names of `definitions`."""

    snapshot: Snapshot
    counters: Mapping[str, int]
    success: Mapping[str, int]  # by the reason of the end
    histograms: Mapping[str, State]


@dataclass(frozen=True)
class EngineFigures:
    """The values of an engine at one moment."""

    model_name: str
    cache_config: Callable[[int], Mapping[str, object]]  # labels of the KV cache, from its number of pages
    instances: Mapping[int, InstanceFigures]
    counters: Mapping[str, Mapping[tuple[str, ...], int]]
    transition_seconds: Mapping[str, State]  # by kind
    capacities: Sequence[KVCapacity]  # of the instances in order; () if they are unknown


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


def render(figures: EngineFigures, prefix: MetricsPrefix) -> bytes:
    """Return the page of metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(figures, prefix))
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


def names(name: str, prefix: MetricsPrefix) -> list[str]:
    """Return the names under which a metric is shown."""
    own, vllm = f"jaxserve_{name}", [f"vllm:{known}" for known in VLLM_NAMES.get(name, ())]
    if prefix == "jaxserve":
        return [own]
    return vllm or [own] if prefix == "vllm" else [own, *vllm]


class _Page(Collector):
    """A collector of all families of a page."""

    def __init__(self, figures: EngineFigures, prefix: MetricsPrefix):
        self._figures, self._prefix = figures, prefix
        self._instances = [((figures.model_name, str(i)), values) for i, values in figures.instances.items()]

    def collect(self) -> Iterable[Metric]:
        for series in (*self._gauges(), *self._counters(), *self._histograms()):
            for name in names(series.name, self._prefix):
                yield series.family(name)
        for name in names(INFO[0], self._prefix):
            yield self._info(name)

    def _of_instances(self, kind: type[Any], name: str, text: str, values: Iterable[tuple[Any, ...]]) -> _Series:
        """Return a metric with one sample for each instance, in order, made from the arguments `values`."""
        samples = [(labels, value) for (labels, _), value in zip(self._instances, values, strict=False)]
        return _Series(kind, name, text, ("model_name", "engine"), samples)

    def _by_label(
        self, kind: type[Any], name: str, label: str, text: str, values: Iterable[Mapping[str, float]]
    ) -> _Series:
        """Return a metric with samples for each instance, in order, by the values of a label."""
        samples = [
            ((*labels, key), (value,))
            for (labels, _), by_key in zip(self._instances, values, strict=True)
            for key, value in by_key.items()
        ]
        return _Series(kind, name, text, ("model_name", "engine", label), samples)

    def _gauges(self) -> Iterator[_Series]:
        snapshots = [figures.snapshot for _, figures in self._instances]
        shown = list(map(gauges, snapshots))
        for name, text in GAUGES.items():
            yield self._of_instances(GaugeMetricFamily, name, text, [(values[name],) for values in shown])
        labelled: dict[str, list[Mapping[str, float]]] = {
            "num_requests_waiting_by_reason": [
                {"capacity": seen.num_waiting - seen.num_deferred, "deferred": seen.num_deferred} for seen in snapshots
            ],
            "layers_by_precision": [seen.layers_by_precision for seen in snapshots],
        }
        for name, (label, text) in LABELLED_GAUGES.items():
            yield self._by_label(GaugeMetricFamily, name, label, text, labelled[name])
        for name, text in CAPACITY_GAUGES.items():
            field = name.removeprefix("kv_capacity_")
            capacities = [(getattr(capacity, field),) for capacity in self._figures.capacities]
            yield self._of_instances(GaugeMetricFamily, name, text, capacities)

    def _counters(self) -> Iterator[_Series]:
        for name, text in COUNTERS.items():
            values = [(figures.counters[name],) for _, figures in self._instances]
            yield self._of_instances(CounterMetricFamily, name, text, values)
        name, label, text = SUCCESS
        yield self._by_label(
            CounterMetricFamily, name, label, text, [figures.success for _, figures in self._instances]
        )
        model = self._figures.model_name
        for name, (labels, text) in ENGINE_COUNTERS.items():
            samples = [((model, *values), (count,)) for values, count in self._figures.counters[name].items()]
            yield _Series(CounterMetricFamily, name, text, ("model_name", *labels), samples)

    def _histograms(self) -> Iterator[_Series]:
        for name, (_, text) in HISTOGRAMS.items():
            states = [figures.histograms[name] for _, figures in self._instances]
            yield self._of_instances(HistogramMetricFamily, name, text, states)
        name, text = TRANSITION_SECONDS
        model = self._figures.model_name
        samples = [((model, kind), state) for kind, state in self._figures.transition_seconds.items()]
        yield _Series(HistogramMetricFamily, name, text, ("model_name", "kind"), samples)

    def _info(self, name: str) -> Metric:
        """Return the metric whose labels describe the KV cache. vLLM's has no label for the model."""
        model = {} if name.startswith("vllm:") else {"model_name": self._figures.model_name}
        family = GaugeMetricFamily(name, INFO[1])
        for (_, engine), figures in self._instances:
            cache = self._figures.cache_config(figures.snapshot.kv_pages_total)
            labels = model | {"engine": engine} | {label: str(value) for label, value in cache.items()}
            family.add_sample(name, labels, 1)
        return family
