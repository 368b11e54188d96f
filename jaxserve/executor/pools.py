"""KV pools whose number of pages changes: they grow by segments, and shrink by moving pages out of the tail.

An elastic pool has address space for all pages that it may ever have, so that growing it changes nothing on the device.
Other pools take memory segment by segment (`kernels.pool_segments`). The pools that several members leave to one
instance have a lane for each of them (`kvcache.lanes`), so that a segment consists of several arrays.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, overload

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxserve.compilation.programs import Program, StartsCompiling, untraced
from jaxserve.core.kv_layout import MAX_MOVED_PAGES
from jaxserve.core.step_shapes import smallest_holding
from jaxserve.kernels import (
    Pool,
    move_pages,
    pool_shape,
    put_pages,
    release_pages,
    reserving,
    storage_dtype,
    take_pages,
)
from jaxserve.kvcache import Lanes
from jaxserve.parallel.placement import POOL_AXES, Placement, bytes_held

MOVES = (16, MAX_MOVED_PAGES)  # pages that one call moves; padded with moves of the null page to itself

Growth = list[Pool]  # for each layer, the arrays to extend its pool by
AbstractPool = tuple[jax.ShapeDtypeStruct, ...]


class PoolPrograms:
    """The programs on the KV pools of a placement, which make segments, and move, copy and release pages in place."""

    def __init__(self, placement: Placement, kv_heads: int, page_size: int, head_dim: int, dtype: DTypeLike):
        """`dtype` is the dtype of activations, or int8."""
        platform = placement.platform
        self.placement, self.sharding = placement, placement.sharding(POOL_AXES)
        sharding, self._dtype = self.sharding, storage_dtype(dtype, platform)
        self._shape = partial(
            pool_shape, kv_heads=kv_heads, page_size=page_size, head_dim=head_dim, dtype=dtype, platform=platform
        )
        self._make = Program(
            f"make {self._shape(1)} {self._dtype} {sharding.mesh.size}",
            jax.jit(self._reserve, static_argnums=0, out_shardings=sharding),
            sharding.mesh,
        )
        self._move = self._program(move_pages, 2)
        self._release = self._program(release_pages, 1)
        self._take = self._program(take_pages, 1, in_place=False)
        self._put = self._program(put_pages, 1, contents=True)

    def abstract(self, sizes: Sequence[int]) -> AbstractPool:
        """Return the abstract pool with segments of these numbers of pages."""
        return tuple(jax.ShapeDtypeStruct(self._shape(size), self._dtype, sharding=self.sharding) for size in sizes)

    def make(self, pages: int) -> Pool:
        """Return a pool of zeros with one segment. On an elastic platform a page takes memory when it is written."""
        made = self._make.executables.get(pages)
        return (self._make(pages) if made is None else made(),)

    def move(self, pool: Pool, pairs: np.ndarray) -> Pool:
        """Return the pool with pages pairs[:, 0] copied to pages pairs[:, 1], at most `MOVES[-1]`."""
        size = smallest_holding(MOVES, len(pairs))
        ids = np.zeros((2, size), np.int32)
        ids[:, : len(pairs)] = pairs.T
        return self._move.at((pages_of(pool), size))(pool, *ids)

    def release(self, pool: Pool, kept: Sequence[int]) -> Pool:
        """Return the pool with the memory of the first kept[i] pages of each array i; the others become undefined."""
        sizes = pages_of(pool)
        return self._release.at(sizes)(pool, np.array([kept, sizes], np.int32).T)

    def take(self, pool: Pool, ids: np.ndarray) -> jax.Array:
        """Return the contents of pages i32[N], where N is one of `MOVES`."""
        return self._take.at((pages_of(pool), len(ids)))(pool, ids)

    def put(self, pool: Pool, contents: jax.Array, ids: np.ndarray) -> Pool:
        """Return the pool with `contents` as the pages i32[N], where N is one of `MOVES`."""
        return self._put.at((pages_of(pool), len(ids)))(pool, contents, ids)

    def compile_segments(self, sizes: Iterable[int], compiler: StartsCompiling) -> None:
        """Start to compile the programs that make segments of these numbers of pages."""
        for size in dict.fromkeys(sizes):
            compiler.compile(self._make, size, static=(size,))

    def compile(self, lanes: Lanes, present: int, compiler: StartsCompiling, *, copies: bool = False) -> None:
        """Start to compile the programs of a pool with `present` of its segments, and with more of them.

        `copies`: also those that copy pages to other pools and from them.
        """
        self.compile_segments(lanes.sizes, compiler)
        for count in range(present, len(lanes.sizes) + 1):
            pool = self.abstract(lanes.arrays(count))
            for size in MOVES:
                ids, (contents,) = jax.ShapeDtypeStruct((size,), np.int32), self.abstract((size,))
                compiler.compile(self._move, (pages_of(pool), size), pool, ids, ids)
                if copies:
                    compiler.compile(self._take, (pages_of(pool), size), pool, ids)
                    compiler.compile(self._put, (pages_of(pool), size), pool, contents, ids)
            compiler.compile(self._release, pages_of(pool), pool, jax.ShapeDtypeStruct((len(pool), 2), np.int32))

    def _reserve(self, pages: int) -> jax.Array:
        return reserving(self._shape(pages), self._dtype, self.sharding)()

    def _program(
        self, operation: Callable[..., Any], operands: int, *, contents: bool = False, in_place: bool = True
    ) -> Program:
        """Return a program of a pool, perhaps the contents of pages, and `operands` arrays of page ids.

        It works on each device's own part of the pool, in place unless it only reads.
        """
        name, own = operation.__name__, self.sharding.spec
        if self.sharding.mesh.size > 1:
            operation = jax.shard_map(
                operation,
                mesh=self.sharding.mesh,
                in_specs=(own, *([own] if contents else []), *[PartitionSpec()] * operands),
                out_specs=own,
                check_vma=False,  # custom calls do not declare how their outputs vary
            )
        donated = 0 if in_place else ()
        return Program(name, jax.jit(untraced(operation), donate_argnums=donated, out_shardings=self.sharding))


class Pools:
    """The KV pools of an instance's decoder layers, in order.

    All pools have segments of the same sizes and the same number of lanes. Methods take page ids, and `PoolPrograms`
    takes places. Methods that change pools are called between two steps and only dispatch: steps that were dispatched
    before use the pages as they were.
    """

    def __init__(
        self,
        programs: Sequence[PoolPrograms],
        sizes: Sequence[int],
        pools: Sequence[Pool] | None = None,
        *,
        lanes: int = 1,
    ):
        """Make the first segment of every pool with the programs of each layer, or take existing `pools`.

        `sizes` holds the pages of one lane in all segments that a pool may have.
        """
        self.programs, self.sizes, self.lanes = tuple(programs), tuple(sizes), Lanes(tuple(sizes), lanes)
        self._make = tuple(programs.make for programs in self.programs)
        layers = range(len(self.programs))
        self._pools = [self._segment(layer, self.sizes[0]) for layer in layers] if pools is None else list(pools)
        for pool in self._pools:
            assert pages_of(pool) == self.lanes.arrays(len(pool) // lanes), "segments are taken in order"

    def __len__(self) -> int:
        return len(self._pools)

    @overload
    def __getitem__(self, layer: int) -> Pool: ...
    @overload
    def __getitem__(self, layer: slice) -> list[Pool]: ...
    def __getitem__(self, layer: int | slice) -> Pool | list[Pool]:
        """Return the pool of a decoder layer, or the pools of several."""
        return self._pools[layer]

    @overload
    def __setitem__(self, layer: int, pool: Pool) -> None: ...
    @overload
    def __setitem__(self, layer: slice, pool: Iterable[Pool]) -> None: ...
    def __setitem__(self, layer: int | slice, pool: Any) -> None:
        """Store the pools that a step returned."""
        self._pools[layer] = pool

    @property
    def segments(self) -> int:
        """The present number of segments of each pool."""
        return len(self._pools[0]) // self.lanes.count if self._pools else 1

    @property
    def pages(self) -> tuple[int, ...]:
        """The numbers of pages of the present arrays of each pool, which the programs of steps depend on."""
        return self.lanes.arrays(self.segments)

    @property
    def nbytes(self) -> int:
        """The bytes of all segments, summed over devices."""
        segments = chain.from_iterable(self._pools)
        return sum(map(bytes_held, segments))

    def prepare(self, pages: int) -> Growth:
        """Allocate and return the segments that are missing for `pages` pages in every pool.

        Any thread may call this. Steps do not see the segments before `extend`.
        """
        sizes = self.sizes[self.segments : self.lanes.segments_covering(pages)]
        growth: Growth = []
        try:
            for layer in range(len(self)):
                growth.append(())
                for size in sizes:
                    growth[layer] += self._segment(layer, size)
            jax.block_until_ready(growth)
        except BaseException:
            free(growth)
            raise
        return growth

    def extend(self, growth: Growth) -> None:
        """Append prepared segments to the pools; `growth` is empty afterwards."""
        self._pools = [pool + more for pool, more in zip(self._pools, growth, strict=True)]
        growth.clear()

    def shrink(self, moves: Mapping[int, int], pages: int) -> None:
        """Copy pages as `moves` (source: target) says, then release all pages from `pages` on.

        Elastic pools release page by page, other pools whole segments. If copying raises, only the target pages have
        changed.
        """
        self.move(moves)  # in all layers before any page is released
        segments = min(self.lanes.segments_covering(pages), self.segments)
        kept, arrays = self.lanes.rows_below(pages, segments), segments * self.lanes.count
        for layer, pool in enumerate(self._pools):
            self._pools[layer] = self.programs[layer].release(pool[:arrays], kept)
            free([pool[arrays:]])

    def move(self, moves: Mapping[int, int]) -> None:
        """Copy pages as `moves` (source: target) says. No target is also a source."""
        pairs, batch = self.lanes.places(list(moves.items())), MOVES[-1]
        for layer in range(len(self)):
            for start in range(0, len(pairs), batch):
                self._pools[layer] = self.programs[layer].move(self._pools[layer], pairs[start : start + batch])

    def take(self, layer: int, pages: np.ndarray) -> jax.Array:
        """Return the contents of pages i32[N] of a layer, where N is one of `MOVES`."""
        return self.programs[layer].take(self._pools[layer], self._places(pages))

    def put(self, layer: int, contents: jax.Array, pages: np.ndarray) -> None:
        """Write `contents` to the pages i32[N] of a layer, where N is one of `MOVES`."""
        self._pools[layer] = self.programs[layer].put(self._pools[layer], contents, self._places(pages))

    def lane(self, layer: int, lane: int) -> Pool:
        """Return the arrays of one lane of a layer's pool, in which a page is found by its row."""
        return self._pools[layer][lane :: self.lanes.count]

    def set_lane(self, layer: int, lane: int, pool: Pool) -> None:
        """Store the arrays of one lane that a program returned."""
        arrays = list(self._pools[layer])
        arrays[lane :: self.lanes.count] = pool
        self._pools[layer] = tuple(arrays)

    def give_up(self) -> None:
        """Forget all pools, whose memory belongs to others from now on."""
        self._pools = []

    def take_over(self, other: "Pools") -> None:
        """Take the pools of another object on the same devices, which has none afterwards."""
        self._pools = other._pools
        other.give_up()

    def run_on_padding(self, layer: int) -> None:
        """Run the compiled programs of a layer's pool without effect: the null page moves and no page is released."""
        programs, pool = self.programs[layer], self._pools[layer]
        for size in MOVES:
            pool = programs.move(pool, np.zeros((size, 2), np.int32))
        self._pools[layer] = programs.release(pool, pages_of(pool))
        for size in set(self.sizes[1:]):
            free([self._make[layer](size)])

    def close(self) -> None:
        """Free the memory of all pools."""
        free(self._pools)

    def _segment(self, layer: int, size: int) -> Pool:
        """Return the arrays of one segment, one for each lane."""
        return tuple(chain.from_iterable(self._make[layer](size) for _ in range(self.lanes.count)))

    def _places(self, pages: np.ndarray) -> np.ndarray:
        return self.lanes.places(pages).astype(np.int32)


def free(pools: Iterable[Pool]) -> None:
    """Free the memory of segments after everything that was dispatched for them has run."""
    for segment in chain.from_iterable(pools):
        segment.delete()


def pages_of(pool: Pool | AbstractPool) -> tuple[int, ...]:
    """Return the pages of each array of a pool."""
    return tuple(segment.shape[0] for segment in pool)
