"""The data of the plots as arrays, computed from results without drawing; times are in seconds."""

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
MIN_SERVED = 0.95  # a server that completes a smaller share of what arrives is saturated
MAX_BINS = 60
MIN_EVENTS = 5  # per bin on average: fewer show more noise than load
STEPS = (1, 2, 5)  # widths of bins are these numbers times powers of ten
_SERIES = re.compile(r"(?P<name>[^{]+)(?:\{(?P<labels>.*)\})?")
_LABEL = re.compile(r"(\w+)=\"?([^\",}]*)\"?")


@dataclass(frozen=True)
class Requests:
    """The requests of a result that ended, one array element each; missing times are NaN."""

    arrival_s: Floats
    start_s: Floats  # arrival, or later if --max-concurrency held the request back
    ttft_s: Floats
    tpot_s: Floats
    e2el_s: Floats
    end_s: Floats  # also set for failed requests
    failed: NDArray[np.bool_]

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> "Requests":
        """Return the requests in a result's per-request lists, or no requests if it has no such lists."""
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
        """Return `ttft`, `tpot` or `e2el` in seconds."""
        return {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.e2el_s}[name]


def _tpot(result: Mapping[str, Any], count: int) -> Floats:
    """Return the mean time per token after the first, from the gaps between chunks."""
    gaps = np.array([math.fsum(gaps) for gaps in result.get("itls") or ()] or np.full(count, np.nan))
    after_first = _floats(result.get("output_lens"), count) - 1
    tpot: Floats = np.divide(gaps, after_first, out=np.full(count, np.nan), where=after_first > 0)
    return tpot


def _floats(values: Sequence[float] | None, count: int) -> Floats:
    return np.array(values if values else np.full(count, np.nan), np.float64)


# -- the server's series


def server_times(result: Mapping[str, Any]) -> Floats:
    """Return the times at which /metrics was sampled."""
    return np.array((result.get("server") or {}).get("t") or (), np.float64)


def server_series(result: Mapping[str, Any], name: str) -> Floats | None:
    """Return a gauge or counter over `server_times`, summed over its labels, or None if the server does not have it."""
    found = list(_labelled(result, name).values())
    return np.sum(found, axis=0) if found else None


def server_series_by(result: Mapping[str, Any], name: str, label: str) -> dict[str, Floats]:
    """Return a gauge by the values of one label, summed over the other labels."""
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
    """Return time and version of every change of the plan that was seen during the run."""
    versions = server_series(result, "plan_version")
    if versions is None or len(versions) < 2:
        return []
    times = server_times(result)
    return [(float(times[i]), int(versions[i])) for i in np.flatnonzero(np.diff(versions) > 0) + 1]


# -- over time


def bin_width(duration_s: float, events: int, per_bin: int = MIN_EVENTS) -> float:
    """Return a round bin width that gives at most `MAX_BINS` bins, with at least `per_bin` events on average.

    Round means 1, 2 or 5 times a power of ten.
    """
    least = max(duration_s, 1e-3) / min(MAX_BINS, max(events // per_bin, 1))
    power = 10.0 ** math.floor(math.log10(least))
    return next((step * power for step in STEPS if step * power >= least), 10 * power)


def rate(times_s: Floats, width_s: float, end_s: float) -> tuple[Floats, Floats]:
    """Return the edges of bins from 0 to at least `end_s`, and the events per second in each bin."""
    edges = np.arange(math.ceil(max(end_s, width_s) / width_s) + 1, dtype=np.float64) * width_s
    counts, _ = np.histogram(times_s[np.isfinite(times_s)], edges)
    return edges, counts / width_s


def binned(times_s: Floats, values: Floats, width_s: float, percentile: float) -> tuple[Floats, Floats]:
    """Return the middles of the bins that hold values, and a percentile of the values in each."""
    valid = np.isfinite(values) & np.isfinite(times_s)
    bins = np.floor(times_s[valid] / width_s).astype(int)
    inside = values[valid]
    present = np.unique(bins)
    points = [np.percentile(inside[bins == index], percentile) for index in present]
    return (present + 0.5) * width_s, np.array(points, np.float64)


def in_flight(requests: Requests) -> tuple[Floats, Floats]:
    """Return the number of requests in flight, as the client sees it, as times and counts of a step function."""
    times = np.concatenate([requests.start_s, requests.end_s])
    changes = np.repeat([1.0, -1.0], len(requests.start_s))
    # At the same time, an end comes before a start.
    order = np.lexsort((changes, times))
    return times[order], np.cumsum(changes[order])


def cdf(values: Floats) -> tuple[Floats, Floats]:
    """Return the sorted values, and the share of values up to each."""
    ordered = np.sort(values[np.isfinite(values)])
    return ordered, np.arange(1, len(ordered) + 1) / max(len(ordered), 1)


# -- throughput against rate


@dataclass(frozen=True)
class RatePoint:
    """One run of a sweep over rates: what arrived, and what was served."""

    rate: float  # requests per second that arrived
    served: float  # share of `rate` that the server kept up with
    output_tokens: float  # per request
    median_ttft_s: float
    p99_ttft_s: float


def rate_point(result: Mapping[str, Any]) -> RatePoint | None:
    """Return a run as a point of a sweep, or None if it has no rate or fewer than two requests completed.

    `served` is the time in which the middle 90 % of the requests arrived, over the time in which the middle 90 % of the
    completed requests ended, times the share that completed. Neither time includes the duration of a request, so that
    short runs of a server that keeps up give 1. A server that falls behind is still working after the last arrival.
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
    """Return the rate at which the share served falls below `MIN_SERVED`, interpolated between two runs.

    None if no run fell behind, or if the run with the lowest rate already did.
    """
    ordered = sorted(points, key=lambda point: point.rate)
    for before, after in itertools.pairwise(ordered):
        if before.served >= MIN_SERVED > after.served:
            part = (before.served - MIN_SERVED) / (before.served - after.served)
            return before.rate + part * (after.rate - before.rate)
    return None
