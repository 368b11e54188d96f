"""Open-loop load: every request is sent when it is due, even if the server has not answered earlier ones."""

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxserve.bench.record import RequestRecord
from jaxserve.bench.workload import BenchRequest, Sample, Workload

LATE_S = 0.010  # a request sent later than this after it was due is late
LAG_S = 0.010  # a wake-up later than this shows that the client's event loop lags
LAG_INTERVAL_S = 0.050
# Above either share the client is saturated: it has shaped what it measured.
TOLERATED_LATE = 0.01  # of requests
TOLERATED_LAG = 0.05  # of wake-ups; starting many requests at once delays a few

Clock = Callable[[], float]
Progress = Callable[[RequestRecord], None]


class Sender(Protocol):
    """The part of a `Client` that `run_load` needs."""

    async def send(self, sample: Sample, record: RequestRecord, now: Clock = ...) -> None: ...


@dataclass(frozen=True)
class Load:
    """The outcome of a run. `origin_s` is the clock's value at second 0 of the records."""

    records: list[RequestRecord]
    duration_s: float  # from the first arrival to the last end, or to the interruption
    interrupted: bool
    client: dict[str, Any] = field(default_factory=dict)  # of `client_health`
    origin_s: float = 0.0

    @property
    def warning(self) -> str | None:
        """A warning if the client fell behind, because figures then do not describe the server alone."""
        if not self.client.get("saturated"):
            return None
        return (
            "the client fell behind: "
            f"{self.client['late']} of {self.client['sent']} requests sent over {LATE_S * 1e3:g} ms late "
            f"(at most {self.client['max_lateness_ms']:.0f} ms), "
            f"its event loop lagged by up to {self.client['max_loop_lag_ms']:.0f} ms"
        )


async def run_load(
    workload: Workload,
    client: Sender,
    *,
    max_concurrency: int | None = None,
    clock: Clock = time.monotonic,
    on_progress: Progress | None = None,
) -> Load:
    """Send a workload and wait for all answers. `on_progress` is called for each request that ends.

    `clock` must be the event loop's clock, or run as it does. A request that cannot be sent in time is sent at once and
    counted as late. With `max_concurrency` a request is due when it has arrived and fewer than `max_concurrency` are in
    flight.

    Cancellation (Ctrl-C under `asyncio.run`) ends the run and is not raised: what was measured is returned, and the
    records of unfinished requests have no end.
    """
    origin = clock()
    run = _Run(workload.requests, client, max_concurrency, lambda: clock() - origin, on_progress)
    interrupted = False
    watch = asyncio.create_task(run.watch())
    try:
        with _garbage_collector_skips_old_objects():
            await run.send_all()
    except asyncio.CancelledError:
        if task := asyncio.current_task():
            task.uncancel()
        interrupted = True
    finally:
        watch.cancel()
    end = run.now() if interrupted else max((record.end_s or 0.0 for record in run.records), default=0.0)
    start = run.records[0].arrival_s if run.records else 0.0
    return Load(run.records, max(end - start, 0.0), interrupted, client_health(run.records, run.lags_s), origin)


@contextlib.contextmanager
def _garbage_collector_skips_old_objects() -> Iterator[None]:
    # Scanning all objects that exist before the run would stop the client for 0.1 to 0.3 s.
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Run:
    def __init__(
        self,
        requests: Sequence[BenchRequest],
        client: Sender,
        max_concurrency: int | None,
        now: Clock,
        on_progress: Progress | None,
    ):
        self.now = now
        self.records = [
            RequestRecord(index, request.arrival_s, request.arrival_s, request.sample.input_tokens)
            for index, request in enumerate(requests)
        ]
        self.lags_s: list[float] = []
        self._requests = requests
        self._client = client
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._on_progress = on_progress

    async def send_all(self) -> None:
        """Start every request at its arrival and wait for all of them."""
        async with asyncio.TaskGroup() as group:
            for request, record in zip(self._requests, self.records, strict=True):
                if (wait := request.arrival_s - self.now()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._send(request.sample, record))

    async def _send(self, sample: Sample, record: RequestRecord) -> None:
        async with self._slot(record):
            await self._client.send(sample, record, self.now)
        if self._on_progress:
            self._on_progress(record)

    @contextlib.asynccontextmanager
    async def _slot(self, record: RequestRecord) -> AsyncIterator[None]:
        if self._slots is None:
            yield
            return
        has_to_wait = self._slots.locked()
        async with self._slots:
            if has_to_wait:
                record.due_s = self.now()
            yield

    async def watch(self) -> None:
        """Record how late the event loop wakes a sleeping task, which is also how late it notices tokens."""
        while True:
            due = self.now() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.lags_s.append(max(self.now() - due, 0.0))


def client_health(records: Sequence[RequestRecord], lags_s: Sequence[float]) -> dict[str, Any]:
    """Return figures of the client's own delays: requests sent late, and the lag of its event loop in milliseconds.

    If all requests are due at once, as with an infinite rate, only the first can be on time. Their lateness is
    reported, but the lag alone decides whether the client was saturated.
    """
    lateness = np.array([record.lateness_s for record in records if record.sent_s is not None])
    lags = np.array(lags_s)
    late = int((lateness > LATE_S).sum())
    late_share = late / len(lateness) if len(lateness) else 0.0
    lag_share = float((lags > LAG_S).mean()) if len(lags) else 0.0
    paced = len({record.due_s for record in records}) > 1
    return {
        "sent": len(lateness),
        "late": late,
        "mean_lateness_ms": 1e3 * float(lateness.mean()) if len(lateness) else 0.0,
        "max_lateness_ms": 1e3 * float(lateness.max()) if len(lateness) else 0.0,
        "mean_loop_lag_ms": 1e3 * float(lags.mean()) if len(lags) else 0.0,
        "max_loop_lag_ms": 1e3 * float(lags.max()) if len(lags) else 0.0,
        "late_share": late_share,
        "loop_lag_share": lag_share,
        "saturated": (paced and late_share > TOLERATED_LATE) or lag_share > TOLERATED_LAG,
    }
