"""Results of `bench serve` made from a small model of a server with continuous batching, without waiting."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from jaxserve.bench.metrics import summarize
from jaxserve.bench.record import RequestRecord
from jaxserve.bench.result import build

STEP_S, PER_SEQUENCE_S, PREFILL_TOKENS_PER_S = 0.010, 0.0006, 20_000
PAGE, PAGES = 16, 2000
ENVIRONMENT = {"cpu": "some CPU", "cores": "2", "memory": "24 GiB", "jaxserve": "0.1.0"}


@dataclass
class SimulatedServer:
    """A server that decodes one token of each running sequence per step; requests wait for slots and pages."""

    slots: int = 32
    records: list[RequestRecord] = field(default_factory=list)
    waiting: list[tuple[RequestRecord, int]] = field(default_factory=list)
    running: list[tuple[RequestRecord, int]] = field(default_factory=list)
    pages: int = PAGES
    slower: float = 1.0
    series: dict[str, list[float]] = field(default_factory=dict)

    def used(self) -> int:
        return sum(-(-(record.input_tokens + record.output_tokens) // PAGE) for record, _ in self.running)

    def admit(self) -> int:
        """Move requests that fit from waiting to running; return the prompt tokens to compute."""
        prompts = 0
        while self.waiting and len(self.running) < self.slots:
            record, _ = self.waiting[0]
            if self.used() + record.input_tokens // PAGE + 8 > self.pages:
                break
            self.running.append(self.waiting.pop(0))
            prompts += record.input_tokens
        return prompts

    def step(self, now: float) -> float:
        """Run one step and return the time at which it ends."""
        prompts = self.admit()
        seconds = STEP_S + PER_SEQUENCE_S * len(self.running) + prompts / PREFILL_TOKENS_PER_S
        now += seconds * self.slower
        for record, wanted in list(self.running):
            record.chunk_times_s.append(now)
            record.output_tokens += 1
            if record.output_tokens == wanted:
                record.end_s = now
                self.running.remove((record, wanted))
        return now

    def sample(self, now: float, swap: bool) -> None:
        values = {
            "t": now,
            "num_requests_running": len(self.running),
            "num_requests_waiting": len(self.waiting),
            "kv_pages_used": self.used(),
            "kv_pages_total": self.pages,
            "plan_version": 2 if swap else 1,
            'layers_by_precision{precision="bfloat16"}': 8 if swap else 16,
            'layers_by_precision{precision="int8"}': 8 if swap else 0,
        }
        for name, value in values.items():
            self.series.setdefault(name, []).append(value)


def simulate(
    rate: float, *, n: int = 300, seed: int = 0, slots: int = 32, slower: float = 1.0, swap_at: float | None = None
) -> tuple[list[RequestRecord], dict[str, list[float]]]:
    """Return records and server series of n requests.

    At `swap_at` seconds half the layers become int8 and pages are added.
    """
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, n))
    outputs = 1 + rng.geometric(1 / 100, n)
    server = SimulatedServer(slots=slots, slower=slower)
    server.records = [
        RequestRecord(i, float(time), float(time), int(tokens))
        for i, (time, tokens) in enumerate(zip(arrivals, rng.integers(64, 900, n), strict=True))
    ]
    coming = list(zip(server.records, map(int, outputs), strict=True))
    now, sampled = 0.0, 0.0
    while coming or server.waiting or server.running:
        while coming and coming[0][0].arrival_s <= now:
            record, wanted = coming.pop(0)
            record.sent_s = record.arrival_s
            server.waiting.append((record, wanted))
        swapped = swap_at is not None and now >= swap_at
        server.pages = 2 * PAGES if swapped else PAGES
        if now >= sampled:
            server.sample(now, swapped)
            sampled += 1.0
        busy = server.waiting or server.running
        now = server.step(now) if busy else coming[0][0].arrival_s
    return server.records, server.series


def fail(records: Iterable[RequestRecord], reason: str) -> None:
    """Let requests fail after 0.2 seconds, without a token."""
    for record in records:
        record.chunk_times_s, record.output_tokens, record.error = [], 0, reason
        record.end_s = record.due_s + 0.2


def result(rate: float = 5.0, *, label: str | None = None, with_server: bool = True, **more: Any) -> dict[str, Any]:
    """Return a result of `bench serve` against the modelled server."""
    records, series = simulate(rate, **more)
    return result_of(records, series if with_server else {}, rate=rate, label=label, seed=more.get("seed", 0))


def result_of(
    records: list[RequestRecord],
    series: dict[str, list[float]] | None = None,
    *,
    rate: float = 5.0,
    label: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Return a result of `bench serve` with these records."""
    return build(
        "serve",
        date=datetime(2026, 11, 20, 18, 30, tzinfo=UTC),
        command=["jaxserve", "bench", "serve", "--request-rate", str(rate)],
        environment=ENVIRONMENT,
        seed=seed,
        target={"backend": "openai", "label": label, "model_id": "tiny", "request_rate": rate, "slo": {"ttft": 300.0}},
        workload={"dataset": "random", "input_len": "uniform:64,900"},
        summary=summarize(records, max(record.end_s or 0.0 for record in records)),
        records=records,
        server=series,
    )
