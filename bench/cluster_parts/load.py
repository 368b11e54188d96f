"""The load of the cluster demonstration: short requests that stream all the time, single long ones, and bursts."""

import argparse
import asyncio
import inspect
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.cluster_parts.setup import NAME
from jaxserve.bench.client import Client, Target
from jaxserve.bench.record import RequestRecord
from jaxserve.bench.workload import Sample
from jaxserve.core.bundled import bundled_model_path
from jaxserve.engine.tokenizer import Tokenizer

STREAMS = 2  # short requests at a time
SHORT, ANSWER, LONG_ANSWER = 40, 200, 32  # tokens
BURST_PROMPT, BURST_ANSWER = 430, 60  # tokens: nearly all KV pages of an instance
PAUSE_S = 0.8  # of a stream between two requests, so that two cores also compile


@dataclass
class Load:
    """The requests of the demonstration, with times in seconds after `began`."""

    url: str
    began: float
    short: list[RequestRecord] = field(default_factory=list)
    long: list[RequestRecord] = field(default_factory=list)
    bursts: list[RequestRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tokens = tuple(Tokenizer.load(bundled_model_path()).encode(inspect.getsource(argparse)))
        self._client = Client(Target(self.url, NAME, extra_body={"temperature": 0}, ignore_eos=True))

    async def __aenter__(self) -> "Load":
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__(None, None, None)

    async def stream(self, over: asyncio.Event) -> None:
        """Send short requests, a few at a time, until it is over and their answers have ended."""

        async def one_after_another(number: int) -> None:
            while not over.is_set():
                await self._send(SHORT, ANSWER, 50 * number, self.short)
                await asyncio.sleep(PAUSE_S)

        await asyncio.gather(*map(one_after_another, range(STREAMS)))

    async def ask(self, tokens: int) -> RequestRecord:
        """Send a long prompt, and return the record of its answer."""
        return await self._send(tokens, LONG_ANSWER, 1000 + len(self.long), self.long)

    async def burst(self, count: int) -> list[RequestRecord]:
        """Send requests all at once, and return the records of their answers."""
        first = len(self.bursts)
        sent = [self._send(BURST_PROMPT, BURST_ANSWER, 200 * number, self.bursts) for number in range(count)]
        await asyncio.gather(*sent)
        return self.bursts[first:]

    @property
    def errors(self) -> list[str]:
        """The errors of requests, in words."""
        return [record.error for record in (*self.short, *self.long, *self.bursts) if record.error]

    async def _send(self, tokens: int, answer: int, start: int, records: list[RequestRecord]) -> RequestRecord:
        sample = Sample(self._tokens[start : start + tokens], tokens, answer)
        record = RequestRecord(len(records), self._now(), self._now(), tokens)
        records.append(record)
        await self._client.send(sample, record, self._now)
        return record

    def _now(self) -> float:
        return time.monotonic() - self.began


def figures(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return what became of requests, with times in seconds."""
    first = [record.ttft_s for record in records if record.ttft_s is not None]
    return {
        "requests": len(records),
        "answered": sum(record.ok for record in records),
        "mean_ttft_s": statistics.mean(first) if first else None,
        "longest_ttft_s": max(first, default=None),
        "longest_gap_s": longest_gap(records),
    }


def longest_gap(records: Sequence[RequestRecord], since_s: float = 0.0) -> float:
    """Return the longest time between two parts of an answer that ended after a moment, in seconds; 0 without any."""
    pairs = (pair for record in records for pair in pairwise(record.chunk_times_s))
    return max((after - before for before, after in pairs if after > since_s), default=0.0)
