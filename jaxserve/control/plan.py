"""Plans: immutable descriptions of what runs where.

A plan has instances, which are replicas of the model that serve requests independently. An instance has pipeline
stages. A stage has blocks, which run on its devices with tensor parallelism over all of them.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxserve.core.block_names import is_layer, layer_name
from jaxserve.core.errors import ConfigError, PlanError

log = logging.getLogger(__name__)

SHOWN_INSTANCES = 4  # in the representation of a plan


@dataclass(frozen=True)
class BlockPlan:
    """A block of the model ("embed", "layers.0", ..., "head") and the precision in which it runs."""

    block: str
    precision: str


@dataclass(frozen=True)
class StagePlan:
    """A pipeline stage: consecutive blocks on the same devices."""

    blocks: tuple[BlockPlan, ...]
    devices: tuple[int, ...]  # indices into the machine's list of devices
    kv_pages: int  # the null page included
    lanes: int = 1  # of its KV pools: the instances of the start whose KV pages it has, in arrays of their own

    @property
    def tp(self) -> int:
        """Degree of tensor parallelism."""
        return len(self.devices)


@dataclass(frozen=True, repr=False)
class InstancePlan:
    """An instance: a replica of the whole model, as stages in order.

    Its name is given once, and everything that is kept beside the plan is found by it.
    """

    stages: tuple[StagePlan, ...]
    name: str = "0"
    max_num_seqs: int | None = None  # sequences that may run at once; None: as many as the engine has slots for
    draining: bool = False  # new requests go to other instances

    def __repr__(self) -> str:
        layers = ", ".join(f"{count} {precision}" for precision, count in Counter(self.layer_precisions).items())
        devices = ", ".join(map(str, sorted(self.devices)))
        draining = ", draining" if self.draining else ""
        pages = f"KV pages: {self.kv_pages:,}"
        return f"<InstancePlan {self.name!r} on devices {devices}, layers: {layers}, {pages}{draining}>"

    @cached_property
    def layer_precisions(self) -> tuple[str, ...]:
        """Precision of each decoder layer."""
        return tuple(block.precision for block in self.blocks if is_layer(block.block))

    @cached_property
    def blocks(self) -> tuple[BlockPlan, ...]:
        """All blocks in the order in which they run."""
        return tuple(block for stage in self.stages for block in stage.blocks)

    @property
    def kv_pages(self) -> int:
        """Number of KV pages, the null page included. All stages have the same, because page ids are valid in all."""
        return self.stages[0].kv_pages

    @property
    def lanes(self) -> int:
        """Number of instances of the start that share their layers in this one, as its stages. Usually 1."""
        return self.stages[0].lanes

    @property
    def tp(self) -> int:
        """Degree of tensor parallelism of its first stage; only instances with one stage change it."""
        return self.stages[0].tp

    def stage_of(self, block: str) -> StagePlan:
        """Return the stage that runs a block, which must be one of the model's."""
        return next(stage for stage in self.stages if any(planned.block == block for planned in stage.blocks))

    def precision(self, block: str) -> str:
        """Return the precision of a block. Raise `PlanError` if no block has this name."""
        try:
            return self.precisions[block]
        except KeyError:
            first, last = self.blocks[0].block, self.blocks[-1].block
            raise PlanError(f"unknown block {block!r}: the blocks are {first} to {last}") from None

    def with_precisions(self, precisions: Mapping[str, str]) -> "InstancePlan":
        """Return the plan with the given precisions of some blocks. Raise `PlanError` for a block that is unknown."""
        unknown = precisions.keys() - self.precisions.keys()
        if unknown:
            first, last = self.blocks[0].block, self.blocks[-1].block
            names = ", ".join(sorted(unknown))
            raise PlanError(f"instance {self.name} has no block {names}: its blocks are {first} to {last}")

        def changed(block: BlockPlan) -> BlockPlan:
            return BlockPlan(block.block, precisions[block.block]) if block.block in precisions else block

        stages = (replace(stage, blocks=tuple(map(changed, stage.blocks))) for stage in self.stages)
        return replace(self, stages=tuple(stages))

    def with_kv_pages(self, pages: int) -> "InstancePlan":
        """Return the plan with `pages` KV pages in all stages."""
        return replace(self, stages=tuple(replace(stage, kv_pages=pages) for stage in self.stages))

    def with_max_num_seqs(self, count: int | None) -> "InstancePlan":
        """Return the plan with another limit on the sequences that run at once."""
        return replace(self, max_num_seqs=count)

    def with_draining(self, draining: bool) -> "InstancePlan":
        """Return the plan of an instance that new requests avoid, or no longer avoid."""
        return replace(self, draining=draining)

    @property
    def devices(self) -> frozenset[int]:
        """All devices of the stages."""
        return frozenset(device for stage in self.stages for device in stage.devices)

    def same_place(self, other: "InstancePlan") -> bool:
        """Return whether both plans have the same blocks on the same devices, in whatever precisions."""
        return self._place == other._place

    @cached_property
    def _place(self) -> tuple[tuple[tuple[int, ...], int, tuple[str, ...]], ...]:
        return tuple(
            (stage.devices, stage.lanes, tuple(block.block for block in stage.blocks)) for stage in self.stages
        )

    @cached_property
    def precisions(self) -> Mapping[str, str]:
        """Precision of each block."""
        return {block.block: block.precision for block in self.blocks}


