"""Left operands of products: arrays, or deferred operations that a kernel may fuse into the product."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeferredNorm:
    """Root-mean-square normalisation of x [rows..., C] over C, times a weight [C]; computed in float32."""

    x: Array
    weight: Array
    eps: float = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self.x.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the result."""
        return self.x.dtype

    def value(self) -> Array:
        """Return the result of the operation."""
        wide = self.x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * self.weight.astype(jnp.float32)).astype(self.dtype)

    def as_matrix(self, rows: int) -> "DeferredNorm":
        """Return the operation on a matrix with the given number of rows."""
        return DeferredNorm(self.x.reshape(rows, -1), self.weight, self.eps)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeferredSwiGLU:
    """silu(gate) * up, with shape [rows..., N*M], of gates and ups [rows..., N, 2, M]; computed in float32."""

    gate_up: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        *rows, parts, _, size = self.gate_up.shape
        return (*rows, parts * size)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the result."""
        return self.gate_up.dtype

    def value(self) -> Array:
        """Return the result of the operation."""
        gate, up = (self.gate_up[..., i, :].astype(jnp.float32) for i in range(2))
        return (jax.nn.silu(gate) * up).astype(self.dtype).reshape(self.shape)

    def as_matrix(self, rows: int) -> "DeferredSwiGLU":
        """Return the operation on a matrix with the given number of rows."""
        return DeferredSwiGLU(self.gate_up.reshape(rows, *self.gate_up.shape[-3:]))


LeftOperand = Array | DeferredNorm | DeferredSwiGLU
"""The left operand of a product."""


def as_matrix(x: LeftOperand, rows: int) -> LeftOperand:
    """Return x [rows..., c...] as a matrix [R, C] with the given number of rows."""
    return x.as_matrix(rows) if isinstance(x, DeferredNorm | DeferredSwiGLU) else x.reshape(rows, -1)


def value_of(x: LeftOperand) -> Array:
    """Return the operand as an array, after its deferred operation."""
    return x.value() if isinstance(x, DeferredNorm | DeferredSwiGLU) else x
