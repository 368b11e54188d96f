"""The KV pool of one layer: [P, K, 2, S, D] = page, kv head, key or value, token of the page, head_dim.

Page 0 is the null page: padding tokens write there and nothing that is read from it may reach an output.

A pool of 16-bit floats is stored as uint16 on CPU, where XLA widens a bfloat16 scatter to float32 and so copies the
whole pool at every step; the bits are the same, and only the values written and gathered are ever bitcast.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Sharding
from jax.typing import DTypeLike


def storage_dtype(dtype: DTypeLike, platform: str) -> jnp.dtype:
    """The dtype in which a pool of `dtype` values is stored on a platform ("cpu", "gpu", ...)."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.uint16) if platform == "cpu" and dtype.itemsize == 2 else dtype


def kv_pool(
    pages: int,
    kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: DTypeLike,
    device: jax.Device | Sharding | None = None,
) -> Array:
    """A zeroed pool [P, K, 2, S, D] for `dtype` values on a device or sharding (None: JAX's default device)."""
    match device:
        case None:
            platform = jax.default_backend()
        case Sharding():
            platform = next(iter(device.device_set)).platform
        case _:
            platform = device.platform
    return jnp.zeros((pages, kv_heads, 2, page_size, head_dim), storage_dtype(dtype, platform), device=device)


def to_storage(x: Array, dtype: DTypeLike) -> Array:
    """Values as the pool stores them: cast, or the same bits where the pool holds uint16."""
    return lax.bitcast_convert_type(x, jnp.uint16) if dtype == jnp.uint16 else x.astype(dtype)


def from_storage(x: Array, dtype: DTypeLike) -> Array:
    """Stored values as `dtype`, the dtype they were written with where the pool holds uint16."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x.astype(dtype)


def kv_write(pool: Array, k: Array, v: Array, slots: Array) -> Array:
    """Writes keys and values [T, K, D] into the pool [P, K, 2, S, D] at `slots` i32[T] (page * S + offset).

    In place when the caller donates the pool. Slots are distinct, except that padding rows share page 0.
    """
    page_size = pool.shape[3]
    values = to_storage(jnp.stack([k, v], axis=2), pool.dtype)  # [T, K, 2, D]
    return pool.at[slots // page_size, :, :, slots % page_size].set(values, mode="drop")
