"""Rows of a product's left side that are computed on their way into it, where a kernel can do so, or by themselves."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeferredNorm:
    """x [rows..., C] under root-mean-square normalisation over C, times a weight [C]; in float32 inside."""

    x: Array
    weight: Array
    eps: float = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the value."""
        return self.x.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of the value."""
        return self.x.dtype

    def value(self) -> Array:
        """The rows by themselves."""
        wide = self.x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * self.weight.astype(jnp.float32)).astype(self.dtype)

    def as_matrix(self, rows: int) -> "DeferredNorm":
        """With one axis of rows."""
        return DeferredNorm(self.x.reshape(rows, -1), self.weight, self.eps)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeferredSwiGLU:
    """silu(gate) * up [rows..., N*M] of a projection [rows..., N, 2, M] to both; in float32 inside."""

    gate_up: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the value."""
        *rows, parts, _, size = self.gate_up.shape
        return (*rows, parts * size)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the value."""
        return self.gate_up.dtype

    def value(self) -> Array:
        """The rows by themselves."""
        gate, up = (self.gate_up[..., i, :].astype(jnp.float32) for i in range(2))
        return (jax.nn.silu(gate) * up).astype(self.dtype).reshape(self.shape)

    def as_matrix(self, rows: int) -> "DeferredSwiGLU":
        """With one axis of rows."""
        return DeferredSwiGLU(self.gate_up.reshape(rows, *self.gate_up.shape[-3:]))


LeftOperand = Array | DeferredNorm | DeferredSwiGLU
"""What stands on the left of a product."""


def as_matrix(x: LeftOperand, rows: int) -> LeftOperand:
    """With one axis of rows; x [rows..., c...] becomes [R, C]."""
    return x.as_matrix(rows) if isinstance(x, DeferredNorm | DeferredSwiGLU) else x.reshape(rows, -1)


def value_of(x: LeftOperand) -> Array:
    """The rows by themselves."""
    return x.value() if isinstance(x, DeferredNorm | DeferredSwiGLU) else x
