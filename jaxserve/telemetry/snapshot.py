"""Snapshot: the state of one engine between two steps, as policies, health checks and metrics see it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxserve.core.renamed import Renamed


@dataclass(frozen=True)
class Recent:
    """Means and trends over a short window of snapshots; None where the window has seen nothing of the kind."""

    seconds: float  # that the window really covers
    kv_usage: float  # mean KV pages held by sequences, as a share of the pages that there are now
    kv_trend: float | None  # how they change per second, by least squares, as a share of the pages that there are now
    waiting: float  # mean sequences
    queue_delay: float  # s, mean of the longest wait
    preemptions: int  # in the window
    ttft_p95: float | None  # s
    tpot: float | None  # s, mean
    tokens_per_s: float | None  # generated
    arrivals_per_s: float | None  # sequences
    max_kv_usage: float  # at any moment, as a share of the pages that there were then
    max_wait: float  # s, at any moment
    most_kv_usage = Renamed("max_kv_usage")
    longest_wait = Renamed("max_wait")


@dataclass(frozen=True)
class Snapshot:
    """State of an engine at `time` (seconds of the engine's clock). Bytes are resident bytes of the ledger."""

    time: float = 0.0
    steps: int = 0  # finished since the start; health checks look for progress here
    num_running: int = 0  # sequences
    num_waiting: int = 0  # sequences
    waiting_tokens: int = 0  # prompt tokens of the waiting sequences that are still to be computed
    kv_pages_total: int = 0  # without the null page
    kv_pages_used: int = 0  # held by sequences; pages kept only by the prefix cache are free
    plan_version: int = 0
    layers_by_precision: Mapping[str, int] = field(default_factory=dict)  # e.g. {"bfloat16": 16}
    weight_bytes: int = 0
    variant_bytes: int = 0  # layers that are kept beside them on the devices
    kv_bytes: int = 0  # all that the pools take: pages, and what rounds them up
    oldest_wait: float = 0.0  # s since the sequence queued first arrived or was preempted; 0 if none waits
    # cumulative since the start
    preemptions: int = 0
    generated_tokens: int = 0
    finished: int = 0  # sequences
    first_tokens: tuple[int, ...] = ()  # times to first token by bucket: `metrics.TIME_BOUNDS`, then infinity
    gaps: int = 0  # between two tokens of a sequence
    gap_seconds: float = 0.0
    recent: Recent | None = None  # filled by `windows.Smoother` alone

    @property
    def kv_usage(self) -> float:
        """Share of the KV pages held by sequences, from 0 to 1."""
        return self.kv_pages_used / self.kv_pages_total if self.kv_pages_total else 0.0

    def at(self, now: float) -> "Snapshot":
        """The same state seen later: an engine without steps takes no snapshots, but what waits goes on waiting."""
        passed = max(0.0, now - self.time)
        waited = self.oldest_wait + passed if self.num_waiting else self.oldest_wait
        return replace(self, time=self.time + passed, oldest_wait=waited)


def combine(snapshots: Sequence[Snapshot]) -> Snapshot:
    """The state of several instances as one: sums, the latest time and plan, the longest wait. No recent window."""
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
        finished=sum(s.finished for s in snapshots),
        first_tokens=tuple(map(sum, zip(*(s.first_tokens for s in snapshots if s.first_tokens), strict=True))),
        gaps=sum(s.gaps for s in snapshots),
        gap_seconds=sum(s.gap_seconds for s in snapshots),
    )
