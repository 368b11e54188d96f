"""Paged attention as a custom call; attention*.cc are the kernels and attention_call.cc the call."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.kernels.meta import AttentionMeta
from jaxserve.kernels.native.library import ATTENTION, targets
from jaxserve.kernels.segments import Pool

UNLIMITED = 2**62  # a window that no context fills
MAX_LANES = 16  # floats of the widest vector
DIM_MULTIPLE = 16  # so that at least AVX2 can be used, whose unit is two vectors of 8


def supports(q: Array, pool: Pool) -> bool:
    """Whether the kernel is there, and has a path for these dtypes, this head_dim and pools of one segment."""
    pools = {"bfloat16": (jnp.uint16, jnp.int8), "float32": (jnp.float32, jnp.int8)}
    return (
        len(pool) == 1
        and pool[0].dtype in pools.get(q.dtype.name, ())
        and q.shape[-1] % DIM_MULTIPLE == 0
        and ATTENTION in targets()
    )


def paged_attention(
    q: Array,
    pool: Pool,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int | None = None,
    max_lanes: int = MAX_LANES,
    matrix_unit: bool = True,
) -> Array:
    """Attention of q [T, K, G, D] over pages; see `kernels.attention.paged_attention` for the contract.

    `max_lanes` limits the floats of a vector, and so the instruction sets to choose from (8: AVX2, 4: any machine).
    `matrix_unit`: whether prompts may be computed on one, where there is one.
    Page ids outside the pool and positions outside the page table are an error when the step runs.
    """
    call = jax.ffi.ffi_call(ATTENTION, jax.ShapeDtypeStruct(q.shape, q.dtype))
    limits = {"window": np.int64(UNLIMITED if window is None else window), "max_lanes": np.int64(max_lanes)}
    limits |= {"matrix_unit": matrix_unit and max_lanes == MAX_LANES}
    return call(q, *pool, *meta, scale=np.float32(scale), **limits)
