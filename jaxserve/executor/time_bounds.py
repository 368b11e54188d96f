"""Bounds of the times that layers can take, by which a disturbed measurement is recognised.

The time of a layer is the difference of two measured steps. On a busy machine it may come out as nothing, or as many
times what it is: no device reads a layer's weights faster than its fastest cache, and no precision is slower than
another one by more than what the slowest products cost.
"""

from collections.abc import Hashable, Mapping, Sequence, Set
from typing import TypeVar

# Bytes of weights that a device may read in a second: more than the caches of any that is known deliver.
MOST_BYTES_PER_S = {"cpu": 4e12}
MOST_ON_ACCELERATORS = 4e13
MOST_TIMES = 60.0  # the time of a precision beside that of another one; products without a kernel take up to 30 times
MOST_ATTENTION = 0.9  # of a layer's time
CONFIRMED = 1.2  # a least time is confirmed if another one is at most so many times as long

Key = TypeVar("Key", bound=Hashable)


def least_seconds(nbytes: float, platform: str) -> float:
    """Return a time (s) that reading a layer's weights must exceed, of which each device reads `nbytes` bytes."""
    return nbytes / MOST_BYTES_PER_S.get(platform, MOST_ON_ACCELERATORS)


def possible(seconds: Mapping[Key, float], least: Mapping[Key, float]) -> bool:
    """Return whether layers can take these times in different precisions, by the times that each must exceed."""
    if any(found <= least[key] for key, found in seconds.items()):
        return False
    return max(seconds.values()) <= MOST_TIMES * min(seconds.values())


def bounded(seconds: Mapping[Key, float], base: Mapping[Key, float]) -> dict[Key, float]:
    """Return times (s) by cases, none of which is impossible beside that of another precision in the same case."""
    return {
        case: min(max(found, base[case] / MOST_TIMES), MOST_TIMES * base[case]) if case in base else found
        for case, found in seconds.items()
    }


def without(doubtful: Set[Key], times: Mapping[str, Mapping[Key, float]], base: str) -> dict[str, Mapping[Key, float]]:
    """Return the times by precisions and cases without the doubtful cases.

    A precision of which nothing is left is taken to be as fast as `base`, of which all is taken if nothing is left.
    """
    left = {name: {case: s for case, s in found.items() if case not in doubtful} for name, found in times.items()}
    return {name: found or left[base] or times[base] for name, found in left.items()}


def without_attention(seconds: float, attention: float) -> float:
    """Return the time (s) of a layer without attention, whose own time was measured on longer contexts."""
    return seconds - min(attention, MOST_ATTENTION * seconds)


def is_confirmed(samples: Sequence[float]) -> bool:
    """Return whether the least of several times was found about twice, so that it is no outlier."""
    least, *others = sorted(samples)
    return bool(others) and others[0] <= CONFIRMED * least
