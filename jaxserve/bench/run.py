"""One measured run: server, workload, load, result."""

import asyncio
import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxserve.bench.client import Client, Target
from jaxserve.bench.consistency import check_server, check_workload
from jaxserve.bench.environment import describe_environment
from jaxserve.bench.load import Load, run_load
from jaxserve.bench.metrics import PERCENTILES, summarize
from jaxserve.bench.options import ArrivalOptions, DatasetOptions, LoadOptions, ServerOptions, TraceOptions
from jaxserve.bench.record import RequestRecord
from jaxserve.bench.result import Kind, Result, build
from jaxserve.bench.sampler import MetricsSampler
from jaxserve.bench.server import discover, request_target, served_vocabulary, serving
from jaxserve.bench.vocabulary import Vocabulary
from jaxserve.bench.workload import Sample, Workload
from jaxserve.bench.workload_builder import build_workload
from jaxserve.console.progress import progress_bar
from jaxserve.core.errors import ConfigError


@dataclass(frozen=True)
class Experiment:
    """All options that a run depends on, so that it can be repeated."""

    server: ServerOptions
    load: LoadOptions
    dataset: DatasetOptions
    arrivals: ArrivalOptions
    trace: TraceOptions
    label: str | None = None
    progress: bool = True


def run_experiment(experiment: Experiment, kind: Kind, command: Sequence[str]) -> Result:
    """Measure a server and return the result; after Ctrl-C, a result of what was measured until then.

    Raise ConfigError, before any load is sent, if options contradict each other or the server refuses a warm-up
    request. Raise SpawnError if a spawned server does not start.
    """
    server, options = experiment.server, experiment.load
    check_server(server, options)
    check_workload(experiment.dataset, experiment.arrivals, experiment.trace)  # before any server is started
    objectives, percentiles = options.objectives(), _percentiles(options)
    as_text = (server.prompt_format or ("text" if server.is_chat else "tokens")) == "text"
    if server.is_chat and not as_text:
        raise ConfigError("--prompt-format is tokens: a chat endpoint takes text alone")
    if server.ignore_eos is None:
        server = replace(server, ignore_eos=experiment.dataset.dataset == "trace")
    with serving(server) as base_url:
        model = discover(base_url, server)
        vocabulary = served_vocabulary(model, server)
        target = request_target(base_url, model, server)
        workload = build_workload(
            experiment.dataset, experiment.arrivals, experiment.trace, vocabulary, as_text=as_text
        )
        warmups = list(_warmups(workload, vocabulary, options.num_warmups, as_text))
        load, series, queue = asyncio.run(_measure(target, workload, warmups, options, experiment.progress))
    settings = {
        "backend": "openai-chat" if target.is_chat else "openai",
        "label": experiment.label,
        "base_url": base_url,
        "model_id": model.name,
        "tokenizer_id": vocabulary.name,
        "num_prompts": len(workload.requests),
        "request_rate": _rate(experiment, workload),
        "burstiness": experiment.arrivals.burstiness,
        "max_concurrency": options.max_concurrency,
        "ignore_eos": server.ignore_eos,
        "slo": objectives,
        "serve_args": server.serve_args if server.spawn else None,
    }
    summary = summarize(load.records, load.duration_s, goodput=objectives, percentiles=percentiles)
    return build(
        kind,
        date=datetime.datetime.now(),
        command=command,
        environment=describe_environment(),
        seed=experiment.dataset.seed,
        target=settings,
        workload=workload.description,
        summary=summary | queue,
        records=load.records,
        client=load.client | {"warning": load.warning},
        server=series,
        interrupted=load.interrupted,
        save_detailed=options.save_detailed,
    )


def run_in_turn(
    experiment: Experiment,
    configurations: Mapping[str, str],
    rounds: int,
    memory_gb: float | None,
    command: Sequence[str],
) -> Iterable[Result]:
    """Measure servers of several configurations (label: arguments) one after another, `rounds` times.

    All get the same load and the same memory. Every other round runs in reverse order, so that a drift of the machine
    affects all configurations alike. Yields each result, and stops after one that was interrupted.
    """
    kind: Kind = "trace" if experiment.dataset.dataset == "trace" else "serve"
    memory = "" if memory_gb is None else f" --memory-gb {memory_gb:g}"
    for index in range(rounds):
        order = list(configurations.items())
        for label, args in order if index % 2 == 0 else reversed(order):
            server = replace(experiment.server, spawn=True, serve_args=args + memory)
            labelled = replace(experiment, server=server, label=label)
            result = run_experiment(labelled, kind, command)
            yield result
            if result["interrupted"]:
                return


def _percentiles(options: LoadOptions) -> list[float]:
    """Return the percentiles that scripts look for and those that the options add."""
    return sorted({*PERCENTILES, *options.percentiles()})


async def _measure(
    target: Target, workload: Workload, warmups: Sequence[Sample], options: LoadOptions, progress: bool
) -> tuple[Load, dict[str, Any], dict[str, Any]]:
    """Return the load, the server's series and the figures of its queue."""
    async with Client(target) as client:
        await asyncio.gather(*(_warm_up(client, sample) for sample in warmups))
        with progress_bar("requests", len(workload.requests), shown=progress) as bar:

            def advance(record: RequestRecord) -> None:
                bar.advance()

            async def send_load() -> Load:
                return await run_load(workload, client, max_concurrency=options.max_concurrency, on_progress=advance)

            if options.metrics_interval <= 0:
                return await send_load(), {}, {}
            async with MetricsSampler(target.base_url, options.metrics_interval, target.api_key) as sampler:
                load = await send_load()
            return load, sampler.series(load.origin_s), sampler.queue_time(_percentiles(options))


async def _warm_up(client: Client, sample: Sample) -> None:
    record = RequestRecord(index=0, due_s=0.0, arrival_s=0.0, input_tokens=sample.input_tokens)
    await client.send(sample, record)
    if record.error:
        raise ConfigError(f"the server did not answer a warm-up request: {record.error}")


def _warmups(workload: Workload, vocabulary: Vocabulary, count: int, as_text: bool) -> Iterable[Sample]:
    """Yield requests as long as the first ones but of other tokens, so that the prefix cache cannot help the run."""
    rng = np.random.default_rng([workload.description["seed"], 1])
    for request in workload.requests[:count]:
        n = request.sample.input_tokens
        prompt = vocabulary.text_of_length(rng, n)[0] if as_text else vocabulary.random_ids(rng, n)
        yield replace(request.sample, prompt=prompt)


def _rate(experiment: Experiment, workload: Workload) -> float:
    """Return the offered requests per second: the configured rate, or the mean rate of a trace or ramp."""
    if experiment.dataset.dataset != "trace" and experiment.arrivals.ramp() is None:
        return experiment.arrivals.request_rate
    last = workload.requests[-1].arrival_s
    return len(workload.requests) / last if last else float("inf")
