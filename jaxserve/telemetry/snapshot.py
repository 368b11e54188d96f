"""Snapshots of an engine between two steps, as policies, health checks and metrics see it."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from jaxserve.core.renamed import Renamed


@dataclass(frozen=True)
class Recent:
    """Means, extremes and trends over a short window of snapshots; None if the window has no such observations.

    Those that `windows.Smoother` makes compute a value when it is first read: policies read few of them.
    """

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
    prompt_tokens_per_s: float | None = None  # computed, and not found in the prefix cache
    most_kv_usage = Renamed("max_kv_usage")
    longest_wait = Renamed("max_wait")

    @classmethod
    def of(cls, window: object) -> "Recent":
        """Return the values that an immutable `window` has as attributes, each of them read when it is first needed."""
        recent = object.__new__(cls)
        recent.__dict__["_window"] = window
        return recent

    if not TYPE_CHECKING:  # type checkers would let every name pass

        def __getattr__(self, name: str) -> Any:
            """Read a value of the window that has not been read before."""
            if name not in Recent.__dataclass_fields__ or "_window" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            value = self.__dict__[name] = getattr(self.__dict__["_window"], name)
            return value


@dataclass(frozen=True)
class Snapshot:
    """State of an engine at one moment. Bytes are resident bytes, summed over its devices."""

    time: float = 0.0  # s of the engine's clock
    steps: int = 0  # steps finished since the start, from which health checks see progress
    num_running: int = 0  # sequences
    num_held: int = 0  # of these, the ones that go on when KV pages of theirs have come from another device
    num_waiting: int = 0  # sequences
    num_deferred: int = 0  # of these, the ones that wait for a prompt that another answer shares with them
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
    prefix_queries: int = 0  # tokens of prompts that were looked up in the prefix cache
    prefix_hits: int = 0  # of these, the ones that were found
    finished: int = 0  # sequences
    first_tokens: tuple[int, ...] = ()  # number of first tokens by time: buckets `TIME_BOUNDS` and infinity
    gaps: int = 0  # number of gaps between two tokens of a sequence
    gap_seconds: float = 0.0  # sum of these gaps
    busy_seconds: float = 0.0  # sum of the times that ended steps took
    expected_seconds: float = 0.0  # sum of the times that the cost model expected of the same steps; 0 without one
    recent: Recent | None = None  # set only by `windows.Smoother`

    @property
    def kv_usage(self) -> float:
        """Share of the KV pages held by sequences (0 to 1)."""
        return self.kv_pages_used / self.kv_pages_total if self.kv_pages_total else 0.0

    @property
    def layers_text(self) -> str:
        """The number of layers in each precision, such as "4 bfloat16, 20 int8"."""
        return ", ".join(f"{count} {name}" for name, count in sorted(self.layers_by_precision.items()))

    @property
    def totals(self) -> "Snapshot":
        """The values that are cumulative since the start, alone."""
        return Snapshot(**{name: getattr(self, name) for name in _TOTALS})

    def at(self, now: float) -> "Snapshot":
        """Return the snapshot moved to the time `now`, with waits that have grown longer.

        An engine that runs no steps takes no snapshots, but its waiting sequences go on waiting.
        """
        return self.with_values(time=max(self.time, now), oldest_wait=self.oldest_wait_at(now))

    def oldest_wait_at(self, now: float) -> float:
        """Return `oldest_wait` at the time `now`, if nothing happens until then."""
        return self.oldest_wait + max(0.0, now - self.time) if self.num_waiting else self.oldest_wait

    def with_values(self, **values: Any) -> "Snapshot":
        """Return the snapshot with other values of some fields.

        `dataclasses.replace` does the same in many times the time, which counts where there are a thousand instances.
        """
        copy = object.__new__(Snapshot)
        own = copy.__dict__
        own.update(self.__dict__)
        own.update(values)
        return copy


@dataclass(frozen=True)
class WaitingRoom:
    """The requests that wait because no instance can hold them now, although one could after a change of the plan."""

    time: float = 0.0  # s of the engine's clock
    count: int = 0  # requests
    tokens: int = 0  # prompt tokens of all their answers
    longest: int = 0  # tokens that an instance must be able to hold to serve every one of them
    oldest_wait: float = 0.0  # s since the first of them arrived


_TOTALS = (
    "steps",
    "preemptions",
    "generated_tokens",
    "prefill_tokens",
    "prefix_queries",
    "prefix_hits",
    "finished",
    "first_tokens",
    "gaps",
    "gap_seconds",
    "busy_seconds",
    "expected_seconds",
)
# Fields that `combine` does not add up.
_LARGEST = ("time", "plan_version", "oldest_wait")
_APART = ("layers_by_precision", "first_tokens", "recent")
_ADDED = tuple(f.name for f in fields(Snapshot) if f.name not in _LARGEST + _APART)


def combine(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Combine snapshots of several instances: sums, the latest time and plan version, the longest wait; no `recent`."""
    if len(snapshots) <= 1:
        return snapshots[0] if snapshots else Snapshot()
    layers: Counter[str] = Counter()
    for snapshot in snapshots:
        for precision, count in snapshot.layers_by_precision.items():
            layers[precision] += count
    counts = [snapshot.first_tokens for snapshot in snapshots if snapshot.first_tokens]
    return Snapshot(
        layers_by_precision=dict(layers),
        first_tokens=tuple(map(sum, zip(*counts, strict=True))),
        **_reduce(max, _LARGEST, snapshots),
        **_reduce(sum, _ADDED, snapshots),
    )


def _reduce(
    function: Callable[[Iterable[Any]], Any], names: Sequence[str], snapshots: Sequence[Snapshot]
) -> dict[str, Any]:
    """Return for each of these fields what the function makes of its values."""
    return {name: function(map(attrgetter(name), snapshots)) for name in names}
