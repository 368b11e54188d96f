"""The limits that the machine and the model set for a plan, in bytes of one device."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxserve.control.costs import CostModel
from jaxserve.control.plan import InstancePlan, Plan, StagePlan
from jaxserve.core.block_names import is_layer
from jaxserve.core.errors import PlanError
from jaxserve.core.kv_layout import pages_covered, pages_filling
from jaxserve.core.renamed import Renamed
from jaxserve.core.step_shapes import Buckets

DEFAULT_SHAPES = Buckets(max_num_seqs=256, max_tiles=64, tile=32, min_rows=1, widths=(1,))


@dataclass(frozen=True)
class Resources:
    """Limits of an instance's plan, the same for all instances. Bytes are those on each device of a stage.

    `fixed` is what a stage takes under every plan: runtime, workspace, embedding and head, granules of the pools,
    pinned variants, and the swap buffer. The swap buffer has room for the smaller variant of one layer, so that a swap
    needs no more memory than the larger of the plans before and after it.
    """

    budget: int  # bytes of each device
    fixed: tuple[int, ...]  # by stage
    layer_bytes: Mapping[tuple[str, str], int]  # (decoder layer, precision it may have) -> bytes
    page_bytes: tuple[int, ...]  # by stage: one KV page in the pools of all of its layers
    min_pages: int  # smallest number of KV pages, the null page included, as in all numbers of pages here
    max_pages: int  # largest number of KV pages that the pools have room for
    copy_rate: float  # bytes/s of copies from host memory while steps go on
    in_place: tuple[str, ...] = ()  # precisions in which layers run on their pinned variants and take no more memory
    segments: tuple[int, ...] = ()  # pages of each segment that pools grow by; () if they grow page by page
    # What steps cost under any plan; None if it is unknown. It is no limit, and no part of equality.
    costs: CostModel | None = field(default=None, compare=False, repr=False)
    shapes: Buckets = DEFAULT_SHAPES  # of steps
    page_size: int = 16  # tokens
    least_pages = Renamed("min_pages")
    most_pages = Renamed("max_pages")
    kept = Renamed("in_place")

    def precisions(self, block: str) -> tuple[str, ...]:
        """Return the precisions that a decoder layer may have, the largest first; () for other blocks."""
        sizes = {precision: size for (name, precision), size in self.layer_bytes.items() if name == block}
        return tuple(sorted(sizes, key=lambda precision: -sizes[precision]))

    def bytes_of(self, block: str, precision: str) -> int:
        """Return the bytes of a decoder layer. Raise `PlanError` if it cannot have this precision."""
        try:
            return self.layer_bytes[block, precision]
        except KeyError:
            known = self.precisions(block)
            allowed = f"choose from {', '.join(known)}" if known else "it cannot change"
            raise PlanError(f"{block} cannot have precision {precision!r}: {allowed} (variants)") from None

    def bytes_taken(self, block: str, precision: str) -> int:
        """Return the bytes that a decoder layer adds to `fixed`: 0 if it uses its pinned variant in place.

        Raise `PlanError` if it cannot have this precision.
        """
        size = self.bytes_of(block, precision)
        return 0 if precision in self.in_place else size

    def weight_bytes(self, stage: StagePlan) -> int:
        """Return the bytes that a stage's decoder layers add to `fixed`.

        Raise `PlanError` if a layer cannot have its precision.
        """
        return sum(self.bytes_taken(b.block, b.precision) for b in stage.blocks if is_layer(b.block))

    def stage_bytes(self, index: int, stage: StagePlan) -> int:
        """Return all bytes that a stage takes; `index` is its position in the instance.

        Raise `PlanError` if a layer cannot have its precision.
        """
        return self.fixed[index] + self.weight_bytes(stage) + self.page_bytes[index] * self.pages_taken(stage.kv_pages)

    def kv_capacity(self, instance: InstancePlan) -> int:
        """Return the largest number of KV pages that fit besides an instance's layers, at most `max_pages`."""
        fitting = (
            (self.budget - self.fixed[index] - self.weight_bytes(stage)) // self.page_bytes[index]
            for index, stage in enumerate(instance.stages)
        )
        pages = max(0, min(self.max_pages, *fitting))
        return pages_filling(self.segments, pages) if self.segments else pages

    def max_capacity(self, instance: InstancePlan) -> int:
        """Return the largest number of KV pages that an instance can have, with all its layers at their smallest."""
        layers = [block.block for block in instance.blocks if is_layer(block.block)]
        smallest = {
            layer: min(self.precisions(layer), key=lambda precision: self.bytes_taken(layer, precision))
            for layer in layers
        }
        return self.kv_capacity(instance.with_precisions(smallest))

    def pages_taken(self, pages: int) -> int:
        """Return how many pages take memory while `pages` may be in use: whole segments, if pools have segments."""
        return pages_covered(self.segments, pages) if self.segments else pages


def validate(plan: Plan, resources: Resources) -> None:
    """Raise `PlanError` that names the fault and the limit if a plan does not fit.

    The plans that `diff` leads through from one valid plan to another are valid too, as memory is freed before it is
    taken.
    """
    devices = Counter(device for instance in plan.instances for stage in instance.stages for device in stage.devices)
    for device, stages in devices.items():
        if stages > 1:
            raise PlanError(f"device {device} has {stages} stages: it can have one")
    for instance in plan.instances:
        validate_instance(instance, resources)


def validate_instance(instance: InstancePlan, resources: Resources) -> None:
    """Raise `PlanError` that names the fault and the limit if an instance's plan does not fit."""
    if instance.max_num_seqs is not None and instance.max_num_seqs < 1:
        raise PlanError(
            f"instance {instance.name} runs at most {instance.max_num_seqs} sequences: it must be at least 1"
        )
    if len(instance.stages) != len(resources.fixed):
        raise PlanError(
            f"instance {instance.name} has {len(instance.stages)} stages: it must have {len(resources.fixed)}"
        )
    for index, stage in enumerate(instance.stages):
        where = f"instance {instance.name}, stage {index}"
        if not resources.min_pages <= stage.kv_pages <= resources.max_pages:
            raise PlanError(
                f"{where} has {stage.kv_pages} KV pages: it must be from {resources.min_pages} (max_model_len) "
                f"to {resources.max_pages} (max_kv_pages)"
            )
        if stage.kv_pages != instance.kv_pages:
            raise PlanError(
                f"{where} has {stage.kv_pages} KV pages: it must have {instance.kv_pages}, as many as stage 0"
            )
        needed = resources.stage_bytes(index, stage)
        if needed > resources.budget:
            raise PlanError(
                f"{where} needs {needed / 1e9:.3f} GB per device: the budget is {resources.budget / 1e9:.3f} GB, "
                f"in which {resources.kv_capacity(instance) or 'no'} KV pages fit besides its layers (memory_gb)"
            )
