"""Paged attention on CPU in plain XLA, for installations without the native kernels.

A loop over sequences contains a loop over chunks of their pages with an online softmax. Both have dynamic trip counts,
so that the cost depends on the contexts and not on the page tables' width, and a chunk stays in cache. The products are
in float32, because XLA's batched bfloat16 product on CPU is missing or several times slower.
"""

import jax.numpy as jnp
from jax import Array, lax

from jaxserve.kernels.kv import from_storage
from jaxserve.kernels.meta import AttentionMeta
from jaxserve.kernels.pool_segments import Pool, take_pages

CHUNK_TOKENS = 128  # keys and values of a chunk in float32, of all heads, fit in L2
MIN_ROWS = 4  # a product with fewer rows takes XLA's slow matrix-vector path
LOWEST = -1e30  # not -inf, so that the difference of two is 0 and not NaN


def paged_attention(q: Array, pool: Pool, meta: AttentionMeta, *, scale: float, window: int | None = None) -> Array:
    """Return attention of q [T, K, G, D] over pages, as `kernels.attention.paged_attention` defines it."""
    rows, tiles = meta.decode_lengths.shape[0], meta.tile_starts.shape[0]
    outputs = []
    if rows:
        valid = (meta.decode_lengths > 0).astype(jnp.int32)
        decode = q[:rows, None]  # a decode row is a tile of one token
        outputs.append(_attend(decode, pool, meta.decode_pages, meta.decode_lengths - 1, valid, scale, window))
    if tiles:
        prefill = q[rows:].reshape(tiles, -1, *q.shape[1:])
        outputs.append(_attend(prefill, pool, meta.tile_pages, meta.tile_starts, meta.tile_lengths, scale, window))
    return jnp.concatenate([o.reshape(-1, *q.shape[1:]) for o in outputs]) if outputs else q


def _attend(
    q: Array, pool: Pool, pages: Array, starts: Array, lengths: Array, scale: float, window: int | None
) -> Array:
    """Return attention of tiles q [N, Q, K, G, D], one tile after another."""
    n, tokens, kv_heads, groups, head_dim = q.shape
    chunk = max(1, CHUNK_TOKENS // pool[0].shape[3])
    pages = jnp.pad(pages, ((0, 0), (0, -pages.shape[1] % chunk)))
    rows = q.transpose(0, 2, 1, 3, 4).reshape(n, kv_heads, tokens * groups, head_dim)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, max(0, MIN_ROWS - tokens * groups)), (0, 0)))

    def tile(args: tuple[Array, ...]) -> Array:
        return _attend_tile(*args, pool, chunk, groups, scale, window)

    out = lax.map(tile, (rows, pages, starts, lengths))[:, :, : tokens * groups]
    return out.reshape(n, kv_heads, tokens, groups, head_dim).transpose(0, 2, 1, 3, 4)


def _attend_tile(
    q: Array,
    pages: Array,
    start: Array,
    length: Array,
    pool: Pool,
    chunk: int,
    groups: int,
    scale: float,
    window: int | None,
) -> Array:
    """Return attention of the rows q [K, R, D] of a tile over its pages [W], `chunk` pages at a time."""
    kv_heads, rows, head_dim = q.shape
    page_size = pool[0].shape[3]
    span = chunk * page_size
    token = jnp.arange(rows) // groups
    query = jnp.where(token < length, start + token, -1)  # padding rows see no position
    scaled = q.astype(jnp.float32) * scale

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        kv = take_pages(pool, lax.dynamic_slice(pages, (i * chunk,), (chunk,)))  # [chunk, K, 2, S, R]
        kv = jnp.moveaxis(from_storage(kv, head_dim, q.dtype, jnp.float32), 0, 2).reshape(kv_heads, 2, span, head_dim)
        key = i * span + jnp.arange(span)
        seen = key <= query[:, None]
        if window is not None:
            seen &= key > query[:, None] - window
        scores = jnp.where(seen, jnp.einsum("krd,ktd->krt", scaled, kv[:, 0]), LOWEST)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0)
        decay = jnp.exp(top - new_top)
        # Positions beyond the context, or before every token's window, are stale memory. A weight of 0 is not enough,
        # because 0 * NaN is NaN.
        live = key < start + length
        if window is not None:
            live &= key > start - window
        values = jnp.where(live[:, None], kv[:, 1], 0)
        acc = acc * decay[..., None] + jnp.einsum("krt,ktd->krd", weights, values)
        return new_top, total * decay + weights.sum(-1), acc

    first = 0 if window is None else jnp.maximum(start - window + 1, 0) // span
    last = jnp.where(length > 0, (start + length + span - 1) // span, first)
    zeros = jnp.zeros((kv_heads, rows), jnp.float32)
    _, total, acc = lax.fori_loop(first, last, step, (zeros + LOWEST, zeros, jnp.zeros(q.shape, jnp.float32)))
    return (acc / jnp.where(total > 0, total, 1)[..., None]).astype(q.dtype)
