"""Stages: the runs of consecutive blocks that share a placement."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Generic, TypeVar

from jax import Array

from jaxserve.compilation.programs import Program
from jaxserve.executor.blocks import BlockSignature, LoadedBlock
from jaxserve.parallel.placement import Placement

Block = TypeVar("Block", LoadedBlock, BlockSignature)


@dataclass(frozen=True)
class Stage(Generic[Block]):
    """Consecutive blocks on one placement: any of the embedding, decoder layers and the head.

    The blocks are loaded, or only their signatures are known. `first_layer` is the index of the first decoder layer in
    the model, and so of its KV pool.
    """

    placement: Placement
    embed: Block | None
    layers: tuple[Block, ...]
    head: Block | None
    first_layer: int

    @cached_property
    def executables(self) -> tuple[Program, ...]:
        """The programs of the decoder layers, in order."""
        return tuple(loaded.executable for loaded in self.layers)

    @property
    def distinct_layers(self) -> tuple[Block, ...]:
        """The last decoder layer of each program."""
        return tuple({loaded.executable: loaded for loaded in self.layers}.values())

    @cached_property
    def leaves(self) -> tuple[tuple[Array, ...], ...]:
        """The parameters of every block, in order."""
        blocks = (self.embed, *self.layers, self.head)
        return tuple(loaded.leaves for loaded in blocks if loaded is not None)

    @property
    def pools(self) -> slice:
        """The indices of the decoder layers' KV pools."""
        return slice(self.first_layer, self.first_layer + len(self.layers))


def stages_of(blocks: Sequence[LoadedBlock]) -> tuple[Stage[LoadedBlock], ...]:
    """Return the stages of a model's blocks, which are in order."""
    stages: list[Stage[LoadedBlock]] = []
    first_layer = 0
    for placement, run in groupby(blocks, key=lambda loaded: loaded.placement):
        by_kind = {
            kind: tuple(group) for kind, group in groupby(run, key=lambda loaded: loaded.block.partition(".")[0])
        }
        layers = by_kind.get("layers", ())
        (embed,), (head,) = by_kind.get("embed", (None,)), by_kind.get("head", (None,))
        stages.append(Stage(placement, embed, layers, head, first_layer))
        first_layer += len(layers)
    return tuple(stages)
