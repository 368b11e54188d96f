"""How many bytes a plan needs on each device, known before anything is loaded."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp

from jaxserve.checkpoint.layout import Layout
from jaxserve.control import StagePlan
from jaxserve.core.config import ModelConfig
from jaxserve.core.precision import BITS
from jaxserve.executor.buckets import Buckets
from jaxserve.executor.sampling import DeviceSampler
from jaxserve.kernels import page_bytes
from jaxserve.models import abstract_block
from jaxserve.parallel.placement import RULES
from jaxserve.quantization import QArray

RESERVE = 1.25  # XLA's temporaries beyond those counted here
LIVE_COPIES = 3  # of the largest intermediate, alive at once


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage on each of its devices."""

    weights: int
    page: int  # one KV page in the pools of all of the stage's layers
    workspace: int  # activations, logits, sampler
    pools: int  # KV pools: one for each layer
    exchange: int = 0  # a layer in two variants at once, beside the larger one


BytesOf = Callable[[str, str], int]
"""(block, precision) -> bytes of its parameters on each device of the stage."""


def stage_memory(
    config: ModelConfig,
    stage: StagePlan,
    bytes_of: BytesOf,
    buckets: Buckets,
    page_size: int,
    kv_dtype: str,
    top: int,
    variants: Sequence[str] = (),
) -> StageMemory:
    """The bytes of a stage under the physical `config`.

    `kv_dtype` is that of the KV pools, `top` the largest number of log-probabilities, and `variants` are the
    precisions that layers may change to.
    """
    names = [block.block for block in stage.blocks]
    precisions = {(block.block, block.precision) for block in stage.blocks}
    weights = sum(bytes_of(block.block, block.precision) for block in stage.blocks)
    if config.tie_embeddings and {"embed", "head"} <= set(names):
        weights -= bytes_of("embed", stage.blocks[0].precision)
    layers = [name for name in names if name.startswith("layers.")]
    exchange = max((_second(bytes_of(name, precision) for precision in variants) for name in layers), default=0)
    heads = config.num_kv_heads // stage.tp
    page = len(layers) * page_bytes(heads, page_size, config.head_dim, kv_dtype)
    workspace = workspace_bytes(config, buckets, stage.tp, sampling="head" in names, top=top)
    wanted = precisions | {(name, precision) for name in layers for precision in variants}
    workspace += max(dequantized_bytes(config, name, stage.tp, precision) for name, precision in wanted)
    return StageMemory(weights, page, workspace, len(layers), exchange)


def _second(sizes: Iterable[int]) -> int:
    """The largest but one; 0 if there is none."""
    return max(sorted(sizes, reverse=True)[1:], default=0)


def block_bytes(config: ModelConfig, block: str, precision: str, tp: int, layout: Layout | None = None) -> int:
    """Bytes of a block's parameters on each of tp devices.

    `layout`: that of its quantised weights, if not the modules'. Raises `ConfigError` where it cannot be split.
    """
    _, variables = abstract_block(config, block, precision)
    total = 0
    for variable in variables.values():
        value = variable.get_value()
        if isinstance(value, QArray) and layout is not None:
            size = layout.nbytes(value, tp if variable.axes[-1] in RULES else 1)
        else:
            size = sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(value))
        total += size // (tp if any(axis in RULES for axis in variable.axes) else 1)
    return total


def dequantized_bytes(config: ModelConfig, block: str, tp: int, precision: str) -> int:
    """What the largest quantised weight of a layer takes on each device while XLA multiplies by it; 0 if none is."""
    if "." not in block or precision not in BITS:
        return 0
    _, variables = abstract_block(config, block, precision)
    sizes = [0]
    for variable in variables.values():
        value = variable.get_value()
        if isinstance(value, QArray):
            shape = value.shape[1:] if variable.axes[0] == "experts" else value.shape  # one expert at a time
            sizes.append(prod(shape) // (tp if any(axis in RULES for axis in variable.axes) else 1))
    return 2 * max(sizes) * jnp.dtype(config.dtype).itemsize


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
        total += DeviceSampler.bytes_needed(buckets.max_num_seqs, config.vocab_rows)
    return int(total * RESERVE)
