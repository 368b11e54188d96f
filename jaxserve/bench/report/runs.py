"""The results of a report as its plots take them, and which of them one line stands for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxserve.bench.report.series import Floats, Requests

Arrays = Sequence[Floats | None]


@dataclass(frozen=True)
class PlottedRun:
    """One result with the name and the requests that plots need."""

    name: str
    result: Mapping[str, Any]
    requests: Requests

    @property
    def end_s(self) -> float:
        """The time at which the last request ended."""
        ends = self.requests.end_s[np.isfinite(self.requests.end_s)]
        return float(ends.max()) if len(ends) else 0.0


def united(runs: Sequence[PlottedRun], arrays: Callable[[PlottedRun], Arrays]) -> list[tuple[int, PlottedRun]]:
    """Return the results to draw, with their indices: of those whose `arrays` are equal only the first, with all names.

    Equal lines would hide each other, and look as if one of them were missing.
    """
    found: list[tuple[int, PlottedRun]] = []
    for index, run in enumerate(runs):
        values = arrays(run)
        for place, (first, known) in enumerate(found):
            if _equal(values, arrays(runs[first])):
                found[place] = first, replace(known, name=f"{known.name} and {run.name}")
                break
        else:
            found.append((index, run))
    return found


def _equal(some: Arrays, others: Arrays) -> bool:
    """Return whether arrays are equal, and none of them is missing or empty."""
    pairs = zip(some, others, strict=True)
    return all(a is not None and b is not None and len(a) and np.array_equal(a, b, equal_nan=True) for a, b in pairs)
