"""Transitions: the primitive changes of a plan, with what they cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from jaxserve.control.plan import Plan
from jaxserve.core.errors import PlanError


@dataclass(frozen=True)
class SwapPrecision:
    """One decoder layer of an instance changes its precision. Bytes are those on each device of its stage."""

    instance: int
    block: str
    before: str
    after: str
    bytes_freed: int  # for others, once it is done
    bytes_needed: int  # more than before, once it is done
    peak_bytes: int  # beside what is held already, while it is prepared; `Resources.fixed` has room for it
    seconds: float  # estimated

    def apply(self, plan: Plan) -> Plan:
        """The plan's next version, with this done. Raises `PlanError` if it does not start from this plan."""
        if plan.instances[self.instance].precision(self.block) != self.before:
            raise PlanError(f"{self.block} of plan {plan.version} is not {self.before}")
        return plan.with_precisions(self.instance, {self.block: self.after})

    def __str__(self) -> str:
        return f"instance {self.instance}: {self.block} {self.before} -> {self.after} ({self._cost()})"

    def _cost(self) -> str:
        change = f"frees {_mb(self.bytes_freed)}" if self.bytes_freed else f"needs {_mb(self.bytes_needed)}"
        return f"{change}, about {self.seconds * 1e3:.0f} ms"


@dataclass(frozen=True)
class ResizeKVPool:
    """An instance's KV pools get more or fewer pages. Bytes are those on each device, where pages are largest."""

    instance: int
    before: int  # pages, the null page included
    after: int
    bytes_freed: int
    bytes_needed: int
    peak_bytes: int
    seconds: float  # estimated: to shrink, as if all pages had to move

    def apply(self, plan: Plan) -> Plan:
        """The plan's next version, with this done. Raises `PlanError` if it does not start from this plan."""
        if plan.instances[self.instance].kv_pages != self.before:
            raise PlanError(f"plan {plan.version} has {plan.instances[self.instance].kv_pages} KV pages")
        return plan.with_kv_pages(self.instance, self.after)

    def __str__(self) -> str:
        change = f"frees {_mb(self.bytes_freed)}" if self.bytes_freed else f"needs {_mb(self.bytes_needed)}"
        return f"instance {self.instance}: KV {self.before} -> {self.after} pages ({change})"


Transition = SwapPrecision | ResizeKVPool


def batches(transitions: Sequence[Transition]) -> Iterator[tuple[Transition, ...]]:
    """Consecutive transitions that are put in force at once, between the same two steps; most are alone.

    Together are layers of an instance that all free memory or all need it, and take none on the way that they do not
    keep: where quantised ones are used where they are kept. So no step runs a mixture that nobody wanted.
    """

    def batch(numbered: tuple[int, Transition]) -> object:
        number, transition = numbered
        if isinstance(transition, SwapPrecision) and transition.peak_bytes == transition.bytes_needed:
            return transition.instance, transition.bytes_needed > 0
        return number

    for _, run in groupby(enumerate(transitions), key=batch):
        yield tuple(transition for _, transition in run)


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


# Seconds for which a smaller pool waits for pages in use, and from try to try. Not long: no policy is asked meanwhile,
# even if a burst has come.
SHRINK_PATIENCE, SHRINK_RETRY = 0.3, 0.02


@dataclass(frozen=True)
class Outcome:
    """How a transition ended: `error` says why it failed, and then nothing of it is in force.

    `seconds` are those of all that were put in force with it.
    """

    transition: Transition
    error: str | None
    seconds: float


class Actuator(Protocol):
    """Carries transitions out in order, batch after batch (`transitions.batches`), while steps go on."""

    @property
    def busy(self) -> bool:
        """Whether a transition is still to end. When not, `poll` has all outcomes."""
        ...

    def start(self, transitions: Sequence[Transition]) -> None:
        """Begins, and returns at once; only called when not busy. After a transition that fails the rest is dropped."""
        ...

    def poll(self) -> Sequence[Outcome]:
        """What has ended since the last call, in order."""
        ...
