"""The load of a calibration: every kind of step that a server takes, over HTTP, as a real load has them.

    lone     one request after the other, of prompts of several lengths: what lies outside of the engine
    batches  so many clients, each with one request after the other, with little and with much behind them: steps that
             mostly decode
    mixed    the same with requests of any length: decodes beside prompts
    open     such requests at random times, half as many as were answered then, and three quarters: as users come

Clients go on for a while, so that the server's other threads are as far behind the engine as they ever are. Phases end
with the time that they have, and not before each kind was there once.
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
LOADS = (0.5, 0.75)  # of what is answered when clients do not pause
LONE_ANSWER, BATCH_ANSWERS, MIXED_ANSWERS = 8, (32, 96), (1, 64)  # tokens
SHORT = 16  # tokens of a prompt with little behind it
DEEP = 8192  # tokens that a whole batch has behind it at most: the rest is a straight line
GAP = 0.01  # s between lone requests, so that the engine is idle
Progress = Callable[[str], None]
Lengths = Callable[[], tuple[int, int]]  # tokens of a prompt and of its answer


@dataclass(frozen=True)
class Limits:
    """What the server can take."""

    max_num_seqs: int
    max_model_len: int  # tokens
    prefill_tokens: int  # of a step
    kv_tokens: int  # that its pages hold
    vocab_size: int


@dataclass(frozen=True)
class Given:
    """Requests with times of the monotonic clock: those that came alone, and those that came as users do."""

    lone: tuple[RequestRecord, ...]
    open: tuple[RequestRecord, ...]


class CalibrationLoad:
    """Loads one server for `seconds`, or somewhat longer where steps are slow."""

    def __init__(self, client: Client, limits: Limits, seconds: float, seed: int = 0):
        self._client, self._limits, self._seconds = client, limits, seconds
        self._rng = np.random.default_rng(seed)

    async def run(self, progress: Progress = lambda phase: None) -> Given:
        """All phases, each announced. Raises `ConfigError` if a request is not answered."""
        await asyncio.gather(*(self._send(SHORT, LONE_ANSWER) for _ in range(2)))  # connections, and first calls
        progress("lone requests")
        lone = await self._lone(self._seconds * SHARES["lone"])
        progress("batches")
        await self._batches(self._seconds * SHARES["batches"])
        progress("prompts beside answers")
        rate = await self._mixed(self._seconds * SHARES["mixed"])
        progress("requests at random times")
        found = [await self._open(self._seconds * SHARES["open"] / len(LOADS), load * rate) for load in LOADS]
        return Given(tuple(lone), tuple(record for records in found for record in records))

    async def _lone(self, seconds: float) -> list[RequestRecord]:
        records, end = [], time.monotonic() + seconds
        while time.monotonic() < end or not records:
            for length in prompt_lengths(self._limits):
                records.append(await self._send(length, LONE_ANSWER))
                await asyncio.sleep(GAP)
        return records

    async def _batches(self, seconds: float) -> None:
        cases = list(batches(self._limits))
        for size, prompt in cases:
            await self._clients(size, seconds / len(cases), lambda prompt=prompt: (prompt, self._drawn(BATCH_ANSWERS)))

    async def _mixed(self, seconds: float) -> float:
        """Returns how many requests per second were answered with as many clients as run at once."""
        most = self._limits.max_num_seqs
        sizes = sorted({max(1, most // 8), max(1, most // 2), most})
        rates = [await self._clients(clients, seconds / len(sizes), self._any_lengths) for clients in sizes]
        return rates[-1]

    async def _open(self, seconds: float, rate: float) -> list[RequestRecord]:
        """Requests at random times, so many per second."""
        tasks, end = [], time.monotonic() + seconds
        while time.monotonic() < end or not tasks:
            tasks.append(asyncio.create_task(self._send(*self._any_lengths())))
            await asyncio.sleep(self._rng.exponential(1 / rate))
        return await asyncio.gather(*tasks)

    async def _clients(self, count: int, seconds: float, lengths: Lengths) -> float:
        """So many clients, each with one request after the other; returns how many per second were answered."""
        start, answered = time.monotonic(), 0

        async def one() -> None:
            nonlocal answered
            done = False
            while time.monotonic() < start + seconds or not done:
                await self._send(*lengths())
                answered, done = answered + 1, True

        await asyncio.gather(*(one() for _ in range(count)))
        return answered / (time.monotonic() - start)

    async def _send(self, prompt: int, answer: int) -> RequestRecord:
        """One request of random tokens, to its end."""
        tokens = tuple(self._rng.integers(1, self._limits.vocab_size, prompt).tolist())
        now = time.monotonic()
        record = RequestRecord(0, now, now, prompt)
        await self._client.send(Sample(tokens, prompt, min(answer, self._limits.max_model_len - prompt)), record)
        if record.error is not None:
            raise ConfigError(f"a request of {prompt} and {answer} tokens was not answered: {record.error}")
        return record

    def _any_lengths(self) -> tuple[int, int]:
        longest = prompt_lengths(self._limits)[-1]
        return int(np.exp(self._rng.uniform(0, np.log(longest)))), self._drawn(MIXED_ANSWERS)

    def _drawn(self, between: tuple[int, int]) -> int:
        return int(self._rng.integers(*between, endpoint=True))


def prompt_lengths(limits: Limits) -> list[int]:
    """From short to long, each about twice the one before; the longest takes several steps, if the model allows."""
    longest = min(2 * limits.prefill_tokens, limits.max_model_len - LONE_ANSWER, limits.kv_tokens // 2)
    lengths = [longest]
    while lengths[-1] > 2 * SHORT:
        lengths.append(lengths[-1] // 2)
    return lengths[::-1]


def batches(limits: Limits) -> Iterator[tuple[int, int]]:
    """(clients, prompt tokens of each): the sizes of steps, and one between each two."""
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
