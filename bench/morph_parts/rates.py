"""The runs of a sweep over request rates, which are multiples of the rate that full precision can serve.

Full precision is saturated first, in the same sweep. Then every system serves Poisson arrivals at every rate, beginning
with a light load.
"""

import asyncio
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.morph_parts.measure import measure, result, started
from bench.morph_parts.quality import adaptation_figures, profile_of
from bench.morph_parts.systems import NAMES, Setup, System
from bench.morph_parts.timeline import saturated_throughput
from bench.morph_parts.traffic import Prompts, workload
from jaxserve.bench.arrivals import arrivals
from jaxserve.bench.result import Result, load, plain, save
from jaxserve.bench.traces.trace import Trace
from jaxserve.bench.workload import Workload
from jaxserve.core.errors import JaxserveError

TRAFFIC = "rates"  # names these runs in their results
SATURATED = math.inf  # the multiple that stands for all requests at once
LIGHT_LOAD = 0.3  # the multiple at which an adapting system must do nothing
SETTLE_S = 5.0  # from the last answer of a run until the next run


@dataclass(frozen=True)
class Offered:
    """The requests that a sweep offers: lengths drawn from a trace's, and pieces of `prompts`."""

    lengths: Trace
    prompts: Prompts
    seconds: float  # of arrivals
    at_once: int  # number of requests that saturate an engine

    def rate(self, multiple: float, capacity: float | None) -> float:
        """Return requests per second at a multiple of `capacity`, the tokens/s of saturated full precision."""
        if multiple == SATURATED:
            return math.inf
        assert capacity is not None, "full precision is saturated first"
        return multiple * capacity / float(self.lengths.output_tokens.mean())

    def requests(self, rate: float, number: int) -> Workload:
        """Return Poisson arrivals at `rate` requests per second. Equal rates and rounds give equal requests."""
        rng = np.random.default_rng([5, number])
        count = self.at_once if math.isinf(rate) else max(2, round(rate * self.seconds))
        facts = {"rate": rate, "seconds": self.seconds}
        columns = self.lengths.taken(rng.integers(len(self.lengths), size=count))
        times = arrivals(count, rate, 1.0, rng)
        return workload(self.lengths.changed("poisson", facts, **columns | {"arrival_s": times}), self.prompts, rng)


@dataclass(frozen=True)
class Visit:
    """The runs that one server of a system makes, by multiple of the capacity."""

    system: System
    multiples: tuple[float, ...]


def visits(full: System, chosen: Sequence[System], multiples: Sequence[float], *, one_server_each: bool) -> list[Visit]:
    """Return the order of a sweep.

    Systems take turns at each multiple, in reverse order every other time, so that a slow minute of the machine does
    not hit one of them. With `one_server_each` each system makes all of its runs before the next one starts.
    """
    if one_server_each:
        others = [Visit(system, tuple(multiples)) for system in chosen if system != full]
        return [Visit(full, (SATURATED, *(multiples if full in chosen else ()))), *others]
    turns = [(m, chosen if turn % 2 == 0 else chosen[::-1]) for turn, m in enumerate(multiples)]
    return [Visit(full, (SATURATED,)), *(Visit(system, (m,)) for m, systems in turns for system in systems)]


