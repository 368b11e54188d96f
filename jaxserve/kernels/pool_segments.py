"""Pools in several arrays: page ids run through the segments in order.

A pool that cannot take memory page by page (`kernels.elastic`) grows by another segment: nothing that is there moves or
is copied, and a segment of one layer is small enough for the hole that a smaller variant of a layer leaves. An id is
found in its segment by comparing it with where each one starts.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

Pool = tuple[Array, ...]  # segments [P_i, ...], each of them not empty; pages 0 to P_0 - 1 are in the first one


def starts_of(pool: Pool) -> Sequence[int]:
    """The id of each segment's first page."""
    return [sum(segment.shape[0] for segment in pool[:number]) for number in range(len(pool))]


def take_pages(pool: Pool, pages: Array) -> Array:
    """The contents [*I, ...] of pages i32[*I]. All of them are in the pool."""
    taken = pool[0].at[pages].get(mode="clip")
    for start, segment in zip(starts_of(pool)[1:], pool[1:], strict=True):
        inside = (pages >= start).reshape(*pages.shape, *[1] * (segment.ndim - 1))
        taken = jnp.where(inside, segment.at[jnp.maximum(pages - start, 0)].get(mode="clip"), taken)
    return taken


def own_pages(pool: Pool, pages: Array) -> list[Array]:
    """Each segment's own numbers i32[*I] of pages i32[*I]; out of its bounds for those that lie in others."""
    return [
        jnp.where(pages >= start, pages - start, segment.shape[0]) if start else pages
        for start, segment in zip(starts_of(pool), pool, strict=True)
    ]
