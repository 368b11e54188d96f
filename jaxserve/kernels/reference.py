"""The reference of paged attention: vectorised, without loops.

Tests specify other implementations by it, and it runs on GPUs without a Pallas kernel. Its cost depends on the page
table's width W, not on the context lengths, so that callers on GPU bucket W.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve.kernels.kv import from_storage
from jaxserve.kernels.meta import AttentionMeta
from jaxserve.kernels.pool_segments import Pool, take_pages


def paged_attention(
    q: Array,
    pool: Pool,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int | None = None,
    compute_dtype: DTypeLike = jnp.float32,
) -> Array:
    """Return attention of q [T, K, G, D] over pages, as `kernels.attention.paged_attention` defines it.

    `compute_dtype` is the dtype of the operands of both products, which always accumulate in float32.
    """
    rows, tiles = meta.decode_lengths.shape[0], meta.tile_starts.shape[0]
    tokens = (q.shape[0] - rows) // tiles if tiles else 0
    kwargs = {"scale": scale, "window": window, "compute_dtype": compute_dtype}
    decode = attend(  # a decode row is a tile of one token
        q[:rows, None], pool, meta.decode_pages, meta.decode_lengths - 1, meta.decode_lengths > 0, **kwargs
    )
    prefill = q[rows:].reshape(tiles, tokens, *q.shape[1:])
    prefill = attend(prefill, pool, meta.tile_pages, meta.tile_starts, meta.tile_lengths, **kwargs)
    return jnp.concatenate([decode.reshape(-1, *q.shape[1:]), prefill.reshape(-1, *q.shape[1:])])


def attend(
    q: Array,
    pool: Pool,
    pages: Array,
    starts: Array,
    lengths: Array,
    *,
    scale: float,
    window: int | None,
    compute_dtype: DTypeLike,
) -> Array:
    """Return attention of tiles q [N, Q, K, G, D]; tile n has positions starts[n] to starts[n] + lengths[n] - 1.

    Token i of a tile sees the keys at positions <= starts[n] + i (and, with a window w, > starts[n] + i - w). Tokens
    from lengths[n] on are padding and get zeros.
    """
    n, tokens, kv_heads, _, head_dim = q.shape
    kv = from_storage(take_pages(pool, pages), head_dim, q.dtype, compute_dtype)  # [N, W, K, 2, S, D]
    kv = jnp.moveaxis(kv, 1, 3).reshape(n, kv_heads, 2, pages.shape[1] * pool[0].shape[3], head_dim)
    token, key = jnp.arange(tokens), jnp.arange(kv.shape[3])
    query = (starts[:, None] + token)[..., None]
    seen = (key <= query) & (token < lengths[:, None])[..., None]  # [N, Q, keys]
    if window is not None:
        seen &= key > query - window

    scores = scale * jnp.einsum(
        "nqkgd,nktd->nkgqt", q.astype(compute_dtype), kv[:, :, 0], preferred_element_type=jnp.float32
    )
    weights = jax.nn.softmax(scores, axis=-1, where=seen[:, None, None])
    # The softmax of rows that see nothing is NaN.
    weights = jnp.where(seen[:, None, None], weights, 0).astype(compute_dtype)
    # Values that no token of the tile sees are stale memory. A weight of 0 is not enough, because 0 * NaN is NaN.
    values = jnp.where(jnp.any(seen, axis=1)[:, None, :, None], kv[:, :, 1], 0)
    out = jnp.einsum("nkgqt,nktd->nqkgd", weights, values, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)
