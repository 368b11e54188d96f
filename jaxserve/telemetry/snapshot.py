"""Snapshots of an engine between two steps, as policies, health checks and metrics see it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxserve.core.renamed import Renamed


@dataclass(frozen=True)
class Recent:
    """Means, extremes and trends over a short window of snapshots; None if the window has no such observations."""

    seconds: float  # length of time that the window covers
    kv_usage: float  # mean of the KV pages held by sequences, as a share of the present number of pages
    kv_trend: float | None  # change of the KV pages held, by least squares: share of the present pages per second
    waiting: float  # mean number of waiting sequences
    queue_delay: float  # s: mean over time of the longest wait
    preemptions: int  # in the window
    ttft_p95: float | None  # s
    tpot: float | None  # s: mean time between two tokens of a sequence
    tokens_per_s: float | None  # generated tokens
    arrivals_per_s: float | None  # sequences
    max_kv_usage: float  # largest share of the KV pages held by sequences at any moment
    max_wait: float  # s: longest wait at any moment
    most_kv_usage = Renamed("max_kv_usage")
    longest_wait = Renamed("max_wait")


@dataclass(frozen=True)
class Snapshot:
    """State of an engine at one moment. Bytes are resident bytes, summed over its devices."""

    time: float = 0.0  # s of the engine's clock
    steps: int = 0  # steps finished since the start, from which health checks see progress
    num_running: int = 0  # sequences
    num_waiting: int = 0  # sequences
    waiting_tokens: int = 0  # prompt tokens of waiting sequences that remain to be computed
    kv_pages_total: int = 0  # without the null page
    kv_pages_used: int = 0  # pages held by sequences; pages that only the prefix cache holds are free
    plan_version: int = 0
    layers_by_precision: Mapping[str, int] = field(default_factory=dict)  # e.g. {"bfloat16": 16}
    weight_bytes: int = 0
    variant_bytes: int = 0  # pinned variants on the devices that are not in use as weights
    kv_bytes: int = 0  # KV pools: their pages, rounded up to granules or segments
    oldest_wait: float = 0.0  # s: longest time that a waiting sequence has waited since it arrived or was preempted
    # Cumulative since the start:
    preemptions: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0  # of prompts, without those found in the prefix cache
    finished: int = 0  # sequences
    first_tokens: tuple[int, ...] = ()  # number of first tokens by time: buckets `metrics.TIME_BOUNDS` and infinity
    gaps: int = 0  # number of gaps between two tokens of a sequence
    gap_seconds: float = 0.0  # sum of these gaps
    busy_seconds: float = 0.0  # sum of the times that ended steps took
    expected_seconds: float = 0.0  # sum of the times that the cost model expected of the same steps; 0 without one
    recent: Recent | None = None  # set only by `windows.Smoother`

    @property
    def kv_usage(self) -> float:
        """Share of the KV pages held by sequences (0 to 1)."""
        return self.kv_pages_used / self.kv_pages_total if self.kv_pages_total else 0.0

    def at(self, now: float) -> "Snapshot":
        """Return the snapshot moved to the time `now`, with waits that have grown longer.

        An engine that runs no steps takes no snapshots, but its waiting sequences go on waiting.
        """
        passed = max(0.0, now - self.time)
        waited = self.oldest_wait + passed if self.num_waiting else self.oldest_wait
        return replace(self, time=self.time + passed, oldest_wait=waited)


def combine(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Combine snapshots of several instances: sums, the latest time and plan version, the longest wait; no `recent`."""
    if len(snapshots) == 1:
        return snapshots[0]
    layers: Counter[str] = Counter()
    for snapshot in snapshots:
        layers.update(snapshot.layers_by_precision)
    return Snapshot(
        time=max(s.time for s in snapshots),
        steps=sum(s.steps for s in snapshots),
        num_running=sum(s.num_running for s in snapshots),
        num_waiting=sum(s.num_waiting for s in snapshots),
        waiting_tokens=sum(s.waiting_tokens for s in snapshots),
        kv_pages_total=sum(s.kv_pages_total for s in snapshots),
        kv_pages_used=sum(s.kv_pages_used for s in snapshots),
        plan_version=max(s.plan_version for s in snapshots),
        layers_by_precision=layers,
        weight_bytes=sum(s.weight_bytes for s in snapshots),
        variant_bytes=sum(s.variant_bytes for s in snapshots),
        kv_bytes=sum(s.kv_bytes for s in snapshots),
        oldest_wait=max(s.oldest_wait for s in snapshots),
        preemptions=sum(s.preemptions for s in snapshots),
        generated_tokens=sum(s.generated_tokens for s in snapshots),
        prefill_tokens=sum(s.prefill_tokens for s in snapshots),
        finished=sum(s.finished for s in snapshots),
        first_tokens=tuple(map(sum, zip(*(s.first_tokens for s in snapshots if s.first_tokens), strict=True))),
        gaps=sum(s.gaps for s in snapshots),
        gap_seconds=sum(s.gap_seconds for s in snapshots),
        busy_seconds=sum(s.busy_seconds for s in snapshots),
        expected_seconds=sum(s.expected_seconds for s in snapshots),
    )
