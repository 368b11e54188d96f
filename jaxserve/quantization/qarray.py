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
    """A quantised weight [out..., C] that is contracted over C, its last axis. A pytree of arrays.

    With u the codes (packed as in `packing`), g = i // group and b the bits:

        w[o, i] = scales[o, g] * (u[o, i] - 2**(b-1) - zeros[o, g])          0 <= u < 2**b

    `zeros` is None for a symmetric weight, which means 0. Scales may be negative. The numbers q = u - 2**(b-1) are
    exact in bfloat16, so that products with them can be summed in float32 and scaled afterwards. Zeros cost one more
    term for each group of inputs x: scales * (sum(q * x) - zeros * sum(x)).

    Invariants: codes uint8 [out..., packed_bytes(b, C)]; scales and zeros [out..., C / group], bfloat16 or float32.
    The axes of `out` are those of the weight, so that a shard along them is a shard of the QArray. A shard along C must
    be a whole number of packed units and of groups.
    """

    codes: Array
    scales: Array
    zeros: Array | None = None
    bits: int = field(default=4)
    size: int = field(default=0)  # C

    @property
    def group(self) -> int:
        """The number of inputs that share a scale."""
        return self.size // self.scales.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight: [out..., C]."""
        return (*self.codes.shape[:-1], self.size)

    @property
    def nbytes(self) -> int:
        """The bytes of codes, scales and zeros."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def __getitem__(self, index: Any) -> "QArray":
        """Return the QArray itself for [...], which is how a module reads a parameter. Raise `TypeError` otherwise."""
        if index is not Ellipsis:
            raise TypeError(f"a QArray has no part {index!r}: only [...] is allowed")
        return self

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """Return the weight [out..., C]. This is the reference of the format, and runs on any backend."""
        q = unpacked(jnp.asarray(self.codes), self.bits, self.size).astype(jnp.float32) - (1 << (self.bits - 1))
        grouped = q.reshape(*self.scales.shape, self.group)
        if self.zeros is not None:
            grouped -= jnp.asarray(self.zeros, jnp.float32)[..., None]
        grouped *= jnp.asarray(self.scales, jnp.float32)[..., None]
        return grouped.reshape(self.shape).astype(dtype)


def unpacked(codes: jax.Array, bits: int, size: int) -> jax.Array:
    """Unpack uint8 [..., packed_bytes] into codes uint8 [..., size] like `packing.unpack`, but in JAX."""
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