@dataclass(frozen=True, repr=False)
class Plan:
    """A plan of all instances. It is never changed: a change is another plan with the next version."""

    version: int
    instances: tuple[InstancePlan, ...]

    def __repr__(self) -> str:
        """Return what the instances run; `plan_yaml.to_yaml` has all blocks."""
        shown = "; ".join(map(repr, self.instances[:SHOWN_INSTANCES]))
        more = len(self.instances) - SHOWN_INSTANCES
        return f"<Plan {self.version}: {shown}{f'; and {more} more' if more > 0 else ''}>"

    def instance(self, name: str) -> InstancePlan:
        """Return the plan of an instance. Raise `PlanError` if there is no instance of this name."""
        try:
            return self._by_name[name]
        except KeyError:
            known = ", ".join(self._by_name)
            raise PlanError(f"unknown instance {name!r}: the instances are {known}") from None

    @property
    def largest_tp(self) -> int:
        """The largest degree of tensor parallelism of an instance."""
        return max(instance.tp for instance in self.instances)

    def with_instance(self, instance: InstancePlan) -> "Plan":
        """Return the next version of the plan, in which `instance` replaces the instance of its name.

        Raise `PlanError` if there is no instance of this name.
        """
        self.instance(instance.name)
        instances = (instance if old.name == instance.name else old for old in self.instances)
        return Plan(self.version + 1, tuple(instances))

    def with_precisions(self, instance: str, precisions: Mapping[str, str]) -> "Plan":
        """Return the next version of the plan, with the given precisions of some blocks of an instance.

        Raise `PlanError` if the instance or one of its blocks is unknown.
        """
        return self.with_instance(self.instance(instance).with_precisions(precisions))

    def with_kv_pages(self, instance: str, pages: int) -> "Plan":
        """Return the next version of the plan, with `pages` KV pages in all stages of an instance."""
        return self.with_instance(self.instance(instance).with_kv_pages(pages))

    @cached_property
    def _by_name(self) -> Mapping[str, InstancePlan]:
        return {instance.name: instance for instance in self.instances}


