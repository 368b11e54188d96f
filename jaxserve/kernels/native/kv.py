"""Writing into KV pools of int8 as a custom call; rows.cc makes codes of numbers and kv_call.cc is the call."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.kernels.native.library import KV_WRITE, targets
from jaxserve.kernels.segments import Pool


def supports(kv: Array, pool: Pool) -> bool:
    """Whether the call is there, and takes these dtypes and pools of one segment."""
    is_kind = pool[0].dtype == jnp.int8 and kv.dtype in (jnp.bfloat16, jnp.float32)
    return len(pool) == 1 and is_kind and KV_WRITE in targets()


def kv_write(pool: Pool, kv: Array, slots: Array) -> Pool:
    """Writes keys and values [T, K, 2, D] at `slots` i32[T]; see `kernels.kv.kv_write` for the contract.

    A slot outside the pool is an error when the step runs.
    """
    (segment,) = pool
    result = jax.ShapeDtypeStruct(segment.shape, segment.dtype)
    return (jax.ffi.ffi_call(KV_WRITE, result, input_output_aliases={0: 0})(segment, kv, slots),)
