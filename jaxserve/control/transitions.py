"""Transitions: the elementary changes of an instance's plan, with their costs and what they do to a running instance.

Each kind of transition is one class. Its methods `stage`, `commit` and `release` act on a `RunningInstance`, which is
real or simulated. `control.reconfigure` says when they are called, and holds the rules that all kinds share.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

from jaxserve.control.costs import InstanceCost
from jaxserve.control.plan import InstancePlan
from jaxserve.core.errors import PlanError
from jaxserve.scheduler import Scheduler
from jaxserve.telemetry import Snapshot

T = TypeVar("T")


# -- waits, which the procedure and the transitions yield to whoever drives them


@dataclass(frozen=True)
class Sleep:
    """A wait until a time (s)."""

    until: float


@dataclass(frozen=True)
class BetweenSteps:
    """A wait until a function has run between two steps. The wait raises what the function raises.

    If it raises `Cancelled`, the function has not run and never will. Otherwise the wait's value is a fence: an object
    for `StepsEnded`.
    """

    function: Callable[[], None]


@dataclass(frozen=True)
class BetweenStepsOf(BetweenSteps):
    """A wait as `BetweenSteps`, for the steps of one of several instances."""

    instance: str


@dataclass(frozen=True)
class EachBetweenSteps:
    """A wait until functions have run, each between two steps of its own instance (name: function), in any order.

    The wait raises what one of the functions raises, or `Cancelled` as `BetweenSteps`.
    """

    functions: Mapping[str, Callable[[], None]]


@dataclass(frozen=True)
class StepsEnded:
    """A wait until the steps have ended that had been dispatched when the fence was made."""

    fence: Any


@dataclass(frozen=True)
class Rendezvous:
    """A wait until a function has run while several instances are stopped between two steps, with no token in flight.

    The wait raises what the function raises, or `Cancelled` as `BetweenSteps`.
    """

    instances: tuple[str, ...]
    function: Callable[[], None]


@dataclass(frozen=True)
class Beside:
    """No wait: another procedure begins, and both go on beside each other."""

    procedure: "Waits[None]"


Waits = Generator[Any, Any, T]  # of the waits above, and of those that only one driver knows


class PlannedCore(Protocol):
    """The part of an engine core that transitions change."""

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def salt(self) -> str: ...

    @property
    def plan_fields(self) -> Snapshot: ...

    @property
    def cost(self) -> InstanceCost | None: ...

    def replan(self, salt: str, plan_fields: Snapshot, cost: InstanceCost | None = None) -> None:
        """Set the plan's name in the prefix cache, its fields of the snapshot and its step times."""
        ...


class StoppedInstance(Protocol):
    """An instance between two steps, as its transitions see it. Layers and segments are opaque to them."""

    @property
    def core(self) -> PlannedCore: ...

    def use(self, plan: InstancePlan) -> None:
        """Run steps under this plan, of which the engine core has been told."""
        ...

    def replace_layers(self, layers: Sequence[Any]) -> Sequence[Any]:
        """Use these layers from the next step on, and return the layers that they replace."""
        ...

    def exchange_layer(self, block: str, precision: str, seconds: float) -> None:
        """Free a layer, and then bring another variant to its place, which is estimated to take `seconds`.

        If that fails, the variant that was there is brought back before this raises. If that fails as well, the
        instance's next step does.
        """
        ...

    def extend_pools(self, segments: Any) -> None:
        """Append segments to the KV pools."""
        ...

    def shrink_pools(self, moves: Mapping[int, int], pages: int) -> None:
        """Have the device move pages (source: target), and then free all pages from `pages` on."""
        ...


class RunningInstance(StoppedInstance, Protocol):
    """An instance as its transitions see it while its steps go on, and between two steps."""

    def prepare_layer(self, block: str, precision: str, size: int, seconds: float) -> Waits[Any]:
        """Bring a variant of a layer next to the one in use: `size` bytes per device, estimated to take `seconds`."""
        ...

    def hold_layer(self, block: str, precisions: Sequence[str]) -> Waits[None]:
        """Have variants of a layer where `exchange_layer` takes them from."""
        ...

    def prepare_segments(self, pages: int) -> Waits[Any]:
        """Allocate the segments that the KV pools lack for `pages` pages."""
        ...

    def free_layers(self, layers: Sequence[Any]) -> None:
        """Free those of the layers that the instance does not use."""
        ...

    def free_segments(self, segments: Any) -> None:
        """Free segments that were allocated and not used."""
        ...

    def pages_moved(self, moves: Mapping[int, int], seconds: float) -> Waits[None]:
        """Wait until pages have been moved, which is estimated to take `seconds`, and their memory is free."""
        ...


