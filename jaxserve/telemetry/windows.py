"""Smoothing of snapshots over a window of the last seconds. Time is that of the snapshots."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from jaxserve.telemetry.metrics import TIME_BOUNDS
from jaxserve.telemetry.snapshot import Recent, Snapshot

RESOLUTION = 64  # snapshots per window; if they come more often, a later one replaces the one before it


class Smoother:
    """A smoother of one engine's snapshots over the last `window` seconds."""

    def __init__(self, window: float = 5.0):
        self.window = window
        self._snapshots: deque[Snapshot] = deque()

    def observe(self, snapshot: Snapshot) -> Snapshot:
        """Add a snapshot to the window, and return it with `recent` set.

        Cumulative counts stay exact, however rarely snapshots come. Earlier snapshots whose time is not before the new
        one's are replaced.
        """
        seen = self._snapshots
        if len(seen) > 1 and snapshot.time - seen[-2].time < self.window / RESOLUTION:
            seen.pop()
        while seen and seen[-1].time >= snapshot.time:
            seen.pop()
        seen.append(replace(snapshot, recent=None))
        while len(seen) > 1 and seen[1].time <= snapshot.time - self.window:
            seen.popleft()
        return replace(snapshot, recent=summary(seen))


def summary(snapshots: Sequence[Snapshot]) -> Recent:
    """Summarise snapshots: at least one, in the order of their times."""
    first, last, count = snapshots[0], snapshots[-1], len(snapshots)
    seconds = last.time - first.time
    # Shares are of the present number of pages, so that resizing the pool does not look like a trend.
    pages = max(1, last.kv_pages_total)
    gaps, gap_seconds = last.gaps - first.gaps, last.gap_seconds - first.gap_seconds
    return Recent(
        seconds=seconds,
        kv_usage=sum(s.kv_pages_used for s in snapshots) / count / pages,
        kv_trend=_slope(snapshots) / pages if seconds > 0 else None,
        waiting=sum(s.num_waiting for s in snapshots) / count,
        queue_delay=sum(s.oldest_wait for s in snapshots) / count,
        preemptions=last.preemptions - first.preemptions,
        ttft_p95=quantile(_between(first.first_tokens, last.first_tokens), 0.95),
        tpot=gap_seconds / gaps if gaps > 0 else None,
        tokens_per_s=(last.generated_tokens - first.generated_tokens) / seconds if seconds > 0 else None,
        arrivals_per_s=max(0, _arrived(last) - _arrived(first)) / seconds if seconds > 0 else None,
        max_kv_usage=max(s.kv_usage for s in snapshots),
        max_wait=max(s.oldest_wait for s in snapshots),
    )


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
    """Return the counts added to each bucket; empty `before` means that nothing had been counted."""
    return tuple(b - a for a, b in zip(before or (0,) * len(after), after, strict=True))


def _slope(snapshots: Sequence[Snapshot]) -> float:
    """Return how fast the number of held pages changes, by least squares, in pages/s."""
    start, count = snapshots[0].time, len(snapshots)
    mean_time = sum(s.time - start for s in snapshots) / count
    mean_used = sum(s.kv_pages_used for s in snapshots) / count
    covariance = sum((s.time - start - mean_time) * (s.kv_pages_used - mean_used) for s in snapshots)
    variance = sum((s.time - start - mean_time) ** 2 for s in snapshots)
    return covariance / variance if variance > 0 else 0.0
