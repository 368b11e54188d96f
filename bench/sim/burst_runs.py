"""Systems under a trace with overloads, Qwen2.5-14B on 8 x A800, and what comes of them.

The rate of the trace and the memory of the devices are calibrated (`calibrated`), so that memory runs out in the
overloads and computing does not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from bench.sim.amoeba import served
from bench.sim.burst_traces import compute_share, scaled
from bench.sim.migration import with_migration
from bench.sim.swapping import connect, swapping
from jaxserve.bench.traces.trace import Trace
from jaxserve.control.exchange import PageExchange
from jaxserve.core.config import EngineConfig
from jaxserve.sim.build import BuiltSimulation, build_simulation
from jaxserve.sim.cluster import Cluster, resolve_cluster
from jaxserve.sim.hardware import load_hardware
from jaxserve.sim.pipeline import Interval, Pipeline, StageTime
from jaxserve.sim.shape import ModelShape
from jaxserve.sim.simulation import Answered, Frontend, SimRequest

DEVICES, BATCHED = 8, 2048
PROVISION = 2.1  # KV memory over the average demand, as in KunServe's section 2.2
BUSIEST = 0.8  # share of the devices' time that the requests of the busiest 10 s take to compute
PLENTY_GB = 400.0  # of a device whose memory never runs out
ALL_ROWS = 10**9
SLO_TTFT = 5.0  # s; what morph is given
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class System:
    """Options of the engine, and what it does with requests that find no pages."""

    options: Mapping[str, Any] = field(default_factory=dict)
    swaps: bool = False  # to the host
    migrates: bool = False
    at_once: bool = False  # groups exchange all pages in one chunk, whatever memory that takes
    plenty: bool = False  # of memory, which never runs out


@dataclass(frozen=True)
class Setting:
    """A trace and the machines for it."""

    requests: Sequence[SimRequest]
    memory_gb: float
    hosts: int = DEVICES  # with one device each, or 1 with all of them
    longest: int | None = 20_000  # tokens of a sequence; None: as many as there is memory for
    overloads: Sequence[tuple[float, float]] = ()  # s, in which the demand for KV exceeds the memory for it
    facts: Mapping[str, float] = field(default_factory=dict)  # of the calibration


def cluster_of(
    memory_gb: float, options: Mapping[str, Any] | None = None, *, hosts: int = DEVICES, longest: int | None = 20_000
) -> Cluster:
    """Return eight devices with `memory_gb` each."""
    options = dict(options or {})
    given = {"dp": DEVICES, "memory_gb": memory_gb, "prefix_caching": False, "max_num_batched_tokens": BATCHED}
    given |= {"max_model_len": longest, "max_queued_requests": 10**6, "max_queued_tokens": 10**10}
    if "morph" in options.get("policy", ""):
        given["slo_ttft"] = SLO_TTFT
    hardware = load_hardware("a800")
    hardware = replace(hardware, devices_per_host=DEVICES // hosts, memory=max(hardware.memory, int(memory_gb * 1e9)))
    return resolve_cluster(EngineConfig(**given | options), ModelShape.load("qwen2.5-14b"), hardware)


# -- calibration


def calibrated(
    trace: Trace,
    *,
    rng: np.random.Generator,
    hosts: int = DEVICES,
    memory_gb: float | None = None,
    longest: int | None = 20_000,
    further: Callable[[Trace], Trace] = lambda trace: trace,
) -> Setting:
    """Return a setting in which memory runs out in overloads, and computing does not.

    The rate is the largest for which the requests of the busiest 10 s need no more than the share `BUSIEST` of the
    devices' time. The memory has room for `PROVISION` times the KV pages that requests hold or wait for on average,
    where memory never runs out. With `memory_gb` that is given, and the rate follows from it instead. `further` adds
    requests to the trace of that rate.
    """
    unlimited = cluster_of(PLENTY_GB, hosts=hosts, longest=longest)
    cost = unlimited.true_costs.of(unlimited.memory.plan.instances[0])
    if memory_gb is None:
        trace = further(scaled(trace, BUSIEST / compute_share(trace, cost, BATCHED, DEVICES).max(), rng))
        demand = kv_demand(unlimited, trace)
        tokens = max(PROVISION * float(demand.mean()) / DEVICES, (longest or 0) + 2500)
        memory_gb = memory_for(tokens, hosts, longest)
    else:
        tokens = kv_tokens(cluster_of(memory_gb, hosts=hosts, longest=longest)) * DEVICES
        trace, demand = _filling(trace, unlimited, tokens / PROVISION, rng)
    tokens = kv_tokens(cluster_of(memory_gb, hosts=hosts, longest=longest)) * DEVICES
    share = compute_share(trace, cost, BATCHED, DEVICES)
    facts = {
        "requests/s": len(trace) / trace.duration_s,
        "KV tokens": tokens,
        "KV over the average demand": tokens / float(demand.mean()),
        "largest demand over KV": float(demand.max()) / tokens,
        "mean compute": float(share.mean()),
        "busiest 10 s compute": float(share.max()),
    }
    return Setting(requests_of(trace), memory_gb, hosts, longest, overloads(demand, tokens), facts)


def _filling(trace: Trace, unlimited: Cluster, mean: float, rng: np.random.Generator) -> tuple[Trace, Floats]:
    """Return a trace with a mean demand of so many tokens of KV, and its demand by seconds.

    Computing suffices on average; otherwise the demand would have no end.
    """
    cost = unlimited.true_costs.of(unlimited.memory.plan.instances[0])
    low, high = 0.0, 1 / float(compute_share(trace, cost, BATCHED, DEVICES).mean())
    for _ in range(7):
        factor = (low + high) / 2
        made = scaled(trace, factor, rng)
        demand = kv_demand(unlimited, made)
        low, high = (factor, high) if demand.mean() < mean else (low, factor)
    return made, demand


def kv_demand(cluster: Cluster, trace: Trace) -> Floats:
    """Return the tokens of the KV pages that requests hold or wait for, by seconds of the trace."""
    built = build_simulation(cluster, detailed=False, interval=1.0)
    served(built, requests_of(trace))
    series = built.sampler.series()
    held = np.array(series["kv_pages_used"]) * cluster.config.page_size + np.array(series["num_tokens_waiting"])
    return held[np.array(series["t"]) <= trace.duration_s]


def kv_tokens(cluster: Cluster) -> int:
    """Return the tokens for which an instance has KV pages."""
    return (cluster.memory.plan.instances[0].kv_pages - 1) * cluster.config.page_size


def memory_for(tokens: float, hosts: int = DEVICES, longest: int | None = 20_000) -> float:
    """Return the memory of a device (GB) with room for KV pages of so many tokens, beside all layers."""
    low, high = 60.0, 100.0
    few, many = (kv_tokens(cluster_of(each, hosts=hosts, longest=longest)) for each in (low, high))
    return round(low + (tokens - few) * (high - low) / (many - few), 1)


def overloads(demand: Floats, tokens: int, gap: float = 60.0) -> list[tuple[float, float]]:
    """Return from when to when (s) the demand exceeds the memory, with intervals less than `gap` apart as one."""
    found: list[tuple[float, float]] = []
    for second in np.flatnonzero(demand > tokens).tolist():
        begin = found.pop()[0] if found and second - found[-1][1] < gap else second
        found.append((begin, second + 1))
    return found


def requests_of(trace: Trace) -> list[SimRequest]:
    """Return the requests of a trace, whose lengths are at least 1."""
    columns = (trace.arrival_s, np.maximum(trace.input_tokens, 1), np.maximum(trace.output_tokens, 1))
    return [SimRequest(*each) for each in zip(*(column.tolist() for column in columns), strict=True)]


# -- runs


@dataclass(frozen=True)
class Busy:
    """The time that the stages of a pipeline computed for one step."""

    time: float  # s
    busy: float  # s, of all stages
    there: float  # s, of all stages with work in flight


@dataclass(frozen=True)
class Outcome:
    """The result of a system on a trace. Times are those of answered requests."""

    arrival: Floats
    prompts: NDArray[np.int64]  # tokens
    ttft: Floats
    tpot: Floats
    last: Floats
    lengths: NDArray[np.int64]
    refused: int
    preempted: int
    steps: Sequence[Busy]  # of pipelines
    sets: Sequence[tuple[float, bool]]  # from when on (s), and whether each device had an instance of its own
    exchanges: Sequence[tuple[float, float]]  # from when to when (s)
    restored: bool  # at the end

    def within(self, ttft: float | Floats, tpot: float) -> float:
        """Return the share of all requests whose times are no longer."""
        return float(np.sum((self.ttft <= ttft) & (self.tpot <= tpot)) / (len(self.ttft) + self.refused))

    def percentile_ttft(self, percent: float) -> float:
        """Return a percentile over all requests; a refused one waits for ever."""
        waited = np.concatenate([self.ttft, np.full(self.refused, np.inf)])
        return float(np.percentile(waited, percent, method="lower"))

    def bubbles(self, times: Sequence[tuple[float, float]] | None = None) -> float | None:
        """Return the share of the time with work in which stages were idle, by default at any time."""
        steps = [step for step in self.steps if times is None or any(a <= step.time < b for a, b in times)]
        there = sum(step.there for step in steps)
        return 1 - sum(step.busy for step in steps) / there if there else None

    def throughput(self, times: Sequence[tuple[float, float]] | None = None) -> float:
        """Return the output tokens/s, by default from the first second to the last."""
        spans, total = times or [(0.0, float(self.last.max()))], 0.0
        begin = self.arrival + self.ttft
        for start, end in spans:
            inside = np.clip(np.minimum(self.last, end) - np.maximum(begin, start), 0, None)
            total += float(np.sum(self.lengths * inside / np.maximum(self.last - begin, 1e-9)))
        return total / sum(end - start for start, end in spans)

    def grouped(self) -> float:
        """Return the share of the time in which not every device had an instance of its own."""
        return (
            sum(self.ends(index) - time for index, (time, whole) in enumerate(self.sets) if not whole) / self.last.max()
        )

    def ends(self, index: int) -> float:
        """Return until when (s) a set of instances was there."""
        return (
            self.sets[index + 1][0] if index + 1 < len(self.sets) else max(float(self.last.max()), self.sets[index][0])
        )

    def whole_after(self, time: float) -> float | None:
        """Return how long after a time each device had an instance of its own again, None if that never was so."""
        times = [
            max(begin, time) for index, (begin, whole) in enumerate(self.sets) if whole and self.ends(index) > time
        ]
        return min(times, default=time if not self.sets else None) - time if times or not self.sets else None

    def dropped_after(self, time: float) -> float | None:
        """Return how long after a time the next group began, None if there is none."""
        times = [begin for begin, whole in self.sets if not whole and begin >= time]
        return min(times) - time if times else None


def outcome(system: System, setting: Setting) -> Outcome:
    """Simulate a system."""
    memory = PLENTY_GB if system.plenty else setting.memory_gb
    cluster = cluster_of(memory, system.options, hosts=setting.hosts, longest=setting.longest)
    page, links = cluster.resources.page_bytes(cluster.memory.plan.instances[0].stages[0]), cluster.hardware.links
    with ExitStack() as stack:
        steps = stack.enter_context(_recorded())
        if system.at_once:
            stack.enter_context(patch.object(PageExchange, "_chunk", lambda _: ALL_ROWS))
        if system.swaps:
            stack.enter_context(swapping(links["pcie"].seconds(page)))
        built = build_simulation(cluster, detailed=False, interval=0.0)
        if system.swaps:
            connect(built)
        if system.migrates:
            link = cluster.hardware.link(0, DEVICES - 1)
            overheads = cluster.hardware.overheads
            frontend = Frontend(overheads.request, overheads.prompt_token, overheads.stream)
            built, _ = with_migration(built, link, page, frontend)
        answers = served(built, setting.requests)
    return _outcome(built, answers, steps)


@contextmanager
def _recorded() -> Iterator[list[Busy]]:
    """Record what the stages of pipelines do meanwhile."""
    steps: list[Busy] = []
    dispatch = Pipeline.dispatch

    def recorded(pipeline: Pipeline, begin: float, times: Sequence[StageTime]) -> list[Interval]:
        busy, span = pipeline.busy, pipeline.span
        intervals = dispatch(pipeline, begin, times)
        steps.append(Busy(begin, pipeline.busy - busy, pipeline.stages * (pipeline.span - span)))
        return intervals

    with patch.object(Pipeline, "dispatch", recorded):
        yield steps


def _outcome(built: BuiltSimulation, answers: Sequence[Answered], steps: Sequence[Busy]) -> Outcome:
    done = [answer for answer in answers if answer.error is None]
    arrival = np.array([answer.request.arrival for answer in done])
    first, last = (np.array([getattr(answer, at) for answer in done]) for at in ("first_token", "last_token"))
    lengths = np.array([answer.output_tokens for answer in done])
    control = built.control
    exchanges: dict[str, tuple[float, float]] = {}
    for chunk in [] if control is None else control.chunks:
        begin, end = exchanges.get(chunk.instance, (chunk.time, chunk.end))
        exchanges[chunk.instance] = min(begin, chunk.time), max(end, chunk.end)
    return Outcome(
        arrival,
        np.array([answer.request.input_tokens for answer in done]),
        first - arrival,
        (last - first) / np.maximum(lengths - 1, 1),
        last,
        lengths,
        len(answers) - len(done),
        int(built.simulation.front.snapshot().preemptions),
        steps,
        [] if control is None else [(each.time, len(each.instances) == DEVICES) for each in control.sets],
        list(exchanges.values()),
        control is None or control.settled_since is not None,
    )