@dataclass(frozen=True)
class Transition:
    """A change of one instance's plan. Bytes are those on each device of the stage where they are largest."""

    instance: str  # name

    @property
    def bytes_freed(self) -> int:
        """Bytes that are free after the change, and were not before."""
        return 0

    @property
    def bytes_needed(self) -> int:
        """Bytes that are taken after the change, and were not before."""
        return 0

    @property
    def bytes_beside(self) -> Mapping[int, int]:
        """Bytes by device that are taken during the change in addition to the larger of the plans before and after."""
        return {}

    def in_less_room(self) -> "Transition | None":
        """Return the same change with less memory, for which steps stop for longer, or None if there is none."""
        return None

    def joins(self, first: "Transition") -> bool:
        """Return whether this transition may be committed between the same two steps as `first`."""
        return False

    def apply(self, plan: InstancePlan) -> InstancePlan:
        """Return the instance's plan with this change. Raise `PlanError` if it does not start from this plan."""
        raise NotImplementedError

    # What follows acts on a batch of transitions that join each other. `staged` is what `stage` returns.

    @classmethod
    def stage(cls, batch: Sequence[Any], instance: RunningInstance) -> Waits[Any]:
        """Prepare what the batch needs while steps go on. What was prepared is freed if this raises."""
        yield from ()
        return None

    @classmethod
    def commit(cls, batch: Sequence[Any], instance: StoppedInstance, staged: Any, undo: ExitStack) -> Any:
        """Carry the batch out between two steps, and return what `release` needs.

        Whatever is done is undone by `undo`, except for a last action that cannot fail afterwards.
        """
        raise NotImplementedError

    @classmethod
    def release(cls, batch: Sequence[Any], instance: RunningInstance, held: Any) -> Waits[None]:
        """Free what the batch replaced, after the steps that use it have ended."""
        yield from ()

    @classmethod
    def discard(cls, batch: Sequence[Any], instance: RunningInstance, staged: Any) -> None:
        """Free what was staged for a batch that was not committed."""


@dataclass(frozen=True)
class SwapPrecision(Transition):
    """Change of one decoder layer's precision.

    The other variant is copied next to the one in use while steps go on. Where there is no room for both, the layer is
    freed first, and steps wait for the copy (`frees_first`).
    """

    block: str
    before: str
    after: str
    devices: tuple[int, ...]
    bytes_before: int  # that the layer takes on each device; 0 for a variant that is used where it is pinned
    bytes_after: int
    seconds: float  # estimated
    frees_first: bool = field(default=False, compare=False)  # how it is carried out

    @property
    def bytes_freed(self) -> int:
        return max(0, self.bytes_before - self.bytes_after)

    @property
    def bytes_needed(self) -> int:
        return max(0, self.bytes_after - self.bytes_before)

    @property
    def bytes_beside(self) -> Mapping[int, int]:
        return {} if self.frees_first else dict.fromkeys(self.devices, min(self.bytes_before, self.bytes_after))

    def in_less_room(self) -> "SwapPrecision | None":
        return replace(self, frees_first=True) if any(self.bytes_beside.values()) else None

    def joins(self, first: Transition) -> bool:
        if not isinstance(first, SwapPrecision) or first.frees_first:
            return False
        return bool(self.bytes_needed) == bool(first.bytes_needed)

    def apply(self, plan: InstancePlan) -> InstancePlan:
        if (now := plan.precision(self.block)) != self.before:
            raise PlanError(f"{self.block} of instance {plan.name} is {now}: the change starts from {self.before}")
        return plan.with_precisions({self.block: self.after})

    @classmethod
    def stage(cls, batch: Sequence["SwapPrecision"], instance: RunningInstance) -> Waits[Any]:
        if batch[0].frees_first:
            (swap,) = batch
            yield from instance.hold_layer(swap.block, (swap.before, swap.after))
            return ()
        layers: list[Any] = []
        try:
            for swap in batch:
                layers.append(
                    (yield from instance.prepare_layer(swap.block, swap.after, swap.bytes_after, swap.seconds))
                )
        except BaseException:
            instance.free_layers(layers)
            raise
        return layers

    @classmethod
    def commit(cls, batch: Sequence["SwapPrecision"], instance: StoppedInstance, staged: Any, undo: ExitStack) -> Any:
        if batch[0].frees_first:
            (swap,) = batch
            instance.exchange_layer(swap.block, swap.after, swap.seconds)
            undo.callback(instance.exchange_layer, swap.block, swap.before, swap.seconds)
            return ()
        replaced = instance.replace_layers(staged)
        undo.callback(instance.replace_layers, replaced)
        return replaced

    @classmethod
    def release(cls, batch: Sequence["SwapPrecision"], instance: RunningInstance, held: Any) -> Waits[None]:
        yield from ()
        instance.free_layers(held)

    @classmethod
    def discard(cls, batch: Sequence["SwapPrecision"], instance: RunningInstance, staged: Any) -> None:
        instance.free_layers(staged)

    def __str__(self) -> str:
        change = f"frees {_mb(self.bytes_freed)}" if self.bytes_freed else f"needs {_mb(self.bytes_needed)}"
        cost = f"{change}, about {self.seconds * 1e3:.0f} ms{' without steps' if self.frees_first else ''}"
        return f"instance {self.instance}: {self.block} {self.before} -> {self.after} ({cost})"


