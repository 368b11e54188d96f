"""Objectives in percentiles, and the figures of a simulated run that they limit."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.bench.metrics import MS
from jaxserve.bench.options import OBJECTIVES
from jaxserve.core.errors import ConfigError
from jaxserve.sim.request_columns import Floats, RequestColumns

FORM = re.compile(rf"({'|'.join(OBJECTIVES)}):(?:p(\d+(?:\.\d+)?):)?(\d+(?:\.\d+)?)")
PATIENCE_S = 60.0  # within which the last requests of a run must end, if the objectives do not allow more


@dataclass(frozen=True)
class Objective:
    """A limit (ms) on a percentile of `ttft`, `tpot` or `e2el`."""

    metric: str
    percentile: float
    limit: float

    @property
    def name(self) -> str:
        """The figure that is limited, such as "P95 TTFT"."""
        return f"P{self.percentile:g} {self.metric.upper()}"

    def __str__(self) -> str:
        return f"{self.name} of at most {self.limit:,g} ms"


def parse_objectives(texts: Sequence[str], percentile: float) -> tuple[Objective, ...]:
    """Return the objectives that texts such as "ttft:2000" and "tpot:p99:50" describe, by default of `percentile`.

    Raise `ConfigError` if there is none, or one has another form or limits a figure twice.
    """
    if not 0 < percentile < 100:
        raise ConfigError(f"--percentile is {percentile:g}: it must be above 0 and below 100")
    words = [word for text in texts for word in re.split(r"[\s,]+", text.strip()) if word]
    if not words:
        raise ConfigError("no objective is given: give limits in ms, such as --goodput ttft:2000 tpot:50")
    found: list[Objective] = []
    for word in words:
        match = FORM.fullmatch(word)
        if match is None or not float(match[3]) or not 0 < float(match[2] or percentile) < 100:
            raise ConfigError(f"--goodput has {word!r}: give objectives as ttft:MS, tpot:MS or e2el:MS, or ttft:p99:MS")
        found.append(Objective(match[1], float(match[2] or percentile), float(match[3])))
    names = [objective.name for objective in found]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"--goodput limits {doubled} twice: give one limit")
    return tuple(found)


def loosest(objectives: Sequence[Objective], metric: str) -> float | None:
    """Return the largest limit (ms) on a metric; None if there is none."""
    return max((each.limit for each in objectives if each.metric == metric), default=None)


def strictest(objectives: Sequence[Objective]) -> dict[str, float]:
    """Return the smallest limit (ms) on each limited metric."""
    limits: dict[str, float] = {}
    for each in objectives:
        limits[each.metric] = min(each.limit, limits.get(each.metric, math.inf))
    return limits


def end_of_run(objectives: Sequence[Objective], last_arrival_s: float, output_tokens: int) -> float:
    """Return the virtual time (s) by which requests must have ended.

    The last request gets as long as the objectives allow an answer of `output_tokens`, the longest one, but at least
    `PATIENCE_S`. A load that outgrows the cluster therefore shows also where no objective limits the waiting.
    """
    ttft, tpot, e2el = (loosest(objectives, metric) for metric in OBJECTIVES)
    allowed = e2el if e2el is not None else (ttft or 0.0) + (tpot or 0.0) * (output_tokens - 1)
    return last_arrival_s + max(PATIENCE_S, allowed / MS)


def measure(columns: RequestColumns, objectives: Sequence[Objective], end_s: float) -> tuple[float, ...]:
    """Return the figure (ms) of each objective: infinity if too many requests did not end by `end_s`, or were refused.

    An answer of one token has no TPOT.
    """
    last, first, arrival = columns.last_s, columns.first_s, columns.arrival_s
    missed = misses(columns, end_s)
    gaps = columns.output_tokens - 1
    tpot = np.divide(last - first, gaps, out=np.zeros(len(gaps)), where=gaps > 0)
    values = {"ttft": first - arrival, "tpot": tpot, "e2el": last - arrival}
    return tuple(
        percentile_of(
            np.where(missed, math.inf, values[each.metric])[gaps > 0 if each.metric == "tpot" else slice(None)],
            each.percentile,
        )
        * MS
        for each in objectives
    )


def misses(columns: RequestColumns, end_s: float) -> np.ndarray:
    """Return which requests were refused or did not end by `end_s`, as an array of bools."""
    return columns.refused | ~(columns.last_s <= end_s)


def percentile_of(values: Floats, percentile: float) -> float:
    """Return a percentile as `bench` computes it, of values that may be infinite; 0 if there are none."""
    if not len(values):
        return 0.0
    with np.errstate(invalid="ignore"):
        found = float(np.percentile(values, percentile))
    return math.inf if math.isnan(found) else found
