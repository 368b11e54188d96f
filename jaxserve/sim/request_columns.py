"""Latency figures from four numbers per request, so that a million requests take little memory.

The keys are those of `bench.metrics.summarize`. The figures are the same except for two that need the time of every
token. The inter-token latency of a request counts as its mean, once for each gap: the mean over all requests is exact,
the spread within a request is lost. The peak of output tokens in a second assumes that a request's tokens are spread
evenly from its first to its last.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.bench.metrics import MS, PERCENTILES, goodput_figures, per_second, statistics
from jaxserve.bench.traces.trace import Trace
from jaxserve.sim.simulation import Answered

Floats = NDArray[np.float64]
MAX_REASONS = 20  # different reasons of failures that are counted; further ones count as `OTHERS`
OTHERS = "other reasons"


class RequestColumns:
    """The results of the requests of a trace, as arrays of a few numbers per request."""

    def __init__(self, trace: Trace):
        self.arrival_s: Floats = trace.arrival_s
        self.input_tokens = np.maximum(trace.input_tokens, 1)
        self.output_tokens = np.maximum(trace.output_tokens, 1)
        self.first_s, self.last_s = np.full(len(trace), np.nan), np.full(len(trace), np.nan)
        self.refused = np.zeros(len(trace), bool)
        self.reasons: Counter[str] = Counter()

    def take(self, answered: Answered) -> None:
        """Record the result of one request."""
        if answered.error is None:
            self.first_s[answered.index], self.last_s[answered.index] = answered.first_token, answered.last_token
            return
        self.refused[answered.index] = True
        known = answered.error in self.reasons or len(self.reasons) < MAX_REASONS
        self.reasons[answered.error if known else OTHERS] += 1

    def summary(
        self, *, goodput: Mapping[str, float] | None = None, percentiles: Sequence[float] = PERCENTILES
    ) -> dict[str, Any]:
        """Return the figures that `bench.metrics.summarize` returns for detailed records."""
        done = ~np.isnan(self.last_s)
        arrival, first, last = self.arrival_s[done], self.first_s[done], self.last_s[done]
        outputs = self.output_tokens[done]
        ttft, e2el, gaps = first - arrival, last - arrival, outputs - 1
        tpot = np.divide(last - first, gaps, out=np.zeros(len(gaps)), where=gaps > 0)
        failed, duration = int(self.refused.sum()), self._duration()
        inputs, total = int(self.input_tokens[done].sum()), int(outputs.sum())
        return {
            "completed": len(last),
            "failed": failed,
            "unfinished": len(self.last_s) - len(last) - failed,
            "duration": duration,
            "total_input_tokens": inputs,
            "total_output_tokens": total,
            "request_throughput": per_second(len(last), duration),
            "output_throughput": per_second(total, duration),
            "total_token_throughput": per_second(inputs + total, duration),
            "max_output_tokens_per_s": _peak_tokens(arrival, first, last, gaps),
            "max_concurrent_requests": self._peak_concurrency(),
            **_goodput({"ttft": ttft, "tpot": tpot, "e2el": e2el}, failed, duration, goodput or {}),
            **statistics("ttft", ttft.tolist(), percentiles),
            **statistics("tpot", tpot[gaps > 0].tolist(), percentiles),
            **weighted_statistics("itl", tpot, gaps, percentiles),
            **statistics("e2el", e2el.tolist(), percentiles),
        }

    def _ends(self) -> Floats:
        """Return the end of each request (s); NaN if it has not ended."""
        return np.where(self.refused, self.arrival_s, self.last_s)

    def _duration(self) -> float:
        """Return the seconds from the first arrival to the last end."""
        ends = self._ends()
        ends = ends[~np.isnan(ends)]
        return float(ends.max() - self.arrival_s[0]) if len(ends) else 0.0

    def _peak_concurrency(self) -> int:
        ends = self._ends()
        over = ~np.isnan(ends)
        times = np.concatenate([self.arrival_s[over], ends[over]])
        changes = np.repeat([1, -1], over.sum())
        order = np.lexsort((changes, times))  # at equal times ends come first
        return int(np.cumsum(changes[order]).max(initial=0))


def weighted_statistics(
    name: str, values_s: Floats, weights: NDArray[np.int64], percentiles: Sequence[float]
) -> dict[str, float | None]:
    """Return `bench.metrics.statistics` of values that occur `weights` times each.

    A percentile is always one of the values, without interpolation.
    """
    words = ["mean", "median", "std", "max", *(f"p{percentile:g}" for percentile in percentiles)]
    keys = [f"{word}_{name}_ms" for word in words]
    if not weights.sum():
        return dict.fromkeys(keys)
    order = np.argsort(values_s)
    order = order[weights[order] > 0]
    values, counts = values_s[order] * MS, weights[order]
    below = np.cumsum(counts)
    mean = float(np.average(values, weights=counts))
    std = float(np.sqrt(np.average((values - mean) ** 2, weights=counts)))
    places = np.searchsorted(below, np.array([50.0, *percentiles]) / 100 * below[-1])
    median, *others = values[np.minimum(places, len(values) - 1)].tolist()
    return dict(zip(keys, (mean, median, std, float(values[-1]), *others), strict=True))


def _peak_tokens(arrival: Floats, first: Floats, last: Floats, gaps: NDArray[np.int64]) -> float | None:
    """Return the maximum of output tokens in one second, with seconds counted from the first arrival."""
    if not len(first):
        return None
    begin, end = first - arrival.min(), last - arrival.min()
    rates = np.divide(gaps, end - begin, out=np.zeros(len(gaps)), where=end > begin)
    seconds = int(end.max()) + 2

    def until(times: Floats, amounts: Floats) -> Floats:
        """Return the sums of the amounts with times up to second 0, 1, ..."""
        sums: Floats = np.cumsum(np.bincount(np.ceil(times).astype(int), amounts, seconds + 1))
        return sums

    clock = np.arange(seconds + 1)
    # At time t a request has 1 + rate (t - begin) tokens, between its first and its last one. If all its tokens came at
    # once, it has all of them from its begin on.
    at_once = np.where(end > begin, 0, gaps)
    tokens = until(begin, 1.0 + at_once) + clock * (until(begin, rates) - until(end, rates))
    tokens -= until(begin, rates * begin) - until(end, rates * end)
    return float(np.diff(tokens, prepend=0.0).max())


def _goodput(
    seen: Mapping[str, Floats], failed: int, duration_s: float, goodput: Mapping[str, float]
) -> dict[str, float | None]:
    """Return the goodput figures of `bench.metrics`: a good request meets all objectives, a failed one none."""
    if not goodput:
        return dict.fromkeys(("request_goodput", "goodput", "slo_attainment", "slo_violation_rate"))
    met = [seen[name] * MS <= limit for name, limit in goodput.items()]
    return goodput_figures(int(np.logical_and.reduce(met).sum()), len(met[0]) + failed, duration_s)
