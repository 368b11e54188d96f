"""The order of swapping: the layer of the highest score first, and the scores anew after every choice."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Degradation = Callable[[frozenset[int], Sequence[int]], Mapping[int, float]]
"""(layers swapped so far, candidates) -> MDS of each candidate, at most 1."""


@dataclass(frozen=True)
class Choice:
    """A layer, with its MDS and its LIS when it was chosen."""

    layer: int
    mds: float
    lis: float


@dataclass(frozen=True)
class Ranking:
    """All layers in the order of their choice, and the MDS by layer before the first."""

    choices: tuple[Choice, ...]
    first_mds: tuple[float, ...]


def rank(
    local: Sequence[float], degradation: Degradation, weight: float, done: Callable[[], None] = lambda: None
) -> Ranking:
    """Greedy choice by LIS = local + weight * MDS; the lower number wins between equals. Calls `done` after each.

    `local` holds the part of LIS that does not change. After the first choice, a candidate is only measured if it could
    win with an MDS of 1: that is exact, and most of the work is saved where the local parts lie far apart.
    """
    layers = range(len(local))
    first = degradation(frozenset(), layers)
    choices = [_best(local, first, weight)]
    done()
    for _ in layers[1:]:
        swapped = frozenset(choice.layer for choice in choices)
        favourite, *others = sorted((p for p in layers if p not in swapped), key=lambda p: (-local[p], p))
        mds = dict(degradation(swapped, [favourite]))
        bar = local[favourite] + weight * mds[favourite]
        rivals = [p for p in others if local[p] + weight >= bar]
        if rivals:
            mds |= degradation(swapped, rivals)
        choices.append(_best(local, mds, weight))
        done()
    return Ranking(tuple(choices), tuple(first[p] for p in layers))


def _best(local: Sequence[float], mds: Mapping[int, float], weight: float) -> Choice:
    choices = [Choice(p, mds[p], local[p] + weight * mds[p]) for p in sorted(mds)]
    return max(choices, key=lambda choice: choice.lis)  # the first of equals
