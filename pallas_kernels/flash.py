"""The kernel of paged attention: a block of query rows against the pages of its sequence, one tile of keys at a time.

It is written for Mosaic GPU. The bulk copy engine fetches the pages of keys and values several tiles ahead, while the
tensor cores multiply the present tile. A program is one warpgroup and computes 64 rows: all query heads of one kv head
for one or more tokens, so that keys and values are read once for the whole group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxserve.kernels.pool_segments import Pool, starts_of
from pallas_kernels.blocks import AttentionBlocks
from pallas_kernels.context import Context, PoolKind, kind_of
from pallas_kernels.mosaic import WARPGROUP_ROWS, launch, transposed

MASKED = -1e30  # the score of a position that is not seen; finite, so that the difference of two is not NaN


def flash(
    q: Array,
    pool: Pool,
    pages: Array,
    starts: Array,
    lengths: Array,
    *,
    group: int,
    scale: float,
    window: int | None,
    splits: int,
    blocks: AttentionBlocks,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Return attention of q [N, K, R, D] over segments [P, K, 2, S, ...]; row r of a tile belongs to token r // group.

    The results are the outputs [splits, N, K, R, D] and the base-2 logarithms of the sums of exponentials
    f32 [splits, N, K, R], where each split has its share of the keys. Rows that see nothing get zeros, and a logarithm
    of at most MASKED. R is at most 64 and a multiple of 8, or a multiple of 64.
    """
    rows = min(q.shape[2], WARPGROUP_ROWS)
    assert q.shape[2] % rows == rows % 8 == 0, q.shape
    kind = kind_of(pool, q.shape[3], q.dtype, interpret)
    q, segments = kind.operands(q, pool)
    n, kv_heads, r, _ = q.shape
    body = partial(
        _kernel, kind=kind, firsts=tuple(starts_of(pool)), rows=rows, group=group, scale=scale * math.log2(math.e),
        window=window, splits=splits, blocks=blocks,
    )  # fmt: skip
    out, sums = launch(
        body,
        out=(
            jax.ShapeDtypeStruct((splits, *q.shape), q.dtype),
            jax.ShapeDtypeStruct((splits, n, kv_heads, r), jnp.float32),
        ),
        grid={"split": splits, "tile": n, "head": kv_heads, "block": r // rows},
        scratch={
            "q_s": plgpu.SMEM((WARPGROUP_ROWS, kind.width), q.dtype, transforms=kind.swizzled),
            "p_s": plgpu.SMEM((WARPGROUP_ROWS, blocks.keys), q.dtype, transforms=kind.swizzled),
            "sums_s": plgpu.SMEM((WARPGROUP_ROWS,), jnp.float32),
            "q_arrived": plgpu.Barrier(),
            **kind.scratch(max(1, blocks.keys // pool[0].shape[3]), blocks),
        },
        interpret=interpret,
    )(pages, starts, lengths, q, *segments)
    return kind.result(out), sums


@dataclass(frozen=True)
class _Queries:
    """The rows [row, row + rows) of a tile of queries, and the positions that they see."""

    row: Array
    rows: int
    group: int  # rows of a token
    start: Array  # position of the tile's first token
    length: Array  # tokens of the tile
    window: int | None

    def context(self) -> tuple[Array | int, Array]:
        """Return the positions [begin, end) that any of the rows sees."""
        token = lax.div(self.row, self.group)
        last = jnp.minimum(lax.div(self.row + self.rows - 1, self.group), self.length - 1)
        end = jnp.where(token < self.length, self.start + last + 1, 0)
        begin = 0 if self.window is None else jnp.maximum(self.start + token + 1 - self.window, 0)
        return begin, end

    def see(self, at: Array, keys: int, end: Array) -> Array:
        """Return which of the positions [at, at + keys) each row sees, bool [64, keys]."""
        key = at + _iota((WARPGROUP_ROWS, keys), 1)
        query = self.start + lax.div(self.row + _iota((WARPGROUP_ROWS, keys), 0), self.group)
        seen = key <= jnp.minimum(query, end - 1)
        if self.window is not None:
            seen &= key > query - self.window
        return seen

    def valid(self, width: int) -> Array:
        """Return which rows are not padding, bool [64, width]."""
        return lax.div(self.row + _iota((WARPGROUP_ROWS, width), 0), self.group) < self.length


def _kernel(
    pages_g, starts_g, lengths_g, q_g, *segments_and_out,
    q_s, p_s, sums_s, q_arrived, kind: PoolKind, firsts: Sequence[int], rows: int, group: int, scale: float,
    window: int | None, splits: int, blocks: AttentionBlocks, **kv_s: Any,
):  # fmt: skip
    """Run one program: a block of query rows against its share of the context.

    Names end in _g for global memory and in _s for shared memory; all else is in registers. The last positional
    arguments are the segments of the pool and the two outputs. `firsts` holds the ids of the segments' first pages,
    and `kv_s` the fields of the buffers.
    """
    *pool_g, out_g, sums_g = segments_and_out
    split, tile, head = (lax.axis_index(name) for name in ("split", "tile", "head"))
    row = lax.axis_index("block") * rows
    queries = _Queries(row, rows, group, starts_g[tile], lengths_g[tile], window)
    keys, width, dtype = blocks.keys, kind.width, q_g.dtype
    begin, end = queries.context()
    first, after = _share_of_tiles(begin, end, keys, split, splits)
    kv = kind.buffers(**kv_s)
    context = Context(pool_g, firsts, pages_g, tile, head, kv)

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, m, l = carry
        slot, at = lax.rem(i - first, blocks.stages), i * keys
        s = _product((WARPGROUP_ROWS, keys), q_s, transposed(kv.keys(slot))) * scale
        s = jnp.where(queries.see(at, keys, end), s, MASKED)
        p, m_new, shrink = _online_softmax(s, m)
        p_s[...] = p.astype(dtype)

        values_s = kv.values(slot, (begin - at, end - at))
        plgpu.commit_smem()
        acc = acc * _columns(shrink, acc) + _product((WARPGROUP_ROWS, width), p_s, values_s)

        @pl.when(i + blocks.stages < after)
        def _() -> None:
            context.fetch(i + blocks.stages, slot)

        return acc, m_new, l * shrink + p.sum(axis=1)

    lax.fori_loop(first, jnp.minimum(first + blocks.stages, after), lambda i, _: context.fetch(i, i - first), None)
    plgpu.copy_gmem_to_smem(q_g.at[tile, head, pl.ds(row, rows)], q_s.at[pl.ds(0, rows)], q_arrived)
    plgpu.barrier_wait(q_arrived)
    acc, m, l = lax.fori_loop(first, after, step, _initial_carry(width))

    valid = queries.valid(width)
    l = jnp.where(l == 0, 1.0, l)
    q_s[...] = jnp.where(valid, acc / _columns(l, acc), 0).astype(dtype)
    sums_s[...] = m + jnp.log2(l)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_s.at[pl.ds(0, rows)], out_g.at[split, tile, head, pl.ds(row, rows)])
    plgpu.copy_smem_to_gmem(sums_s.at[pl.ds(0, rows)], sums_g.at[split, tile, head, pl.ds(row, rows)])
    plgpu.wait_smem_to_gmem(0)


def _share_of_tiles(begin: Array | int, end: Array, keys: int, split: Array, splits: int) -> tuple[Array, Array]:
    """Return the tiles [first, after) of keys in the share `split` of the positions [begin, end)."""
    first, after = lax.div(jnp.int32(begin), keys), lax.div(end + keys - 1, keys)
    share = lax.div(jnp.maximum(after - first, 0) + splits - 1, splits)
    first = first + split * share
    return first, jnp.minimum(first + share, after)


def _initial_carry(width: int) -> tuple[Array, Array, Array]:
    """Return the outputs, maxima and sums of rows that have seen no keys."""
    by_row = plgpu.Layout.WGMMA.reduce(1)
    return (
        _full((WARPGROUP_ROWS, width), 0.0, plgpu.Layout.WGMMA),
        _full((WARPGROUP_ROWS,), MASKED, by_row),
        _full((WARPGROUP_ROWS,), 0.0, by_row),
    )


def _online_softmax(s: Array, m: Array) -> tuple[Array, Array, Array]:
    """Return the powers of 2 of scores, the new maxima of rows, and the factors for the previous outputs and sums."""
    m_new = jnp.maximum(m, s.max(axis=1))
    return jnp.exp2(s - _columns(m_new, s)), m_new, jnp.exp2(m - m_new)


def _product(shape: tuple[int, int], x, y) -> Array:
    """Return x @ y of two references in shared memory, in registers."""

    def body(acc):
        plgpu.wgmma(acc, x, y)
        plgpu.wgmma_wait(0)
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))


def _iota(shape: tuple[int, int], axis: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def _full(shape: tuple[int, ...], value: float, layout: plgpu.Layout) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _columns(x: Array, like: Array) -> Array:
    """Return x [rows] in every column of the shape of `like`."""
    return lax.broadcast_in_dim(x, like.shape, [0])
