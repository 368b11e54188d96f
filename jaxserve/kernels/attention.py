"""Paged attention: one operation, dispatched by platform when the program is lowered."""

from functools import partial

from jax import Array, lax

from jaxserve.core.config import KernelBackend
from jaxserve.kernels import reference, xla_cpu
from jaxserve.kernels.backend import device_kind, uses_native, uses_pallas
from jaxserve.kernels.meta import AttentionMeta
from jaxserve.kernels.native import attention as native
from jaxserve.kernels.segments import Pool

__all__ = ["AttentionMeta", "paged_attention"]


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
    on_cpu = native if uses_native(backend) and native.supports(q, pool) else xla_cpu
    platforms = {"cpu": partial(on_cpu.paged_attention, **kwargs)}
    if uses_pallas(backend):
        from pallas_kernels import blocks, paged_attention as pallas  # takes a while, and only GPUs need it

        if pallas.supports(q, pool):
            platforms["cuda"] = partial(pallas.paged_attention, **kwargs, blocks=blocks.blocks_for(device_kind()))
    default = partial(reference.paged_attention, **kwargs, compute_dtype=q.dtype)
    return lax.platform_dependent(q, pool, meta, default=default, **platforms)
