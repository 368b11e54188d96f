"""A histogram that takes a whole step's observations at once: a bisection each and one lock for all of them."""

import math
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping

INFINITY = "+Inf"


def one_two_five(first: float, last: float) -> tuple[float, ...]:
    """Bucket bounds 1, 2, 5, 10, 20, ... times `first` (a power of ten), up to `last`."""
    decade = round(math.log10(first))
    bounds: list[float] = []
    while True:
        for digit in (1, 2, 5):
            bound = float(f"{digit}e{decade}")
            if bound > last:
                return tuple(bounds)
            bounds.append(bound)
        decade += 1


class Histogram:
    """Observations per bucket and their sum. `bounds`: increasing upper bounds, inclusive, without infinity."""

    def __init__(self, bounds: Iterable[float]):
        self.bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Mutates: adds one observation."""
        with self._lock:
            self._counts[bisect_left(self.bounds, value)] += 1
            self._sum += value

    def observe_all(self, values: Mapping[float, int]) -> None:
        """Mutates: adds several observations: value -> how often it was seen."""
        bounds, counts = self.bounds, self._counts
        with self._lock:
            for value, times in values.items():
                counts[bisect_left(bounds, value)] += times
                self._sum += value * times

    def state(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative buckets as Prometheus wants them [(upper bound, count so far)], and the sum."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        buckets, running = [], 0
        for bound, count in zip((*map(str, self.bounds), INFINITY), counts, strict=True):
            running += count
            buckets.append((bound, float(running)))
        return buckets, total
