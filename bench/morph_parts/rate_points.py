"""The figures of a sweep over request rates, from the results of its runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from bench.morph_parts.rates import LIGHT_LOAD, SATURATED
from bench.morph_parts.summary import cell, tpots
from bench.morph_parts.systems import ADAPTING, FULL, NAMES
from bench.morph_parts.timeline import increase
from jaxserve.bench.report.series import Floats, server_series, server_series_by, server_times
from jaxserve.bench.result import Result

QUANTILES = (*(round(0.05 * place, 2) for place in range(1, 20)), 0.99)  # of the distribution of TPOT
TPOT_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Point:
    """The figures of one system at one rate over all rounds; None stands for not measured."""

    system: str
    multiple: float  # of full precision's capacity
    rate: float  # requests per second that arrived
    rounds: int
    requests: int
    failed: int
    violations: float | None  # share of the requests without a first token within the objective
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_mean_ms: float | None
    tpot_p50_ms: float | None
    tpot_p95_ms: float | None
    tpot_p99_ms: float | None
    tpot_cdf_ms: Sequence[float]  # at `QUANTILES`
    queue_mean_ms: float | None  # from arrival to the first step, as the server measured it
    queue_p50_ms: float | None  # median of the rounds, interpolated in the server's histogram
    queue_p95_ms: float | None
    tokens_per_s: float | None  # of complete answers, median of the rounds
    preemptions: int
    kv_used_mean: float | None  # share of the pool's pages in use until the last answer
    kv_used_max: float | None
    peak_kv_pages: int  # of the pool
    decisions: int  # to change the plan
    swaps: int  # of layers
    failed_transitions: int
    swapped_layers: float  # mean over tokens
    loss: float | None  # relative rise of the cross-entropy
    agreement: float | None  # of greedy tokens with full precision
    restored_s: float | None  # after the last answer, the longest; None if a round was never restored


def points(results: Iterable[Result]) -> list[Point]:
    """Return the points of all Poisson runs, in the order of rates and systems."""
    found = [result for result in results if result["multiple"] != SATURATED]
    found.sort(key=_place)
    return [point(list(some)) for _, some in groupby(found, key=_place)]


def _place(result: Result) -> tuple[float, int]:
    return result["multiple"], NAMES.index(result["system"])


def point(results: Sequence[Result]) -> Point:
    """Return the figures of one system at one rate from its rounds."""
    shared, first = cell(results), results[0]
    values = np.concatenate([tpots(result) for result in results]) * 1e3
    p50, p95, p99 = np.percentile(values, TPOT_PERCENTILES).tolist() if len(values) else [None] * 3
    used = np.concatenate([_used_share(result) for result in results])
    return Point(
        system=first["system"],
        multiple=first["multiple"],
        rate=float(np.mean([result["rate"] for result in results])),
        rounds=shared.rounds,
        requests=shared.requests,
        failed=shared.failed,
        violations=shared.violations,
        ttft_p50_s=shared.ttft_s[0] if shared.ttft_s else None,
        ttft_p95_s=shared.ttft_s[1] if shared.ttft_s else None,
        tpot_mean_ms=float(values.mean()) if len(values) else None,
        tpot_p50_ms=p50,
        tpot_p95_ms=p95,
        tpot_p99_ms=p99,
        tpot_cdf_ms=np.quantile(values, QUANTILES).tolist() if len(values) else [],
        queue_mean_ms=_mean_by_requests(results, "mean_queue_ms"),
        queue_p50_ms=_median(results, "median_queue_ms"),
        queue_p95_ms=_median(results, "p95_queue_ms"),
        tokens_per_s=_median(results, "output_throughput"),
        preemptions=sum(_increase(result, "num_preemptions_total") for result in results),
        kv_used_mean=float(used.mean()) if len(used) else None,
        kv_used_max=float(used.max()) if len(used) else None,
        peak_kv_pages=shared.peak_pages,
        decisions=sum(len(result["decisions"]) for result in results),
        swaps=sum(_swaps(result) for result in results),
        failed_transitions=sum(count for outcome, count in shared.transitions.items() if outcome != "done"),
        swapped_layers=shared.swapped,
        loss=shared.loss,
        agreement=shared.agreement,
        restored_s=shared.restored_s if shared.restored_s is not None and np.isfinite(shared.restored_s) else None,
    )


def _used_share(result: Result) -> Floats:
    """Return the share of the KV pages in use at each sample from the start of the load to the last answer."""
    total, used = (server_series(result, name) for name in ("kv_pages_total", "kv_pages_used"))
    if total is None or used is None:
        return np.zeros(0)
    ends = [start + latency for start, latency in zip(result["start_times"], result["latencies"], strict=True)]
    times = server_times(result)
    loaded = (times >= 0) & (times <= max(ends, default=0.0)) & (total > 0)
    return used[loaded] / total[loaded]


def _increase(result: Result, name: str) -> int:
    counter = server_series(result, name)
    return 0 if counter is None else increase(counter)


def _swaps(result: Result) -> int:
    by_kind = server_series_by(result, "transitions_total", "kind")
    return increase(by_kind["SwapPrecision"]) if "SwapPrecision" in by_kind else 0


def _mean_by_requests(results: Sequence[Result], name: str) -> float | None:
    known = [(value, result["completed"]) for result in results if (value := result.get(name)) is not None]
    return float(np.average([v for v, _ in known], weights=[count for _, count in known])) if known else None


def _median(results: Sequence[Result], name: str) -> float | None:
    known = [value for result in results if (value := result.get(name)) is not None]
    return float(np.median(known)) if known else None


# -- what follows from several points


@dataclass(frozen=True)
class Sustained:
    """The load up to which a system's P95 TTFT met the objective."""

    system: str
    multiple: float | None  # of full precision's capacity, interpolated between two rates; None: at no measured rate
    is_exceeded: bool  # whether a higher rate missed the objective


