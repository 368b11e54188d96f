"""Transfer of keys and values from the pages of a pool to the tensor cores, one tile at a time.

Names end in _g for global memory, _s for shared memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jaxserve.core.numeric import ceil_div
from jaxserve.kernels.kv import row_size
from jaxserve.kernels.pool_segments import Pool
from pallas_kernels.blocks import AttentionBlocks
from pallas_kernels.mosaic import from_codes, load, tiles

Seen = tuple[Array, Array]
"""The positions [from, to) of a tile that are in the context. Memory of other positions may be stale."""


class Buffers(Protocol):
    """Slots in shared memory for tiles of keys and values, which it converts to operands of a product."""

    k_s: Any  # [slots, keys, ...]: rows as stored in the pool
    v_s: Any
    k_arrived: Any
    v_arrived: Any

    def keys(self, slot: Array) -> Any:
        """Wait for a tile's keys and return them as [keys, D]."""

    def values(self, slot: Array, seen: Seen) -> Any:
        """Wait for a tile's values and return them as [keys, D], with zeros in place of stale memory.

        Call it after the product with the tile's keys. `commit_smem` must follow.
        """


@dataclass(frozen=True)
class NumberBuffers:
    """Buffers for a pool of 16-bit floats, which the tensor cores read as they are stored."""

    k_s: Any  # [slots, keys, D]
    v_s: Any
    k_arrived: Any
    v_arrived: Any

    def keys(self, slot: Array) -> Any:
        plgpu.barrier_wait(self.k_arrived.at[slot])
        return self.k_s.at[slot]

    def values(self, slot: Array, seen: Seen) -> Any:
        plgpu.barrier_wait(self.v_arrived.at[slot])

        @pl.when((seen[0] > 0) | (seen[1] < self.v_s.shape[1]))
        def _() -> None:
            self.v_s[slot] = _only(seen, plgpu.layout_cast(self.v_s[slot], plgpu.Layout.WGMMA))

        return self.v_s.at[slot]