class PlanInForce:
    """The plan in force, which the actuators of all instances change and everything else reads. Thread-safe."""

    def __init__(self, plan: Plan):
        self._lock = threading.Lock()
        self._version = plan.version
        self._instances = {instance.name: instance for instance in plan.instances}
        self._names = set(self._instances)
        self._plan = plan
        self._held_as: dict[str, int] = {}  # see `limit_requests`
        self._followers: list[Callable[[], None]] = []

    def follow(self, changed: Callable[[], None]) -> None:
        """Have a function called after each change, by the thread that has made it. The function must be quick.

        It is also called when the policy has changed, and with it which plans may come into force.
        """
        self._followers.append(changed)

    @property
    def plan(self) -> Plan:
        """The plan of all instances."""
        with self._lock:
            if self._plan.version != self._version:
                self._plan = Plan(self._version, tuple(self._instances.values()))
            return self._plan

    @property
    def used_names(self) -> frozenset[str]:
        """The names of all instances that there have been."""
        with self._lock:
            return frozenset(self._names)

    @property
    def version(self) -> int:
        """The version of the plan, which grows by 1 with each transition."""
        return self._version

    def instance(self, name: str) -> InstancePlan:
        """Return the plan of an instance, whose name must be known."""
        return self._instances[name]

    def limit_requests(self, name: str, degree: int | None) -> None:
        """Let an instance hold only what one of a smaller degree holds, while its KV pages are divided; None ends that.

        The instance need not be in force yet.
        """
        with self._lock:
            self._held_as.pop(name, None)
            if degree is not None:
                self._held_as[name] = degree
        self.tell()

    def holds_as(self, name: str) -> int:
        """Return the degree on which depends how long requests an instance holds."""
        return self._held_as.get(name) or self._instances[name].tp

    def regroup(self, before: Collection[str], after: Sequence[InstancePlan]) -> int:
        """Put instances in force instead of those named `before`, as one transition. Return the new version."""
        with self._lock:
            position = min((index for index, name in enumerate(self._instances) if name in before), default=None)
            kept = [instance for name, instance in self._instances.items() if name not in before]
            place = len(kept) if position is None else position
            self._instances = {instance.name: instance for instance in (*kept[:place], *after, *kept[place:])}
            self._names.update(self._instances)
            self._held_as = {name: degree for name, degree in self._held_as.items() if name in self._instances}
            self._version += 1
            version = self._version
        self.tell()
        return version

    def commit(self, instance: InstancePlan, transitions: int) -> int:
        """Put an instance's plan in force that differs by a number of transitions. Return the new version."""
        with self._lock:
            self._instances[instance.name] = instance
            self._version += transitions
            version = self._version
        self.tell()
        return version

    def tell(self) -> None:
        """Call all followers."""
        for changed in self._followers:
            try:
                changed()
            except Exception:  # the plan is in force all the same
                log.exception("the plan has changed, and not all parts of the engine were told")


def block_chain(embed: str, layer_precisions: Sequence[str], head: str) -> tuple[BlockPlan, ...]:
    """Return all blocks of a model in order, with the given precisions of embedding, decoder layers and head."""
    layers = (BlockPlan(layer_name(layer), precision) for layer, precision in enumerate(layer_precisions))
    return (BlockPlan("embed", embed), *layers, BlockPlan("head", head))


def parallel_plan(chain: Sequence[BlockPlan], *, kv_pages: int, tp: int, pp: int, dp: int, devices: int) -> Plan:
    """Return a plan of `dp` instances with `pp` stages of `tp` devices each.

    `chain` has all blocks of the model in order. Layers are split evenly over stages, and devices are used in order.

    Raise `ConfigError` if the machine has too few devices or the model too few layers.
    """
    num_layers = len(chain) - 2
    for name, degree in (("tp", tp), ("pp", pp), ("dp", dp)):
        if degree < 1:
            raise ConfigError(f"{name} is {degree}: it must be at least 1")
    if tp * pp * dp > devices:
        raise ConfigError(
            f"tp x pp x dp is {tp} x {pp} x {dp}, which needs {tp * pp * dp} devices: the machine has {devices}"
        )
    if pp > num_layers:
        raise ConfigError(f"pp is {pp}: it must be at most {num_layers}, the number of the model's layers")
    bounds = [num_layers * i // pp for i in range(pp + 1)]
    instances = []
    for replica in range(dp):
        stages = []
        for stage in range(pp):
            first = 0 if stage == 0 else bounds[stage] + 1
            last = num_layers + 2 if stage == pp - 1 else bounds[stage + 1] + 1
            start = (replica * pp + stage) * tp
            stages.append(StagePlan(tuple(chain[first:last]), tuple(range(start, start + tp)), kv_pages))
        instances.append(InstancePlan(tuple(stages), str(replica)))
    return Plan(1, tuple(instances))
