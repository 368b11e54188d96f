"""Plan: an immutable description of what runs where. Serving is executing the current plan.

A plan has instances (replicas that serve requests independently), an instance has pipeline stages, and a stage has
blocks that run on its devices with tensor parallelism over all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxserve.core.block_names import is_layer, layer_name
from jaxserve.core.errors import ConfigError, PlanError


@dataclass(frozen=True)
class BlockPlan:
    """One block of the chain ("embed", "layers.0", ..., "head") and the variant of it that runs."""

    block: str
    precision: str


@dataclass(frozen=True)
class StagePlan:
    """Consecutive blocks on the same devices (indices into the machine's device list)."""

    blocks: tuple[BlockPlan, ...]
    devices: tuple[int, ...]
    kv_pages: int

    @property
    def tp(self) -> int:
        """The degree of tensor parallelism."""
        return len(self.devices)


@dataclass(frozen=True)
class InstancePlan:
    """A full copy of the model: its stages in order."""

    stages: tuple[StagePlan, ...]

    @cached_property
    def layer_precisions(self) -> tuple[str, ...]:
        """The precision of each decoder layer."""
        return tuple(block.precision for block in self.blocks if is_layer(block.block))

    @cached_property
    def blocks(self) -> tuple[BlockPlan, ...]:
        """All blocks in the order in which they run."""
        return tuple(block for stage in self.stages for block in stage.blocks)

    @property
    def kv_pages(self) -> int:
        """KV pages in use, the null page included: a page's id is valid in all stages alike."""
        return self.stages[0].kv_pages

    def precision(self, block: str) -> str:
        """The precision of a block. Raises `PlanError` if there is none of this name."""
        for known in self.blocks:
            if known.block == block:
                return known.precision
        raise PlanError(f"there is no block {block!r}")


@dataclass(frozen=True)
class Plan:
    """The whole runtime. A change is a new plan with the next version."""

    version: int
    instances: tuple[InstancePlan, ...]

    def with_precisions(self, instance: int, precisions: Mapping[str, str]) -> "Plan":
        """The next version, with other precisions of some blocks. Raises `PlanError` for a block that is not there."""
        old = self.instances[instance]
        unknown = precisions.keys() - {block.block for block in old.blocks}
        if unknown:
            raise PlanError(f"instance {instance} has no block {', '.join(sorted(unknown))}")

        def changed(block: BlockPlan) -> BlockPlan:
            return BlockPlan(block.block, precisions[block.block]) if block.block in precisions else block

        stages = (replace(stage, blocks=tuple(map(changed, stage.blocks))) for stage in old.stages)
        return self._with_instance(instance, InstancePlan(tuple(stages)))

    def with_kv_pages(self, instance: int, pages: int) -> "Plan":
        """The next version, with another number of KV pages in all stages of an instance."""
        stages = tuple(replace(stage, kv_pages=pages) for stage in self.instances[instance].stages)
        return self._with_instance(instance, InstancePlan(stages))

    def _with_instance(self, number: int, instance: InstancePlan) -> "Plan":
        instances = (*self.instances[:number], instance, *self.instances[number + 1 :])
        return Plan(self.version + 1, instances)


def chain_of(embed: str, layer_precisions: Sequence[str], head: str) -> tuple[BlockPlan, ...]:
    """All blocks of a model: the embedding, the decoder layers and the head, in the precisions given."""
    layers = (BlockPlan(layer_name(number), precision) for number, precision in enumerate(layer_precisions))
    return (BlockPlan("embed", embed), *layers, BlockPlan("head", head))


def static_plan(chain: Sequence[BlockPlan], *, kv_pages: int, tp: int, pp: int, dp: int, devices: int) -> Plan:
    """dp instances of pp stages of tp devices each, layers split evenly, devices taken in order.

    `chain` has all blocks: the embedding, the layers, the head.

    Raises `ConfigError` when the machine has too few devices or the model too few layers.
    """
    num_layers = len(chain) - 2
    for name, degree in (("tp", tp), ("pp", pp), ("dp", dp)):
        if degree < 1:
            raise ConfigError(f"{name} is {degree}, it must be at least 1")
    if tp * pp * dp > devices:
        raise ConfigError(f"tp x pp x dp = {tp} x {pp} x {dp} needs {tp * pp * dp} devices, there are {devices}")
    if pp > num_layers:
        raise ConfigError(f"pp is {pp}, the model has only {num_layers} layers")
    bounds = [num_layers * i // pp for i in range(pp + 1)]
    instances = []
    for replica in range(dp):
        stages = []
        for stage in range(pp):
            first = 0 if stage == 0 else bounds[stage] + 1
            last = num_layers + 2 if stage == pp - 1 else bounds[stage + 1] + 1
            start = (replica * pp + stage) * tp
            stages.append(StagePlan(tuple(chain[first:last]), tuple(range(start, start + tp)), kv_pages))
        instances.append(InstancePlan(tuple(stages)))
    return Plan(1, tuple(instances))
