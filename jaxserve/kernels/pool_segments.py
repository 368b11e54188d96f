"""KV pools of several arrays (segments), with page ids that run through the segments in order.

A pool that cannot take memory page by page (`kernels.elastic`) grows by a segment, so that existing pages are neither
moved nor copied. A segment of one layer fits into the memory that a smaller variant of a layer leaves free. A pool that
several instances leave to one has the segments of each of them (`kvcache.lanes`). The segment of a page is found by
comparing the page's id with the first id of each segment.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

Pool = tuple[Array, ...]  # segments [P_i, ...] with P_i > 0; pages 0 to P_0 - 1 are in the first segment


def starts_of(pool: Pool) -> Sequence[int]:
    """Return the id of each segment's first page."""
    return [sum(segment.shape[0] for segment in pool[:index]) for index in range(len(pool))]


def take_pages(pool: Pool, pages: Array) -> Array:
    """Return the contents [*I, ...] of pages i32[*I], which must be in the pool."""
    taken = pool[0].at[pages].get(mode="clip")
    for start, segment in zip(starts_of(pool)[1:], pool[1:], strict=True):
        inside = (pages >= start).reshape(*pages.shape, *[1] * (segment.ndim - 1))
        taken = jnp.where(inside, segment.at[jnp.maximum(pages - start, 0)].get(mode="clip"), taken)
    return taken


def put_pages(pool: Pool, contents: Array, pages: Array) -> Pool:
    """Return the pool with `contents` [N, ...] as the pages i32[N], which are distinct but for the null page."""
    own = zip(pool, own_pages(pool, pages), strict=True)
    return tuple(segment.at[ids].set(contents, mode="drop") for segment, ids in own)


def own_pages(pool: Pool, pages: Array) -> list[Array]:
    """Return the indices i32[*I] of pages i32[*I] in each segment, out of bounds for pages of other segments."""
    return [
        jnp.where(pages >= start, pages - start, segment.shape[0]) if start else pages
        for start, segment in zip(starts_of(pool), pool, strict=True)
    ]
