"""Projected queries, keys and values, and their rotary position embedding (RoPE)."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.kernels.operands import DeferredNorm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadNorms:
    """The weights of root-mean-square normalisation of each query head and each key head."""

    q: Array  # [D], weight for queries
    k: Array  # [D], weight for keys
    eps: float = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProjectedQKV:
    """Projected queries, keys and values of a step's tokens, with deferred normalisation and rotation.

    These are deferred because attention kernels can compute them while they read queries and keys.
    """

    parts: Array  # [T, K, G + 2, D]: for each kv head its queries, its key and its value
    cos: Array  # f32 [T, D/2]
    sin: Array  # f32 [T, D/2]
    norms: HeadNorms | None = None  # applied before rotation

    def value(self) -> tuple[Array, Array, Array]:
        """Return normalised and rotated queries [T, K, G, D] and keys [T, K, D], and values [T, K, D]."""
        q, k, v = self.parts[:, :, :-2], self.parts[:, :, -2], self.parts[:, :, -1]
        if self.norms is not None:
            q, k = (DeferredNorm(x, w, self.norms.eps).value() for x, w in ((q, self.norms.q), (k, self.norms.k)))
        return apply_rope(q, self.cos, self.sin), apply_rope(k, self.cos, self.sin), v


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate every head of x [T, heads..., D] by its token's angles, given as cosines and sines f32 [T, D/2].

    Elements i and i + D/2 form a pair, as in Hugging Face's rotate-half convention. The result is computed in float32
    and has the dtype of `x`.
    """
    heads = tuple(range(1, x.ndim - 1))
    cos, sin = jnp.expand_dims(cos, heads), jnp.expand_dims(sin, heads)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)
