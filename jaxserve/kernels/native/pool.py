"""KV pools whose memory is committed as it is first written and given back on request; pool_call.cc has the calls."""

import ctypes
import mmap
import sys

import jax
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxserve.core.numeric import ceil_div
from jaxserve.kernels.native.library import RELEASE_PAGES, RESERVE_POOL, targets


def supported() -> bool:
    """Whether the library is there, and the operating system takes memory back and promises zeros in its place."""
    return sys.platform == "linux" and {RESERVE_POOL, RELEASE_PAGES} <= targets()


def reserve_pool(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Zeros that take address space alone until they are written."""
    return jax.ffi.ffi_call(RESERVE_POOL, jax.ShapeDtypeStruct(shape, dtype))()


def release_pages(pool: Array, pages: Array) -> Array:
    """The pool [P, ...], where it was, without the memory of pages[0] to pages[1] - 1 (i32[2]).

    The caller donates the pool. The pages' contents are undefined afterwards: zeros where whole pages of the operating
    system were given back, what they were at the edges. A range that is not in the pool, and a platform that cannot do
    it, are errors when the call runs.
    """
    result = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    return jax.ffi.ffi_call(RELEASE_PAGES, result, input_output_aliases={0: 0})(pool, pages)


def committed_bytes(pool: Array) -> int:
    """What of a pool in this process's memory is backed by physical memory now, in whole pages of the system.

    Counts what was only read, too: that is backed by the system's page of zeros. Waits for the pool. Needs Linux.
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