@dataclass(frozen=True)
class ResizeKVPool(Transition):
    """Change of the number of KV pages of an instance."""

    before: int  # pages, the null page included
    after: int  # pages, the null page included
    change: int  # bytes on each device, of the largest stage; negative if memory is freed
    seconds: float  # estimated; for a smaller pool, as if all removed pages were moved

    @property
    def bytes_freed(self) -> int:
        return max(0, -self.change)

    @property
    def bytes_needed(self) -> int:
        return max(0, self.change)

    def apply(self, plan: InstancePlan) -> InstancePlan:
        if plan.kv_pages != self.before:
            raise PlanError(f"instance {plan.name} has {plan.kv_pages} KV pages: the change starts from {self.before}")
        return plan.with_kv_pages(self.after)

    @classmethod
    def stage(cls, batch: Sequence["ResizeKVPool"], instance: RunningInstance) -> Waits[Any]:
        (resize,) = batch
        if resize.after < resize.before:
            return None
        return (yield from instance.prepare_segments(resize.after))

    @classmethod
    def commit(cls, batch: Sequence["ResizeKVPool"], instance: StoppedInstance, staged: Any, undo: ExitStack) -> Any:
        (resize,) = batch
        more = resize.after - resize.before
        if more >= 0:
            instance.core.scheduler.grow(more)
            # The new pages hold nothing yet, so that none needs to be moved.
            undo.callback(instance.core.scheduler.shrink, more, lambda moves: None)
            instance.extend_pools(staged)
            return {}
        moved: dict[int, int] = {}

        def move(moves: Mapping[int, int]) -> None:
            instance.shrink_pools(moves, resize.after)
            moved.update(moves)

        # The last action, because moved pages cannot be moved back. It raises `PagesInUse` before it moves anything.
        instance.core.scheduler.shrink(-more, move)
        return moved

    @classmethod
    def release(cls, batch: Sequence["ResizeKVPool"], instance: RunningInstance, held: Any) -> Waits[None]:
        (resize,) = batch
        if resize.after < resize.before:
            seconds = resize.seconds * len(held) / (resize.before - resize.after)
            yield from instance.pages_moved(held, seconds)

    @classmethod
    def discard(cls, batch: Sequence["ResizeKVPool"], instance: RunningInstance, staged: Any) -> None:
        if staged is not None:
            instance.free_segments(staged)

    def __str__(self) -> str:
        change = f"frees {_mb(self.bytes_freed)}" if self.bytes_freed else f"needs {_mb(self.bytes_needed)}"
        return f"instance {self.instance}: KV {self.before} -> {self.after} pages ({change})"


@dataclass(frozen=True)
class LimitSequences(Transition):
    """Change of the number of sequences that may run at once. Sequences that run already are not stopped."""

    before: int | None
    after: int | None  # None: as many as the engine has slots for

    seconds: ClassVar[float] = 0.0

    @property
    def lowers(self) -> bool:
        """True if fewer sequences may run after the change than before."""
        return self.after is not None and (self.before is None or self.after < self.before)

    def apply(self, plan: InstancePlan) -> InstancePlan:
        if plan.max_num_seqs != self.before:
            raise PlanError(
                f"instance {plan.name} runs at most {_limit(plan.max_num_seqs)}: the change starts from "
                f"{_limit(self.before)}"
            )
        return plan.with_max_num_seqs(self.after)

    @classmethod
    def commit(cls, batch: Sequence["LimitSequences"], instance: StoppedInstance, staged: Any, undo: ExitStack) -> Any:
        (limit,) = batch
        undo.callback(instance.core.scheduler.limit_sequences, limit.before)
        instance.core.scheduler.limit_sequences(limit.after)

    def __str__(self) -> str:
        return f"instance {self.instance}: at most {_limit(self.before)} -> {_limit(self.after)} at once"


@dataclass(frozen=True)
class SetDraining(Transition):
    """Change of whether new requests go to other instances. Those that an instance has already are not affected."""

    draining: bool

    seconds: ClassVar[float] = 0.0

    def apply(self, plan: InstancePlan) -> InstancePlan:
        return plan.with_draining(self.draining)

    @classmethod
    def commit(cls, batch: Sequence["SetDraining"], instance: StoppedInstance, staged: Any, undo: ExitStack) -> Any:
        """Do nothing: the router follows the plan in force."""

    def __str__(self) -> str:
        return f"instance {self.instance}: {'drains' if self.draining else 'takes new requests again'}"


def _limit(count: int | None) -> str:
    return "all sequences" if count is None else f"{count} sequences"


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a transition or a regroup. One that failed has changed nothing."""

    transition: Any  # `Transition`, or `Regroup`
    error: str | None  # why it failed; None if it is in force
    seconds: float  # duration of its whole batch


class Actuator(Protocol):
    """An actuator of one instance, which carries out transitions in order while steps go on."""

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
