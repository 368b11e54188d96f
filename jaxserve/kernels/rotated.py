"""Queries, keys and values as a layer projects them, and their rotary position embedding."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rotated:
    """Queries, keys and values of a step's tokens, queries and keys rotated by where the tokens stand.

    Rotated by who takes them, since attention may do so on the way.
    """

    parts: Array  # [T, K, G + 2, D]: the queries of each kv head, its key and its value, before rotation
    cos: Array  # f32 [T, D/2]
    sin: Array  # f32 [T, D/2]

    def value(self) -> tuple[Array, Array, Array]:
        """Queries [T, K, G, D], keys and values [T, K, D]."""
        q, k, v = self.parts[:, :, :-2], self.parts[:, :, -2], self.parts[:, :, -1]
        return apply_rope(q, self.cos, self.sin), apply_rope(k, self.cos, self.sin), v


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates every head of x [T, heads..., D] by its token's angles, whose cosines and sines are f32 [T, D/2].

    Number i and number i + D/2 turn together, as in Hugging Face's rotate-half convention. Computed in float32, returned
    in the dtype of `x`.
    """
    heads = tuple(range(1, x.ndim - 1))
    cos, sin = jnp.expand_dims(cos, heads), jnp.expand_dims(sin, heads)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)
