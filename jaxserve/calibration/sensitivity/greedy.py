"""The greedy order of swapping: always the layer of the highest score, with new scores after every choice."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Degradation = Callable[[frozenset[int], Sequence[int]], Mapping[int, float]]
"""A function (layers swapped so far, candidates) -> MDS of each candidate, at most 1."""


@dataclass(frozen=True)
class Choice:
    """A chosen layer, with its MDS and LIS at the time of the choice."""

    layer: int
    mds: float
    lis: float


@dataclass(frozen=True)
class Ranking:
    """All layers in the order in which they were chosen."""

    choices: tuple[Choice, ...]
    first_mds: tuple[float, ...]  # MDS by layer with no layer swapped


def rank(
    local: Sequence[float], degradation: Degradation, weight: float, done: Callable[[], None] = lambda: None
) -> Ranking:
    """Rank layers by greedy choice of the highest LIS = local + weight * MDS. `done` is called after each choice.

    `local` is the part of LIS that does not change. Between equals, the lower layer wins. After the first choice, a
    candidate is only measured if it could win with an MDS of 1. The result is exact, and most of the work is saved if
    the local parts differ much.
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
