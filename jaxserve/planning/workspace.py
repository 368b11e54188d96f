"""Bytes that a stage of the plan needs on each device, computed from the sizes of its blocks and the step shapes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxserve.control.plan import StagePlan
from jaxserve.core.block_names import is_layer
from jaxserve.core.config import ModelConfig
from jaxserve.core.kv_layout import MAX_MOVED_PAGES
from jaxserve.core.step_shapes import Buckets

TEMPORARIES_FACTOR = 1.25  # for XLA's temporaries beyond those counted here
LIVE_COPIES = 3  # copies of the largest intermediate that are alive at once


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage on each of its devices."""

    weights: int
    page: int  # bytes of one KV page in the pools of all of the stage's layers
    workspace: int  # activations, logits and sampler; between steps, pages that are being moved
    pools: int  # number of KV pools: one for each layer
    swap_buffer: int = 0  # room for the smaller of two variants of one layer during a swap
    variants: int = 0  # quantised layers pinned in the same memory, without those that weights use in place

    @property
    def bytes_without_pages(self) -> int:
        """Bytes of everything except the KV pages."""
        return self.weights + self.variants + self.workspace + self.swap_buffer


@dataclass(frozen=True)
class PinnedVariants:
    """Precisions whose layer variants are pinned in the devices' own memory: on CPU the host is the device."""

    precisions: tuple[str, ...] = ()
    in_place: bool = False  # layers run on the pinned arrays, without a copy

    @property
    def in_place_precisions(self) -> tuple[str, ...]:
        """Precisions in which a layer takes no memory besides its pinned variant."""
        return self.precisions if self.in_place else ()


NOTHING_PINNED = PinnedVariants()


class Sizes(Protocol):
    """Sizes of a model's parts, in bytes on each device."""

    def block(self, block: str, precision: str) -> int:
        """Return the bytes of a block's parameters."""
        ...

    def dequantized(self, block: str, precision: str) -> int:
        """Return the bytes of a layer's largest quantised weight while XLA multiplies by it; 0 in full precision."""
        ...

    @property
    def page(self) -> int:
        """Bytes of one KV page in the pool of one layer."""
        ...


def stage_memory(
    config: ModelConfig,
    stage: StagePlan,
    sizes: Sizes,
    buckets: Buckets,
    top: int,
    variants: Sequence[str] = (),
    pinned: PinnedVariants = NOTHING_PINNED,
) -> StageMemory:
    """Return the bytes that a stage of the model with the padded `config` needs on each device.

    `top` is the largest number of log-probabilities per token, and `variants` are the precisions that layers may change
    to.
    """
    names = [block.block for block in stage.blocks]
    running = {(block.block, block.precision) for block in stage.blocks}
    weights = sum(sizes.block(block.block, block.precision) for block in stage.blocks)
    if config.tie_embeddings and {"embed", "head"} <= set(names):
        weights -= sizes.block("embed", stage.blocks[0].precision)
    layers = [name for name in names if is_layer(name)]
    copied = [precision for precision in variants if precision not in pinned.in_place_precisions]
    # Two variants of one layer exist at once. The larger one is booked among the weights, the smaller one here. Where
    # the host is the device and splits a layer, the whole layer that was read stays until all its parts are made.
    room = _largest if pinned.precisions and stage.tp > 1 else _second_largest
    swap_buffer = max((room(sizes.block(name, precision) for precision in copied) for name in layers), default=0)
    pinned_layers = {(name, precision) for name in layers for precision in pinned.precisions}
    if pinned.in_place:
        pinned_layers -= running
    workspace = workspace_bytes(config, buckets, stage.tp, sampling="head" in names, top=top)
    possible = running | {(name, precision) for name in layers for precision in variants}
    workspace += max(sizes.dequantized(name, precision) for name, precision in possible)
    return StageMemory(
        weights,
        page=len(layers) * sizes.page,
        workspace=max(workspace, int(MAX_MOVED_PAGES * sizes.page * TEMPORARIES_FACTOR)),
        pools=len(layers),
        swap_buffer=swap_buffer,
        variants=sum(sizes.block(name, precision) for name, precision in pinned_layers),
    )


def workspace_bytes(config: ModelConfig, buckets: Buckets, tp: int, *, sampling: bool, top: int) -> int:
    """Estimate from above the bytes of a step's temporaries on each device, the sampler's state included."""
    tokens = max(shape.tokens for shape in buckets.all())
    inner = max(2 * config.intermediate_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim) // tp
    if config.moe is not None:
        inner = max(inner, 2 * config.moe.intermediate_size * config.moe.experts_per_token // tp)
    total = LIVE_COPIES * tokens * (inner + 2 * config.hidden_size) * 4
    if sampling:
        rows = max(max(buckets.rows), buckets.tile)
        total += LIVE_COPIES * rows * (config.vocab_rows + top) * 4
        total += sampler_bytes(buckets.max_num_seqs, config.vocab_rows)
    return int(total * TEMPORARIES_FACTOR)


def sampler_bytes(slots: int, vocab: int) -> int:
    """Return the bytes of `DeviceSampler`'s state: for each slot the newest token, and which tokens have occurred."""
    return (slots + 1) * (4 + 5 * vocab)


def _largest(sizes: Iterable[int]) -> int:
    return max(sizes, default=0)


def _second_largest(sizes: Iterable[int]) -> int:
    return max(sorted(sizes, reverse=True)[1:], default=0)