def sustained(found: Sequence[Point], slo_s: float) -> list[Sustained]:
    """Return how much load each system sustains."""
    systems = dict.fromkeys(point.system for point in found)
    return [_sustained(name, [point for point in found if point.system == name], slo_s) for name in systems]


def _sustained(system: str, found: Sequence[Point], slo_s: float) -> Sustained:
    rising = [(point.multiple, point.ttft_p95_s) for point in found if point.ttft_p95_s is not None]
    if not rising or rising[0][1] > slo_s:
        return Sustained(system, None, bool(rising))
    for (low, before), (high, after) in pairwise(rising):
        if after > slo_s:
            return Sustained(system, low + (high - low) * (slo_s - before) / (after - before), True)
    return Sustained(system, rising[-1][0], False)


@dataclass(frozen=True)
class LightLoad:
    """What a system did at light load, beside full precision with the same requests."""

    system: str
    transitions: int
    identical: int  # answers that are equal to the letter
    answers: int
    reason: str = ""  # of the first decision to change the plan

    @property
    def is_unharmed(self) -> bool:
        """Whether nothing was done and nothing differs."""
        return self.transitions == 0 and 0 < self.answers == self.identical


def light_load(results: Iterable[Result]) -> list[LightLoad]:
    """Return the check of every adapting system that ran at light load beside full precision."""
    runs = {(result["system"], result["round"]): result for result in results if result["multiple"] == LIGHT_LOAD}
    found = []
    for system in ADAPTING:
        pairs = [
            (run, runs[FULL, number])
            for (name, number), run in runs.items()
            if name == system and (FULL, number) in runs
        ]
        if pairs:
            same = [answer for run, full in pairs for answer in _same_answers(run, full)]
            transitions = sum(sum(run["adaptation"]["transitions"].values()) for run, _ in pairs)
            reason = next((decision["reason"] for run, _ in pairs for decision in run["decisions"]), "")
            found.append(LightLoad(system, transitions, sum(same), len(same), reason))
    return found


def _same_answers(run: Result, full: Result) -> list[bool]:
    """Return for each request whether both answers are complete and equal."""
    assert run["prompts"] == full["prompts"], "both systems served the same requests"
    columns = (run["generated_texts"], full["generated_texts"], run["errors"], full["errors"])
    return [mine == theirs and not error and not other for mine, theirs, error, other in zip(*columns, strict=True)]
