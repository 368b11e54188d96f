"""Queries, keys and values as a layer projects them, and their rotary position embedding."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.kernels.operands import DeferredNorm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadNorms:
    """Root-mean-square normalisation of each query and each key, by itself."""

    q: Array  # [D], the weight of queries
    k: Array  # [D], that of keys
    eps: float = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProjectedQKV:
    """Queries, keys and values of a step's tokens, queries and keys rotated by where the tokens stand.

    Normalised and rotated by who takes them, since attention may do so on the way.
    """

    parts: Array  # [T, K, G + 2, D]: the queries of each kv head, its key and its value, as they are projected
    cos: Array  # f32 [T, D/2]
    sin: Array  # f32 [T, D/2]
    norms: HeadNorms | None = None  # before rotation

    def value(self) -> tuple[Array, Array, Array]:
        """Queries [T, K, G, D], keys and values [T, K, D]."""
        q, k, v = self.parts[:, :, :-2], self.parts[:, :, -2], self.parts[:, :, -1]
        if self.norms is not None:
            q, k = (DeferredNorm(x, w, self.norms.eps).value() for x, w in ((q, self.norms.q), (k, self.norms.k)))
        return apply_rope(q, self.cos, self.sin), apply_rope(k, self.cos, self.sin), v


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates every head of x [T, heads..., D] by its token's angles, whose cosines and sines are f32 [T, D/2].

    Number i and number i + D/2 turn together, as in Hugging Face's rotate-half convention. Computed in float32,
    returned in the dtype of `x`.
    """
    heads = tuple(range(1, x.ndim - 1))
    cos, sin = jnp.expand_dims(cos, heads), jnp.expand_dims(sin, heads)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)
