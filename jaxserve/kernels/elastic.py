"""KV pools that take memory as their pages are used, and give it back.

On an *elastic* platform a pool reserves address space for the most pages that it may ever have. A page's memory is
committed when the page is first written, and `release_pages` gives it back; the pool never moves and keeps its shape,
so that nothing is copied or compiled again. Elsewhere the same functions work, reserving is allocating, and releasing
does nothing. Elastic today: CPU on Linux, with the native kernels.

Pools are segments [P, ...] (`kernels.segments`): pages come first and are contiguous in memory, on each device of a
sharding too. An elastic pool has one.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxserve.kernels.native import pool as native
from jaxserve.kernels.pool_segments import Pool, own_pages, take_pages

GRANULE = 2 << 20  # bytes: what an elastic pool takes or keeps of memory at once, at most


def is_elastic(platform: str) -> bool:
    """Whether pools on a platform ("cpu", "gpu", ...) take memory only for pages that are in use."""
    return platform == "cpu" and native.supported()


def reserve(shape: Sequence[int], dtype: DTypeLike, device: jax.Device | Sharding | None = None) -> Array:
    """Zeros on a device or sharding (None: JAX's default device), on an elastic platform without their memory.

    They are zeros everywhere: memory that is fresh from the system reads as zero, and other is cleared.
    """
    if not is_elastic(platform_of(device)):
        return jnp.zeros(shape, dtype, device=device)
    if device is None:
        return _reserve(tuple(shape), jnp.dtype(dtype))
    sharding = device if isinstance(device, Sharding) else jax.sharding.SingleDeviceSharding(device)
    shards = []
    for part in sharding.addressable_devices:
        with jax.default_device(part):
            shards.append(_reserve(sharding.shard_shape(tuple(shape)), jnp.dtype(dtype)))
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)


def release_pages(pool: Pool, pages: Array) -> Pool:
    """The pool without the memory of pages[0] to pages[1] - 1 (i32[2]); their contents are undefined afterwards.

    In place when the caller donates the pool, and ordered by it: what was dispatched before still reads them. Only
    whole pages of the operating system are given back, so that neighbours keep their contents. Does nothing where the
    platform is not elastic. Of a sharded pool, each device is given its own part (`jax.shard_map`).
    """
    if len(pool) > 1 or not native.supported():
        return pool
    return (lax.platform_dependent(*pool, pages, cpu=native.release_pages, default=_keep),)


def move_pages(pool: Pool, source: Array, target: Array) -> Pool:
    """The pool with the contents of pages `source` i32[N] in `target` i32[N] too.

    In place when the caller donates the pool. All are read before any is written. Targets are distinct, except that
    padding moves the null page to itself.
    """
    pages = take_pages(pool, source)
    own = zip(pool, own_pages(pool, target), strict=True)
    return tuple(segment.at[ids].set(pages, mode="drop") for segment, ids in own)


def committed_bytes(pool: Pool) -> int:
    """Physical memory behind a pool now. Waits for the pool."""
    elastic = is_elastic(platform_of(pool[0].sharding))
    return sum(native.committed_bytes(segment) if elastic else segment.nbytes for segment in pool)


def platform_of(device: jax.Device | Sharding | None) -> str:
    """The platform of a device or sharding (None: JAX's default device)."""
    match device:
        case None:
            return jax.default_backend()
        case Sharding():
            return next(iter(device.device_set)).platform
        case _:
            return device.platform


@partial(jax.jit, static_argnums=(0, 1))
def _reserve(shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    return native.reserve_pool(shape, dtype)


def _keep(pool: Array, pages: Array) -> Array:
    return pool
