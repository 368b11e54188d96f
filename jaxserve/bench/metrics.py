"""Figures of a run, computed from its request records and named as in `vllm bench serve`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.bench.record import RequestRecord

PERCENTILES = (90.0, 95.0, 99.0)
MS = 1e3


def summarize(
    records: Sequence[RequestRecord],
    duration_s: float,
    *,
    goodput: Mapping[str, float] | None = None,
    percentiles: Sequence[float] = PERCENTILES,
) -> dict[str, Any]:
    """Return the figures of one run.

    `goodput` maps any of ttft, tpot and e2el to an objective in ms; a good request meets all objectives. A figure that
    cannot be computed is None, never NaN. Latencies and token counts are those of completed requests. Requests that
    were still running when the run was interrupted are neither completed nor failed, but `unfinished`.
    """
    done = [record for record in records if record.ok]
    failed = sum(record.error is not None for record in records)
    inputs, outputs = sum(r.input_tokens for r in done), sum(r.output_tokens for r in done)
    return {
        "completed": len(done),
        "failed": failed,
        "unfinished": len(records) - len(done) - failed,
        "duration": duration_s,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": per_second(len(done), duration_s),
        "output_throughput": per_second(outputs, duration_s),
        "total_token_throughput": per_second(inputs + outputs, duration_s),
        "max_output_tokens_per_s": peak_tokens_per_s(done),
        "max_concurrent_requests": peak_concurrency(records),
        **_goodput(done, failed, duration_s, goodput or {}),
        **statistics("ttft", (r.ttft_s for r in done), percentiles),
        **statistics("tpot", (r.tpot_s for r in done), percentiles),
        **statistics("itl", (gap for r in done for gap in r.itl_s), percentiles),
        **statistics("e2el", (r.e2el_s for r in done), percentiles),
    }


def statistics(
    name: str, values_s: Iterable[float | None], percentiles: Sequence[float] = PERCENTILES
) -> dict[str, float | None]:
    """Return mean_, median_, std_, max_ and pXX_{name}_ms of values in seconds, ignoring those that are None."""
    values = np.array([value for value in values_s if value is not None], float) * MS
    words = ["mean", "median", "std", "max", *(f"p{percentile:g}" for percentile in percentiles)]
    if not len(values):
        return {f"{word}_{name}_ms": None for word in words}
    figures = [values.mean(), np.median(values), values.std(), values.max(), *np.percentile(values, percentiles)]
    return {f"{word}_{name}_ms": float(figure) for word, figure in zip(words, figures, strict=True)}


def is_good(record: RequestRecord, goodput: Mapping[str, float]) -> bool:
    """Return whether a request completed within all objectives (ms).

    As in vLLM, an answer of one token has a TPOT of 0.
    """
    seen = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
    return record.ok and all(
        (value := seen[name]) is not None and value * MS <= limit for name, limit in goodput.items()
    )


def peak_tokens_per_s(done: Sequence[RequestRecord]) -> float | None:
    """Return the most output tokens in any second, counting whole seconds from the first sending.

    A server may send several tokens in one chunk, so an answer's tokens are spread evenly over its chunks.
    """
    if not done:
        return None
    times = np.concatenate([record.chunk_times_s for record in done])
    tokens = np.concatenate([np.full(n := len(r.chunk_times_s), r.output_tokens / max(n, 1)) for r in done])
    start = min(record.due_s if record.sent_s is None else record.sent_s for record in done)
    return float(np.bincount(np.maximum(times - start, 0).astype(int), tokens).max())


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Return the most requests in flight at any moment, from sending to the end.

    A request without an end counts until the end of the run.
    """
    sent = [(record.sent_s, record.end_s) for record in records if record.sent_s is not None]
    changes = [(start, 1) for start, _ in sent] + [(end, -1) for _, end in sent if end is not None]
    # At equal times sorting puts ends (-1) before starts (+1).
    steps = [step for _, step in sorted(changes)]
    return int(np.cumsum(steps).max()) if steps else 0


def _goodput(
    done: Sequence[RequestRecord], failed: int, duration_s: float, goodput: Mapping[str, float]
) -> dict[str, float | None]:
    """Return the figures of goodput, all None without objectives; a failed request violates every objective."""
    if not goodput:
        return dict.fromkeys(("request_goodput", "goodput", "slo_attainment", "slo_violation_rate"))
    return goodput_figures(sum(is_good(record, goodput) for record in done), len(done) + failed, duration_s)


def goodput_figures(good: int, count: int, duration_s: float) -> dict[str, float | None]:
    """Return the goodput and the SLO attainment of `count` requests, of which `good` met all objectives."""
    attainment = good / count if count else None
    throughput = per_second(good, duration_s)
    return {
        # Good requests per second, under vLLM's name and under a shorter one.
        "request_goodput": throughput,
        "goodput": throughput,
        "slo_attainment": attainment,
        "slo_violation_rate": None if attainment is None else 1 - attainment,
    }


def per_second(count: float, duration_s: float) -> float | None:
    """Return `count` per second, or None if the duration is 0."""
    return count / duration_s if duration_s > 0 else None
