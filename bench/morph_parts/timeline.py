"""The adaptation over time in a result's series: swapped layers, pages, transitions and step times."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from jaxserve.bench.report.series import Floats, server_series, server_series_by, server_times
from jaxserve.core.precision import BITS

BEFORE_S = 1.0  # of steps before a swap, which those during it are compared with
FULL_BITS = 16  # per weight in full precision, bfloat16
MIN_GAPS = 20  # between tokens, for a meaningful median


@dataclass(frozen=True)
class Tokens:
    """The chunks of all answers: arrival at the client, time since the chunk before (NaN: first), number of tokens."""

    time_s: Floats
    gap_s: Floats
    weight: Floats

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> "Tokens":
        """Read the per-request lists of a result."""
        times, gaps, weights = [np.zeros(0)], [np.zeros(0)], [np.zeros(0)]
        rows = zip(result["start_times"], result["ttfts"], result["itls"], result["output_lens"], strict=True)
        for start, ttft, between, count in rows:
            if count:
                after = np.concatenate([[0.0], np.cumsum(between)])
                times.append(start + ttft + after)
                gaps.append(np.concatenate([[np.nan], between]))
                weights.append(np.full(len(after), count / len(after)))
        return cls(np.concatenate(times), np.concatenate(gaps), np.concatenate(weights))


@dataclass(frozen=True)
class Timeline:
    """The server's state at each sample."""

    time_s: Floats
    swapped: Floats  # quantised decoder layers
    bits: Floats  # per weight, mean over the decoder layers
    kv_pages: Floats
    kv_used: Floats
    swaps: Floats  # number of swapped layers since the start

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> "Timeline":
        """Read the server's series of a result."""
        time_s = server_times(result)
        nothing = np.zeros_like(time_s)
        by_precision = server_series_by(result, "layers_by_precision", "precision")
        layers = {precision: np.nan_to_num(counts) for precision, counts in by_precision.items()}
        fewer = [(counts, BITS[precision]) for precision, counts in layers.items() if precision in BITS]
        saved = sum((counts * (FULL_BITS - bits) for counts, bits in fewer), nothing)
        swaps = server_series_by(result, "transitions_total", "kind").get("SwapPrecision", nothing)
        pages, used = (server_series(result, name) for name in ("kv_pages_total", "kv_pages_used"))
        return cls(
            time_s,
            sum((counts for counts, _ in fewer), nothing),
            FULL_BITS - saved / np.maximum(sum(layers.values(), nothing), 1),
            nothing if pages is None else pages,
            nothing if used is None else used,
            np.nan_to_num(swaps),
        )

    def swapped_at(self, times: Floats) -> Floats:
        """Return the swapped layers at each time: the larger number of the two samples around it."""
        after = np.searchsorted(self.time_s, times)
        last = len(self.time_s) - 1
        return np.maximum(self.swapped[np.clip(after, 0, last)], self.swapped[np.clip(after - 1, 0, last)])

    def swap_spans(self) -> Iterator[tuple[float, float]]:
        """Yield start and end, at samples, of the intervals in which layers were swapped."""
        begin = None
        for (early, late), more in zip(pairwise(self.time_s), np.diff(self.swaps) > 0, strict=True):
            if more and begin is None:
                begin = early
            if not more and begin is not None:
                yield begin, early
                begin = None
            end = late
        if begin is not None:
            yield begin, end


def tokens_by_swapped(result: Mapping[str, Any]) -> dict[int, float]:
    """Return the tokens that were generated with 0, 1, ... layers swapped."""
    tokens, timeline = Tokens.of(result), Timeline.of(result)
    counts = timeline.swapped_at(tokens.time_s)
    return {int(count): float(tokens.weight[counts == count].sum()) for count in np.unique(counts)}


def step_ratios(result: Mapping[str, Any]) -> list[float]:
    """Return, for each interval with swaps, the median gap between tokens in it over the median in the second before.

    Intervals are left out if most tokens before them reached the client several at a time, because the gaps then say
    nothing about steps.
    """
    tokens, ratios = Tokens.of(result), []
    for begin, end in Timeline.of(result).swap_spans():
        during, before = (_gaps(tokens, *span) for span in ((begin, end), (begin - BEFORE_S, begin)))
        if min(len(during), len(before)) >= MIN_GAPS and np.median(before) > 0:
            ratios.append(float(np.median(during) / np.median(before)))
    return ratios


def _gaps(tokens: Tokens, begin: float, end: float) -> Floats:
    inside = (tokens.time_s > begin) & (tokens.time_s <= end) & np.isfinite(tokens.gap_s)
    return tokens.gap_s[inside]


def transitions(result: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of transitions during the run by outcome: "done", "failed"."""
    found = server_series_by(result, "transitions_total", "outcome")
    return {outcome: count for outcome, values in found.items() if (count := increase(values))}


def increase(counter: Floats) -> int:
    """Return how much a counter rose during the run; before its first event it has no value (NaN)."""
    values = np.nan_to_num(counter)
    return int(values[-1] - values[0])


def saturated_throughput(result: Mapping[str, Any]) -> float | None:
    """Return tokens per second while the middle part, from 20 % to 90 % of all tokens, was generated.

    None if the result has too few tokens.
    """
    tokens = Tokens.of(result)
    order = np.argsort(tokens.time_s)
    times, done = tokens.time_s[order], np.cumsum(tokens.weight[order])
    if not len(done):
        return None
    first, last = np.searchsorted(done, [0.2 * done[-1], 0.9 * done[-1]])
    seconds = times[last] - times[first]
    return float((done[last] - done[first]) / seconds) if seconds > 0 else None
