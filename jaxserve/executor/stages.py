"""Stages: the runs of consecutive blocks of the block table that share a placement."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from jax import Array

from jaxserve.compilation.programs import Program
from jaxserve.executor.blocks import LoadedBlock
from jaxserve.parallel.placement import Placement


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks on one placement: maybe the embedding, decoder layers, maybe the head.

    `first_layer` is the number of the first decoder layer, and so of its KV pool.
    """

    placement: Placement
    embed: LoadedBlock | None
    layers: tuple[LoadedBlock, ...]
    head: LoadedBlock | None
    first_layer: int

    @cached_property
    def executables(self) -> tuple[Program, ...]:
        """What the decoder layers run."""
        return tuple(row.executable for row in self.layers)

    @cached_property
    def leaves(self) -> tuple[tuple[Array, ...], ...]:
        """The parameters of every block, in order."""
        return tuple(row.leaves for row in (self.embed, *self.layers, self.head) if row is not None)

    @property
    def pools(self) -> slice:
        """Which KV pools are those of the decoder layers."""
        return slice(self.first_layer, self.first_layer + len(self.layers))


def stages_of(rows: Sequence[LoadedBlock]) -> tuple[Stage, ...]:
    """Runs of consecutive rows with equal placement."""
    stages: list[Stage] = []
    layer = 0
    for placement, run in groupby(rows, key=lambda row: row.placement):
        by_kind = {kind: tuple(group) for kind, group in groupby(run, key=lambda row: row.block.partition(".")[0])}
        layers = by_kind.get("layers", ())
        (embed,), (head,) = by_kind.get("embed", (None,)), by_kind.get("head", (None,))
        stages.append(Stage(placement, embed, layers, head, layer))
        layer += len(layers)
    return tuple(stages)
