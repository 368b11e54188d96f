"""Figures of requests of which only four numbers each are kept, so that a million take little memory.

The keys are those of `bench.metrics.summarize`, and so are the figures but for two that need the time of every token.
Inter-token latencies are a request's mean, once for each of its gaps: their mean over all is exact, the spread within a
request is not seen. For the peak of output tokens in a second, a request's tokens are spread evenly from its first to
its last.
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
MAX_REASONS = 20  # of failures that are told apart
OTHERS = "other reasons"


class RequestColumns:
    """What came of the requests of a trace."""

    def __init__(self, trace: Trace):
        self.arrival_s: Floats = trace.arrival_s
        self.input_tokens = np.maximum(trace.input_tokens, 1)
        self.output_tokens = np.maximum(trace.output_tokens, 1)
        self.first_s, self.last_s = np.full(len(trace), np.nan), np.full(len(trace), np.nan)
        self.refused = np.zeros(len(trace), bool)
        self.reasons: Counter[str] = Counter()

    def take(self, answered: Answered) -> None:
        """Mutates: one more request has ended."""
        if answered.error is None:
            self.first_s[answered.index], self.last_s[answered.index] = answered.first_token, answered.last_token
            return
        self.refused[answered.index] = True
        known = answered.error in self.reasons or len(self.reasons) < MAX_REASONS
        self.reasons[answered.error if known else OTHERS] += 1

    def summary(
        self, *, goodput: Mapping[str, float] | None = None, percentiles: Sequence[float] = PERCENTILES
    ) -> dict[str, Any]:
        """The figures of `bench.metrics.summarize`."""
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
        """When each request was over; NaN where it was not."""
        return np.where(self.refused, self.arrival_s, self.last_s)

    def _duration(self) -> float:
        """From the first arrival to the last end."""
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
    """As `bench.metrics.statistics` of values that each occur `weights` times; percentiles are values that occur."""
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
    """Most output tokens in one of the seconds that are counted from the first arrival."""
    if not len(first):
        return None
    begin, end = first - arrival.min(), last - arrival.min()
    rates = np.divide(gaps, end - begin, out=np.zeros(len(gaps)), where=end > begin)
    seconds = int(end.max()) + 2

    def until(times: Floats, amounts: Floats) -> Floats:
        """The sum of the amounts whose times have come, at second 0, 1, ..."""
        sums: Floats = np.cumsum(np.bincount(np.ceil(times).astype(int), amounts, seconds + 1))
        return sums

    clock = np.arange(seconds + 1)
    # A request has had 1 + rate (t - begin) tokens from its begin on, and no more after its end; at once: all of them.
    at_once = np.where(end > begin, 0, gaps)
    tokens = until(begin, 1.0 + at_once) + clock * (until(begin, rates) - until(end, rates))
    tokens -= until(begin, rates * begin) - until(end, rates * end)
    return float(np.diff(tokens, prepend=0.0).max())


def _goodput(
    seen: Mapping[str, Floats], failed: int, duration_s: float, goodput: Mapping[str, float]
) -> dict[str, float | None]:
    """As in `bench.metrics`: a request is good that meets all objectives, one that failed meets none."""
    if not goodput:
        return dict.fromkeys(("request_goodput", "goodput", "slo_attainment", "slo_violation_rate"))
    met = [seen[name] * MS <= limit for name, limit in goodput.items()]
    return goodput_figures(int(np.logical_and.reduce(met).sum()), len(met[0]) + failed, duration_s)
