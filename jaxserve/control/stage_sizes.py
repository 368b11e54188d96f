"""Bytes of a plan's stages: what limits of plans are computed from, and a table of them for tests and recorded runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from jaxserve.control.plan import InstancePlan, StagePlan
from jaxserve.core.block_names import is_layer


class StageSizes(Protocol):
    """Bytes that a stage takes on each of its devices, whatever its blocks, their precisions and its devices are."""

    @property
    def in_place(self) -> tuple[str, ...]:
        """Precisions in which layers run on held variants and take no more memory."""
        ...

    def precisions(self, block: str) -> tuple[str, ...]:
        """Return the precisions that a decoder layer may have, the largest first; () for other blocks."""
        ...

    def block(self, block: str, precision: str, tp: int | None = None) -> int:
        """Return the bytes of a block on each of `tp` devices, by default as many as a stage had at the start."""
        ...

    def page(self, stage: StagePlan) -> int:
        """Return the bytes of one KV page in the pools of all layers of a stage."""
        ...

    def entries(self, stage: StagePlan) -> Mapping[str, int]:
        """Return the bytes of everything in a stage but its KV pages, by the name of the ledger's entry.

        Raise `PlanError` if a block cannot have its precision.
        """
        ...


@dataclass(frozen=True)
class SizeTable:
    """Sizes (`StageSizes`) that are given as numbers, for stages as they are in one plan."""

    layers: Mapping[tuple[str, str], int]  # (decoder layer, precision that it may have) -> bytes
    fixed: Mapping[str, int]  # block -> bytes that its stage takes besides layers and KV pages
    pages: Mapping[str, int]  # decoder layer -> bytes of one KV page in its pool
    in_place: tuple[str, ...] = ()

    @classmethod
    def of(cls, sizes: StageSizes, instance: InstancePlan) -> "SizeTable":
        """Return the table of the stages of an instance's plan."""
        layers: dict[tuple[str, str], int] = {}
        fixed: dict[str, int] = {}
        pages: dict[str, int] = {}
        for stage in instance.stages:
            own = [block for block in stage.blocks if is_layer(block.block)]
            taken = sum(
                sizes.block(block.block, block.precision, stage.tp)
                for block in own
                if block.precision not in sizes.in_place
            )
            fixed[stage.blocks[0].block] = sum(sizes.entries(stage).values()) - taken
            for block in own:
                pages[block.block] = sizes.page(stage) // len(own)
                for precision in sizes.precisions(block.block):
                    layers[block.block, precision] = sizes.block(block.block, precision, stage.tp)
        return cls(layers, fixed, pages, sizes.in_place)

    def precisions(self, block: str) -> tuple[str, ...]:
        sizes = {precision: size for (name, precision), size in self.layers.items() if name == block}
        return tuple(sorted(sizes, key=lambda precision: -sizes[precision]))

    def block(self, block: str, precision: str, tp: int | None = None) -> int:
        return self.layers[block, precision]

    def page(self, stage: StagePlan) -> int:
        return sum(self.pages.get(block.block, 0) for block in stage.blocks)

    def entries(self, stage: StagePlan) -> Mapping[str, int]:
        layers = (block for block in stage.blocks if is_layer(block.block) and block.precision not in self.in_place)
        return {
            "weights": sum(self.layers[block.block, block.precision] for block in layers),
            "fixed": sum(self.fixed.get(block.block, 0) for block in stage.blocks),
        }
