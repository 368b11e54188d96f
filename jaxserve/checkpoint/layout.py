"""Memory layouts of a checkpoint's quantised weights, known before the weights are read."""

from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.checkpoint.imported import ImportedStore
from jaxserve.checkpoint.loader import Checkpoint
from jaxserve.checkpoint.refit import group_after, stored_inputs
from jaxserve.core.block_names import is_layer
from jaxserve.core.config import ModelConfig
from jaxserve.core.precision import BITS
from jaxserve.core.scale_groups import group_size
from jaxserve.quantization import QArray

BFLOAT16, FLOAT32 = 2, 4  # bytes


class Layout(NamedTuple):
    """The layout of a layer's quantised weights, which decides their sizes together with their bits."""

    group: int  # inputs that share a scale as they are stored, where that divides; 0: all inputs of an output
    scale_bytes: int  # per group, for its scale and its zero
    config: ModelConfig
    padded: ModelConfig

    def nbytes(self, name: str, weight: QArray) -> int:
        """Return the bytes of a padded weight in this layout.

        Raise `ConfigError` if padding or a split over devices leaves no whole groups.
        """
        *out, size = weight.shape
        return prod(weight.codes.shape) + prod(out) * self._groups(name, size) * self.scale_bytes

    def abstract(self, name: str, weight: QArray) -> QArray:
        """Return the shapes and dtypes of a padded weight's arrays in this layout."""
        *out, size = weight.shape
        dtype = jnp.float32 if self.scale_bytes == 2 * FLOAT32 else jnp.bfloat16
        codes = jax.ShapeDtypeStruct(weight.codes.shape, weight.codes.dtype)
        scales = jax.ShapeDtypeStruct((*out, self._groups(name, size)), dtype)
        return QArray(codes, scales, None if self.scale_bytes == BFLOAT16 else scales, weight.bits, size)

    def _groups(self, name: str, size: int) -> int:
        """Return how many groups a padded weight of `size` inputs has."""
        stored = stored_inputs(name, size, self.config)
        group = group_size(stored, self.group)
        return size // group_after(name, group, self.config, self.padded)


def stored_layout(checkpoint: Checkpoint, padded: ModelConfig, block_id: str, precision: str) -> Layout | None:
    """Return the layout of a layer that is stored or prepared in a quantised precision.

    For layers quantised by other tools it is an upper limit. None means that the layer is rounded while it is loaded,
    to the layout that its module has.
    """
    if precision not in BITS or not is_layer(block_id):
        return None
    config, prepared = checkpoint.config, checkpoint.prepared
    if isinstance(checkpoint.store, ImportedStore) and checkpoint.precision(block_id) == precision:
        return Layout(checkpoint.store.scheme.group, 2 * FLOAT32, config, padded)
    if prepared is None or precision not in prepared.precisions:
        return None
    method = prepared.method(precision)
    return Layout(method.group, BFLOAT16 if method.symmetric else 2 * BFLOAT16, config, padded)
