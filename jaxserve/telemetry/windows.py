"""Smoothing of snapshots over a window of the last seconds. Time is that of the snapshots.

An instance is observed ten times a second, and there may be a thousand. An observation therefore costs the same however
many snapshots the window has, and what a policy does not read of `Recent` is not computed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from operator import sub
from typing import NamedTuple, TypeVar

from jaxserve.telemetry.definitions import TIME_BOUNDS
from jaxserve.telemetry.snapshot import Recent, Snapshot

RESOLUTION = 64  # snapshots per window; if they come more often, a later one replaces the one before it
TICKS = 2.0**40  # per second; a power of two, so that a float of seconds has a whole number of ticks from 4096 s on

Number = TypeVar("Number", int, float)


class Smoother:
    """A smoother of one engine's snapshots over the last `window` seconds."""

    def __init__(self, window: float = 5.0):
        self.window = window
        self._kept: deque[_Observation] = deque()  # in the order of their times, without the latest
        self._latest: _Observation | None = None  # apart, because the next one may replace it
        self._kv_usage, self._wait = _SlidingMaximum(), _SlidingMaximum()  # over `_kept`

    def observe(self, snapshot: Snapshot, now: float | None = None) -> Snapshot:
        """Add a snapshot to the window, and return it with `recent` set, moved to the time `now` as by `Snapshot.at`.

        Cumulative counts stay exact, however rarely snapshots come. Earlier snapshots whose time is not before the new
        one's are replaced. Without `now` the snapshot keeps its time.
        """
        if snapshot.recent is not None:  # it would keep the windows of all earlier snapshots in memory
            snapshot = snapshot.with_values(recent=None)
        time = snapshot.time if now is None else max(snapshot.time, now)
        wait, kv_usage, kept = snapshot.oldest_wait_at(time), snapshot.kv_usage, self._kept
        self._keep_latest(time)
        while len(kept) > 1 and kept[1].time <= time - self.window:
            kept.popleft()
        before = kept[-1].sums if kept else NOTHING
        latest = _Observation(snapshot, time, wait, kv_usage, before, before.plus(time, wait, snapshot))
        first = kept[0] if kept else latest
        max_kv_usage = max(kv_usage, self._kv_usage.since(first.time))
        window = _Window(first, latest, max_kv_usage, max(wait, self._wait.since(first.time)))
        self._latest = latest
        return snapshot.with_values(time=time, oldest_wait=wait, recent=Recent.of(window))

    def _keep_latest(self, now: float) -> None:
        """Keep the latest observation, unless that of time `now` replaces it."""
        kept, latest = self._kept, self._latest
        if kept and now - kept[-1].time < self.window / RESOLUTION:
            if now <= kept[-1].time:
                self._return_to(now)
        elif latest is not None and latest.time < now:
            kept.append(latest)
            self._add_to_maxima(latest)

    def _return_to(self, now: float) -> None:
        """Forget the kept observations that are not before `now`: the clock went back."""
        while self._kept and self._kept[-1].time >= now:
            self._kept.pop()
        self._kv_usage, self._wait = _SlidingMaximum(), _SlidingMaximum()
        for observation in self._kept:
            self._add_to_maxima(observation)

    def _add_to_maxima(self, observation: "_Observation") -> None:
        self._kv_usage.add(observation.time, observation.kv_usage)
        self._wait.add(observation.time, observation.wait)


class _SlidingMaximum:
    """A maximum of the values since a time that moves on."""

    def __init__(self) -> None:
        self._largest: deque[tuple[float, float]] = deque()  # (time, value), each value larger than all after it

    def add(self, time: float, value: float) -> None:
        """Add a value whose time is after those of the others."""
        largest = self._largest
        while largest and largest[-1][1] <= value:
            largest.pop()
        largest.append((time, value))

    def since(self, start: float) -> float:
        """Return the maximum of the values since the time `start` (0 without values), and forget those before it."""
        largest = self._largest
        while largest and largest[0][0] < start:
            largest.popleft()
        return largest[0][1] if largest else 0.0


