"""The traffic: arrivals of a trace, scaled to saturate full precision at the peak, with prompts of real text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.bench.traces.scaling import replicate, thin
from jaxserve.bench.traces.trace import Trace
from jaxserve.bench.workload import Sample, Workload

PEAK_S = 10  # the peak of a trace is its busiest interval of this length
MIN_TOKENS = 4  # of a prompt or an answer


@dataclass(frozen=True)
class RequestLengths:
    """The lengths that a trace is scaled to, in tokens: means, and the maxima of any request."""

    prompt: int
    answer: int
    max_prompt_tokens: int
    max_answer_tokens: int


def with_lengths(trace: Trace, lengths: RequestLengths) -> Trace:
    """Multiply prompts and answers by one factor each, so that they have the wanted means, and clip them.

    Requests without an answer, which failed, are left out.
    """
    answered = np.flatnonzero(trace.output_tokens > 0)
    columns = trace.taken(answered)
    factors = {}
    for name, mean, limit in (
        ("input_tokens", lengths.prompt, lengths.max_prompt_tokens),
        ("output_tokens", lengths.answer, lengths.max_answer_tokens),
    ):
        factors[name] = _factor(columns[name], mean, limit)
        columns[name] = _clipped(columns[name] * factors[name], limit)
    facts = {
        "factor_input": round(factors["input_tokens"], 4),
        "factor_output": round(factors["output_tokens"], 4),
        "max_input": lengths.max_prompt_tokens,
        "max_output": lengths.max_answer_tokens,
        "mean_input": float(columns["input_tokens"].mean()),
        "mean_output": float(columns["output_tokens"].mean()),
        "failed_left_out": len(trace) - len(answered),
    }
    return trace.changed("scale_and_clip_lengths", facts, **columns | {"hash_ids": None})


def _clipped(tokens: np.ndarray, limit: int) -> np.ndarray:
    return np.clip(np.rint(tokens), MIN_TOKENS, limit).astype(np.int64)


def _factor(tokens: np.ndarray, mean: float, limit: int) -> float:
    """Find by bisection the factor with which the mean after clipping is right, or as near as possible."""
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _clipped(tokens * middle, limit).mean() < mean else (low, middle)
    return high


def peak_demand(trace: Trace) -> float:
    """Return the answer tokens per second requested in the busiest `PEAK_S` seconds."""
    seconds = np.bincount(trace.arrival_s.astype(np.int64), weights=trace.output_tokens)
    if len(seconds) <= PEAK_S:
        return float(seconds.sum() / PEAK_S)
    return float(np.convolve(seconds, np.ones(PEAK_S), "valid").max() / PEAK_S)


def with_peak(trace: Trace, tokens_per_s: float, rng: np.random.Generator) -> Trace:
    """Thin a trace, after replicating one with too few requests, so that the peak requests `tokens_per_s`.

    Times do not change.
    """
    share = tokens_per_s / peak_demand(trace)
    if share > 1:
        trace = replicate(trace, math.ceil(share), rng)
        share = tokens_per_s / peak_demand(trace)
    drawn = [thin(trace, min(share, 1.0), rng) for _ in range(8)]
    thinned = min(drawn, key=lambda candidate: abs(peak_demand(candidate) - tokens_per_s))
    return thinned.changed("peak", {"wanted_tokens_per_s": tokens_per_s, "tokens_per_s": peak_demand(thinned)})


def at_once(trace: Trace, count: int, rng: np.random.Generator) -> Trace:
    """Return `count` requests with the trace's lengths that all arrive at second 0, which saturates any server."""
    rows = np.sort(rng.choice(len(trace), count, replace=count > len(trace)))
    return trace.changed("at_once", {"count": count}, **trace.taken(rows) | {"arrival_s": np.zeros(count)})


def workload(trace: Trace, prompts: "Prompts", rng: np.random.Generator) -> Workload:
    """Return the trace's requests with prompts of its lengths."""
    samples = [
        Sample(prompts.take(rng, length), length, answer)
        for length, answer in zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    ]
    return Workload.of(samples, trace.arrival_s, {"dataset": "trace", **trace.description(), "prompts": prompts.source})


@dataclass(frozen=True)
class Prompts:
    """Tokens that prompts are cut from, at random places."""

    tokens: Sequence[int]
    source: str

    def take(self, rng: np.random.Generator, length: int) -> tuple[int, ...]:
        """Return a random prompt of `length` tokens."""
        start = int(rng.integers(len(self.tokens) - length))
        return tuple(self.tokens[start : start + length])
