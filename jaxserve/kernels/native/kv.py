"""KV pools as custom calls: the write of keys and values, copies of pages, and memory that is committed page by page.

The write is in kv.h and kv_call.cc, the rest in pool_call.cc. An elastic pool takes memory at the first write to a
page, and gives it back on request. All calls work on pools of any number of segments.
"""

import ctypes
import mmap
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxserve.core.numeric import ceil_div
from jaxserve.kernels.native.library import KV_WRITE, PUT_PAGES, RELEASE_PAGES, RESERVE_POOL, TAKE_PAGES, targets
from jaxserve.kernels.pool_segments import Pool

POOLS = {"bfloat16": (jnp.uint16, jnp.int8), "float32": (jnp.float32, jnp.int8)}
"""The supported dtypes of pools, by the dtype of keys and values."""


def supports_write(dtype: DTypeLike, pool: Pool) -> bool:
    """Return whether the native write exists and supports keys of this dtype in this pool."""
    return pool[0].dtype in POOLS.get(jnp.dtype(dtype).name, ()) and KV_WRITE in targets()


def kv_write(pool: Pool, kv: Array, slots: Array) -> Pool:
    """Return the pool with keys and values [T, K, 2, D] written at `slots` i32[T], as `kernels.kv.kv_write` does.

    A slot outside the pool is an error when the step runs.
    """
    return _in_place(KV_WRITE, pool, kv, slots)


def supports_elastic_pools() -> bool:
    """Return whether the library has the calls, and released memory reads as zeros on this operating system."""
    return sys.platform == "linux" and {RESERVE_POOL, RELEASE_PAGES, TAKE_PAGES, PUT_PAGES} <= targets()


def reserve_pool(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return zeros that take only address space until they are written."""
    return jax.ffi.ffi_call(RESERVE_POOL, jax.ShapeDtypeStruct(shape, dtype))()


def release_pages(pool: Pool, ranges: Array) -> Pool:
    """Return the pool, in place, without the memory of ranges[s, 0] to ranges[s, 1] - 1 (i32[S, 2]) of each segment s.

    The caller must donate the pool. The contents of the pages are undefined afterwards: zeros where whole pages of the
    operating system were given back, and unchanged at the edges. A range outside a segment, and an unsupported
    platform, are errors when the call runs.
    """
    return _in_place(RELEASE_PAGES, pool, ranges)


def take_pages(pool: Pool, pages: Array) -> Array:
    """Return the contents [N, ...] of pages i32[N]. A page outside the pool is an error when the call runs."""
    result = jax.ShapeDtypeStruct((*pages.shape, *pool[0].shape[1:]), pool[0].dtype)
    return jax.ffi.ffi_call(TAKE_PAGES, result)(pages, *pool)


def put_pages(pool: Pool, contents: Array, pages: Array) -> Pool:
    """Return the pool, in place, with `contents` [N, ...] as the pages i32[N].

    The caller must donate the pool. A page outside the pool is an error when the call runs.
    """
    return _in_place(PUT_PAGES, pool, pages, contents)


def committed_bytes(pool: Array) -> int:
    """Wait for a pool and return the bytes of it that have physical memory, in whole pages of the operating system.

    Pages that were only read count as well: they map to the system's page of zeros. This needs Linux. Raise OSError if
    the system call fails.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    total = 0
    for shard in pool.block_until_ready().addressable_shards:
        begin = shard.data.unsafe_buffer_pointer()
        first, last = begin - begin % mmap.PAGESIZE, begin + shard.data.nbytes
        resident = np.empty(ceil_div(last - first, mmap.PAGESIZE), np.uint8)
        if libc.mincore(first, last - first, resident.ctypes.data) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        total += int(np.count_nonzero(resident & 1)) * mmap.PAGESIZE
    return total


def types_of(pool: Pool) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes and dtypes of a pool's segments."""
    return tuple(jax.ShapeDtypeStruct(segment.shape, segment.dtype) for segment in pool)


def _in_place(call: str, pool: Pool, *operands: Array) -> Pool:
    """Return a pool after a custom call whose last operands, and only results, are its segments."""
    aliases = {len(operands) + index: index for index in range(len(pool))}
    return tuple(jax.ffi.ffi_call(call, types_of(pool), input_output_aliases=aliases)(*operands, *pool))
