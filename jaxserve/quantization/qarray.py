"""QArray: a weight in 8, 4 or 3 bits with a scale for every group of inputs."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.quantization.packing import UNIT, packed_bytes, unpack

Array = jax.Array | np.ndarray


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales", "zeros"], meta_fields=["bits", "size"])
@dataclass(frozen=True)
class QArray:
    """A weight [out..., C] that is contracted over C, its last axis. A pytree of flat arrays.

    With u the codes (`packing` says how they lie in bytes), g = i // group and b the bits:

        w[o, i] = scales[o, g] * (u[o, i] - 2**(b-1) - zeros[o, g])          0 <= u < 2**b

    and zeros absent (symmetric) means 0. Scales may be negative. The numbers u - 2**(b-1) are exact in bfloat16, so
    that products with them can be summed in float32 and scaled afterwards; zeros cost one term more for each group of
    inputs x: scales * (sum(q * x) - zeros * sum(x)).

    Invariants: codes uint8 [out..., packed_bytes(b, C)]; scales and zeros [out..., C / group], bfloat16 or float32.
    The axes of `out` are those of the weight, so that a shard of them is a shard of the QArray; a shard of C is one if
    it is a whole number of units and of groups.
    """

    codes: Array
    scales: Array
    zeros: Array | None = None
    bits: int = field(default=4)
    size: int = field(default=0)  # C

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.size // self.scales.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight: [out..., C]."""
        return (*self.codes.shape[:-1], self.size)

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def __getitem__(self, index: Any) -> "QArray":
        """Only [...], as a module reads a parameter: itself."""
        if index is not Ellipsis:
            raise TypeError("a QArray is read as a whole")
        return self

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """The weight [out..., C] that it stands for. The specification of the format; runs on any backend."""
        q = unpacked(jnp.asarray(self.codes), self.bits, self.size).astype(jnp.float32) - (1 << (self.bits - 1))
        grouped = q.reshape(*self.scales.shape, self.group)
        if self.zeros is not None:
            grouped -= jnp.asarray(self.zeros, jnp.float32)[..., None]
        grouped *= jnp.asarray(self.scales, jnp.float32)[..., None]
        return grouped.reshape(self.shape).astype(dtype)


def unpacked(codes: jax.Array, bits: int, size: int) -> jax.Array:
    """`packing.unpack` in JAX: uint8 [..., packed_bytes] -> uint8 [..., size]."""
    if bits == 8:
        return codes
    units = codes.reshape(*codes.shape[:-1], -1, packed_bytes(bits, UNIT[bits]))
    pairs = units[..., :64].reshape(*units.shape[:-1], 32, 2).astype(jnp.uint16)
    words = pairs[..., 0] | pairs[..., 1] << 8
    width = 4 if bits == 4 else 2
    shifts = width * jnp.arange(16 // width, dtype=jnp.uint16)
    planes = (words[..., None, :] >> shifts[:, None]) & ((1 << width) - 1)
    if bits == 3:
        masks = units[..., 64:].reshape(*units.shape[:-1], 8, 4, 1)
        high = (masks >> jnp.arange(8, dtype=jnp.uint8)) & 1
        planes |= high.reshape(planes.shape).astype(jnp.uint16) << 2
    return planes.reshape(*codes.shape[:-1], -1)[..., :size].astype(jnp.uint8)


__all__ = ["QArray", "unpack", "unpacked"]
