"""The server's own view of a run: its metrics, sampled at fixed intervals."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import httpx2

from jaxserve.bench.prometheus import Scrape, parse
from jaxserve.core.server_address import ServerAddress, trusted_authorities

TIMEOUT_S = 10.0  # for one page, as a server may be busy
QUEUE_TIME = "request_queue_time_seconds"
MS = 1e3


class MetricsSampler:
    """A sampler that scrapes `base_url`/metrics every `interval_s` seconds.

    It is a context manager and samples while inside. A server without metrics, or one that does not answer in time, is
    not an error: its samples are missing.
    """

    def __init__(
        self,
        base_url: str,
        interval_s: float,
        api_key: str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_scrape: Callable[[float, Scrape], None] | None = None,
    ):
        """`on_scrape` is called with the clock's time and the scrape, for each scrape as it arrives."""
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        address = ServerAddress.parse(base_url)
        self._url = f"{address.base_url}/metrics"
        transport = httpx2.AsyncHTTPTransport(uds=address.socket) if address.socket else None
        trusted = trusted_authorities()
        self._http = httpx2.AsyncClient(
            headers=headers, timeout=TIMEOUT_S, trust_env=False, verify=trusted, transport=transport
        )
        self._interval_s = interval_s
        self._clock = clock
        self._on_scrape = on_scrape
        self._scrapes: list[tuple[float, Scrape]] = []
        self._first: Scrape | None = None
        self._last: Scrape | None = None
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._first = await self._scrape(histograms=True)
        if self._first is not None:
            self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._stop.set()
            await self._task  # which completes a scrape under way
            self._last = await self._scrape(histograms=True)
        await self._http.aclose()

    def series(self, origin_s: float = 0.0) -> dict[str, list[float | None]]:
        """Return {"t": times, name: values}, with times in seconds since `origin_s` on the clock.

        Each list of values has one entry per time, None where the series did not exist yet.
        """
        if not self._scrapes:
            return {}
        names = dict.fromkeys(name for _, scrape in self._scrapes for name in scrape.values)
        series: dict[str, list[float | None]] = {"t": [time_s - origin_s for time_s, _ in self._scrapes]}
        return series | {name: [scrape.values.get(name) for _, scrape in self._scrapes] for name in names}

    def queue_time(self, percentiles: Sequence[float] = (90.0, 95.0, 99.0)) -> dict[str, Any]:
        """Return mean_, median_ and pXX_queue_ms of the requests that ended between the first and the last scrape.

        The mean is exact; the other figures are interpolated within the server's buckets. Empty if the server has no
        such histogram.
        """
        if self._first is None or self._last is None or QUEUE_TIME not in self._last.histograms:
            return {}
        queue = self._last.histograms[QUEUE_TIME]
        if before := self._first.histograms.get(QUEUE_TIME):
            queue -= before
        figures = {"mean_queue_ms": queue.mean, "median_queue_ms": queue.quantile(0.5)}
        figures |= {f"p{percentile:g}_queue_ms": queue.quantile(percentile / 100) for percentile in percentiles}
        return {name: None if seconds is None else seconds * MS for name, seconds in figures.items()}

    async def _sample(self) -> None:
        due = self._clock()
        while True:
            due = max(due + self._interval_s, self._clock())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), due - self._clock())
            if self._stop.is_set():
                return
            await self._scrape(histograms=False)

    async def _scrape(self, *, histograms: bool) -> Scrape | None:
        """Scrape once and keep the result with the middle of the time that the scrape took."""
        start = self._clock()
        try:
            answer = await self._http.get(self._url)
            answer.raise_for_status()
            scrape = parse(answer.text, histograms=histograms)
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError):
            return None
        time_s = (start + self._clock()) / 2
        self._scrapes.append((time_s, scrape))
        if self._on_scrape:
            self._on_scrape(time_s, scrape)
        return scrape
