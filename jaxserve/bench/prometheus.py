"""Prometheus' text format, reduced to what a measurement wants: one number per series, whatever the engine's prefix.

Names lose the prefixes `jaxserve_` and `vllm:`, so that series of both compare. Labels that tell instances of a server
apart are dropped, and what they told apart is added up; shares (`..._perc`, `..._ratio`) are averaged, and of
`plan_version` the highest counts.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

PREFIXES = ("jaxserve_", "vllm:")
INSTANCE_LABELS = frozenset({"model_name", "engine", "instance"})
SHARES = ("_perc", "_ratio")
HIGHEST = frozenset({"plan_version"})
MEANS = frozenset({"iteration_seconds", "time_to_first_token_seconds"})  # sum and count are values: means in between


@dataclass(frozen=True)
class Histogram:
    """Cumulative buckets {upper bound: observations up to it}, and the sum of all observations."""

    buckets: Mapping[float, float]
    total: float

    @property
    def count(self) -> float:
        """How many observations."""
        return self.buckets.get(math.inf, 0.0)

    @property
    def mean(self) -> float | None:
        """Exact; None without observations."""
        return self.total / self.count if self.count else None

    def __add__(self, other: Self) -> "Histogram":
        return self._combined(other, 1)

    def __sub__(self, other: Self) -> "Histogram":
        return self._combined(other, -1)

    def quantile(self, q: float) -> float | None:
        """As Prometheus' `histogram_quantile`: linear within a bucket; beyond the last bound, that bound."""
        if not self.count:
            return None
        rank, lower, below = q * self.count, 0.0, 0.0
        for upper, observed in sorted(self.buckets.items()):
            if observed >= rank and observed > below:
                return lower if math.isinf(upper) else lower + (upper - lower) * (rank - below) / (observed - below)
            lower, below = upper, observed
        return None

    def _combined(self, other: Self, sign: int) -> "Histogram":
        bounds = {*self.buckets, *other.buckets}
        buckets = {bound: self.buckets.get(bound, 0.0) + sign * other.buckets.get(bound, 0.0) for bound in bounds}
        return Histogram(buckets, self.total + sign * other.total)


@dataclass(frozen=True)
class Scrape:
    """One look at a server: gauges and counters by `name{label="value"}`, histograms by name."""

    values: Mapping[str, float]
    histograms: Mapping[str, Histogram]


def parse(text: str, *, histograms: bool = True) -> Scrape:
    """Reads a page of metrics. `histograms=False` skips their many lines, which take most of the time.

    Of a page that has one of the known prefixes the rest is left out: figures of the process and of its web server.
    Raises ValueError if it is no such page.
    """
    if not histograms:
        text = "\n".join(line for line in text.splitlines() if "_bucket{" not in line) + "\n"
    families = list(text_string_to_metric_families(text))
    known = [family for family in families if family.name.startswith(PREFIXES)]
    values: dict[str, list[float]] = {}
    found: dict[str, Histogram] = {}
    for family in known or families:
        if family.type in ("gauge", "counter", "unknown"):
            _add_values(values, family.samples)
        elif family.type == "histogram":
            if _short(family.name) in MEANS:
                _add_values(values, [s for s in family.samples if s.name.endswith(("_sum", "_count"))])
            if histograms:
                found[_short(family.name)] = _histogram(family)
    return Scrape({key: _together(key, parts) for key, parts in values.items()}, found)


def _add_values(values: dict[str, list[float]], samples: Iterable[Sample]) -> None:
    """Mutates `values`: adds a family's samples, several to a key where instances were told apart."""
    for sample in samples:
        if sample.name.endswith(("_created", "_info")) or not math.isfinite(sample.value):
            continue
        labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()) if k not in INSTANCE_LABELS)
        key = _short(sample.name) + (f"{{{labels}}}" if labels else "")
        values.setdefault(key, []).append(sample.value)


def _histogram(family: Metric) -> Histogram:
    """All series of a family together."""
    buckets: dict[float, float] = {}
    total = 0.0
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            buckets[bound] = buckets.get(bound, 0.0) + sample.value
        elif sample.name.endswith("_sum"):
            total += sample.value
    return Histogram(buckets, total)


def _together(key: str, parts: Iterable[float]) -> float:
    parts, name = list(parts), key.partition("{")[0]
    if name in HIGHEST:
        return max(parts)
    return sum(parts) / len(parts) if name.endswith(SHARES) else sum(parts)


def _short(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name
