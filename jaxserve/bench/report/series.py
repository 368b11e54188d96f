"""What the plots show, as arrays: computed from a result alone, without drawing anything. Times are in seconds."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIDDLE = (5.0, 95.0)  # percentiles between which arrivals and completions are compared
BEHIND = 0.95  # a server that completes less than this share of what arrives is saturated
BINS = 60  # of a plot over time, at most
EVENTS = 5  # in a bin on average, at least: fewer show more noise than load
STEPS = (1, 2, 5)  # times powers of ten: widths of bins
_SERIES = re.compile(r"(?P<name>[^{]+)(?:\{(?P<labels>.*)\})?")
_LABEL = re.compile(r"(\w+)=\"?([^\",}]*)\"?")


@dataclass(frozen=True)
class Requests:
    """The requests of a result that ended, one element each; NaN where there is no such time."""

    arrival_s: Floats
    start_s: Floats  # when --max-concurrency let it go
    ttft_s: Floats
    tpot_s: Floats
    e2el_s: Floats
    end_s: Floats  # of failed requests too
    failed: NDArray[np.bool_]

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> "Requests":
        """Reads the per-request lists; a result without them has no requests."""
        failed = np.array([bool(error) for error in result.get("errors") or ()], bool)
        start = _floats(result.get("start_times"), len(failed))
        latency = _floats(result.get("latencies"), len(failed))
        ttft = _floats(result.get("ttfts"), len(failed))
        return cls(
            arrival_s=_floats(result.get("arrival_times"), len(failed)),
            start_s=start,
            ttft_s=np.where(failed, np.nan, ttft),
            tpot_s=np.where(failed, np.nan, _tpot(result, len(failed))),
            e2el_s=np.where(failed, np.nan, latency),
            end_s=start + latency,
            failed=failed,
        )

    def metric(self, name: str) -> Floats:
        """`ttft`, `tpot` or `e2el`, in seconds."""
        return {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.e2el_s}[name]


def _tpot(result: Mapping[str, Any], count: int) -> Floats:
    """Mean time per token after the first, from the gaps between chunks."""
    gaps = np.array([math.fsum(gaps) for gaps in result.get("itls") or ()] or np.full(count, np.nan))
    after_first = _floats(result.get("output_lens"), count) - 1
    tpot: Floats = np.divide(gaps, after_first, out=np.full(count, np.nan), where=after_first > 0)
    return tpot


def _floats(values: Sequence[float] | None, count: int) -> Floats:
    return np.array(values if values else np.full(count, np.nan), np.float64)


# -- the server's series


def server_times(result: Mapping[str, Any]) -> Floats:
    """When /metrics was sampled."""
    return np.array((result.get("server") or {}).get("t") or (), np.float64)


def server_series(result: Mapping[str, Any], name: str) -> Floats | None:
    """A gauge or counter over `server_times`, summed over its labels; None if the server has none of this name."""
    found = list(_labelled(result, name).values())
    return np.sum(found, axis=0) if found else None


def server_series_by(result: Mapping[str, Any], name: str, label: str) -> dict[str, Floats]:
    """A gauge by the values of one label, summed over the other labels."""
    summed: dict[str, Floats] = {}
    for labels, values in _labelled(result, name).items():
        key = dict(labels).get(label, "")
        summed[key] = summed[key] + values if key in summed else values
    return summed


def _labelled(result: Mapping[str, Any], name: str) -> dict[tuple[tuple[str, str], ...], Floats]:
    found = {}
    for key, values in (result.get("server") or {}).items():
        parsed = _SERIES.fullmatch(key)
        if parsed and parsed["name"] == name:
            found[tuple(_LABEL.findall(parsed["labels"] or ""))] = np.array(values, np.float64)  # None becomes NaN
    return found


def plan_changes(result: Mapping[str, Any]) -> list[tuple[float, int]]:
    """When a new version of the plan was first seen, and which; nothing for the version a run began with."""
    versions = server_series(result, "plan_version")
    if versions is None or len(versions) < 2:
        return []
    times = server_times(result)
    return [(float(times[i]), int(versions[i])) for i in np.flatnonzero(np.diff(versions) > 0) + 1]


# -- over time


def bin_width(duration_s: float, events: int, per_bin: int = EVENTS) -> float:
    """A round width (1, 2 or 5 times a power of ten) of bins: at most `BINS`, and on average with `per_bin` events."""
    least = max(duration_s, 1e-3) / min(BINS, max(events // per_bin, 1))
    power = 10.0 ** math.floor(math.log10(least))
    return next((step * power for step in STEPS if step * power >= least), 10 * power)


def rate(times_s: Floats, width_s: float, end_s: float) -> tuple[Floats, Floats]:
    """Edges of bins from 0 to at least `end_s`, and events per second in each."""
    edges = np.arange(math.ceil(max(end_s, width_s) / width_s) + 1, dtype=np.float64) * width_s
    counts, _ = np.histogram(times_s[np.isfinite(times_s)], edges)
    return edges, counts / width_s


def binned(times_s: Floats, values: Floats, width_s: float, percentile: float) -> tuple[Floats, Floats]:
    """Middles of bins that hold values, and a percentile of the values in each."""
    valid = np.isfinite(values) & np.isfinite(times_s)
    bins = np.floor(times_s[valid] / width_s).astype(int)
    inside = values[valid]
    present = np.unique(bins)
    points = [np.percentile(inside[bins == number], percentile) for number in present]
    return (present + 0.5) * width_s, np.array(points, np.float64)


def in_flight(requests: Requests) -> tuple[Floats, Floats]:
    """Steps of the number of requests that were sent and have not ended, as the client sees them."""
    times = np.concatenate([requests.start_s, requests.end_s])
    changes = np.repeat([1.0, -1.0], len(requests.start_s))
    order = np.lexsort((changes, times))  # an end before a beginning at the same time
    return times[order], np.cumsum(changes[order])


def cdf(values: Floats) -> tuple[Floats, Floats]:
    """Sorted values, and the share of values up to each."""
    ordered = np.sort(values[np.isfinite(values)])
    return ordered, np.arange(1, len(ordered) + 1) / max(len(ordered), 1)


# -- throughput against rate


@dataclass(frozen=True)
class RatePoint:
    """One run of a sweep: what arrived, and what was served of it."""

    rate: float  # requests per second that arrived
    served: float  # share of it that the server kept up with
    output_tokens: float  # per request
    median_ttft_s: float
    p99_ttft_s: float


def rate_point(result: Mapping[str, Any]) -> RatePoint | None:
    """None for runs without a rate: everything at once, or fewer than two requests completed.

    `served` is the time in which the middle 90 % of the requests arrived over the time in which the middle 90 % of
    those that completed did, times the share that completed. The time a request takes is in neither, so that short
    runs of a server that keeps up come out at 1; one that does not still works when the arrivals have ended.
    """
    requests = Requests.of(result)
    done = np.isfinite(requests.e2el_s)
    if done.sum() < 2:
        return None
    arrived, completed = (
        float(np.diff(np.percentile(times, MIDDLE))[0]) for times in (requests.arrival_s, requests.end_s[done])
    )
    if arrived <= 0 or completed <= 0:
        return None
    configured = result.get("request_rate")
    realised = (MIDDLE[1] - MIDDLE[0]) / 100 * len(requests.arrival_s) / arrived
    ttft = requests.ttft_s[np.isfinite(requests.ttft_s)]
    return RatePoint(
        rate=float(configured) if isinstance(configured, int | float) else realised,
        served=min(arrived / completed, 1.0) * float(done.mean()),
        output_tokens=float(np.mean(np.array(result["output_lens"])[done])),
        median_ttft_s=float(np.median(ttft)),
        p99_ttft_s=float(np.percentile(ttft, 99)),
    )


def saturation(points: Iterable[RatePoint]) -> float | None:
    """The rate at which the share served falls below `BEHIND`, between two runs by linear interpolation.

    None if no run fell behind, or already the slowest did: then no run shows the rate.
    """
    ordered = sorted(points, key=lambda point: point.rate)
    for before, after in itertools.pairwise(ordered):
        if before.served >= BEHIND > after.served:
            part = (before.served - BEHIND) / (before.served - after.served)
            return before.rate + part * (after.rate - before.rate)
    return None
