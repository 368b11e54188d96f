"""One simulated run: a workload on a cluster, with a result in the form of `jaxserve bench`."""

import datetime
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxserve.bench.environment import describe_environment
from jaxserve.bench.metrics import PERCENTILES, summarize
from jaxserve.bench.options import ArrivalOptions, DatasetOptions, TraceOptions
from jaxserve.bench.prometheus import parse
from jaxserve.bench.record import RequestRecord
from jaxserve.bench.result import Result, build, plain
from jaxserve.console.progress import progress_bar
from jaxserve.core.errors import ConfigError
from jaxserve.sim.build import BuiltSimulation, build_simulation
from jaxserve.sim.cluster import Cluster, parse_cluster, resolve_cluster
from jaxserve.sim.control import SimControl
from jaxserve.sim.hardware import load_hardware
from jaxserve.sim.options import ClusterOptions, FigureOptions
from jaxserve.sim.pipeline import bubbles
from jaxserve.sim.request_columns import RequestColumns
from jaxserve.sim.shape import ModelShape
from jaxserve.sim.simulation import Answered
from jaxserve.sim.workload import SimWorkload, sim_workload
from jaxserve.telemetry import EngineMetrics

MAX_DETAILED = 50_000  # maximum number of requests whose token times are stored by default
QUEUE_TIME = "request_queue_time_seconds"
MS = 1e3


@dataclass(frozen=True)
class SimExperiment:
    """All options of a simulated run."""

    cluster: ClusterOptions
    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    arrivals: ArrivalOptions = field(default_factory=ArrivalOptions)
    trace: TraceOptions = field(default_factory=TraceOptions)
    figures: FigureOptions = field(default_factory=FigureOptions)
    label: str | None = None
    progress: bool = False


@dataclass
class CollectedAnswers:
    """The results of the requests that have ended, as detailed records or as columns of a few numbers."""

    columns: RequestColumns
    records: list[RequestRecord] | None  # with the time of every token; None if results go to `columns`
    last_answer_s: float = 0.0
    interrupted: bool = False
    count: int = 0

    def take(self, answered: Answered) -> None:
        """Record the result of one request."""
        self.count += 1
        self.last_answer_s = max(self.last_answer_s, answered.last_token or 0.0)
        if self.records is None:
            self.columns.take(answered)
        else:
            self.records.append(record_of(answered))


def run_simulation(experiment: SimExperiment, command: Sequence[str]) -> Result:
    """Simulate and return the result, which is partial after Ctrl-C.

    `command` is the command line that the result names. Raise `ConfigError` if the options do not fit together, and
    `MemoryBudgetError` if the model does not fit.
    """
    load = experiment.figures.load()
    objectives, percentiles = load.objectives(), sorted({*PERCENTILES, *load.percentiles()})
    workload = sim_workload(experiment.dataset, experiment.arrivals, experiment.trace)
    caching = experiment.cluster.prefix_caching
    workload = SimWorkload(workload.trace, workload.description, distinct=bool(caching))
    cluster = cluster_of(experiment.cluster, prefix_caching=workload.shares if caching is None else caching)
    if not objectives and cluster.config.slo_ttft is not None:
        objectives = {"ttft": cluster.config.slo_ttft * MS}
    detail = experiment.figures.detail
    detailed = len(workload) <= MAX_DETAILED if detail is None else detail
    built = build_simulation(
        cluster, detailed=detailed, interval=load.metrics_interval, model_folder=experiment.cluster.model_folder
    )
    collected = simulate(built, workload, detailed=detailed, progress=experiment.progress)
    records = sorted(collected.records or (), key=lambda record: record.index)
    result = build(
        "trace" if "trace" in workload.description else "serve",
        date=datetime.datetime.now(),
        command=command,
        environment=describe_environment(),
        seed=experiment.dataset.seed,
        target=_target(experiment, cluster, workload, objectives),
        workload=workload.description,
        summary=_summary(collected, records, len(workload), objectives, percentiles)
        | queue_time(built.metrics, percentiles),
        records=records,
        server=built.sampler.series(),
        interrupted=collected.interrupted,
    )
    extra: dict[str, Any] = {"failures": dict(collected.columns.reasons)} if not detailed else {}
    idle = bubbles(built.pipelines)
    extra |= {} if idle is None else {"bubbles": idle}
    result |= plain(extra | _adaptation(built.control, collected))
    return result


def cluster_of(options: ClusterOptions, *, prefix_caching: bool) -> Cluster:
    """Resolve the cluster that the options describe.

    Raise `ConfigError` for an invalid option, and `MemoryBudgetError` if the model does not fit.
    """
    if options.hardware is None:
        raise ConfigError("no hardware is given: give a name in configs/hardware or a YAML file (--hardware)")
    hardware = load_hardware(options.hardware)
    devices, hardware = parse_cluster(options.cluster, hardware, options.tp * options.pp)
    config = options.config(devices, prefix_caching=prefix_caching)
    return resolve_cluster(config, ModelShape.load(options.model_path), hardware, elastic=options.elastic_kv)


def simulate(
    built: BuiltSimulation, workload: SimWorkload, *, detailed: bool, progress: bool = False
) -> CollectedAnswers:
    """Run a simulation to its end, or until Ctrl-C, and return the results of its requests."""
    collected = CollectedAnswers(RequestColumns(workload.trace), [] if detailed else None)
    try:
        with progress_bar("simulated requests", len(workload), shown=progress) as bar:
            for answered in built.simulation.run(workload.requests()):
                collected.take(answered)
                bar.advance()
                if collected.count == len(workload):
                    built.sampler.finish()
    except KeyboardInterrupt:
        collected.interrupted = True
    return collected


