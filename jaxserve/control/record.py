"""Records that the controller keeps for operators: its decisions, and samples of the engine's state."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.control.plan import Plan
from jaxserve.control.resources import Resources
from jaxserve.telemetry import Snapshot

BY_OPERATOR = "by the operator: "  # how reasons of an operator's changes begin
NEW = Snapshot()  # of an instance that has begun since snapshots were taken


@dataclass(frozen=True)
class Decision:
    """A policy's proposal and its outcome. Without transitions it is an operator's change of the policy."""

    time: float
    policy: str
    reason: str
    before_version: int
    target_version: int
    transitions: tuple[str, ...]
    outcome: str  # "started", "done", "failed: ...", "rejected: ..."
    instance: str = ""  # name; "" if the decision is about all instances


@dataclass(frozen=True)
class HistorySample:
    """State of all instances at one moment. Bytes are summed over all devices, as the ledger counts them."""

    time: float
    precisions: Mapping[str, int]  # precision -> number of decoder layers
    weight_bytes: int
    variant_bytes: int  # pinned variants that are not in use as weights
    kv_used_bytes: int
    kv_free_bytes: int
    kv_rounding_bytes: int  # of whole granules or segments beyond the pages
    waiting: int  # sequences
    running: int  # sequences
    ttft_p95: float | None  # s, of the instance where it is longest
    tpot: float | None  # s, of the instance where it is longest
    kv_usage: float  # share of the KV pages of all instances that sequences hold
    waiting_room: int = 0  # requests that no instance can hold
    prompt_tokens_per_s: float = 0.0  # computed, of all instances
    generated_tokens_per_s: float = 0.0  # of all instances


def sample(
    now: float, plan: Plan, seen: Mapping[str, Snapshot], resources: Resources, waiting_room: int = 0
) -> HistorySample:
    """Return a sample at time `now` (s), from smoothed snapshots of all instances by name and the plan in force."""
    snapshots = seen.values()
    precisions: Counter[str] = Counter()
    used = free = rounding = pages_used = pages_total = 0
    for instance in plan.instances:
        snapshot = seen.get(instance.name, NEW)
        precisions.update(instance.layer_precisions)
        page = sum(resources.page_bytes(stage) * stage.tp for stage in instance.stages)
        used += page * snapshot.kv_pages_used
        pages = snapshot.kv_pages_total + 1  # the null page included
        free += page * (pages - snapshot.kv_pages_used)
        rounding += max(0, snapshot.kv_bytes - page * pages)
        pages_used += snapshot.kv_pages_used
        pages_total += snapshot.kv_pages_total
    recent = [snapshot.recent for snapshot in snapshots if snapshot.recent is not None]
    return HistorySample(
        time=now,
        precisions=dict(precisions),
        weight_bytes=sum(snapshot.weight_bytes for snapshot in snapshots),
        variant_bytes=sum(snapshot.variant_bytes for snapshot in snapshots),
        kv_used_bytes=used,
        kv_free_bytes=free,
        kv_rounding_bytes=rounding,
        waiting=sum(snapshot.num_waiting for snapshot in snapshots),
        running=sum(snapshot.num_running for snapshot in snapshots),
        ttft_p95=max((r.ttft_p95 for r in recent if r.ttft_p95 is not None), default=None),
        tpot=max((r.tpot for r in recent if r.tpot is not None), default=None),
        kv_usage=pages_used / pages_total if pages_total > 0 else 0.0,
        waiting_room=waiting_room,
        prompt_tokens_per_s=sum(max(0.0, r.prompt_tokens_per_s or 0.0) for r in recent),
        generated_tokens_per_s=sum(max(0.0, r.tokens_per_s or 0.0) for r in recent),
    )
