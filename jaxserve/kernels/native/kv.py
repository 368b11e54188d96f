"""KV pools as custom calls: the write of keys and values, and memory that is committed page by page.

The write is in kv.h and kv_call.cc. An elastic pool takes memory at the first write to a page, and gives it back on
request (pool_call.cc).
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
from jaxserve.kernels.native.library import KV_WRITE, RELEASE_PAGES, RESERVE_POOL, targets
from jaxserve.kernels.pool_segments import Pool

POOLS = {"bfloat16": (jnp.uint16, jnp.int8), "float32": (jnp.float32, jnp.int8)}
"""The supported dtypes of pools, by the dtype of keys and values."""


def supports_write(dtype: DTypeLike, pool: Pool) -> bool:
    """Return whether the native write exists and supports keys of this dtype in this pool, which has one segment."""
    return len(pool) == 1 and pool[0].dtype in POOLS.get(jnp.dtype(dtype).name, ()) and KV_WRITE in targets()


def kv_write(pool: Pool, kv: Array, slots: Array) -> Pool:
    """Return the pool with keys and values [T, K, 2, D] written at `slots` i32[T], as `kernels.kv.kv_write` does.

    A slot outside the pool is an error when the step runs.
    """
    (segment,) = pool
    result = jax.ShapeDtypeStruct(segment.shape, segment.dtype)
    return (jax.ffi.ffi_call(KV_WRITE, result, input_output_aliases={0: 0})(segment, kv, slots),)


def supports_elastic_pools() -> bool:
    """Return whether the library has the calls, and released memory reads as zeros on this operating system."""
    return sys.platform == "linux" and {RESERVE_POOL, RELEASE_PAGES} <= targets()


def reserve_pool(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return zeros that take only address space until they are written."""
    return jax.ffi.ffi_call(RESERVE_POOL, jax.ShapeDtypeStruct(shape, dtype))()


def release_pages(pool: Array, pages: Array) -> Array:
    """Return the pool [P, ...], in place, without the memory of pages[0] to pages[1] - 1 (i32[2]).

    The caller must donate the pool. The contents of the pages are undefined afterwards: zeros where whole pages of the
    operating system were given back, and unchanged at the edges. A range outside the pool, and an unsupported platform,
    are errors when the call runs.
    """
    result = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    return jax.ffi.ffi_call(RELEASE_PAGES, result, input_output_aliases={0: 0})(pool, pages)


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
