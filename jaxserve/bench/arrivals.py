"""Arrival times: all at once, evenly, as a Poisson process, in bursts, or at a rate that rises."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxserve.core.errors import ConfigError


@dataclass(frozen=True)
class RampUp:
    """A request rate that goes from `start_rps` to `end_rps` requests per second over the requests of a run."""

    strategy: str  # "linear" or "exponential"
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if self.strategy not in ("linear", "exponential"):
            raise ConfigError(f"unknown ramp-up {self.strategy!r}: choose from linear, exponential")
        for rate in (self.start_rps, self.end_rps):
            if not 0 < rate < math.inf:
                raise ConfigError(f"a ramp-up rate is {rate:g} requests/s: it must be finite and above 0")

    def rates(self, n: int) -> NDArray[np.float64]:
        """Return the rate [n] at which each request follows the one before."""
        progress = np.arange(n) / max(n - 1, 1)
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * (self.end_rps / self.start_rps) ** progress


def arrivals(
    n: int, rate: float, burstiness: float, rng: np.random.Generator, ramp_up: RampUp | None = None
) -> NDArray[np.float64]:
    """Return the arrival times [n] in seconds, in increasing order.

    Intervals follow a gamma distribution with shape `burstiness`: 1 is a Poisson process, smaller values are burstier,
    and infinity is even. As in `vllm bench serve`, the times are scaled so that the last one is n / rate: every seed
    offers the same load. With a ramp-up its rates replace `rate`, and times are not scaled. With an infinite rate all
    requests arrive at 0.

    Raise ConfigError if `rate` or `burstiness` is not above 0.
    """
    if not rate > 0:
        raise ConfigError(
            f"the request rate is {rate:g}: it must be above 0, or inf to send everything at once (--request-rate)"
        )
    if not burstiness > 0:
        raise ConfigError(f"the burstiness is {burstiness:g}: it must be above 0 (--burstiness)")
    if n == 0 or (ramp_up is None and math.isinf(rate)):
        return np.zeros(n)
    rates = np.full(n, rate) if ramp_up is None else ramp_up.rates(n)
    even = math.isinf(burstiness)
    times = np.cumsum(1 / rates if even else rng.gamma(burstiness, 1 / (rates * burstiness)))
    if ramp_up is None and times[-1] > 0:
        times *= n / rate / times[-1]
    return times