@dataclass
class Sweep:
    """One round of a sweep, whose runs are written to a folder, one file each."""

    setup: Setup
    offered: Offered
    folder: Path
    number: int  # of the round
    resume: bool = False  # skip runs that have a result
    deadline_s: float = math.inf  # of the monotonic clock: no run begins that would probably end after it
    capacity: float | None = None  # tokens/s of saturated full precision; None: measured first
    _start_s: float = 0.0  # that the slowest server took to start

    def run(self, full: System, order: Sequence[Visit]) -> list[str]:
        """Make all runs, and return which are missing and why.

        A server that fails costs its own runs alone, except that nothing can follow without a capacity.
        """
        saturated = self._path(full, SATURATED)
        if self.capacity is None and self.resume and saturated.exists():
            self.capacity = saturated_throughput(load(saturated))
        missing = []
        for visit in order:
            pending = [multiple for multiple in visit.multiples if not self._is_known(visit.system, multiple)]
            try:
                if pending:
                    self._visit(visit.system, pending)
            except JaxserveError as error:
                missing.append(f"{visit.system.label} at {', '.join(map(load_name, pending))}: {error}")
                print(missing[-1], flush=True)
                if self.capacity is None:
                    break
        return missing

    def _path(self, system: System, multiple: float) -> Path:
        return self.folder / f"{multiple:g}-{system.name}-{self.number}.json"

    def _is_known(self, system: System, multiple: float) -> bool:
        if multiple == SATURATED:
            return self.capacity is not None
        return self.resume and self._path(system, multiple).exists()

    def _visit(self, system: System, pending: list[float]) -> None:
        """Make runs on one server, and remove each from `pending`. Raise JaxserveError for the first that fails."""
        self._check_time(self._start_s, pending[0])
        begun = time.monotonic()
        with started(system) as url:
            self._start_s = max(self._start_s, time.monotonic() - begun)
            while pending:
                self._check_time(0.0, pending[0])
                self._measure(system, url, pending[0])
                del pending[0]

    def _check_time(self, start_s: float, multiple: float) -> None:
        """Raise JaxserveError if a run would not end in time: what arrives too fast takes longer to serve."""
        serve_s = self.offered.seconds * (1 if multiple == SATURATED else max(1, multiple)) + SETTLE_S
        if time.monotonic() + start_s + serve_s > self.deadline_s:
            raise JaxserveError("no time was left")

    def _measure(self, system: System, url: str, multiple: float) -> None:
        rate = self.offered.rate(multiple, self.capacity)
        load_of = self.offered.requests(rate, self.number)
        seen = asyncio.run(measure(url, load_of))
        measured = result(system, self.setup, load_of, seen, [sys.executable, *sys.argv])
        measured |= adaptation_figures(measured, profile_of(self.setup.model))
        # The server may have served other rates before.
        measured["decisions"] = [decision for decision in measured["decisions"] if decision["time"] >= 0]
        if multiple == SATURATED:
            self.capacity = saturated_throughput(measured)
            if self.capacity is None:
                raise JaxserveError("no request was answered")
        facts = {"traffic": TRAFFIC, "multiple": multiple, "rate": rate, "round": self.number}
        facts["capacity"] = self.capacity
        save(plain(measured | facts), self._path(system, multiple))
        print(_line(measured, system, multiple), flush=True)


def load_name(multiple: float) -> str:
    """Return a load in words: "1.5x", or "saturation"."""
    return "saturation" if multiple == SATURATED else f"{multiple:g}x"


def _line(measured: Result, system: System, multiple: float) -> str:
    ttft, violated, tpot = (measured[name] or 0 for name in ("p95_ttft_ms", "slo_violation_rate", "mean_tpot_ms"))
    return (
        f"{load_name(multiple)} {system.name}: {measured['completed']} of {measured['num_prompts']} answered, "
        f"P95 TTFT {ttft / 1e3:.2f} s, {violated:.1%} over the SLO, TPOT {tpot:.1f} ms, "
        f"{measured['output_throughput'] or 0:.0f} tokens/s, {len(measured['decisions'])} decisions"
    )


def read(folder: Path) -> list[Result]:
    """Return the results of a sweep's runs, in the order of their multiples and names, with the path of each."""
    found = [(path, load(path)) for path in sorted(folder.glob("*-*-[0-9]*.json"))]
    results = [result | {"path": path, "multiple": float(result["multiple"])} for path, result in found]
    return sorted(results, key=lambda result: (result["multiple"], NAMES.index(result["system"]), result["round"]))
