"""Smoothing: what the snapshots of the last seconds say together. Time comes with the snapshots."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from jaxserve.telemetry.metrics import TIME_BOUNDS
from jaxserve.telemetry.snapshot import Recent, Snapshot

RESOLUTION = 64  # snapshots kept per window; of more frequent ones the latest counts


class Smoother:
    """Keeps the snapshots of one engine over a window of `window` seconds."""

    def __init__(self, window: float = 5.0):
        self.window = window
        self._kept: deque[Snapshot] = deque()

    def observe(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with its recent past. Mutates.

        Nothing is lost of what is cumulative, however seldom snapshots come; a clock that stands still, or goes back,
        replaces the latest one.
        """
        kept = self._kept
        if len(kept) > 1 and snapshot.time - kept[-2].time < self.window / RESOLUTION:
            kept.pop()
        while kept and kept[-1].time >= snapshot.time:
            kept.pop()
        kept.append(replace(snapshot, recent=None))
        while len(kept) > 1 and kept[1].time <= snapshot.time - self.window:
            kept.popleft()
        return replace(snapshot, recent=summary(kept))


def summary(snapshots: Sequence[Snapshot]) -> Recent:
    """What snapshots in the order of their times, at least one, say together."""
    first, last, count = snapshots[0], snapshots[-1], len(snapshots)
    seconds = last.time - first.time
    pages = max(1, last.kv_pages_total)  # of now: a resized pool is no trend
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
    """A quantile of times counted by bucket (`TIME_BOUNDS`, then infinity), linear within a bucket; None of nothing.

    Beyond the last bound there is no telling: it is that bound then.
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
    """Sequences that have arrived since the start."""
    return snapshot.finished + snapshot.num_running + snapshot.num_waiting


def _between(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Counts by bucket that were added; no buckets before means none counted."""
    return tuple(b - a for a, b in zip(before or (0,) * len(after), after, strict=True))


def _slope(snapshots: Sequence[Snapshot]) -> float:
    """Of the pages held over time, by least squares; pages/s."""
    start, count = snapshots[0].time, len(snapshots)
    mean_time = sum(s.time - start for s in snapshots) / count
    mean_used = sum(s.kv_pages_used for s in snapshots) / count
    covariance = sum((s.time - start - mean_time) * (s.kv_pages_used - mean_used) for s in snapshots)
    variance = sum((s.time - start - mean_time) ** 2 for s in snapshots)
    return covariance / variance if variance > 0 else 0.0
