"""Bytes that a stage of the plan needs on each device, computed from the sizes of its blocks and the step shapes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from jaxserve.control.plan import StagePlan
from jaxserve.core.block_names import is_layer
from jaxserve.core.config import ModelConfig
from jaxserve.core.degrees import Degrees
from jaxserve.core.kv_layout import MAX_MOVED_PAGES, exchanged_pages
from jaxserve.core.numeric import ceil_div
from jaxserve.core.step_shapes import Buckets

TEMPORARIES_FACTOR = 1.25  # for XLA's temporaries beyond those counted here
LIVE_COPIES = 3  # copies of the largest intermediate that are alive at once


class DegreeSizes(Protocol):
    """Sizes of a model's parts with one degree of tensor parallelism, in bytes on each device."""

    @property
    def config(self) -> ModelConfig:
        """The model's configuration, padded for the degree."""
        ...

    @property
    def page(self) -> int:
        """Bytes of one KV page in the pool of one layer."""
        ...

    def block(self, block: str, precision: str) -> int:
        """Return the bytes of a block's parameters."""
        ...

    def dequantized(self, block: str, precision: str) -> int:
        """Return the most bytes of a layer's weights that XLA dequantises at once; 0 in full precision."""
        ...


@dataclass(frozen=True)
class PinnedVariants:
    """Precisions in which layers of all instances run on one held variant, as on CPU, where the host is the device."""

    precisions: tuple[str, ...] = ()
    instances: int = 1  # at the start
    cuts: int = 1  # for different degrees, which instances may need at once; each may be a copy

    def share(self, size: int, members: int = 1) -> int:
        """Return the part of a held variant's bytes that an instance bears in the place of `members` instances."""
        return ceil_div(size * members, self.instances)


EXCHANGED_ROWS = 32  # for which there is always room
EXCHANGED_SHARE = 1 / 16  # of the layers that a group drops: room for its KV pages on their way


@dataclass(frozen=True)
class FixedMemory:
    """Bytes on each device that a stage takes whatever the precisions of its layers are."""

    page: int  # of one KV page in the pools of all of the stage's layers
    workspace: int  # activations, logits and sampler; between steps, pages that are being moved
    exchange: int  # room for second copies of layers that change, or for what a merge moves at once
    variants: int  # quantised layers held in the same memory, as far as this instance bears them


