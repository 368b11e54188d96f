"""What the control plane knows about an engine, as metrics and load reports show it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KVCapacity:
    """The tokens that the KV pages of an instance hold now, and after all changes that its policy may make."""

    tokens: int
    max_tokens: int
    max_seconds: float  # that the changes are estimated to take once the policy has decided on them

    @classmethod
    def total(cls, capacities: Collection["KVCapacity"]) -> "KVCapacity":
        """Return the capacity of several instances, which change at the same time."""
        return cls(
            sum(capacity.tokens for capacity in capacities),
            sum(capacity.max_tokens for capacity in capacities),
            max((capacity.max_seconds for capacity in capacities), default=0.0),
        )


@dataclass(frozen=True)
class Quality:
    """The expected cost of the plan in force: the rise of the cross-entropy over that of full precision."""

    loss: float = 0.0  # as a share
    nats: float | None = 0.0  # a token; None if nothing was measured
    floor: float | None = None  # the largest share that the policy accepts; None if it accepts every one
    measured: bool = True  # on this model; otherwise it is assumed


@dataclass(frozen=True)
class ControlState:
    """The state of a control plane; empty for an engine without one."""

    capacities: Mapping[str, KVCapacity] = field(default_factory=dict)  # by instance
    decisions: Mapping[tuple[str, ...], int] = field(default_factory=dict)  # ended ones, by policy and outcome
    quality: Quality | None = None
