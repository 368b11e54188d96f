"""The cost of a prefill chunk, and of a microbatch of chunks, as in KunServe (section 4.3, equations 1 to 3).

    chunk       seconds(p, c) = a (p c + c^2 + c) + b c + g
    microbatch  the sum over its n chunks, less (n - 1) g

A chunk has c tokens after a prefix of p tokens; a decode is a chunk of one token. a is the time of each pair that
attention multiplies, b of each token that goes through the layers, and g of the step itself, which all of its chunks
share. Chunks are computed in whole tiles, so that the last tile of a prompt costs as much as the others.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.core.errors import ConfigError
from jaxserve.core.step_load import StepLoad

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ChunkCost:
    """The coefficients of the cost of a chunk, in seconds and not negative."""

    a: float
    b: float
    g: float
    tile: int = 1  # tokens

    def seconds(self, prefix: float, length: float) -> float:
        """Return the time (s) of a chunk of `length` tokens after `prefix` tokens."""
        return self.added(prefix, length) + self.g

    def added(self, prefix: float, length: float) -> float:
        """Return the time (s) by which a chunk makes a microbatch longer that has other chunks."""
        tokens = length if length <= 1 else ceil(length / self.tile) * self.tile
        return float(self.a * pairs(prefix, length) + self.b * tokens)

    def microbatch(self, chunks: Iterable[tuple[float, float]]) -> float:
        """Return the time (s) of a microbatch of chunks, each of which is (prefix, length)."""
        return sum(self.added(prefix, length) for prefix, length in chunks) + self.g

    def length(self, prefix: float, seconds: float) -> float:
        """Return the length (tokens) of the chunk after `prefix` tokens that adds this time, without whole tiles."""
        each = self.a * (prefix + 1) + self.b
        if self.a == 0:
            return seconds / each
        return (sqrt(each * each + 4 * self.a * seconds) - each) / (2 * self.a)

    def error(self, prefixes: Sequence[float], lengths: Sequence[float], seconds: Sequence[float]) -> float:
        """Return the mean relative error of chunks alone: |predicted - measured| / measured."""
        return float(np.mean(self.errors(pairs(np.array(prefixes, float), np.array(lengths, float)), lengths, seconds)))

    def errors(self, attended: Sequence[float] | Floats, tokens: Sequence[float], seconds: Sequence[float]) -> Floats:
        """Return the relative errors of steps, each with its pairs that attention multiplies and its tokens."""
        predicted = self.a * np.array(attended, float) + self.b * np.array(tokens, float) + self.g
        errors: Floats = np.abs(predicted / np.array(seconds, float) - 1)
        return errors

    @classmethod
    def fit(cls, prefixes: Sequence[float], lengths: Sequence[float], seconds: Sequence[float]) -> "ChunkCost":
        """Fit a, b and g to measured chunks, each of which was a step. Raise `ConfigError` as `fit_steps`."""
        p, c = np.array(prefixes, float), np.array(lengths, float)
        _check_lengths(p, c, np.array(seconds, float))
        return cls.fit_steps(pairs(p, c), c, seconds)

    @classmethod
    def fit_steps(
        cls, attended: Sequence[float] | Floats, tokens: Sequence[float] | Floats, seconds: Sequence[float] | Floats
    ) -> "ChunkCost":
        """Fit a, b and g to measured steps by least squares of the relative errors, none below 0.

        With relative errors, short steps count as much as long ones. `attended`: the pairs that the attention of each
        step multiplies. `tokens`: those of all tiles, and of decodes. Raise `ConfigError` if the measurements do not
        determine the three coefficients.
        """
        q, c, t = (np.array(values, float) for values in (attended, tokens, seconds))
        _check_lengths(q, c, t)
        columns = np.stack([q, c, np.ones_like(c)], axis=1) / t[:, None]
        if np.linalg.matrix_rank(columns / np.maximum(np.abs(columns).max(axis=0, initial=0), 1e-300)) < 3:
            raise ConfigError(
                f"{len(t)} chunks do not determine a, b and g: at least 3 of different lengths are needed"
            )
        a, b, g = non_negative_by_subsets(columns, np.ones(len(t)))
        return cls(float(a), float(b), float(g))

    @classmethod
    def of_steps(cls, seconds: Callable[[StepLoad], float], budget: int) -> "ChunkCost":
        """Return the cost that comes nearest to other estimates of steps of up to `budget` tokens."""
        lengths = np.unique(np.geomspace(1, budget, 12).round())
        loads = [
            (prefix, length, seconds(StepLoad(int(length), 1, 0, 0, int(pairs(prefix, length)))))
            for length in lengths
            for prefix in (0, budget, 8 * budget)
        ]
        return cls.fit(*zip(*loads, strict=True))


TOKENS = ChunkCost(a=0.0, b=1.0, g=0.0)
"""A cost by which microbatches of equal cost have equally many tokens."""


def pairs(prefix: Any, length: Any) -> Any:
    """Return the pairs of tokens that attention multiplies, p c + c^2 + c. Takes numbers or arrays."""
    return prefix * length + length**2 + length


def _check_lengths(first: Floats, second: Floats, seconds: Floats) -> None:
    if not len(first) == len(second) == len(seconds) or np.any(seconds <= 0):
        raise ConfigError(
            f"{len(first)} prefixes, {len(second)} lengths and {len(seconds)} times: there must be one of each for "
            "every chunk, with times all above 0"
        )


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