class ModelSizes:
    """Sizes (`StageSizes`) of any stage of a model: of any blocks, precisions, and degree of tensor parallelism."""

    def __init__(
        self,
        of_degree: Callable[[int], DegreeSizes],
        degrees: Degrees,
        blocks: Mapping[str, tuple[str, ...]],
        buckets: Buckets,
        top: int,
        pinned: PinnedVariants,
        max_lanes: int = 1,
        swap_room: int = 0,
    ):
        """`degrees` are those that instances may have, and `blocks` the precisions that each block may have.

        `buckets` are the step shapes of an instance at the start. `top` is the largest number of log-probabilities per
        token, and `max_lanes` that of the instances that share their layers. Where all variants are copied, the swap
        buffer has at most `swap_room` bytes.
        """
        self.degrees, self.pinned, self._max_lanes, self._swap_room = degrees, pinned, max_lanes, swap_room
        self._blocks, self._buckets, self._top = blocks, buckets, top
        # A controller asks ten times a second, and sizes follow from the modules' abstract shapes.
        self._of_degree = cache(of_degree)
        self._block_bytes = cache(lambda block, precision, tp: self._of_degree(tp).block(block, precision))
        self._sorted = cache(self._sorted_precisions)
        self._fixed = cache(self._fixed_memory)

    @property
    def in_place(self) -> tuple[str, ...]:
        return self.pinned.precisions

    def precisions(self, block: str) -> tuple[str, ...]:
        return self._sorted(block)

    def block(self, block: str, precision: str, tp: int | None = None) -> int:
        return self._block_bytes(block, precision, self.degrees.tp if tp is None else tp)

    def page(self, stage: StagePlan) -> int:
        return self.fixed(stage).page

    def entries(self, stage: StagePlan) -> dict[str, int]:
        fixed, weights, layers, in_place = self.fixed(stage), 0, 0, 0
        for block in stage.blocks:
            size = self.block(block.block, block.precision, stage.tp)
            if is_layer(block.block):
                layers += size
                if block.precision in self.in_place:
                    size = self.pinned.share(size, self.degrees.members(stage.tp))
                    in_place += size
            weights += size
        # The other stages of a group have as many layers, about.
        pages_under_way = int(EXCHANGED_SHARE * (stage.lanes - 1) * layers)
        return {
            "weights": weights - self._shared(stage),
            "variants": fixed.variants - in_place,
            "workspace": fixed.workspace,
            "exchange": max(fixed.exchange, pages_under_way),
        }

    def fixed(self, stage: StagePlan) -> FixedMemory:
        """Return the bytes that do not depend on the precisions of a stage's layers."""
        return self._fixed(tuple(block.block for block in stage.blocks), stage.tp)

    def _sorted_precisions(self, block: str) -> tuple[str, ...]:
        precisions = self._blocks.get(block, ()) if is_layer(block) else ()
        return tuple(sorted(precisions, key=lambda precision: -self.block(block, precision)))

    def _shared(self, stage: StagePlan) -> int:
        """Return the bytes of the embedding if it is also the weight of a head in the same stage."""
        precisions = {block.block: block.precision for block in stage.blocks if not is_layer(block.block)}
        if len(precisions) < 2 or not self._of_degree(stage.tp).config.tie_embeddings:
            return 0
        return self.block("embed", precisions["embed"], stage.tp)

    def _fixed_memory(self, names: tuple[str, ...], tp: int) -> FixedMemory:
        sizes, members = self._of_degree(tp), self.degrees.members(tp)
        layers = [name for name in names if is_layer(name)]
        copied = {name: [p for p in self._blocks.get(name, ()) if p not in self.in_place] for name in layers}
        # Two variants of one layer exist at once. The larger one is booked among the weights, the smaller one here.
        # Where the host is the device and splits a layer, the whole layer that was read stays until all its parts are
        # made.
        room = _largest if self.pinned.precisions and tp > 1 else _second_largest
        buffers = [room(sizes.block(name, precision) for precision in copied[name]) for name in layers]
        pinned = (
            self.pinned.share(sizes.block(name, precision), members)
            for name in layers
            for precision in self.pinned.precisions
        )
        dequantized = (sizes.dequantized(name, p) for name in layers for p in self._blocks.get(name, ()))
        buckets = self._buckets.times(members)
        lanes = 1 if "embed" in names else self._max_lanes  # the last stage of a group samples for all of them
        slots = lanes * buckets.max_num_seqs if "head" in names else 0
        workspace = workspace_bytes(sizes.config, buckets, tp, slots=slots, top=self._top)
        workspace += max(dequantized, default=0)
        return FixedMemory(
            page=len(layers) * sizes.page,
            workspace=max(workspace, int(MAX_MOVED_PAGES * sizes.page * TEMPORARIES_FACTOR)),
            exchange=max(self._swap_buffer(buffers), self._merge_buffer(names, tp), self._rows_buffer(sizes)),
            variants=self.pinned.cuts * sum(pinned),
        )

    def _swap_buffer(self, buffers: Sequence[int]) -> int:
        """Return the bytes that are kept free for second copies of layers, of which each takes one of `buffers`.

        Where all variants are copied, there is room for several, or for none: layers are then freed first.
        """
        if self.pinned.precisions:
            return max(buffers, default=0)
        return min(self._swap_room, sum(buffers)) if self._swap_room >= max(buffers, default=0) else 0

    def _rows_buffer(self, sizes: DegreeSizes) -> int:
        """Return the bytes of rows of pages on their way between instances that share their layers; 0 without any.

        At most all layers of a row leave a device, and as many bytes come in.
        """
        layers = sum(map(is_layer, self._blocks))
        return 2 * EXCHANGED_ROWS * layers * sizes.page if self._max_lanes > 1 else 0

    def _merge_buffer(self, names: tuple[str, ...], tp: int) -> int:
        """Return the bytes that a merge to twice the degree, or the split back, takes for a time; 0 without any.

        Blocks change one by one. Each device then has two copies of a block: one at the smaller degree, which is booked
        among the weights, and the smaller one at the larger degree. After that KV pages are exchanged layer by layer.
        """
        if tp not in self.degrees.all() or not self.degrees.larger():
            return 0
        larger = min(2 * tp, self.degrees.max_tp)
        copies = (self.block(name, precision, larger) for name in names for precision in self._blocks.get(name, ()))
        sizes = self._of_degree(tp)
        return max(copies) + 2 * exchanged_pages(sizes.platform) * sizes.page


def workspace_bytes(config: ModelConfig, buckets: Buckets, tp: int, *, slots: int, top: int) -> int:
    """Estimate from above the bytes of a step's temporaries on each device, with the sampler's state for `slots`."""
    tokens = max(shape.tokens for shape in buckets.all())
    inner = max(2 * config.intermediate_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim) // tp
    if config.moe is not None:
        inner = max(inner, 2 * config.moe.intermediate_size * config.moe.experts_per_token // tp)
    total = LIVE_COPIES * tokens * (inner + 2 * config.hidden_size) * 4
    if slots:
        rows = max(max(buckets.rows), buckets.tile)
        total += LIVE_COPIES * rows * (config.vocab_rows + top) * 4
        total += sampler_bytes(slots, config.vocab_rows)
    return int(total * TEMPORARIES_FACTOR)


def sampler_bytes(slots: int, vocab: int) -> int:
    """Return the bytes of `DeviceSampler`'s state: for each slot the newest token, and which tokens have occurred."""
    return (slots + 1) * (4 + 5 * vocab)


def _largest(sizes: Iterable[int]) -> int:
    return max(sizes, default=0)


def _second_largest(sizes: Iterable[int]) -> int:
    return max(sorted(sizes, reverse=True)[1:], default=0)
