"""A pure function for each operation of a model, which dispatches to the platform's fastest implementation.

Axis letters: T tokens of a step, K kv heads, G query heads per kv head, D head_dim, P pages, S tokens of a page,
R entries of a pool's row (D, or D codes and their scale), B decode rows, N prefill tiles, Q tokens of a tile, W width
of the page tables.
"""

from jaxserve.kernels.attention import AttentionMeta, paged_attention, write_and_attend
from jaxserve.kernels.elastic import (
    GRANULE,
    committed_bytes,
    is_elastic,
    move_pages,
    put_pages,
    release_pages,
    reserving,
    take_pages,
)
from jaxserve.kernels.grouped_matmul import grouped_matmul
from jaxserve.kernels.kv import kv_pool, kv_write, page_bytes, pool_shape, storage_dtype
from jaxserve.kernels.matmul import AllReduce, matmul
from jaxserve.kernels.operands import DeferredNorm, DeferredSwiGLU, LeftOperand, value_of
from jaxserve.kernels.pool_segments import Pool
from jaxserve.kernels.rope import HeadNorms, ProjectedQKV

__all__ = [
    "GRANULE", "AllReduce", "AttentionMeta", "DeferredNorm", "DeferredSwiGLU", "HeadNorms", "LeftOperand", "Pool",
    "ProjectedQKV", "committed_bytes", "grouped_matmul", "is_elastic", "kv_pool", "kv_write", "matmul", "move_pages",
    "page_bytes", "paged_attention", "pool_shape", "put_pages", "release_pages", "reserving", "storage_dtype",
    "take_pages", "value_of", "write_and_attend",
]  # fmt: skip
