"""Paged attention as custom calls. The kernels are in attention*.cc, the calls in attention_call.cc."""

import jax
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxserve.kernels.meta import AttentionMeta
from jaxserve.kernels.native import kv
from jaxserve.kernels.native.library import ATTENTION, WRITE_AND_ATTEND, targets
from jaxserve.kernels.pool_segments import Pool
from jaxserve.kernels.rope import ProjectedQKV

UNLIMITED = 2**62  # a window larger than any context
MAX_LANES = 16  # floats of the widest vector
DIM_MULTIPLE = 16  # two vectors of 8 floats, which AVX2 processes at once


def supports(dtype: DTypeLike, head_dim: int, pool: Pool) -> bool:
    """Return whether the kernels exist and support queries of this dtype and the pool."""
    exist = {ATTENTION, WRITE_AND_ATTEND} <= targets()
    return exist and kv.supports_write(dtype, pool) and head_dim % DIM_MULTIPLE == 0


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
    """Return attention of q [T, K, G, D] over pages, as `kernels.attention.paged_attention` defines it.

    `max_lanes` limits the floats of a vector, and so the instruction sets (8: AVX2, 4: any machine). `matrix_unit`
    allows prefill on the machine's matrix unit, if it has one. Page ids outside the pool, and positions outside the
    page table, are an error when the step runs.
    """
    call = jax.ffi.ffi_call(ATTENTION, jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(q, *meta, *pool, **_attributes(scale, window, max_lanes, matrix_unit))


def write_and_attend(
    qkv: ProjectedQKV,
    pool: Pool,
    slots: Array,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int | None = None,
    max_lanes: int = MAX_LANES,
    matrix_unit: bool = True,
) -> tuple[Array, Pool]:
    """Return attention and the written pool, as `kernels.attention.write_and_attend` defines them, in one call.

    `max_lanes` and `matrix_unit` apply to attention, as in `paged_attention`. Slots outside the pool are an error when
    the step runs.
    """
    tokens, heads, parts, head_dim = qkv.parts.shape
    out = jax.ShapeDtypeStruct((tokens, heads, parts - 2, head_dim), qkv.parts.dtype)
    norms, eps = ((), 0) if qkv.norms is None else ((qkv.norms.q, qkv.norms.k), qkv.norms.eps)
    operands = (qkv.parts, qkv.cos, qkv.sin, slots, *meta)
    aliases = {len(operands) + index: 1 + index for index in range(len(pool))}
    call = jax.ffi.ffi_call(WRITE_AND_ATTEND, (out, *kv.types_of(pool)), input_output_aliases=aliases)
    attributes = _attributes(scale, window, max_lanes, matrix_unit)
    out, *written = call(*operands, *pool, *norms, eps=np.float32(eps), **attributes)
    return out, tuple(written)


def _attributes(scale: float, window: int | None, max_lanes: int, matrix_unit: bool) -> dict[str, np.generic | bool]:
    return {
        "scale": np.float32(scale),
        "window": np.int64(UNLIMITED if window is None else window),
        "max_lanes": np.int64(max_lanes),
        "matrix_unit": matrix_unit and max_lanes == MAX_LANES,
    }
