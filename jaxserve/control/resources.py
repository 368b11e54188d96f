"""Resources: what the machine and the model allow a plan, in bytes of one device."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.control.plan import InstancePlan, StagePlan
from jaxserve.core.errors import PlanError
from jaxserve.core.segments import covered, elastic_bytes, filled


@dataclass(frozen=True)
class Resources:
    """Equal for all instances. Bytes are those on each device of a stage.

    `fixed` is what a stage takes whatever the plan says: runtime, workspace, embedding and head, and room for one layer
    in two variants at once, beside the larger one, so that an exchange needs no more than the larger of the plans
    before and after it.
    """

    budget: int  # of each device
    fixed: tuple[int, ...]  # by stage
    layer_bytes: Mapping[tuple[str, str], int]  # (decoder layer's block, precision): the precisions that there are
    page_bytes: tuple[int, ...]  # by stage: one KV page in the pools of all of its layers
    least_pages: int  # the null page included, here and below
    most_pages: int  # that the pools have room for
    copy_rate: float  # bytes/s that are copied from host memory while steps go on
    segments: tuple[int, ...] = ()  # pages of each one in which pools take memory; () where they take it page by page
    granules: tuple[int, ...] = ()  # by stage: what they may then take beyond their pages, in bytes; () for nothing

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

    def weight_bytes(self, stage: StagePlan) -> int:
        """Of the stage's decoder layers. Raises `PlanError` for a precision that there is not."""
        return sum(self.bytes_of(b.block, b.precision) for b in stage.blocks if b.block.startswith("layers."))

    def stage_bytes(self, number: int, stage: StagePlan) -> int:
        """All that stage `number` of an instance takes. Raises `PlanError` for a precision that there is not."""
        return self.fixed[number] + self.weight_bytes(stage) + self.kv_bytes(number, stage.kv_pages)

    def kv_bytes(self, number: int, pages: int) -> int:
        """What the pools of stage `number` take while so many pages may be in use."""
        page = self.page_bytes[number]
        if self.segments:
            return covered(self.segments, pages) * page
        return elastic_bytes(pages, self.most_pages, page, self._granules(number))

    def kv_capacity(self, instance: InstancePlan) -> int:
        """The most KV pages that fit beside an instance's layers, and that its pools have room for."""
        fitting = (
            self._pages_in(number, self.budget - self.fixed[number] - self.weight_bytes(stage))
            for number, stage in enumerate(instance.stages)
        )
        pages = max(0, min(fitting))
        return filled(self.segments, pages) if self.segments else pages

    def _pages_in(self, number: int, room: int) -> int:
        """The most pages of stage `number` that so many bytes hold."""
        if self.most_pages * self.page_bytes[number] <= room:
            return self.most_pages
        return (room - self._granules(number)) // self.page_bytes[number]

    def _granules(self, number: int) -> int:
        return self.granules[number] if self.granules else 0
