"""Transitions: the elementary changes of a plan with their costs, and the interface of the actuator."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from jaxserve.control.plan import Plan
from jaxserve.core.errors import PlanError


@dataclass(frozen=True)
class SwapPrecision:
    """Change of one decoder layer's precision. Bytes are those on each device of its stage."""

    instance: int
    block: str
    before: str
    after: str
    bytes_freed: int  # after the change
    bytes_needed: int  # after the change, in addition to the bytes before it
    peak_bytes: int  # during the change, in addition to the bytes before it; the swap buffer holds the excess
    seconds: float  # estimated

    def apply(self, plan: Plan) -> Plan:
        """Return the plan's next version with this change. Raise `PlanError` if it does not start from this plan."""
        if (now := plan.instances[self.instance].precision(self.block)) != self.before:
            raise PlanError(f"{self.block} of plan {plan.version} is {now}: the change starts from {self.before}")
        return plan.with_precisions(self.instance, {self.block: self.after})

    def __str__(self) -> str:
        return f"instance {self.instance}: {self.block} {self.before} -> {self.after} ({self._cost()})"

    def _cost(self) -> str:
        change = f"frees {_mb(self.bytes_freed)}" if self.bytes_freed else f"needs {_mb(self.bytes_needed)}"
        return f"{change}, about {self.seconds * 1e3:.0f} ms"


@dataclass(frozen=True)
class ResizeKVPool:
    """Change of the number of KV pages of an instance. Bytes are those on each device, of the largest stage."""

    instance: int
    before: int  # pages, the null page included
    after: int  # pages, the null page included
    bytes_freed: int
    bytes_needed: int
    peak_bytes: int
    seconds: float  # estimated; for a smaller pool, as if all removed pages were moved

    def apply(self, plan: Plan) -> Plan:
        """Return the plan's next version with this change. Raise `PlanError` if it does not start from this plan."""
        if (now := plan.instances[self.instance].kv_pages) != self.before:
            raise PlanError(f"plan {plan.version} has {now} KV pages: the change starts from {self.before}")
        return plan.with_kv_pages(self.instance, self.after)

    def __str__(self) -> str:
        change = f"frees {_mb(self.bytes_freed)}" if self.bytes_freed else f"needs {_mb(self.bytes_needed)}"
        return f"instance {self.instance}: KV {self.before} -> {self.after} pages ({change})"


Transition = SwapPrecision | ResizeKVPool


def batches(transitions: Sequence[Transition]) -> Iterator[tuple[Transition, ...]]:
    """Yield groups of consecutive transitions that are committed together, between the same two steps.

    Most groups have one transition. Swaps of an instance are committed together if all free memory or all need it, and
    if none takes more memory during the swap than afterwards, as where layers use pinned variants in place. So no step
    runs an assignment of precisions that no plan has.
    """

    def group(indexed: tuple[int, Transition]) -> object:
        index, transition = indexed
        if isinstance(transition, SwapPrecision) and transition.peak_bytes == transition.bytes_needed:
            return transition.instance, transition.bytes_needed > 0
        return index

    for _, run in groupby(enumerate(transitions), key=group):
        yield tuple(transition for _, transition in run)


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


# Seconds for which shrinking a pool waits for pages in use. Not long, because no policy is asked meanwhile, even if a
# burst of requests arrives.
SHRINK_PATIENCE = 0.3
SHRINK_RETRY = 0.02  # seconds between two attempts


@dataclass(frozen=True)
class Outcome:
    """Outcome of a transition. One that failed has changed nothing."""

    transition: Transition
    error: str | None  # why it failed; None if it is in force
    seconds: float  # duration of its whole batch


class Actuator(Protocol):
    """An actuator, which carries out transitions in order while steps go on, one batch (see `batches`) at a time."""

    @property
    def busy(self) -> bool:
        """True while a transition has not ended. Once it is False, `poll` returns all outcomes."""
        ...

    def start(self, transitions: Sequence[Transition]) -> None:
        """Begin to carry out transitions, and return at once. Call it only when the actuator is not busy.

        After a transition that fails, the remaining ones are dropped.
        """
        ...

    def poll(self) -> Sequence[Outcome]:
        """Return the outcomes of transitions that have ended since the last call, in order."""
        ...
