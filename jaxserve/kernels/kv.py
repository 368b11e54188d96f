"""The KV pool of a layer: segments [P, K, 2, S, R] = page, kv head, key or value, token of the page, row.

Page 0 is the null page: padding tokens write there, and nothing that is read from it may reach an output.

A row is a token's key or value of one head. In a pool of floats it has the D = head_dim numbers of that vector. On CPU
16-bit floats are stored as uint16, because XLA widens a bfloat16 scatter to float32 and so copies the complete pool at
every step. The bits are unchanged, and only the values that are written and gathered are bitcast.

In a pool of int8 a row has D codes, and then their scale in the 4 bytes of a float32:

    scale = max |x| / 127        code = round(x / scale)        x ~ code * scale

R is D + 4 on CPU, and the next multiple of 16 on other platforms (`core.kv_layout`).

The scale is in the row, not in an array of its own, so that all pools have the same structure: a page is written, moved
or sent to another device in one operation and is split by head, and a head's page is contiguous. Pools differ only in
the length of a row, and only this module depends on the contents of a row.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxserve.core.config import KernelBackend
from jaxserve.core.kv_layout import SCALE_BYTES, int8_row_bytes
from jaxserve.kernels.backend import uses_native
from jaxserve.kernels.elastic import platform_of, reserve
from jaxserve.kernels.native import kv as native
from jaxserve.kernels.pool_segments import Pool, own_pages

MAX_CODE = 127


def row_size(head_dim: int, dtype: DTypeLike, platform: str) -> int:
    """Return the entries R of a row, in a pool for `dtype` values on a platform ("cpu", "gpu", ...)."""
    return int8_row_bytes(head_dim, platform) if jnp.dtype(dtype) == jnp.int8 else head_dim


def page_bytes(kv_heads: int, page_size: int, head_dim: int, dtype: DTypeLike, platform: str) -> int:
    """Return the bytes of a page in a layer's pool for `dtype` values on a platform."""
    return kv_heads * 2 * page_size * row_size(head_dim, dtype, platform) * jnp.dtype(dtype).itemsize


def storage_dtype(dtype: DTypeLike, platform: str) -> jnp.dtype:
    """Return the dtype that stores `dtype` values in a pool on a platform ("cpu", "gpu", ...)."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.uint16) if platform == "cpu" and dtype.itemsize == 2 else dtype


def kv_pool(
    pages: int,
    kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: DTypeLike,
    device: jax.Device | Sharding | None = None,
) -> Pool:
    """Return a pool of zeros with one segment [P, K, 2, S, R] on a device or sharding (None: JAX's default device).

    `dtype` is the dtype of activations, or int8. On an elastic platform a page takes memory when it is first written.
    """
    (segment,) = abstract_pool(pages, kv_heads, page_size, head_dim, dtype, platform_of(device))
    return (reserve(segment.shape, segment.dtype, device),)


def abstract_pool(
    pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: DTypeLike, platform: str
) -> tuple[jax.ShapeDtypeStruct]:
    """Return the abstract pool that `kv_pool` makes on a platform."""
    shape = (pages, kv_heads, 2, page_size, row_size(head_dim, dtype, platform))
    return (jax.ShapeDtypeStruct(shape, storage_dtype(dtype, platform)),)


def to_storage(x: Array, dtype: DTypeLike, row: int) -> Array:
    """Return vectors [..., D] as rows [..., R = row] of a pool that stores `dtype`."""
    if dtype == jnp.int8:
        rows = _quantize(x)
        return jnp.pad(rows, [(0, 0)] * (x.ndim - 1) + [(0, row - rows.shape[-1])])
    return lax.bitcast_convert_type(x, jnp.uint16) if dtype == jnp.uint16 else x.astype(dtype)


def from_storage(rows: Array, head_dim: int, dtype: DTypeLike, compute_dtype: DTypeLike) -> Array:
    """Return rows [..., R] of a pool as vectors [..., D] of `compute_dtype`; `dtype` is that of the written values."""
    if rows.dtype == jnp.int8:
        scale = lax.bitcast_convert_type(rows[..., head_dim : head_dim + SCALE_BYTES], jnp.float32)[..., None]
        return (rows[..., :head_dim].astype(jnp.float32) * scale).astype(compute_dtype)
    values = lax.bitcast_convert_type(rows, dtype) if rows.dtype == jnp.uint16 else rows
    return values.astype(compute_dtype)


def kv_write(pool: Pool, k: Array, v: Array, slots: Array, *, backend: KernelBackend = "auto") -> Pool:
    """Return the pool with keys and values [T, K, D] written at `slots` i32[T] (page * S + offset).

    This works in place if the caller donates the pool. Slots are distinct, except that padding rows share page 0.
    `backend` limits the implementations.
    """
    kv = jnp.stack([k, v], axis=2)
    is_quantised = pool[0].dtype == jnp.int8  # floats are only copied, which XLA's scatter does as fast
    if uses_native(backend) and is_quantised and native.supports_write(kv.dtype, pool):
        return lax.platform_dependent(pool, kv, slots, cpu=native.kv_write, default=_scatter)
    return _scatter(pool, kv, slots)


def _scatter(pool: Pool, kv: Array, slots: Array) -> Pool:
    """Write keys and values [T, K, 2, D] by XLA's scatter."""
    page_size, row = pool[0].shape[3:]
    rows = to_storage(kv, pool[0].dtype, row)
    own = zip(pool, own_pages(pool, slots // page_size), strict=True)
    return tuple(segment.at[ids, :, :, slots % page_size].set(rows, mode="drop") for segment, ids in own)


def _quantize(x: Array) -> Array:
    """Return vectors [..., D] as int8 rows [..., D + 4]. A number that is not finite makes all of its vector so."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) * (1 / MAX_CODE)  # as XLA divides by a constant
    codes = jnp.round(x / jnp.where(scale == 0, 1, scale))  # a vector of zeros has scale 0
    return jnp.concatenate([codes.astype(jnp.int8), lax.bitcast_convert_type(scale, jnp.int8)[..., 0, :]], axis=-1)
