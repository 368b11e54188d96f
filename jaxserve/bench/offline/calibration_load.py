"""The load of a calibration, over HTTP, which makes a server take every kind of step that real loads cause.

    lone     single requests with prompts of several lengths: shows the time spent outside the engine
    batches  clients that each send one request after the other, with short and long contexts: mostly decode steps
    mixed    clients whose requests have any length: decodes next to prompts
    open     requests of any length at random times, at 0.5 and 0.75 times the rate that `mixed` reached

Clients run for some time, so that the delay of the server's other threads reaches its maximum. A phase ends when its
time is over and each of its cases has run at least once.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from jaxserve.bench.client import Client
from jaxserve.bench.record import RequestRecord
from jaxserve.bench.workload import Sample
from jaxserve.core.errors import ConfigError

SHARES = {"lone": 0.1, "batches": 0.45, "mixed": 0.2, "open": 0.25}  # of the time
LOADS = (0.5, 0.75)  # of the rate at which clients that do not pause are answered
LONE_ANSWER, BATCH_ANSWERS, MIXED_ANSWERS = 8, (32, 96), (1, 64)  # tokens
SHORT = 16  # tokens of a prompt with a short context
DEEP = 8192  # most context tokens of a whole batch: times grow linearly beyond
GAP_S = 0.01  # between lone requests, so that the engine is idle
Progress = Callable[[str], None]
Lengths = Callable[[], tuple[int, int]]  # draws the tokens of a prompt and of its answer


@dataclass(frozen=True)
class Limits:
    """The limits of the server."""

    max_num_seqs: int
    max_model_len: int  # tokens
    prefill_tokens: int  # per step
    kv_tokens: int  # in all KV pages
    vocab_size: int


@dataclass(frozen=True)
class LoadRecords:
    """Records of the phases `lone` and `open`, with times of the monotonic clock."""

    lone: tuple[RequestRecord, ...]
    open: tuple[RequestRecord, ...]


class CalibrationLoad:
    """The load on one server for `seconds`, or somewhat longer if steps are slow."""

    def __init__(self, client: Client, limits: Limits, seconds: float, seed: int = 0):
        self._client, self._limits, self._seconds = client, limits, seconds
        self._rng = np.random.default_rng(seed)

    async def run(self, progress: Progress = lambda phase: None) -> LoadRecords:
        """Run all phases and return their records; `progress` is called with the name of each.

        Raise ConfigError if a request is not answered.
        """
        # Opens connections and makes all first calls.
        await asyncio.gather(*(self._send(SHORT, LONE_ANSWER) for _ in range(2)))
        progress("lone requests")
        lone = await self._lone(self._seconds * SHARES["lone"])
        progress("batches")
        await self._batches(self._seconds * SHARES["batches"])
        progress("prompts and decodes mixed")
        rate = await self._mixed(self._seconds * SHARES["mixed"])
        progress("requests at random times")
        found = [await self._open(self._seconds * SHARES["open"] / len(LOADS), load * rate) for load in LOADS]
        return LoadRecords(tuple(lone), tuple(record for records in found for record in records))

    async def _lone(self, seconds: float) -> list[RequestRecord]:
        records, end = [], time.monotonic() + seconds
        while time.monotonic() < end or not records:
            for length in prompt_lengths(self._limits):
                records.append(await self._send(length, LONE_ANSWER))
                await asyncio.sleep(GAP_S)
        return records

    async def _batches(self, seconds: float) -> None:
        cases = list(batches(self._limits))
        for size, prompt in cases:
            await self._clients(size, seconds / len(cases), lambda prompt=prompt: (prompt, self._drawn(BATCH_ANSWERS)))

    async def _mixed(self, seconds: float) -> float:
        """Return the requests answered per second with as many clients as the server runs sequences."""
        max_clients = self._limits.max_num_seqs
        sizes = sorted({max(1, max_clients // 8), max(1, max_clients // 2), max_clients})
        rates = [await self._clients(clients, seconds / len(sizes), self._any_lengths) for clients in sizes]
        return rates[-1]

    async def _open(self, seconds: float, rate: float) -> list[RequestRecord]:
        """Send requests at random times, `rate` per second on average."""
        tasks, end = [], time.monotonic() + seconds
        while time.monotonic() < end or not tasks:
            tasks.append(asyncio.create_task(self._send(*self._any_lengths())))
            await asyncio.sleep(self._rng.exponential(1 / rate))
        return await asyncio.gather(*tasks)

    async def _clients(self, count: int, seconds: float, lengths: Lengths) -> float:
        """Run `count` clients that each send one request after the other; return requests answered per second."""
        start, answered = time.monotonic(), 0

        async def run_client() -> None:
            nonlocal answered
            done = False
            while time.monotonic() < start + seconds or not done:
                await self._send(*lengths())
                answered, done = answered + 1, True

        await asyncio.gather(*(run_client() for _ in range(count)))
        return answered / (time.monotonic() - start)

    async def _send(self, prompt: int, answer: int) -> RequestRecord:
        """Send one request of random tokens and wait for its answer."""
        tokens = tuple(self._rng.integers(1, self._limits.vocab_size, prompt).tolist())
        now = time.monotonic()
        record = RequestRecord(0, now, now, prompt)
        await self._client.send(Sample(tokens, prompt, min(answer, self._limits.max_model_len - prompt)), record)
        if record.error is not None:
            raise ConfigError(f"a request for {answer} tokens after {prompt} was not answered: {record.error}")
        return record

    def _any_lengths(self) -> tuple[int, int]:
        longest = prompt_lengths(self._limits)[-1]
        return int(np.exp(self._rng.uniform(0, np.log(longest)))), self._drawn(MIXED_ANSWERS)

    def _drawn(self, between: tuple[int, int]) -> int:
        return int(self._rng.integers(*between, endpoint=True))


def prompt_lengths(limits: Limits) -> list[int]:
    """Return prompt lengths in increasing order, each about twice the one before.

    The longest takes several steps, if the model allows.
    """
    longest = min(2 * limits.prefill_tokens, limits.max_model_len - LONE_ANSWER, limits.kv_tokens // 2)
    lengths = [longest]
    while lengths[-1] > 2 * SHORT:
        lengths.append(lengths[-1] // 2)
    return lengths[::-1]


def batches(limits: Limits) -> Iterator[tuple[int, int]]:
    """Yield (clients, prompt tokens of each) for every step size and one size between each two."""
    size, sizes = 1, [limits.max_num_seqs]
    while size < limits.max_num_seqs:
        sizes += [size, size * 3 // 2]
        size *= 2
    for size in sorted({size for size in sizes if size <= limits.max_num_seqs}):
        room = min(limits.kv_tokens // size, limits.max_model_len) - BATCH_ANSWERS[1]
        deep = min(DEEP // size, room)
        yield size, max(1, min(SHORT, deep))
        if deep > 2 * SHORT:
            yield size, deep
