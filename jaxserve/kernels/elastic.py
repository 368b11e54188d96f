"""KV pools that take memory only for the pages in use, and give it back.

On an *elastic* platform a pool reserves address space for the maximum number of its pages. A page's memory is committed
when the page is first written, and `release_pages` gives it back. The pool never moves and keeps its shape, so that
nothing is copied or compiled again. On other platforms the same functions work, but reserving allocates and releasing
does nothing. The only elastic platform is CPU on Linux with the native kernels.

Pools are segments [P, ...] (`kernels.pool_segments`): pages are the first axis and contiguous in memory, also on each
device of a sharding. Each segment of an elastic pool has address space of its own.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, Sharding
from jax.typing import DTypeLike

from jaxserve.kernels import pool_segments
from jaxserve.kernels.native import kv as native
from jaxserve.kernels.pool_segments import Pool

GRANULE = 2 << 20  # bytes: the largest unit in which an elastic pool takes memory or gives it back


def is_elastic(platform: str) -> bool:
    """Return whether pools on a platform ("cpu", "gpu", ...) take memory only for pages in use."""
    return platform == "cpu" and native.supports_elastic_pools()


def reserve(shape: Sequence[int], dtype: DTypeLike, device: jax.Device | Sharding | None = None) -> Array:
    """Return zeros on a device or sharding (None: JAX's default device), on elastic platforms without memory.

    Memory that is fresh from the operating system reads as zero, and other memory is cleared.
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


def reserving(shape: Sequence[int], dtype: DTypeLike, sharding: NamedSharding) -> Callable[[], Array]:
    """Return a function that returns what `reserve` does, to be compiled with `sharding` for its result."""
    if not is_elastic(platform_of(sharding)):
        return partial(jnp.zeros, tuple(shape), dtype)
    reserve = partial(native.reserve_pool, sharding.shard_shape(tuple(shape)), jnp.dtype(dtype))
    if sharding.mesh.size == 1:
        return reserve
    # Custom calls do not declare how their outputs vary over devices, so that cannot be checked.
    return jax.shard_map(reserve, mesh=sharding.mesh, in_specs=(), out_specs=sharding.spec, check_vma=False)


def release_pages(pool: Pool, ranges: Array) -> Pool:
    """Return the pool without the memory of pages ranges[s, 0] to ranges[s, 1] - 1 (i32[S, 2]) of each segment s.

    A segment's pages are counted from its own first one. Their contents become undefined. This works in place if the
    caller donates the pool. Programs that were dispatched before still read the pages. Only whole pages of the
    operating system are given back, so that neighbours keep their contents. On a platform that is not elastic nothing
    happens. For a sharded pool, call it with each device's part (`jax.shard_map`).
    """
    if not native.supports_elastic_pools():
        return pool
    return lax.platform_dependent(pool, ranges, cpu=native.release_pages, default=_unchanged)


def take_pages(pool: Pool, pages: Array) -> Array:
    """Return the contents [N, ...] of pages i32[N], which must be in the pool.

    Where pools are elastic no other page is read, because a page that was only read would count as memory in use.
    """
    if not native.supports_elastic_pools():
        return pool_segments.take_pages(pool, pages)
    return lax.platform_dependent(pool, pages, cpu=native.take_pages, default=pool_segments.take_pages)


def put_pages(pool: Pool, contents: Array, pages: Array) -> Pool:
    """Return the pool with `contents` [N, ...] as the pages i32[N], which are distinct but for the null page.

    This works in place if the caller donates the pool.
    """
    if not native.supports_elastic_pools():
        return pool_segments.put_pages(pool, contents, pages)
    return lax.platform_dependent(pool, contents, pages, cpu=native.put_pages, default=pool_segments.put_pages)


def move_pages(pool: Pool, source: Array, target: Array) -> Pool:
    """Return the pool with the pages `source` i32[N] copied to the pages `target` i32[N].

    This works in place if the caller donates the pool. All pages are read before any is written. Targets are distinct,
    except that padding copies the null page to itself.
    """
    return put_pages(pool, take_pages(pool, source), target)


def committed_bytes(pool: Pool) -> int:
    """Wait for a pool and return its bytes of committed memory."""
    elastic = is_elastic(platform_of(pool[0].sharding))
    return sum(native.committed_bytes(segment) if elastic else segment.nbytes for segment in pool)


def platform_of(device: jax.Device | Sharding | None) -> str:
    """Return the platform of a device or sharding (None: JAX's default device)."""
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


def _unchanged(pool: Pool, ranges: Array) -> Pool:
    return pool
