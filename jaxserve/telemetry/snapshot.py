"""Snapshot: the state of one engine between two steps, as policies, health checks and metrics see it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


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
    kv_bytes: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of the KV pages held by sequences, from 0 to 1."""
        return self.kv_pages_used / self.kv_pages_total if self.kv_pages_total else 0.0


def combine(snapshots: Sequence[Snapshot]) -> Snapshot:
    """The state of several instances as one: sums, and the latest time and plan."""
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
        kv_bytes=sum(s.kv_bytes for s in snapshots),
    )
