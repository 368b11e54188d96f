"""Bursty traffic without a file: generators whose statistics are those of published traces.

A run is cut into cycles. Each is idle for a while, then steady, with one burst at a random place of the steady part;
the i-th highest burst of a run has 1 / sqrt(i) of the height of the first. Through this intensity, whose mean is 1,
runs a renewal process with gamma intervals; its shape adds the clumping that is left. Lengths are drawn from the
quantiles of the source, prompts and answers independently, although in some sources they are correlated.
"""

import numpy as np

from jaxserve.bench.traces.profiles import QUANTILES, Profile, profile_named
from jaxserve.bench.traces.trace import MAX_REQUESTS, Floats, Ints, Trace
from jaxserve.core.errors import ConfigError


def synthetic(profile: Profile | str, duration_s: float, rate: float | None, rng: np.random.Generator) -> Trace:
    """A trace like the source of a profile, or of the one so named, of about `rate` requests per second.

    None is the source's rate. A run of less than a cycle has a whole one, squeezed: it always has its burst.

    Raises ConfigError if there is no such profile, if duration or rate is not above 0, or if no request comes.
    """
    profile = profile_named(profile) if isinstance(profile, str) else profile
    rate = profile.published["rate"] if rate is None else rate
    if not (0 < duration_s < np.inf and 0 < rate < np.inf):
        raise ConfigError(f"a trace of {duration_s:g} s at {rate:g} requests per second: both must be above 0")
    if rate * duration_s > MAX_REQUESTS:
        raise ConfigError(f"{rate * duration_s:g} requests are too many: the limit is {MAX_REQUESTS} (--duration)")
    ends, load = _intensity(profile, duration_s, rng)
    arrivals = np.interp(_renewals(rate * duration_s, profile.shape, rng), rate * load, ends)
    if not len(arrivals):
        raise ConfigError(f"no request comes in {duration_s:g} s at {rate:g} requests per second")
    inputs, outputs = (_lengths(values, len(arrivals), rng) for values in (profile.input_tokens, profile.output_tokens))
    facts = {"operation": "synthetic", "profile": profile.name, "duration_s": duration_s, "rate": rate}
    return Trace.of(profile.name, arrivals, inputs, outputs, history=({**facts, "requests": len(arrivals)},))


def _intensity(profile: Profile, duration_s: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """The intensity's integral, which is straight between the times returned first; it ends at `duration_s`."""
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
    """Points up to `total` whose intervals are gamma-distributed with mean 1."""
    points = np.zeros(0)
    while not len(points) or points[-1] < total:
        more = rng.gamma(shape, 1 / shape, int(total) + 16)
        points = np.append(points, (points[-1] if len(points) else 0) + np.cumsum(more))
    return points[points < total]


def _lengths(quantiles: tuple[float, ...], n: int, rng: np.random.Generator) -> Ints:
    return np.maximum(np.rint(np.interp(rng.random(n), QUANTILES, quantiles)), 1).astype(np.int64)
