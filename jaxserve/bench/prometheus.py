"""A reader of Prometheus' text format that keeps one number per series, whatever the engine.

Names lose the prefixes `jaxserve_` and `vllm:`, so that series of both engines compare. Labels that distinguish
instances of a server are dropped. Values of instances are added, but shares (`..._perc`, `..._ratio`) are averaged,
and of `plan_version` and `kv_capacity_max_seconds` the highest one is taken. Series that a server exports under both
prefixes are read once.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

OWN_PREFIX = "jaxserve_"
PREFIXES = (OWN_PREFIX, "vllm:")
INSTANCE_LABELS = frozenset({"model_name", "engine", "instance"})
SHARES = ("_perc", "_ratio")
HIGHEST = frozenset({"plan_version", "kv_capacity_max_seconds"})
# Histograms whose sum and count become values too, so that means between two scrapes can be computed.
WITH_SUM_AND_COUNT = frozenset({"iteration_seconds", "time_to_first_token_seconds"})


@dataclass(frozen=True)
class Histogram:
    """A histogram: cumulative buckets {upper bound: observations up to it}, and the sum of all observations."""

    buckets: Mapping[float, float]
    total: float

    @property
    def count(self) -> float:
        """The number of observations."""
        return self.buckets.get(math.inf, 0.0)

    @property
    def mean(self) -> float | None:
        """The exact mean, or None without observations."""
        return self.total / self.count if self.count else None

    def __add__(self, other: Self) -> "Histogram":
        return self._combined(other, 1)

    def __sub__(self, other: Self) -> "Histogram":
        return self._combined(other, -1)

    def quantile(self, q: float) -> float | None:
        """Return a quantile (`q` from 0 to 1), interpolated within a bucket like Prometheus' `histogram_quantile`.

        The last finite bound is the largest value returned. None without observations.
        """
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
    """One sample of a server's metrics: values by `name{label="value"}`, and histograms by name."""

    values: Mapping[str, float]
    histograms: Mapping[str, Histogram]


def parse(text: str, *, histograms: bool = True) -> Scrape:
    """Read a page of metrics. `histograms=False` skips histograms, whose many lines take most of the time.

    If any name has a known prefix, all other names are left out: they describe the process and its web server.

    Raise ValueError if the text is not a page of metrics.
    """
    if not histograms:
        text = "\n".join(line for line in text.splitlines() if "_bucket{" not in line) + "\n"
    families = list(text_string_to_metric_families(text))
    known = _known(families)
    values: dict[str, list[float]] = {}
    found: dict[str, Histogram] = {}
    for family in known or families:
        if family.type in ("gauge", "counter", "unknown"):
            _add_values(values, family.samples)
        elif family.type == "histogram":
            if _short(family.name) in WITH_SUM_AND_COUNT:
                _add_values(values, [s for s in family.samples if s.name.endswith(("_sum", "_count"))])
            if histograms:
                found[_short(family.name)] = _histogram(family)
    return Scrape({key: _combined(key, parts) for key, parts in values.items()}, found)


def _known(families: Sequence[Metric]) -> list[Metric]:
    """Return the families with a known prefix, once each if they have several."""
    own = {_short(family.name) for family in families if family.name.startswith(OWN_PREFIX)}
    known = [family for family in families if family.name.startswith(PREFIXES)]
    return [family for family in known if family.name.startswith(OWN_PREFIX) or _short(family.name) not in own]


def _add_values(values: dict[str, list[float]], samples: Iterable[Sample]) -> None:
    """Add a family's samples to `values`: several to a key if there are several instances."""
    for sample in samples:
        if sample.name.endswith(("_created", "_info")) or not math.isfinite(sample.value):
            continue
        labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()) if k not in INSTANCE_LABELS)
        key = _short(sample.name) + (f"{{{labels}}}" if labels else "")
        values.setdefault(key, []).append(sample.value)


def _histogram(family: Metric) -> Histogram:
    """Return the sum of all series of a family."""
    buckets: dict[float, float] = {}
    total = 0.0
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            buckets[bound] = buckets.get(bound, 0.0) + sample.value
        elif sample.name.endswith("_sum"):
            total += sample.value
    return Histogram(buckets, total)


def _combined(key: str, parts: Iterable[float]) -> float:
    parts, name = list(parts), key.partition("{")[0]
    if name in HIGHEST:
        return max(parts)
    return sum(parts) / len(parts) if name.endswith(SHARES) else sum(parts)


def _short(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name
