"""A histogram that adds all observations of a step at once, under one lock."""

import math
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping

INFINITY = "+Inf"


def one_two_five(first: float, last: float) -> tuple[float, ...]:
    """Return the bucket bounds 1, 2, 5, 10, 20, ... times `first` (a power of ten), up to `last`."""
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
    """A histogram: the number of observations in each bucket, and their sum. Thread-safe."""

    def __init__(self, bounds: Iterable[float]):
        """`bounds` are the inclusive upper bounds of the buckets, increasing and without infinity."""
        self.bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Add one observation."""
        with self._lock:
            self._counts[bisect_left(self.bounds, value)] += 1
            self._sum += value

    def observe_all(self, values: Mapping[float, int]) -> None:
        """Add several observations, given as value -> number of times it was observed."""
        bounds, counts = self.bounds, self._counts
        with self._lock:
            for value, times in values.items():
                counts[bisect_left(bounds, value)] += times
                self._sum += value * times

    def state(self) -> tuple[list[tuple[str, float]], float]:
        """Return the buckets in Prometheus' cumulative form, [(upper bound, count up to it)], and the sum."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        buckets, running = [], 0
        for bound, count in zip((*map(str, self.bounds), INFINITY), counts, strict=True):
            running += count
            buckets.append((bound, float(running)))
        return buckets, total