def record_of(answered: Answered) -> RequestRecord:
    """Return the record of a request as its client would see it: each token when it is sampled, a refusal at once."""
    arrival = answered.request.arrival
    return RequestRecord(
        index=answered.index,
        due_s=arrival,
        arrival_s=arrival,
        input_tokens=answered.request.input_tokens,
        sent_s=arrival,
        chunk_times_s=list(answered.token_times),
        end_s=arrival if answered.last_token is None else answered.last_token,
        output_tokens=answered.output_tokens,
        error=answered.error,
    )


def queue_time(metrics: EngineMetrics, percentiles: Sequence[float]) -> dict[str, float | None]:
    """Return mean_, median_ and pXX_queue_ms (ms) as `bench` computes them from /metrics.

    Percentiles are interpolated within the histogram's buckets.
    """
    queue = parse(metrics.render().decode()).histograms[QUEUE_TIME]
    figures = {"mean_queue_ms": queue.mean, "median_queue_ms": queue.quantile(0.5)}
    figures |= {f"p{percentile:g}_queue_ms": queue.quantile(percentile / 100) for percentile in percentiles}
    return {name: None if seconds is None else seconds * MS for name, seconds in figures.items()}


def _summary(
    collected: CollectedAnswers,
    records: Sequence[RequestRecord],
    requests: int,
    objectives: Mapping[str, float],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    if collected.records is None:
        return collected.columns.summary(goodput=objectives, percentiles=percentiles)
    end = max((record.end_s or 0.0 for record in records), default=0.0)
    duration = end - float(collected.columns.arrival_s[0]) if records else 0.0
    summary = summarize(records, duration, goodput=objectives, percentiles=percentiles)
    return summary | {"unfinished": requests - len(records)}


def _target(
    experiment: SimExperiment, cluster: Cluster, workload: SimWorkload, objectives: Mapping[str, float]
) -> dict[str, Any]:
    config, memory, plan = cluster.config, cluster.memory, cluster.memory.plan
    return {
        "simulated": True,
        "backend": "sim",
        "label": experiment.label,
        "model_id": cluster.info.name,
        "tokenizer_id": None,
        "num_prompts": len(workload),
        "request_rate": _rate(experiment, workload),
        "burstiness": experiment.arrivals.burstiness,
        "max_concurrency": None,
        "ignore_eos": True,
        "slo": objectives,
        "hardware": cluster.hardware.name,
        "cluster": experiment.cluster.cluster or str(config.tp * config.pp),
        "tp": config.tp,
        "pp": config.pp,
        "dp": config.dp,
        "microbatches": config.microbatches,
        "policy": config.policy,
        "variants": memory.variants,
        "precision": config.precision,
        "prefix_caching": config.prefix_caching,
        "memory_budget": memory.ledger.budget,
        "kv_pages": plan.instances[0].kv_pages - 1,
        "max_model_len": memory.max_model_len,
    }


def _rate(experiment: SimExperiment, workload: SimWorkload) -> float:
    """Return the offered requests/s: the given rate, or the mean of a trace or a ramp."""
    if "trace" not in workload.description and experiment.arrivals.ramp() is None:
        return experiment.arrivals.request_rate
    last = workload.trace.duration_s
    return len(workload) / last if last else float("inf")


def _adaptation(control: SimControl | None, collected: CollectedAnswers) -> dict[str, Any]:
    """Return the controller's decisions, its transitions, and the seconds until the plan at the start was restored.

    The seconds count from the last answer. They are 0 if it was in force already, and None if it was not restored.
    """
    if control is None:
        return {}
    since = control.settled_since
    restored = None if since is None else max(0.0, since - collected.last_answer_s)
    transitions = [
        {"transition": str(outcome.transition), "error": outcome.error, "seconds": outcome.seconds}
        for outcome in control.outcomes
    ]
    decisions = [asdict(decision) for decision in control.decisions]
    found: dict[str, Any] = {"decisions": decisions, "transitions": transitions, "restored_after_s": restored}
    if control.idle_reason is not None:
        found["idle_policy"] = control.idle_reason
    return found | _regroups(control, collected)


def _regroups(control: SimControl, collected: CollectedAnswers) -> dict[str, Any]:
    """Return the pauses of regroups, and the seconds with each set of instances until the last answer.

    A set is written as instances by their degree: "4x1 + 1x4", or "2x1x2" for two with 2 stages of degree 1. Nothing is
    returned if the set has never changed.
    """
    if len(control.sets) == 1:
        return {}
    seconds: defaultdict[str, float] = defaultdict(float)
    ends = [*(since.time for since in control.sets[1:]), max(collected.last_answer_s, control.sets[-1].time)]
    for since, end in zip(control.sets, ends, strict=True):
        degrees = Counter((plan.tp, plan.lanes, len(plan.stages)) for plan in since.instances)
        kinds = sorted(degrees.items())
        names = (f"{count}x{tp}" + (f"x{stages}" if lanes > 1 else "") for (tp, lanes, stages), count in kinds)
        seconds[" + ".join(names)] += end - since.time
    pauses = [asdict(pause) for pause in control.pauses]
    found: dict[str, Any] = {"count": len(control.sets) - 1, "pauses": pauses, "seconds_by_instances": dict(seconds)}
    if control.chunks:
        exchanged = sum(chunk.link_bytes for chunk in control.chunks)
        waited = sum(chunk.end - chunk.time for chunk in control.chunks)
        found["exchanged"] = {"chunks": len(control.chunks), "link_bytes": exchanged, "seconds": waited}
    return {"regroups": found}
