"""Bytes of blocks and KV pages on each device, computed from shapes before anything is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp

from jaxserve.checkpoint.layout import Layout
from jaxserve.core.config import ModelConfig
from jaxserve.core.dequantization import tile_bytes
from jaxserve.core.precision import BITS
from jaxserve.kernels import page_bytes
from jaxserve.models import abstract_block
from jaxserve.parallel.placement import RULES
from jaxserve.quantization import QArray


@dataclass(frozen=True)
class BlockSizes:
    """Sizes (`workspace.DegreeSizes`) of the model with the padded `config`, on each of `tp` devices."""

    config: ModelConfig
    tp: int
    page_size: int
    kv_dtype: str
    platform: str
    layout: Callable[[str, str], Layout | None]  # (block, precision) -> layout of stored quantised weights, if any

    def block(self, block: str, precision: str) -> int:
        return block_bytes(self.config, block, precision, self.tp, self.layout(block, precision))

    def dequantized(self, block: str, precision: str) -> int:
        return dequantized_bytes(self.config, block, self.tp, precision)

    @property
    def page(self) -> int:
        heads = self.config.num_kv_heads // self.tp
        return page_bytes(heads, self.page_size, self.config.head_dim, self.kv_dtype, self.platform)


def block_bytes(config: ModelConfig, block: str, precision: str, tp: int, layout: Layout | None = None) -> int:
    """Return the bytes of a block's parameters on each of `tp` devices.

    `layout` is the layout of its quantised weights if it differs from the module's. Raise `ConfigError` if weights in
    that layout cannot be split.
    """
    _, variables = abstract_block(config, block, precision)
    total = 0
    for name, variable in variables.items():
        value = variable.get_value()
        if isinstance(value, QArray) and layout is not None:
            size = layout.nbytes(name, value)
        else:
            size = sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(value))
        total += size // (tp if any(axis in RULES for axis in variable.axes) else 1)
    return total


def padding_cost(model: ModelConfig, padded: ModelConfig, blocks: Sequence[tuple[str, str]]) -> tuple[float, float]:
    """Return the shares by which padding enlarges the weights of blocks in their precisions, and the KV cache."""
    sizes = ("num_heads", "num_kv_heads", "intermediate_size", "moe", "vocab_rows")
    if all(getattr(model, size) == getattr(padded, size) for size in sizes):
        return 0.0, 0.0
    before, after = (sum(block_bytes(config, *block, 1) for block in blocks) for config in (model, padded))
    return after / before - 1, padded.num_kv_heads / model.num_kv_heads - 1


def dequantized_bytes(config: ModelConfig, block: str, tp: int, precision: str) -> int:
    """Return the most bytes of a layer's quantised weights that XLA dequantises at once; 0 in full precision.

    They are in the model's dtype, on each of `tp` devices. Experts are multiplied one at a time.
    """
    if "." not in block or precision not in BITS:
        return 0
    _, variables = abstract_block(config, block, precision)
    itemsize, sizes = jnp.dtype(config.dtype).itemsize, [0]
    for variable in variables.values():
        value = variable.get_value()
        if isinstance(value, QArray):
            *out, inputs = value.shape[1:] if variable.axes[0] == "experts" else value.shape
            outputs = prod(out)
            if variable.axes[-1] in RULES:
                inputs //= tp
            elif any(axis in RULES for axis in variable.axes):
                outputs //= tp
            sizes.append(tile_bytes(outputs, inputs, itemsize))
    return max(sizes)
