"""Paged attention: one kernel for decode rows and prefill tiles, with long contexts split over programs."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxserve.core.numeric import ceil_div
from jaxserve.kernels.kv import row_size
from jaxserve.kernels.meta import AttentionMeta
from jaxserve.kernels.pool_segments import Pool
from pallas_kernels.blocks import HOPPER, AttentionBlocks, DeviceBlocks
from pallas_kernels.flash import flash

ROWS = 64  # query rows of a program
HEAD_DIMS = (64, 80, 96, 128, 256)


def supports(q: Array, pool: Pool) -> bool:
    """Return whether the kernel takes q [T, K, G, D] and a pool of segments [P, K, 2, S, R]."""
    page_size, head_dim = pool[0].shape[3], q.shape[3]
    return (
        q.dtype in ((jnp.bfloat16,) if pool[0].dtype == jnp.int8 else (jnp.bfloat16, jnp.float16))
        and pool[0].dtype in (q.dtype, jnp.int8)
        and pool[0].shape[4] == row_size(head_dim, pool[0].dtype, "gpu")
        and head_dim in HEAD_DIMS
        and page_size >= 8
        and page_size & (page_size - 1) == 0
        and q.shape[2] <= ROWS
    )


def paged_attention(
    q: Array,
    pool: Pool,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int | None = None,
    blocks: DeviceBlocks = HOPPER,
    interpret: Any = False,
) -> Array:
    """Return attention of q [T, K, G, D] over a pool of segments [P, K, 2, S, R], as `jaxserve.kernels` defines it.

    Products have 16-bit operands as in the reference, but probabilities are rounded before they are divided by their
    sum.
    """
    rows, tiles = meta.decode_lengths.shape[0], meta.tile_starts.shape[0]
    tokens = (q.shape[0] - rows) // tiles if tiles else 0
    kwargs = {"scale": scale, "window": window, "interpret": interpret}
    parts = []
    if rows:  # tiles of one token
        starts, lengths = jnp.maximum(meta.decode_lengths - 1, 0), jnp.minimum(meta.decode_lengths, 1)
        splits = splits_for(rows * q.shape[1], meta.decode_pages.shape[1] * pool[0].shape[3], blocks)
        parts.append(
            attend(
                q[:rows, None], pool, meta.decode_pages, starts, lengths, splits=splits, blocks=blocks.decode, **kwargs
            )
        )
    if tiles:
        x = q[rows:].reshape(tiles, tokens, *q.shape[1:])
        meta_of_tiles = (meta.tile_pages, meta.tile_starts, meta.tile_lengths)
        parts.append(attend(x, pool, *meta_of_tiles, splits=1, blocks=blocks.prefill, **kwargs))
    return jnp.concatenate([part.reshape(-1, *q.shape[1:]) for part in parts]) if parts else q


def splits_for(programs: int, keys: int, blocks: DeviceBlocks) -> int:
    """Return the number of parts to split contexts of up to `keys` keys into, so that all cores are busy."""
    return max(1, min(blocks.cores * blocks.programs // programs, keys // blocks.split_keys))


def attend(
    q: Array,
    pool: Pool,
    pages: Array,
    starts: Array,
    lengths: Array,
    *,
    scale: float,
    window: int | None,
    splits: int,
    blocks: AttentionBlocks,
    interpret: Any = False,
) -> Array:
    """Return attention of tiles q [N, Q, K, G, D], as `jaxserve.kernels.reference.attend` defines it."""
    n, tokens, kv_heads, group, head_dim = q.shape
    rows = tokens * group
    padded = ceil_div(rows, 8) * 8 if rows <= ROWS else ceil_div(rows, ROWS) * ROWS
    x = jnp.moveaxis(q, 1, 2).reshape(n, kv_heads, rows, head_dim)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))
    out, sums = flash(
        x, pool, pages, starts, lengths,
        group=group, scale=scale, window=window, splits=splits, blocks=blocks, interpret=interpret,
    )  # fmt: skip
    out = out[0] if splits == 1 else merge(out, sums)
    out = out[:, :, :rows].reshape(n, kv_heads, tokens, group, head_dim)
    return jnp.moveaxis(out, 2, 1)


def merge(out: Array, sums: Array) -> Array:
    """Return attention over all keys [..., D] from attention over shares of the keys [splits, ..., D].

    `sums` [splits, ...] are the logarithms to base 2 of each share's sum of exponentials.
    """
    weights = jnp.exp2(sums - sums.max(axis=0))
    total = jnp.einsum("s...,s...d->...d", weights, out.astype(jnp.float32))
    return (total / weights.sum(axis=0)[..., None]).astype(out.dtype)
