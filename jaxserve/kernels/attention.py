"""Paged attention, alone or fused with norms, rotation and the write of keys and values.

The implementation is chosen by platform when a program is lowered.
"""

from functools import partial

from jax import Array, lax

from jaxserve.core.config import KernelBackend
from jaxserve.kernels import reference, xla_cpu
from jaxserve.kernels.backend import device_kind, uses_native, uses_pallas
from jaxserve.kernels.kv import kv_write
from jaxserve.kernels.meta import AttentionMeta
from jaxserve.kernels.native import attention as native
from jaxserve.kernels.pool_segments import Pool
from jaxserve.kernels.rope import ProjectedQKV

__all__ = ["AttentionMeta", "paged_attention", "write_and_attend"]


def paged_attention(
    q: Array,
    pool: Pool,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int | None = None,
    backend: KernelBackend = "auto",
) -> Array:
    """Return attention [T, K, G, D] of a step's tokens q [T, K, G, D] over the pages of a pool (`kernels.kv`).

    T = B + N*Q: first B decode rows of one token each, then N prefill tiles of Q tokens, as `meta` describes. The
    pool already contains the keys and values of these tokens. A token at position p sees positions <= p of its own
    sequence and, with a sliding window w, > p - w. Padding rows and tokens get zeros. Softmax and sums are in float32.
    `backend` limits the implementations.
    """
    kwargs = {"scale": scale, "window": window}
    on_cpu = native if uses_native(backend) and native.supports(q.dtype, q.shape[-1], pool) else xla_cpu
    platforms = {"cpu": partial(on_cpu.paged_attention, **kwargs)}
    if uses_pallas(backend):
        from pallas_kernels import blocks, paged_attention as pallas  # slow to import, and only GPUs need it

        if pallas.supports(q, pool):
            platforms["cuda"] = partial(pallas.paged_attention, **kwargs, blocks=blocks.blocks_for(device_kind()))
    default = partial(reference.paged_attention, **kwargs, compute_dtype=q.dtype)
    return lax.platform_dependent(q, pool, meta, default=default, **platforms)


def write_and_attend(
    qkv: ProjectedQKV,
    pool: Pool,
    slots: Array,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int | None = None,
    backend: KernelBackend = "auto",
) -> tuple[Array, Pool]:
    """Return the outputs [T, K, G, D] of attention for a step's tokens, and the pool with their keys and values.

    Queries and keys are normalised and rotated, keys and values are written at `slots` as by `kv_write`, and then the
    queries attend as in `paged_attention`. On CPU this is one call, because XLA's overhead between calls takes longer
    than the arithmetic.
    """

    def one_by_one(qkv: ProjectedQKV, pool: Pool, slots: Array, meta: AttentionMeta) -> tuple[Array, Pool]:
        q, k, v = qkv.value()
        pool = kv_write(pool, k, v, slots, backend=backend)
        return paged_attention(q, pool, meta, scale=scale, window=window, backend=backend), pool

    parts = qkv.parts
    one_dtype = qkv.norms is None or qkv.norms.q.dtype == qkv.norms.k.dtype == parts.dtype
    if not (uses_native(backend) and one_dtype and native.supports(parts.dtype, parts.shape[-1], pool)):
        return one_by_one(qkv, pool, slots, meta)
    at_once = partial(native.write_and_attend, scale=scale, window=window)
    return lax.platform_dependent(qkv, pool, slots, meta, cpu=at_once, default=one_by_one)
