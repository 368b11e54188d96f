"""A client without a server, for tests of the load."""

import asyncio
import time
from collections import Counter

from jaxserve.bench.record import RequestRecord
from jaxserve.bench.workload import Sample


class FakeClient:
    """Answers every request with one token, or with `error`, after `seconds`, and counts requests in flight.

    It computes for `busy_s` before it sends a request, which needs a `VirtualLoop`.
    """

    def __init__(self, seconds: float, *, busy_s: float = 0.0, error: str | None = None):
        self.seconds, self.busy_s, self.error = seconds, busy_s, error
        self.samples: list[Sample] = []
        self.times_in_flight: Counter[int] = Counter()  # by number of requests in flight
        self._in_flight = 0

    async def send(self, sample: Sample, record: RequestRecord, now=time.monotonic) -> None:
        self.samples.append(sample)
        self._in_flight += 1
        self.times_in_flight[self._in_flight] += 1
        if self.busy_s:
            asyncio.get_running_loop().busy(self.busy_s)
        record.sent_s, record.error = now(), self.error
        await asyncio.sleep(self.seconds)
        record.chunk_times_s, record.output_tokens, record.end_s = [now()], 1, now()
        self._in_flight -= 1
