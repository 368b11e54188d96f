"""Traces with bursts, scaled so that memory runs out in them and computing does not."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.bench.traces.formats import load_trace
from jaxserve.bench.traces.scaling import clip_lengths, replicate, thin
from jaxserve.bench.traces.trace import Trace
from jaxserve.sim.cost_model import InstanceRoofline

Floats = NDArray[np.float64]
LENGTHS = {"longbench": (5900, 499), "sharegpt": (1660, 373), "burstgpt": (642, 262)}  # mean tokens, of KunServe
LONGEST = 16_000, 2_000  # tokens of a prompt and of an answer
OVERLOADS = ((0.2, 0.27), (0.62, 0.69))  # shares of a generated trace
WINDOW = 10.0  # s


def published(path: Path) -> Trace:
    """Return a trace from a file, with the lengths that it has."""
    return clip_lengths(load_trace(path), *LONGEST)


def generated(rng: np.random.Generator, seconds: float, overload: float = 4.0) -> Trace:
    """Return a trace with one random arrival a second on average, and `overload` times that rate in two overloads."""
    times, time = [], 0.0
    while time < seconds:
        high = any(first <= time / seconds < last for first, last in OVERLOADS)
        times.append(time)
        time += float(rng.exponential(1 / (overload if high else 1.0)))
    return with_lengths(Trace.of("generated", times, np.ones(len(times)), np.ones(len(times))), "longbench", rng)


def with_lengths(trace: Trace, name: str, rng: np.random.Generator) -> Trace:
    """Return the arrivals of a trace with log-normal lengths, whose means are those of a data set."""
    inputs, outputs = LENGTHS[name]
    drawn = {
        "input_tokens": _lengths(rng, inputs, 0.6, len(trace), LONGEST[0]),
        "output_tokens": _lengths(rng, outputs, 0.5, len(trace), LONGEST[1]),
    }
    return trace.changed("lengths", {"like": name}, **drawn)


def _lengths(rng: np.random.Generator, mean: float, sigma: float, count: int, longest: int) -> NDArray[np.int64]:
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn, 8, longest).astype(np.int64)


def with_giants(trace: Trace, tokens: int, every: float) -> Trace:
    """Return a trace with a further request every few seconds outside of the overloads of a generated trace.

    Its prompt has `tokens` tokens.
    """
    shares = np.arange(every / 2, trace.duration_s, every) / trace.duration_s
    calm = [share for share in shares if not any(first - 0.02 <= share < last + 0.1 for first, last in OVERLOADS)]
    times, count = np.array(calm) * trace.duration_s, len(calm)
    columns = {
        "arrival_s": np.concatenate([trace.arrival_s, times]),
        "input_tokens": np.concatenate([trace.input_tokens, np.full(count, tokens)]),
        "output_tokens": np.concatenate([trace.output_tokens, np.full(count, 200)]),
    }
    return trace.changed("giants", {"tokens": tokens, "count": count}, **columns)


def compute_share(trace: Trace, cost: InstanceRoofline, budget: int, devices: int) -> Floats:
    """Return the share of the devices' time that requests which arrive together take to compute, by windows."""
    seconds = seconds_to_compute(trace.input_tokens, trace.output_tokens, cost, budget)
    bins = (trace.arrival_s / WINDOW).astype(int)
    return np.bincount(bins, weights=seconds) / (WINDOW * devices)


def seconds_to_compute(inputs: NDArray[Any], outputs: NDArray[Any], cost: InstanceRoofline, budget: int) -> Floats:
    """Return the time of a device (s) that each request takes, whose prompt is computed in chunks of `budget` tokens.

    A token of an answer counts as one of a prompt, and reads its context. That batches also read all weights is left
    out, because one read serves many tokens.
    """
    token, n, m = cost.fixed(budget, 1, 1) / budget, inputs.astype(float), outputs.astype(float)
    pairs = n * (n + budget) / 2 + n  # of KunServe's p c + c^2 + c over chunks
    return token * (n + m) + cost.per_prefill * pairs + cost.per_context * m * (n + m / 2)


def scaled(trace: Trace, factor: float, rng: np.random.Generator) -> Trace:
    """Return a trace with `factor` times the rate and the same pattern, of copies of which some are left out."""
    copies = max(1, math.ceil(factor))
    return thin(replicate(trace, copies, rng), factor / copies, rng)
