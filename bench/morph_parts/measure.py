"""One run: a server of its own, the load, what its metrics said, and whether full precision came back."""

import asyncio
import datetime
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import httpx

from bench.morph_parts.systems import Setup, System
from jaxserve.bench.client import Client, Target
from jaxserve.bench.environment import describe_environment
from jaxserve.bench.load import Load, run_load
from jaxserve.bench.metrics import summarize
from jaxserve.bench.prometheus import Scrape
from jaxserve.bench.record import RequestRecord
from jaxserve.bench.result import build, plain
from jaxserve.bench.sampler import MetricsSampler
from jaxserve.bench.spawn import spawned
from jaxserve.bench.workload import BenchRequest, Sample, Workload
from jaxserve.core.errors import ConfigError

INTERVAL_S = 0.2  # between two looks at the metrics
PATIENCE_S = 40.0  # for layers to come back after the load
SETTLED = ("layers_by_precision", "kv_pages_total")  # what is as at the start when all has come back
READY_S = 300.0
PERCENTILES = (50.0, 90.0, 95.0, 99.0)
WARM_UPS = 4  # requests
MODEL_NAME = "model"

Progress = Callable[[float, Scrape], None]
"""Told every look at the server: seconds since the load's start, and what was seen."""


@dataclass(frozen=True)
class Seen:
    """What came of a run. Times are seconds after the start of the load."""

    load: Load
    series: Mapping[str, Any]
    queue: Mapping[str, Any]
    decisions: list[dict[str, Any]]
    end_s: float  # of the last answer
    restored_s: float | None  # when layers and pages were first seen as at the start again, and stayed so


def run(
    system: System, setup: Setup, workload: Workload, *, command: list[str], progress: Progress | None = None
) -> dict[str, Any]:
    """Measures one system under one workload. The result has the bench's format; see `result` for what is added.

    Raises `JaxserveError` if the server does not start or refuses a request for warming up.
    """
    with started(system) as url:
        return result(system, setup, workload, asyncio.run(measure(url, workload, progress)), command)


def started(system: System) -> AbstractContextManager[str]:
    """A server of the system, which ends with the context; gives its URL."""
    return spawned((*system.serve_args, "--served-model-name", MODEL_NAME), timeout_s=READY_S)


async def measure(url: str, workload: Workload, progress: Progress | None = None) -> Seen:
    """Gives the load, and looks on until all that had changed is as before. Raises `ConfigError`."""
    watch = Watch(progress)
    target = Target(url, MODEL_NAME, extra_body={"temperature": 0}, ignore_eos=True)
    async with Client(target) as client:
        async with MetricsSampler(url, INTERVAL_S, on_scrape=watch.look):  # before anything can change
            await _until(lambda: watch.settled_since is not None, PATIENCE_S)
        await asyncio.gather(*(_warm_up(client, request) for request in workload.requests[:WARM_UPS]))
        async with MetricsSampler(url, INTERVAL_S, on_scrape=watch.look) as sampler:
            watch.origin_s = time.monotonic()
            load = await run_load(workload, client)
            watch.origin_s = load.origin_s
            end = max((record.end_s or 0.0 for record in load.records), default=0.0)
            ended = time.monotonic()  # what was seen before may be out of date
            await _until(lambda: watch.looked > ended and watch.settled_since is not None, PATIENCE_S)
        decisions = await _decisions(url, load.origin_s)
    restored = None if watch.settled_since is None else watch.settled_since - load.origin_s
    return Seen(load, sampler.series(load.origin_s), sampler.queue_time(PERCENTILES), decisions, end, restored)


class Watch:
    """Knows since when layers and pages are as they were at the first look. Mutable."""

    def __init__(self, progress: Progress | None = None):
        self.origin_s = time.monotonic()
        self.settled_since: float | None = None
        self.looked = -math.inf  # when the latest look was
        self._progress = progress
        self._start: dict[str, float] | None = None

    def look(self, time_s: float, scrape: Scrape) -> None:
        """Takes what was seen at `time_s` of the monotonic clock. Mutates."""
        self.looked = time_s
        state = {name: value for name, value in scrape.values.items() if name.startswith(SETTLED)}
        self._start = state if self._start is None else self._start
        if state != self._start:
            self.settled_since = None
        elif self.settled_since is None:
            self.settled_since = time_s
        if self._progress:
            self._progress(time_s - self.origin_s, scrape)


async def _until(condition: Callable[[], bool], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(INTERVAL_S / 4)


async def _warm_up(client: Client, request: BenchRequest) -> None:
    """A request of the same lengths and other tokens: the prefix cache must not know what is measured."""
    prompt = tuple(reversed(request.sample.prompt))
    sample = Sample(prompt, request.sample.input_tokens, min(request.sample.output_tokens, 16))
    record = RequestRecord(0, 0.0, 0.0, sample.input_tokens)
    await client.send(sample, record)
    if record.error:
        raise ConfigError(f"the server did not answer a request for warming up: {record.error}")


async def _decisions(url: str, origin_s: float) -> list[dict[str, Any]]:
    """Those of the controller, with times of the run: server and client read one clock. None of a static engine."""
    deadline = time.monotonic() + PATIENCE_S
    async with httpx.AsyncClient(trust_env=False) as http:
        while True:
            answer = await http.get(f"{url}/admin/decisions", params={"limit": 1000})
            entries = answer.json()["decisions"] if answer.status_code == httpx.codes.OK else []
            if not entries or entries[-1]["outcome"] != "started" or time.monotonic() > deadline:
                return [entry | {"time": entry["time"] - origin_s} for entry in entries]
            await asyncio.sleep(INTERVAL_S)


def result(system: System, setup: Setup, workload: Workload, seen: Seen, command: list[str]) -> dict[str, Any]:
    """The bench's result, with `system`, `kv_pages`, `decisions` and `restored_after_s`.

    `restored_after_s`: from the end of the last answer until layers and pages were as at the start; 0 if they were so
    already, None if they were not when patience ended.
    """
    objectives = {"ttft": setup.slo_ttft * 1e3}
    summary = summarize(seen.load.records, seen.load.duration_s, goodput=objectives, percentiles=PERCENTILES)
    target = {
        "label": system.label,
        "model_id": setup.name,
        "num_prompts": len(workload.requests),
        "slo": objectives,
        "serve_args": " ".join(system.serve_args),
    }
    measured = build(
        "trace",
        date=datetime.datetime.now(),
        command=command,
        environment=describe_environment(),
        target=target,
        workload=workload.description,
        summary=summary | dict(seen.queue),
        records=seen.load.records,
        client=seen.load.client | {"warning": seen.load.warning},
        server=seen.series,
        interrupted=seen.load.interrupted,
        save_detailed=True,
    )
    restored = None if seen.restored_s is None else max(0.0, seen.restored_s - seen.end_s)
    extra = {
        "system": system.name,
        "kv_pages": system.kv_pages,
        "restored_after_s": restored,
        "decisions": seen.decisions,
        "prompts": [list(request.sample.prompt) for request in workload.requests],
    }
    return measured | plain(extra)
