"""The load of a plan: a trace, or requests at a rate, long enough for percentiles to mean something."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from jaxserve.bench.options import ArrivalOptions, DatasetOptions, TraceOptions
from jaxserve.bench.traces.scaling import stretch
from jaxserve.core.errors import ConfigError
from jaxserve.core.options import options_of
from jaxserve.sim.workload import SimWorkload, sim_workload

SECONDS = 300  # of a load at a rate, as far as the limits on requests allow
MIN_REQUESTS, MAX_REQUESTS = 200, 3000
MIN_SECONDS = 60  # of a load at a rate, however many requests that takes


@dataclass(frozen=True)
class PlannedLoad:
    """The options of a load, of which `workload` makes the same requests each time."""

    dataset: DatasetOptions
    arrivals: ArrivalOptions
    trace: TraceOptions

    @classmethod
    def of(cls, dataset: Mapping[str, Any], arrivals: ArrivalOptions, trace: TraceOptions) -> "PlannedLoad":
        """Return the load that options describe, of which `dataset` has those that were given.

        `--rate` alone is the rate of a random load. Raise `ConfigError` if there is neither a rate nor a trace.
        """
        if trace.trace is None and trace.synthetic is None:
            if trace.rate is not None:
                arrivals, trace = replace(arrivals, request_rate=trace.rate), replace(trace, rate=None)
            if arrivals.request_rate == inf and arrivals.ramp() is None:
                raise ConfigError("no load is given: give requests per second (--rate), --trace or --synthetic")
            if not arrivals.request_rate > 0:
                raise ConfigError(f"--rate is {arrivals.request_rate:g}: it must be above 0 requests per second")
            if "num_prompts" not in dataset and arrivals.ramp() is None:
                dataset = {**dataset, "num_prompts": requests_at(arrivals.request_rate)}
        return cls(DatasetOptions(**dataset), arrivals, trace)

    def workload(self, speed: float = 1.0) -> SimWorkload:
        """Return the requests, at `speed` times the rate. Raise `ConfigError` if the options do not fit together."""
        workload = sim_workload(self.dataset, self.arrivals, self.trace)
        return workload if speed == 1 else replace(workload, trace=stretch(workload.trace, 1 / speed))

    def __str__(self) -> str:
        """The load in words."""
        trace = self.workload().trace
        rate = len(trace) / trace.duration_s if trace.duration_s else float("inf")
        means = f"{trace.input_tokens.mean():,.0f} + {trace.output_tokens.mean():,.0f} tokens on average"
        return f"{len(trace):,} requests in {trace.duration_s:,.0f} s ({rate:.3g} a second), {means}"


def requests_at(rate: float) -> int:
    """Return how many requests a load at a rate (requests/s) has by default."""
    usual = min(max(rate * SECONDS, MIN_REQUESTS), MAX_REQUESTS)
    return ceil(max(usual, rate * MIN_SECONDS))


def arguments_of(options: Any) -> list[str]:
    """Return the options that differ from their defaults as arguments of a command."""
    words: list[str] = []
    for field in options_of(type(options)):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append(field.flag if value else f"--no-{field.flag[2:]}")
        elif field.repeated:
            words += [field.flag, *(word for text in value for word in text.split())]
        else:
            words += [
                field.flag,
                f"{value:g}" if isinstance(value, float) and value == float(f"{value:g}") else str(value),
            ]
    return words
