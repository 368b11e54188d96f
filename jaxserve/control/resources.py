"""Resources: what the machine and the model allow a plan, in bytes of one device."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.control.plan import InstancePlan, Plan, StagePlan
from jaxserve.core.block_names import is_layer
from jaxserve.core.errors import PlanError
from jaxserve.core.kv_layout import pages_covered, pages_filling
from jaxserve.core.renamed import Renamed


@dataclass(frozen=True)
class Resources:
    """Equal for all instances. Bytes are those on each device of a stage.

    `fixed` is what a stage takes whatever the plan says: runtime, workspace, embedding and head, granules of the pools,
    layers that are kept, and room for one layer in two variants at once, beside the larger one, so that an exchange
    needs no more than the larger of the plans before and after it.
    """

    budget: int  # of each device
    fixed: tuple[int, ...]  # by stage
    layer_bytes: Mapping[tuple[str, str], int]  # (decoder layer's block, precision): the precisions that there are
    page_bytes: tuple[int, ...]  # by stage: one KV page in the pools of all of its layers
    min_pages: int  # the null page included, here and below
    max_pages: int  # that the pools have room for
    copy_rate: float  # bytes/s that are copied from host memory while steps go on
    kept: tuple[str, ...] = ()  # precisions of which every layer is kept where rows use it, so that it takes no more
    segments: tuple[int, ...] = ()  # pages of each one in which pools take memory; () where they take it page by page
    least_pages = Renamed("min_pages")
    most_pages = Renamed("max_pages")

    def precisions(self, block: str) -> tuple[str, ...]:
        """Those that a decoder layer may have, the largest first; () for a block that is no decoder layer."""
        sizes = {precision: size for (name, precision), size in self.layer_bytes.items() if name == block}
        return tuple(sorted(sizes, key=lambda precision: -sizes[precision]))

    def bytes_of(self, block: str, precision: str) -> int:
        """Of a decoder layer. Raises `PlanError` naming the precisions that there are."""
        try:
            return self.layer_bytes[block, precision]
        except KeyError:
            known = ", ".join(self.precisions(block)) or "none to choose from"
            raise PlanError(f"{block} cannot have precision {precision!r}; there are {known} (variants)") from None

    def bytes_taken(self, block: str, precision: str) -> int:
        """Of a decoder layer, beside what is kept in any case. Raises `PlanError` as `bytes_of`."""
        size = self.bytes_of(block, precision)
        return 0 if precision in self.kept else size

    def weight_bytes(self, stage: StagePlan) -> int:
        """What the stage's decoder layers take. Raises `PlanError` for a precision that there is not."""
        return sum(self.bytes_taken(b.block, b.precision) for b in stage.blocks if is_layer(b.block))

    def stage_bytes(self, number: int, stage: StagePlan) -> int:
        """All that stage `number` of an instance takes. Raises `PlanError` for a precision that there is not."""
        return (
            self.fixed[number] + self.weight_bytes(stage) + self.page_bytes[number] * self.pages_taken(stage.kv_pages)
        )

    def kv_capacity(self, instance: InstancePlan) -> int:
        """The most KV pages that fit beside an instance's layers, and that its pools have room for."""
        fitting = (
            (self.budget - self.fixed[number] - self.weight_bytes(stage)) // self.page_bytes[number]
            for number, stage in enumerate(instance.stages)
        )
        pages = max(0, min(self.max_pages, *fitting))
        return pages_filling(self.segments, pages) if self.segments else pages

    def max_capacity(self, instance: InstancePlan) -> int:
        """The most KV pages that an instance can have: beside all of its layers in what takes least."""
        layers = [block.block for block in instance.blocks if is_layer(block.block)]
        least = {
            layer: min(self.precisions(layer), key=lambda precision: self.bytes_taken(layer, precision))
            for layer in layers
        }
        return self.kv_capacity(Plan(0, (instance,)).with_precisions(0, least).instances[0])

    def pages_taken(self, pages: int) -> int:
        """How many take memory while so many may be in use."""
        return pages_covered(self.segments, pages) if self.segments else pages


def validate(plan: Plan, resources: Resources) -> None:
    """Raises `PlanError` naming what is wrong and the limit it breaks.

    What `diff` puts between two valid plans is valid too: bytes fall to what both have, then rise.
    """
    devices = Counter(device for instance in plan.instances for stage in instance.stages for device in stage.devices)
    for device, stages in devices.items():
        if stages > 1:
            raise PlanError(f"device {device} has {stages} stages, it can have one")
    for number, instance in enumerate(plan.instances):
        if len(instance.stages) != len(resources.fixed):
            raise PlanError(f"instance {number} has {len(instance.stages)} stages, there are {len(resources.fixed)}")
        for index, stage in enumerate(instance.stages):
            where = f"instance {number}, stage {index}"
            if not resources.min_pages <= stage.kv_pages <= resources.max_pages:
                raise PlanError(
                    f"{where} has {stage.kv_pages} KV pages, it must be from {resources.min_pages} (max_model_len) "
                    f"to {resources.max_pages} (max_kv_pages)"
                )
            if stage.kv_pages != instance.kv_pages:
                raise PlanError(f"{where} has {stage.kv_pages} KV pages, stage 0 has {instance.kv_pages}")
            needed = resources.stage_bytes(index, stage)
            if needed > resources.budget:
                raise PlanError(
                    f"{where} needs {needed / 1e9:.3f} GB per device, the budget is {resources.budget / 1e9:.3f} GB; "
                    f"beside its layers {resources.kv_capacity(instance) or 'no'} KV pages fit (memory_gb)"
                )
