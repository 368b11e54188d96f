"""Long lists of cases, of which a run of all tests takes some, and `make test-thorough` all."""

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

THOROUGH = bool(os.environ.get("THOROUGH"))


def some(cases: Iterable[T], count: int) -> list[T]:
    """Return `count` of the cases, evenly spread from the first to the last, or all in a thorough run."""
    every = list(cases)
    if THOROUGH or count >= len(every):
        return every
    return [every[round(index * (len(every) - 1) / max(1, count - 1))] for index in range(count)]
