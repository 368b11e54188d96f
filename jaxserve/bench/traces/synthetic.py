"""Generated traffic: bursts with the statistics of published traces.

A run is divided into cycles. Each cycle is idle for a while and then steady, with one burst at a random place of the
steady part. The i-th highest burst of a run has 1 / sqrt(i) of the first one's height. This gives an intensity with
mean 1. Requests arrive by a renewal process with that intensity and gamma intervals, whose shape adds the remaining
clumping.

Lengths are drawn from the quantiles of the source. Prompts and answers are independent, although they are correlated in
some sources.
"""

import numpy as np

from jaxserve.bench.traces.profiles import QUANTILES, Profile, profile_named
from jaxserve.bench.traces.trace import MAX_REQUESTS, Floats, Ints, Trace
from jaxserve.core.errors import ConfigError


def synthetic(profile: Profile | str, duration_s: float, rate: float | None, rng: np.random.Generator) -> Trace:
    """Return a generated trace of about `rate` requests per second, like the source of a profile.

    `rate` None stands for the source's rate. A run shorter than a cycle compresses one whole cycle, so it always has
    its burst.

    Raise ConfigError if the profile is unknown, if duration or rate is not above 0, or if no request arrives.
    """
    profile = profile_named(profile) if isinstance(profile, str) else profile
    rate = profile.published["rate"] if rate is None else rate
    if not (0 < duration_s < np.inf and 0 < rate < np.inf):
        raise ConfigError(f"the trace has {duration_s:g} s and {rate:g} requests/s: both must be above 0")
    if rate * duration_s > MAX_REQUESTS:
        raise ConfigError(f"{rate * duration_s:g} requests are too many: the limit is {MAX_REQUESTS} (--duration)")
    ends, load = _intensity(profile, duration_s, rng)
    arrivals = np.interp(_renewals(rate * duration_s, profile.shape, rng), rate * load, ends)
    if not len(arrivals):
        raise ConfigError(f"no request arrives in {duration_s:g} s at {rate:g} requests/s: raise --duration or --rate")
    inputs, outputs = (_lengths(values, len(arrivals), rng) for values in (profile.input_tokens, profile.output_tokens))
    facts = {"operation": "synthetic", "profile": profile.name, "duration_s": duration_s, "rate": rate}
    return Trace.of(profile.name, arrivals, inputs, outputs, history=({**facts, "requests": len(arrivals)},))


def _intensity(profile: Profile, duration_s: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return times, and the integral of the intensity at each: linear in between, and `duration_s` at the end."""
    cycles = max(round(duration_s / profile.cycle_s), 1)
    length = duration_s / cycles
    idle, burst = (length * part / profile.cycle_s for part in (profile.idle_s, profile.burst_s))
    heights = rng.permutation(profile.height / np.sqrt(np.arange(1, cycles + 1)))
    steady = (duration_s - burst * heights.sum()) / (cycles * (length - idle - burst))
    before = rng.uniform(0, length - idle - burst, cycles)
    after = length - idle - burst - before
    spans = np.stack([np.full(cycles, idle), before, np.full(cycles, burst), after], axis=1).ravel()
    levels = np.stack([np.zeros(cycles), np.full(cycles, steady), heights, np.full(cycles, steady)], axis=1).ravel()
    return np.append(0, np.cumsum(spans)), np.append(0, np.cumsum(spans * levels))


def _renewals(total: float, shape: float, rng: np.random.Generator) -> Floats:
    """Return points up to `total` whose intervals are gamma-distributed with mean 1."""
    points = np.zeros(0)
    while not len(points) or points[-1] < total:
        more = rng.gamma(shape, 1 / shape, int(total) + 16)
        points = np.append(points, (points[-1] if len(points) else 0) + np.cumsum(more))
    return points[points < total]


def _lengths(quantiles: tuple[float, ...], n: int, rng: np.random.Generator) -> Ints:
    return np.maximum(np.rint(np.interp(rng.random(n), QUANTILES, quantiles)), 1).astype(np.int64)
