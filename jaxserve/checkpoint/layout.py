"""Memory layouts of a checkpoint's quantised weights, known before the weights are read."""

from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.checkpoint.imported import ImportedStore
from jaxserve.checkpoint.loader import Checkpoint
from jaxserve.checkpoint.variants import fitted
from jaxserve.core.block_names import is_layer
from jaxserve.core.config import ModelConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.precision import BITS
from jaxserve.quantization import QArray
from jaxserve.quantization.rounding import group_size

BFLOAT16, FLOAT32 = 2, 4  # bytes


class Layout(NamedTuple):
    """The layout of a quantised weight, which decides its size together with its bits."""

    group: int  # inputs that share a scale; 0: all inputs of an output
    scale_bytes: int  # per group, for its scale and its zero

    def nbytes(self, weight: QArray, parts: int = 1) -> int:
        """Return the bytes of a weight in this layout. Raise `ConfigError` if a split into `parts` cuts a group."""
        *out, size = weight.shape
        group = self._group(size)
        if size // parts % group:
            raise ConfigError(
                f"a weight of {size} inputs that is quantised in groups of {group} cannot be split over {parts} "
                "devices (tp)"
            )
        return prod(weight.codes.shape) + prod(out) * (size // group) * self.scale_bytes

    def abstract(self, weight: QArray) -> QArray:
        """Return the shapes and dtypes of a weight's arrays in this layout."""
        *out, size = weight.shape
        dtype = jnp.float32 if self.scale_bytes == 2 * FLOAT32 else jnp.bfloat16
        codes = jax.ShapeDtypeStruct(weight.codes.shape, weight.codes.dtype)
        scales = jax.ShapeDtypeStruct((*out, size // self._group(size)), dtype)
        return QArray(codes, scales, None if self.scale_bytes == BFLOAT16 else scales, weight.bits, size)

    def _group(self, size: int) -> int:
        return self.group if self.group and size % self.group == 0 else group_size(size, self.group)


def stored_layout(checkpoint: Checkpoint, padded: ModelConfig, block_id: str, precision: str) -> Layout | None:
    """Return the layout of a layer that is stored or prepared in a quantised precision.

    For layers quantised by other tools it is an upper limit. None means that the layer is rounded while it is loaded,
    to the layout that its module has.
    """
    if precision not in BITS or not is_layer(block_id):
        return None
    if isinstance(checkpoint.store, ImportedStore) and checkpoint.precision(block_id) == precision:
        return Layout(checkpoint.store.scheme.group, 2 * FLOAT32)
    prepared = checkpoint.prepared
    if prepared is None or precision not in prepared.precisions or fitted({}, checkpoint.config, padded) is None:
        return None
    method = prepared.method(precision)
    if method.group == 0 and padded.shards > 1:  # as `fitted` decides when the weights are read
        return None
    return Layout(method.group, BFLOAT16 if method.symmetric else 2 * BFLOAT16)