@dataclass(frozen=True)
class CodeBuffers:
    """Buffers for a pool of int8, whose rows arrive as words of two codes and are converted to floats in registers.

    In the converted rows the first codes of all words precede the second codes, as in queries after
    `CodesPool.deinterleave`. Keys and values have separate buffers of numbers, so that all warps meet in a
    `commit_smem` between the product with a buffer and its next use.
    """

    head_dim: int
    interpret: Any
    k_s: Any  # u16 [slots, keys, R / 2]
    v_s: Any
    k_numbers_s: Any  # [keys, 2 W]
    v_numbers_s: Any
    k_arrived: Any
    v_arrived: Any

    def keys(self, slot: Array) -> Any:
        plgpu.barrier_wait(self.k_arrived.at[slot])
        self._unpack(self.k_s, slot, self.k_numbers_s, None)
        plgpu.commit_smem()
        return self.k_numbers_s

    def values(self, slot: Array, seen: Seen) -> Any:
        plgpu.barrier_wait(self.v_arrived.at[slot])
        self._unpack(self.v_s, slot, self.v_numbers_s, seen)
        return self.v_numbers_s

    def _unpack(self, rows_s: Any, slot: Array, numbers_s: Any, seen: Seen | None) -> None:
        row = load(rows_s, (slot,), plgpu.Layout.WGMMA)
        keys, width = rows_s.shape[1], numbers_s.shape[1] // 2
        words = row[:, :width]
        scale = lax.broadcast_in_dim(_scales(row[:, self.head_dim // 2 : self.head_dim // 2 + 8]), (keys, width), [0])
        for half in (0, 1):
            codes = from_codes(words, 8 * half, 8, self.interpret, signed=True)
            numbers = (codes.astype(jnp.float32) * scale).astype(numbers_s.dtype)
            numbers_s[:, pl.ds(half * width, width)] = numbers if seen is None else _only(seen, numbers)


def _scales(words: Array) -> Array:
    """Return the scales f32 [keys] in the first two of the words [keys, 8]; sums select their columns."""
    column = plgpu.broadcasted_iota(jnp.int32, words.shape, 1, layout=plgpu.Layout.WGMMA)
    numbers = words.astype(jnp.float32)
    low, high = (jnp.where(column == i, numbers, 0).sum(axis=1).astype(jnp.uint32) for i in (0, 1))
    return lax.bitcast_convert_type(low | high << jnp.uint32(16), jnp.float32)


def _only(seen: Seen, values: Array) -> Array:
    """Return values with zeros at the positions that are not seen, because 0 * NaN is NaN."""
    position = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
    return jnp.where((position >= seen[0]) & (position < seen[1]), values, 0)


@dataclass(frozen=True)
class Context:
    """The pages of one kv head of a sequence, and the buffers for their tiles."""

    segments_g: Sequence[Any]  # segments of the pool
    firsts: Sequence[int]  # ids of the segments' first pages
    pages_g: Any
    tile: Array  # row of the page table
    head: Array
    buffers: Buffers

    def fetch(self, i: Array, slot: Array | int) -> None:
        """Start to copy tile i of the keys and values; the barriers of the slot signal their arrival."""
        keys, page_size, width = self.buffers.k_s.shape[1], self.segments_g[0].shape[3], self.pages_g.shape[1]
        length = min(keys, page_size)
        for j in range(keys // length):
            at = i * keys + j * page_size
            page = self.pages_g[self.tile, jnp.minimum(lax.div(at, page_size), width - 1)]
            source = slice(None) if length == page_size else pl.ds(lax.rem(at, page_size), length)
            self._copy_page(page, source, slot, pl.ds(j * page_size, length))

    def _copy_page(self, page: Array, source: Any, slot: Array | int, target: Any) -> None:
        """Start to copy a page from the segment that contains it."""
        copies = [
            partial(self._copy, segment_g, page - first, source, slot, target)
            for first, segment_g in zip(self.firsts, self.segments_g, strict=True)
        ]
        if len(copies) == 1:
            copies[0]()
        else:
            lax.switch(sum(jnp.int32(page >= first) for first in self.firsts[1:]), copies)

    def _copy(self, segment_g: Any, page: Array, source: Any, slot: Array | int, target: Any) -> None:
        to = self.buffers
        k, v = (segment_g.at[page, self.head, half, source] for half in (0, 1))
        plgpu.copy_gmem_to_smem(k, to.k_s.at[slot, target], to.k_arrived.at[slot])
        plgpu.copy_gmem_to_smem(v, to.v_s.at[slot, target], to.v_arrived.at[slot])


class PoolKind(Protocol):
    """The parts of the kernel that depend on the pool's dtype."""

    width: int  # of queries, keys and values in the kernel
    swizzled: tuple[Any, ...]  # their layout in shared memory, which both operands of a product need

    def operands(self, q: Array, pool: Pool) -> tuple[Array, list[Array]]:
        """Return the queries and the segments of the pool in the kernel's form."""

    def result(self, out: Array) -> Array:
        """Return the kernel's output [..., width] as [..., D]."""

    def scratch(self, pages: int, blocks: AttentionBlocks) -> Mapping[str, Any]:
        """Return the fields of the buffers for tiles of this number of pages."""

    def buffers(self, **fields: Any) -> Buffers:
        """Return the buffers with these fields."""


@dataclass(frozen=True)
class NumbersPool:
    """A pool of 16-bit floats [P, K, 2, S, D]."""

    head_dim: int
    dtype: DTypeLike

    @property
    def width(self) -> int:
        return self.head_dim

    @property
    def swizzled(self) -> tuple[Any, ...]:
        return tiles(self.head_dim, self.dtype)

    def operands(self, q: Array, pool: Pool) -> tuple[Array, list[Array]]:
        return q, list(pool)

    def result(self, out: Array) -> Array:
        return out

    def scratch(self, pages: int, blocks: AttentionBlocks) -> Mapping[str, Any]:
        kv = plgpu.SMEM((blocks.stages, blocks.keys, self.head_dim), self.dtype, transforms=self.swizzled)
        arrived = plgpu.Barrier(num_arrivals=pages, num_barriers=blocks.stages)
        return {"k_s": kv, "v_s": kv, "k_arrived": arrived, "v_arrived": arrived}

    def buffers(self, **fields: Any) -> NumberBuffers:
        return NumberBuffers(**fields)


@dataclass(frozen=True)
class CodesPool:
    """A pool of int8 [P, K, 2, S, R].

    The kernel reads W words of a row: its codes, and the following bytes up to whole tiles.
    """

    head_dim: int
    dtype: DTypeLike  # of the queries
    interpret: Any

    @property
    def words(self) -> int:
        """The number W of words of a row in the kernel."""
        return ceil_div(self.head_dim, 32) * 16

    @property
    def width(self) -> int:
        return 2 * self.words

    @property
    def swizzled(self) -> tuple[Any, ...]:
        return tiles(self.words, self.dtype)

    def operands(self, q: Array, pool: Pool) -> tuple[Array, list[Array]]:
        """Return the deinterleaved queries and the segments as 16-bit words."""
        pairs = (segment.reshape(*segment.shape[:-1], -1, 2) for segment in pool)
        return self.deinterleave(q), [lax.bitcast_convert_type(pair, jnp.uint16) for pair in pairs]

    def deinterleave(self, x: Array) -> Array:
        """Return x [..., D] as [..., 2 W]: the even numbers and zeros, then the odd numbers and zeros."""
        fill = [(0, 0)] * (x.ndim - 1) + [(0, self.words - self.head_dim // 2)]
        return jnp.concatenate([jnp.pad(x[..., half::2], fill) for half in (0, 1)], axis=-1)

    def result(self, out: Array) -> Array:
        """Invert `deinterleave`."""
        halves = [half[..., : self.head_dim // 2] for half in jnp.split(out, 2, axis=-1)]
        return jnp.stack(halves, axis=-1).reshape(*out.shape[:-1], self.head_dim)

    def scratch(self, pages: int, blocks: AttentionBlocks) -> Mapping[str, Any]:
        row = row_size(self.head_dim, jnp.int8, "gpu") // 2
        kv = plgpu.SMEM(
            (blocks.stages, blocks.keys, row), jnp.uint16
        )  # 16 bytes more than whole lines avoid bank conflicts
        numbers = plgpu.SMEM((blocks.keys, self.width), self.dtype, transforms=self.swizzled)
        arrived = plgpu.Barrier(num_arrivals=pages, num_barriers=blocks.stages)
        return {
            "k_s": kv, "v_s": kv, "k_numbers_s": numbers, "v_numbers_s": numbers, "k_arrived": arrived,
            "v_arrived": arrived,
        }  # fmt: skip

    def buffers(self, **fields: Any) -> CodeBuffers:
        return CodeBuffers(self.head_dim, self.interpret, **fields)


def kind_of(pool: Pool, head_dim: int, dtype: DTypeLike, interpret: Any) -> PoolKind:
    """Return the kind of a pool, for queries of a dtype."""
    return CodesPool(head_dim, dtype, interpret) if pool[0].dtype == jnp.int8 else NumbersPool(head_dim, dtype)
