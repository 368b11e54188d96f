"""What is sent: arrivals of a trace, scaled so that full precision saturates at the peak, with prompts of real text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.bench.traces.scaling import replicate, thin
from jaxserve.bench.traces.trace import Trace
from jaxserve.bench.workload import Sample, Workload

PEAK_S = 10  # the peak of a trace is its busiest stretch of so many seconds
FEWEST = 4  # tokens of a prompt or an answer


@dataclass(frozen=True)
class Lengths:
    """What a trace's lengths are scaled to, in tokens: means first, then the most of any request."""

    prompt: int
    answer: int
    max_prompt_tokens: int
    max_answer_tokens: int


def with_lengths(trace: Trace, lengths: Lengths) -> Trace:
    """Prompts and answers multiplied by one factor each, so that their means are those wanted, and then clipped.

    Requests without an answer, which had failed, are left out.
    """
    answered = np.flatnonzero(trace.output_tokens > 0)
    columns = trace.taken(answered)
    factors = {}
    for name, mean, most in (
        ("input_tokens", lengths.prompt, lengths.max_prompt_tokens),
        ("output_tokens", lengths.answer, lengths.max_answer_tokens),
    ):
        factors[name] = _factor(columns[name], mean, most)
        columns[name] = _clipped(columns[name] * factors[name], most)
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


def _clipped(tokens: np.ndarray, most: int) -> np.ndarray:
    return np.clip(np.rint(tokens), FEWEST, most).astype(np.int64)


def _factor(tokens: np.ndarray, mean: float, most: int) -> float:
    """With which the mean is right after clipping, or as near as it comes: by bisection."""
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _clipped(tokens * middle, most).mean() < mean else (low, middle)
    return high


def peak_demand(trace: Trace) -> float:
    """Answer tokens per second that are asked for in the busiest `PEAK_S` seconds."""
    seconds = np.bincount(trace.arrival_s.astype(np.int64), weights=trace.output_tokens)
    if len(seconds) <= PEAK_S:
        return float(seconds.sum() / PEAK_S)
    return float(np.convolve(seconds, np.ones(PEAK_S), "valid").max() / PEAK_S)


def with_peak(trace: Trace, tokens_per_s: float, rng: np.random.Generator) -> Trace:
    """Thinned, after replication where there are too few requests, so that the peak asks for so much. Time stays."""
    share = tokens_per_s / peak_demand(trace)
    if share > 1:
        trace = replicate(trace, math.ceil(share), rng)
        share = tokens_per_s / peak_demand(trace)
    drawn = [thin(trace, min(share, 1.0), rng) for _ in range(8)]
    thinned = min(drawn, key=lambda one: abs(peak_demand(one) - tokens_per_s))
    return thinned.changed("peak", {"wanted_tokens_per_s": tokens_per_s, "tokens_per_s": peak_demand(thinned)})


def at_once(trace: Trace, count: int, rng: np.random.Generator) -> Trace:
    """`count` requests with the trace's lengths that all arrive at second 0: what saturates any server."""
    rows = np.sort(rng.choice(len(trace), count, replace=count > len(trace)))
    return trace.changed("at_once", {"count": count}, **trace.taken(rows) | {"arrival_s": np.zeros(count)})


def workload(trace: Trace, prompts: "Prompts", rng: np.random.Generator) -> Workload:
    """The trace's requests, with prompts of its lengths."""
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
        """A prompt of `length` tokens."""
        start = int(rng.integers(len(self.tokens) - length))
        return tuple(self.tokens[start : start + length])