class _Sums(NamedTuple):
    """Sums over all observations up to one of them.

    The sums over a window are a difference of two of these. They are integers, so that the difference is exact however
    long the engine has run. Times are in ticks.
    """

    number: int
    pages: int  # held by sequences
    waiting: int
    wait: int
    time: int
    time_squared: int
    time_pages: int  # products of time and pages

    def plus(self, time: float, wait: float, snapshot: Snapshot) -> "_Sums":
        """Return the sums with one more snapshot, whose time and oldest wait (s) are these."""
        number, pages, waiting, waits, times, times_squared, times_pages = self
        now, used = round(time * TICKS), snapshot.kv_pages_used
        return _Sums(
            number + 1,
            pages + used,
            waiting + snapshot.num_waiting,
            waits + round(wait * TICKS),
            times + now,
            times_squared + now * now,
            times_pages + now * used,
        )

    def minus(self, before: "_Sums") -> "_Sums":
        """Return the sums over the observations after those of `before`."""
        return _Sums(*map(sub, self, before))

    def slope(self) -> float:
        """Return how fast the number of held pages changes, by least squares, in pages/s."""
        covariance = self.number * self.time_pages - self.time * self.pages  # number² times as large, as the variance
        variance = self.number * self.time_squared - self.time**2
        return TICKS * (covariance / variance) if variance > 0 else 0.0


NOTHING = _Sums(0, 0, 0, 0, 0, 0, 0)


class _Observation(NamedTuple):
    """A snapshot, values of it when it was moved to the time of its observation, and the sums before and after it."""

    snapshot: Snapshot
    time: float
    wait: float
    kv_usage: float
    sums_before: _Sums
    sums: _Sums


class _Window(NamedTuple):
    """A window as it was after one observation. Its attributes have the names of the fields of `Recent`."""

    first: _Observation
    last: _Observation
    max_kv_usage: float
    max_wait: float

    @property
    def seconds(self) -> float:
        return self.last.time - self.first.time

    @property
    def kv_usage(self) -> float:
        return self._mean(self.last.sums.pages - self.first.sums_before.pages) / self._pages

    @property
    def kv_trend(self) -> float | None:
        return self.last.sums.minus(self.first.sums_before).slope() / self._pages if self.seconds > 0 else None

    @property
    def waiting(self) -> float:
        return self._mean(self.last.sums.waiting - self.first.sums_before.waiting)

    @property
    def queue_delay(self) -> float:
        return self._mean(self.last.sums.wait - self.first.sums_before.wait) / TICKS

    @property
    def preemptions(self) -> int:
        return self._added(lambda s: s.preemptions)

    @property
    def ttft_p95(self) -> float | None:
        before, after = self.first.snapshot.first_tokens, self.last.snapshot.first_tokens
        return None if before == after else quantile(_between(before, after), 0.95)

    @property
    def tpot(self) -> float | None:
        gaps = self._added(lambda s: s.gaps)
        return self._added(lambda s: s.gap_seconds) / gaps if gaps > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        return self._per_second(self._added(lambda s: s.generated_tokens))

    @property
    def prompt_tokens_per_s(self) -> float | None:
        return self._per_second(self._added(lambda s: s.prefill_tokens))

    @property
    def arrivals_per_s(self) -> float | None:
        return self._per_second(max(0, self._added(_arrived)))

    @property
    def _pages(self) -> int:
        """Present number of pages, of which shares are taken, so that resizing the pool does not look like a trend."""
        return max(1, self.last.snapshot.kv_pages_total)

    def _mean(self, total: int) -> float:
        return total / (self.last.sums.number - self.first.sums_before.number)

    def _added(self, cumulative: Callable[[Snapshot], Number]) -> Number:
        """Return by how much a value grew that is cumulative since the start."""
        return cumulative(self.last.snapshot) - cumulative(self.first.snapshot)

    def _per_second(self, amount: float) -> float | None:
        seconds = self.seconds
        return amount / seconds if seconds > 0 else None


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Return a quantile (`share` from 0 to 1) of times counted in the buckets `TIME_BOUNDS` and infinity, or None.

    It is interpolated linearly within its bucket, and None without observations. In the last bucket it is the last
    bound, because times beyond it are unknown.
    """
    wanted, lower = share * sum(counts), 0.0
    if wanted == 0:
        return None
    for count, upper in zip(counts, (*TIME_BOUNDS, TIME_BOUNDS[-1]), strict=True):
        if count and wanted <= count:
            return lower + (upper - lower) * wanted / count
        wanted, lower = wanted - count, upper
    return lower


def _arrived(snapshot: Snapshot) -> int:
    """Return the number of sequences that have arrived since the start."""
    return snapshot.finished + snapshot.num_running + snapshot.num_waiting


def _between(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Return the counts added to each bucket; empty counts mean that nothing had been counted."""
    return tuple(b - a for a, b in zip_longest(before, after, fillvalue=0))
