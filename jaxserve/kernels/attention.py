"""Paged attention, by itself and with what comes before it: dispatched by platform when the program is lowered."""

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
    """Attention of a step's tokens q [T, K, G, D] over the pages of a pool (`kernels.kv`); returns [T, K, G, D].

    T = B + N*Q: first B decode rows of one token each, then N prefill tiles of Q tokens, as `meta` describes. The
    tokens' own keys and values are already in the pool. A token at position p sees positions <= p of its own sequence
    and, with a sliding window w, > p - w. Padding rows and tokens get zeros. Softmax and sums are in float32.
    `backend` says what may run it.
    """
    kwargs = {"scale": scale, "window": window}
    on_cpu = native if uses_native(backend) and native.supports(q.dtype, q.shape[-1], pool) else xla_cpu
    platforms = {"cpu": partial(on_cpu.paged_attention, **kwargs)}
    if uses_pallas(backend):
        from pallas_kernels import blocks, paged_attention as pallas  # takes a while, and only GPUs need it

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
    """What a layer does with the queries, keys and values of a step's tokens: (outputs [T, K, G, D], pool).

    They are normalised and rotated, keys and values written at `slots` as by `kv_write`, and the queries attend as in
    `paged_attention`. On CPU this is one call, since whatever XLA does between calls takes longer than its arithmetic.
    """

    def one_by_one(qkv: ProjectedQKV, pool: Pool, slots: Array, meta: AttentionMeta) -> tuple[Array, Pool]:
        q, k, v = qkv.value()
        pool = kv_write(pool, k, v, slots, backend=backend)
        return paged_attention(q, pool, meta, scale=scale, window=window, backend=backend), pool

    parts = qkv.parts
    alike = qkv.norms is None or qkv.norms.q.dtype == qkv.norms.k.dtype == parts.dtype
    if not (uses_native(backend) and alike and native.supports(parts.dtype, parts.shape[-1], pool)):
        return one_by_one(qkv, pool, slots, meta)
    at_once = partial(native.write_and_attend, scale=scale, window=window)
    return lax.platform_dependent(qkv, pool, slots, meta, cpu=at_once, default=one_by_one)
