"""The cost of a prefill chunk as KunServe fits it to profiles (lookahead batch formulation, equation 1).

    seconds(p, c) = a (p c + c^2 + c) + b c + g

A chunk has c tokens after a prefix of p tokens. a is the time of each pair that attention multiplies, b of each token
that goes through the layers, and g of the step itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.core.errors import ConfigError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ChunkCost:
    """The coefficients of the cost of a chunk, in seconds and not negative."""

    a: float
    b: float
    g: float

    def seconds(self, prefix: float, length: float) -> float:
        """Return the time (s) of a chunk of `length` tokens after `prefix` tokens."""
        return float(self.a * pairs(prefix, length) + self.b * length + self.g)

    def error(self, prefixes: Sequence[float], lengths: Sequence[float], seconds: Sequence[float]) -> float:
        """Return the mean relative error: |predicted - measured| / measured."""
        predicted = [self.seconds(prefix, length) for prefix, length in zip(prefixes, lengths, strict=True)]
        return float(np.mean(np.abs(np.array(predicted) / np.array(seconds) - 1)))

    @classmethod
    def fit(cls, prefixes: Sequence[float], lengths: Sequence[float], seconds: Sequence[float]) -> "ChunkCost":
        """Fit a, b and g to measured chunks by least squares of the relative errors, none below 0.

        With relative errors, short chunks count as much as long ones. Raise `ConfigError` if the measurements do not
        determine the three coefficients.
        """
        p, c, t = (np.array(values, float) for values in (prefixes, lengths, seconds))
        if not len(p) == len(c) == len(t) or np.any(t <= 0):
            raise ConfigError(
                f"{len(p)} prefixes, {len(c)} lengths and {len(t)} times: there must be one of each for every chunk, "
                "with times all above 0"
            )
        columns = np.stack([pairs(p, c), c, np.ones_like(c)], axis=1) / t[:, None]
        if np.linalg.matrix_rank(columns / np.maximum(np.abs(columns).max(axis=0, initial=0), 1e-300)) < 3:
            raise ConfigError(
                f"{len(t)} chunks do not determine a, b and g: at least 3 of different lengths are needed"
            )
        a, b, g = non_negative_by_subsets(columns, np.ones(len(t)))
        return cls(float(a), float(b), float(g))


def pairs(prefix: Any, length: Any) -> Any:
    """Return the pairs of tokens that attention multiplies, p c + c^2 + c. Takes numbers or arrays."""
    return prefix * length + length**2 + length


def non_negative_by_subsets(columns: Floats, wanted: Floats) -> Floats:
    """Return the x >= 0 that minimizes the squares of `columns` x - `wanted`.

    Tries every subset of the few columns: the solution is the best of those that have no negative coefficient.
    """
    count = columns.shape[1]
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    best, least = np.zeros(count), float(wanted @ wanted)
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part = columns[:, chosen] / scale[list(chosen)]
            solution = np.linalg.lstsq(part, wanted, rcond=None)[0]
            rest = part @ solution - wanted
            if np.all(solution >= 0) and (squares := float(rest @ rest)) < least:
                best, least = np.zeros(count), squares
                best[list(chosen)] = solution / scale[list(chosen)]
    return best
