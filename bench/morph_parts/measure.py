"""One run: starting a server, loading it, sampling its metrics, and waiting until the first plan is restored."""

import asyncio
import datetime
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import httpx2

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

INTERVAL_S = 0.2  # between two scrapes
RESTORE_TIMEOUT_S = 40.0  # for layers and pages to return after the load
SETTLED = ("layers_by_precision", "kv_pages_total")  # series that are as at the start after a restore
READY_S = 600.0  # the 8B takes minutes to round its layers
PERCENTILES = (50.0, 90.0, 95.0, 99.0)
WARM_UPS = 4  # requests
MODEL_NAME = "model"

Progress = Callable[[float, Scrape], None]
"""Called for every scrape with the seconds since the start of the load."""


@dataclass(frozen=True)
class Seen:
    """The observations of a run, with times in seconds after the start of the load."""

    load: Load
    series: Mapping[str, Any]
    queue: Mapping[str, Any]
    decisions: list[dict[str, Any]]
    end_s: float  # of the last answer
    restored_s: float | None  # since when layers and pages have been as at the start


def run(
    system: System, setup: Setup, workload: Workload, *, command: list[str], progress: Progress | None = None
) -> dict[str, Any]:
    """Measure one system under one workload and return a result of the bench with the additions of `result`.

    Raise JaxserveError if the server does not start or refuses a warm-up request.
    """
    with started(system) as url:
        return result(system, setup, workload, asyncio.run(measure(url, workload, progress)), command)


def started(system: System) -> AbstractContextManager[str]:
    """Start a server of the system, yield its URL, and stop it at the end."""
    return spawned((*system.serve_args, "--served-model-name", MODEL_NAME), timeout_s=READY_S)


async def measure(url: str, workload: Workload, progress: Progress | None = None) -> Seen:
    """Load the server, and sample it until everything that had changed is restored. Raise ConfigError."""
    watch = Watch(progress)
    target = Target(url, MODEL_NAME, extra_body={"temperature": 0}, ignore_eos=True)
    async with Client(target) as client:
        async with MetricsSampler(url, INTERVAL_S, on_scrape=watch.look):  # before anything can change
            await _until(lambda: watch.settled_since is not None, RESTORE_TIMEOUT_S)
        await asyncio.gather(*(_warm_up(client, request) for request in workload.requests[:WARM_UPS]))
        async with MetricsSampler(url, INTERVAL_S, on_scrape=watch.look) as sampler:
            watch.origin_s = time.monotonic()
            load = await run_load(workload, client)
            watch.origin_s = load.origin_s
            end = max((record.end_s or 0.0 for record in load.records), default=0.0)
            ended = time.monotonic()  # earlier scrapes may be out of date
            await _until(lambda: watch.last_scrape_s > ended and watch.settled_since is not None, RESTORE_TIMEOUT_S)
        decisions = await _decisions(url, load.origin_s)
    restored = None if watch.settled_since is None else watch.settled_since - load.origin_s
    return Seen(load, sampler.series(load.origin_s), sampler.queue_time(PERCENTILES), decisions, end, restored)


class Watch:
    """A record of since when layers and pages have been as in the first scrape."""

    def __init__(self, progress: Progress | None = None):
        self.origin_s = time.monotonic()
        self.settled_since: float | None = None
        self.last_scrape_s = -math.inf
        self._progress = progress
        self._start: dict[str, float] | None = None

    def look(self, time_s: float, scrape: Scrape) -> None:
        """Take in a scrape made at `time_s` of the monotonic clock."""
        self.last_scrape_s = time_s
        state = {name: value for name, value in scrape.values.items() if name.startswith(SETTLED)}
        self._start = state if self._start is None else self._start
        if state != self._start:
            self.settled_since = None
        elif self.settled_since is None:
            self.settled_since = time_s
        if self._progress:
            self._progress(time_s - self.origin_s, scrape)


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(INTERVAL_S / 4)


async def _warm_up(client: Client, request: BenchRequest) -> None:
    """Send a request with equal lengths and other tokens, so that the prefix cache cannot help the run."""
    prompt = tuple(reversed(request.sample.prompt))
    sample = Sample(prompt, request.sample.input_tokens, min(request.sample.output_tokens, 16))
    record = RequestRecord(0, 0.0, 0.0, sample.input_tokens)
    await client.send(sample, record)
    if record.error:
        raise ConfigError(f"the server did not answer a warm-up request: {record.error}")


async def _decisions(url: str, origin_s: float) -> list[dict[str, Any]]:
    """Return the controller's decisions, none for a static engine, with times of the run.

    Server and client read one clock.
    """
    deadline = time.monotonic() + RESTORE_TIMEOUT_S
    async with httpx2.AsyncClient(trust_env=False) as http:
        while True:
            answer = await http.get(f"{url}/admin/decisions", params={"limit": 1000})
            entries = answer.json()["decisions"] if answer.status_code == httpx2.codes.OK else []
            if not entries or entries[-1]["outcome"] != "started" or time.monotonic() > deadline:
                return [entry | {"time": entry["time"] - origin_s} for entry in entries]
            await asyncio.sleep(INTERVAL_S)


def result(system: System, setup: Setup, workload: Workload, seen: Seen, command: list[str]) -> dict[str, Any]:
    """Return the bench's result with `system`, `kv_pages`, `decisions`, `prompts` and `restored_after_s`.

    `restored_after_s` is the time from the end of the last answer until layers and pages are as at the start. It is 0
    if they were so already, and None if they were not before the timeout.
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
