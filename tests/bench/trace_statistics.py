"""Statistics by which traces are compared."""

import numpy as np

from jaxserve.bench.traces.trace import Ints, Trace

BIN_S = 10


def statistics(trace: Trace, seconds: float | None = None) -> dict[str, float | None]:
    """Return rate, burstiness and lengths; None where the trace is too short for a figure.

    `seconds` is the time over which requests were observed, by default until the last arrival.

    - rate: requests per second;
    - cv_interarrival: standard deviation over mean of the intervals; 1 for a Poisson process;
    - peak_to_mean_10s: the most requests in any full 10 seconds, counted from 0, over their mean;
    - in_mean, in_p50, in_p95, out_mean, out_p50, out_p95: tokens of prompts and answers.
    """
    gaps = np.diff(trace.arrival_s)
    seconds = trace.duration_s if seconds is None else seconds
    bins = int(seconds // BIN_S)
    counts = np.bincount((trace.arrival_s // BIN_S).astype(np.int64), minlength=bins)[:bins]
    return {
        "rate": len(trace) / seconds if seconds else None,
        "cv_interarrival": float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() else None,
        "peak_to_mean_10s": float(counts.max() / counts.mean()) if counts.any() else None,
        **_lengths("in", trace.input_tokens),
        **_lengths("out", trace.output_tokens),
    }


def _lengths(name: str, tokens: Ints) -> dict[str, float | None]:
    if not len(tokens):
        return {f"{name}_mean": None, f"{name}_p50": None, f"{name}_p95": None}
    p50, p95 = np.percentile(tokens, [50, 95]).tolist()
    return {f"{name}_mean": float(tokens.mean()), f"{name}_p50": p50, f"{name}_p95": p95}
