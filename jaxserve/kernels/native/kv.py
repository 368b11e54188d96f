"""Writes to KV pools as a custom call. The kernel is in kv.h, the call in kv_call.cc."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxserve.kernels.native.library import KV_WRITE, targets
from jaxserve.kernels.pool_segments import Pool

POOLS = {"bfloat16": (jnp.uint16, jnp.int8), "float32": (jnp.float32, jnp.int8)}
"""The supported dtypes of pools, by the dtype of keys and values."""


def supports(dtype: DTypeLike, pool: Pool) -> bool:
    """Return whether the call exists and supports keys of this dtype and the pool, which has one segment."""
    return len(pool) == 1 and pool[0].dtype in POOLS.get(jnp.dtype(dtype).name, ()) and KV_WRITE in targets()


def kv_write(pool: Pool, kv: Array, slots: Array) -> Pool:
    """Return the pool with keys and values [T, K, 2, D] written at `slots` i32[T], as `kernels.kv.kv_write` does.

    A slot outside the pool is an error when the step runs.
    """
    (segment,) = pool
    result = jax.ShapeDtypeStruct(segment.shape, segment.dtype)
    return (jax.ffi.ffi_call(KV_WRITE, result, input_output_aliases={0: 0})(segment, kv, slots),)
