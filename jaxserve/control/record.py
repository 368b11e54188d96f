"""What the controller remembers for operators: its decisions, and samples of what the engine was like."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxserve.control.plan import Plan
from jaxserve.control.resources import Resources
from jaxserve.telemetry import Snapshot


@dataclass(frozen=True)
class Decision:
    """A proposal of a policy and what became of it; or, without transitions, an operator's change of policy."""

    time: float
    policy: str
    reason: str
    before_version: int
    target_version: int
    transitions: tuple[str, ...]
    outcome: str  # "started", "done", "failed: ...", "rejected: ..."


@dataclass(frozen=True)
class Sample:
    """All instances at one moment. Bytes are the sum over all devices, as the ledger counts them."""

    time: float
    precisions: Mapping[str, int]  # decoder layers
    weight_bytes: int
    variant_bytes: int  # layers that are kept beside them
    kv_used_bytes: int
    kv_free_bytes: int
    kv_rounding_bytes: int  # whole granules or segments beyond the pages
    waiting: int
    running: int
    ttft_p95: float | None  # s, of the worst instance
    tpot: float | None  # s, of the worst instance
    kv_usage: float  # of all pages


def sample(now: float, plan: Plan, snapshots: Sequence[Snapshot], resources: Resources) -> Sample:
    """What `snapshots` (with their recent past) and the plan in force say of the moment `now`."""
    precisions: Counter[str] = Counter()
    used = free = rounding = pages_used = pages_total = 0
    for instance, snapshot in zip(plan.instances, snapshots, strict=True):
        precisions.update(instance.layer_precisions)
        page = sum(size * stage.tp for size, stage in zip(resources.page_bytes, instance.stages, strict=True))
        used += page * snapshot.kv_pages_used
        pages = snapshot.kv_pages_total + 1  # with the null page
        free += page * (pages - snapshot.kv_pages_used)
        rounding += max(0, snapshot.kv_bytes - page * pages)
        pages_used += snapshot.kv_pages_used
        pages_total += snapshot.kv_pages_total
    recent = [snapshot.recent for snapshot in snapshots if snapshot.recent is not None]
    return Sample(
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
    )
