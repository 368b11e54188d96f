"""ChunkCost: what a chunk of a prompt costs, as KunServe fits it to profiles (lookahead batch formulation, equation 1).

    seconds(p, c) = a (p c + c^2 + c) + b c + g

for c tokens after a prefix of p: a for each pair that attention multiplies, b for each token that goes through the
layers, g for the step itself.
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
    """Seconds, all from 0."""

    a: float
    b: float
    g: float

    def seconds(self, prefix: float, length: float) -> float:
        """Of a chunk of `length` tokens after `prefix`."""
        return float(self.a * pairs(prefix, length) + self.b * length + self.g)

    def error(self, prefixes: Sequence[float], lengths: Sequence[float], seconds: Sequence[float]) -> float:
        """The mean of |predicted - measured| / measured."""
        predicted = [self.seconds(prefix, length) for prefix, length in zip(prefixes, lengths, strict=True)]
        return float(np.mean(np.abs(np.array(predicted) / np.array(seconds) - 1)))

    @classmethod
    def fit(cls, prefixes: Sequence[float], lengths: Sequence[float], seconds: Sequence[float]) -> "ChunkCost":
        """That with the least squares of relative errors, none of the three below 0.

        Relative, so that short chunks count like long ones. Raises `ConfigError` for measurements that do not tell the
        three apart.
        """
        p, c, t = (np.array(values, float) for values in (prefixes, lengths, seconds))
        if not len(p) == len(c) == len(t) or np.any(t <= 0):
            raise ConfigError(f"{len(p)} prefixes, {len(c)} lengths and {len(t)} times, all above 0, must be as many")
        columns = np.stack([pairs(p, c), c, np.ones_like(c)], axis=1) / t[:, None]
        if np.linalg.matrix_rank(columns / np.maximum(np.abs(columns).max(axis=0, initial=0), 1e-300)) < 3:
            raise ConfigError(f"{len(t)} chunks do not tell a, b and g apart; it takes 3 of different lengths")
        a, b, g = non_negative(columns, np.ones(len(t)))
        return cls(float(a), float(b), float(g))


def pairs(prefix: Any, length: Any) -> Any:
    """p c + c^2 + c, of numbers or arrays."""
    return prefix * length + length**2 + length


def non_negative(columns: Floats, wanted: Floats) -> Floats:
    """The x >= 0 with the least squares of `columns` x - `wanted`.

    By trying which of the few columns to leave out: the best solution is the best of those whose signs are right.
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
