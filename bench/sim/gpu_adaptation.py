"""Adaptation beside none on simulated GPUs, under the burst of `gpu_burst.py` at several rates.

    python -m bench.sim.gpu_adaptation [--hardware h200 l4] [--instances 1 4] [--rates 0.8 ...] [--seeds 5]

Rate 1 is the measured one, at which full precision is at the edge of its KV pages; an L4 gets the same requests ten
times as slowly. Other seeds draw other requests of the same kind. The last column has P95 of `morph` as multiples of
the better of the others, the largest over the seeds: of whole answers, of the first token and of the time per token.
The last two may be those of different systems, which no system can reach together.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from bench.sim.gpu_burst import ANSWER, BURST_S, PROMPT, SPREAD, figures, options, served
from bench.sim.runs import table
from jaxserve.bench.traces.trace import Trace

RATE, LIGHT_RATE, LIGHT_S = 23.577, 5.44, 11.0  # requests/s of the burst and after it, and the seconds after it
SLOWER = {"h200": 1.0, "l4": 10.0}  # factor on all times
SYSTEMS: Mapping[str, dict[str, Any]] = {"full": {}, "int4": {"precision": "int4"}, "morph": {"policy": "morph"}}
FIGURES = ("P95 answer", "P95 TTFT", "P95 TPOT")
RATES = (0.8, 0.9, 1.0, 1.1, 1.3, 1.6)


@dataclass(frozen=True)
class Case:
    """A burst on some instances."""

    hardware: str
    instances: int
    rate: float  # of the measured burst
    seed: int

    @property
    def slower(self) -> float:
        """The factor on all times."""
        return SLOWER[self.hardware]

    def trace(self) -> Trace:
        """Return the requests of the burst and of a light load."""
        rng = np.random.default_rng(1000 + self.seed)
        counts = [rng.poisson(self.instances * mean) for mean in (self.rate * RATE * BURST_S, LIGHT_RATE * LIGHT_S)]
        ends = (0.0, BURST_S, BURST_S + LIGHT_S)
        times = [np.sort(rng.uniform(*span, count)) for span, count in zip(pairwise(ends), counts, strict=True)]
        whole = np.concatenate(times) * self.slower
        sizes = (rng.uniform(1 - SPREAD, 1 + SPREAD, (len(whole), 2)) * (PROMPT, ANSWER)).astype(int)
        return Trace.of("burst", whole, *sizes.T)

    def run(self, system: str) -> dict[str, float]:
        """Return the figures (s) of the requests that arrived in the burst."""
        cluster = options(hardware=self.hardware, cluster=str(self.instances), **SYSTEMS[system])
        end = BURST_S * self.slower
        return figures([record for record in served(cluster, self.trace()) if record.due_s <= end])


def compared(results: Mapping[str, Mapping[str, float]]) -> tuple[float, ...]:
    """Return by which factor `morph` is above the better of the others, for each figure."""
    others = [name for name in results if name != "morph"]
    return tuple(results["morph"][figure] / min(results[name][figure] for name in others) for figure in FIGURES)


def rows(cases: Sequence[Case]) -> Iterator[tuple[object, ...]]:
    """Yield a row for each hardware, number of instances and rate, with medians over the seeds."""
    groups: dict[tuple[str, int, float], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.hardware, case.instances, case.rate), []).append(case)
    for (hardware, instances, rate), members in groups.items():
        results = [{system: case.run(system) for system in SYSTEMS} for case in members]
        cells = [
            " / ".join(f"{1e3 * median(found[system][figure] for found in results):.4g}" for figure in FIGURES)
            for system in SYSTEMS
        ]
        worst = [max(factors) for factors in zip(*map(compared, results), strict=True)]
        yield hardware, instances, rate, *cells, " / ".join(f"{factor:.2f}" for factor in worst)


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(prog="python -m bench.sim.gpu_adaptation")
    parser.add_argument("--hardware", nargs="+", default=list(SLOWER))
    parser.add_argument("--instances", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", type=int, default=5)
    chosen = parser.parse_args()
    cases = [
        Case(hardware, instances, rate, seed)
        for hardware in chosen.hardware
        for instances in chosen.instances
        for rate in chosen.rates
        for seed in range(chosen.seeds)
    ]
    header = (
        "hardware",
        "instances",
        "rate",
        *(f"{system}: P95 of answer / TTFT / TPOT, ms" for system in SYSTEMS),
        "at most",
    )
    print(table(header, []), flush=True)
    for row in rows(cases):
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
