"""How many bytes a stage needs on each device, from those of its blocks. Imports no JAX: a simulator counts alike."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxserve.control.plan import StagePlan
from jaxserve.core.block_names import is_layer
from jaxserve.core.config import ModelConfig
from jaxserve.core.kv_layout import MAX_MOVED_PAGES
from jaxserve.core.step_shapes import Buckets

RESERVE = 1.25  # XLA's temporaries beyond those counted here
LIVE_COPIES = 3  # of the largest intermediate, alive at once


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage on each of its devices."""

    weights: int
    page: int  # one KV page in the pools of all of the stage's layers
    workspace: int  # activations, logits, sampler; or pages on their way, between steps
    pools: int  # KV pools: one for each layer
    swap_buffer: int = 0  # a layer in two variants at once, beside the larger one
    variants: int = 0  # quantised layers that are kept in the same memory, but for weights that are used there

    @property
    def beside_pages(self) -> int:
        """All but the pages."""
        return self.weights + self.variants + self.workspace + self.swap_buffer


@dataclass(frozen=True)
class PinnedVariants:
    """Which variants of layers are kept in the devices' own memory."""

    precisions: tuple[str, ...] = ()
    in_place: bool = False  # rows use them where they are: no such layer is copied, or there twice

    @property
    def in_place_precisions(self) -> tuple[str, ...]:
        """Precisions of which a row takes nothing more than what is kept."""
        return self.precisions if self.in_place else ()


NOTHING_PINNED = PinnedVariants()


class Sizes(Protocol):
    """Bytes of a model's parts on each device."""

    def block(self, block: str, precision: str) -> int:
        """Of a block's parameters."""
        ...

    def dequantized(self, block: str, precision: str) -> int:
        """Of a layer's largest quantised weight while XLA multiplies by it; 0 if none is quantised."""
        ...

    @property
    def page(self) -> int:
        """Of a KV page in the pool of one layer."""
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
    """The bytes of a stage under the padded `config`.

    `top` is the largest number of log-probabilities, and `variants` are the precisions that layers may change to.
    """
    names = [block.block for block in stage.blocks]
    running = {(block.block, block.precision) for block in stage.blocks}
    weights = sum(sizes.block(block.block, block.precision) for block in stage.blocks)
    if config.tie_embeddings and {"embed", "head"} <= set(names):
        weights -= sizes.block("embed", stage.blocks[0].precision)
    layers = [name for name in names if is_layer(name)]
    copied = [precision for precision in variants if precision not in pinned.in_place_precisions]
    # Where the host is the device, and splits a layer, what has been read is there until all is split.
    room = _largest if pinned.precisions and stage.tp > 1 else _second
    swap_buffer = max((room(sizes.block(name, precision) for precision in copied) for name in layers), default=0)
    beside = {(name, precision) for name in layers for precision in pinned.precisions}
    if pinned.in_place:
        beside -= running
    workspace = workspace_bytes(config, buckets, stage.tp, sampling="head" in names, top=top)
    wanted = running | {(name, precision) for name in layers for precision in variants}
    workspace += max(sizes.dequantized(name, precision) for name, precision in wanted)
    workspace = max(workspace, int(MAX_MOVED_PAGES * sizes.page * RESERVE))
    lying = sum(sizes.block(name, precision) for name, precision in beside)
    return StageMemory(weights, len(layers) * sizes.page, workspace, len(layers), swap_buffer, lying)


def workspace_bytes(config: ModelConfig, buckets: Buckets, tp: int, *, sampling: bool, top: int) -> int:
    """An upper estimate of a step's temporaries on each device, with what the sampler keeps."""
    tokens = max(shape.tokens for shape in buckets.all())
    inner = max(2 * config.intermediate_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim) // tp
    if config.moe is not None:
        inner = max(inner, 2 * config.moe.intermediate_size * config.moe.experts_per_token // tp)
    total = LIVE_COPIES * tokens * (inner + 2 * config.hidden_size) * 4
    if sampling:
        rows = max(max(buckets.rows), buckets.tile)
        total += LIVE_COPIES * rows * (config.vocab_rows + top) * 4
        total += sampler_bytes(buckets.max_num_seqs, config.vocab_rows)
    return int(total * RESERVE)


def sampler_bytes(slots: int, vocab: int) -> int:
    """What `DeviceSampler` keeps on the device: newest tokens, and what has occurred in each sequence."""
    return (slots + 1) * (4 + 5 * vocab)


def _largest(sizes: Iterable[int]) -> int:
    """0 if there is none."""
    return max(sizes, default=0)


def _second(sizes: Iterable[int]) -> int:
    """The largest but one; 0 if there is none."""
    return max(sorted(sizes, reverse=True)[1:], default=0)
