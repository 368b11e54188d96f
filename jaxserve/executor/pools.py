"""KV pools whose number of pages changes: they grow by segments, and shrink by moving pages out of the tail.

An elastic pool has address space for all pages that it may ever have, so that growing it changes nothing on the device.
Other pools take memory segment by segment (`kernels.pool_segments`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, overload

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.compilation.programs import Compiler, Program, abstract
from jaxserve.core.kv_layout import MAX_MOVED_PAGES, segments_covering
from jaxserve.core.step_shapes import smallest_holding
from jaxserve.kernels import Pool, abstract_pool, kv_pool, move_pages, put_pages, release_pages, take_pages
from jaxserve.parallel.placement import POOL_AXES, Placement, bytes_held

MOVES = (16, MAX_MOVED_PAGES)  # pages that one call moves; padded with moves of the null page to itself

Growth = list[Pool]  # for each layer, the segments to extend its pool by
AbstractPool = tuple[jax.ShapeDtypeStruct, ...]

REPLICATED = PartitionSpec()


@dataclass(frozen=True)
class PoolFormat:
    """The contents of a page in a model's KV pools, on all devices of an instance together."""

    kv_heads: int
    page_size: int
    head_dim: int
    dtype: str  # of keys and values, or int8

    def make(self, pages: int, placement: Placement) -> Pool:
        """Return a new pool of one segment."""
        sharding = placement.sharding(POOL_AXES)
        return kv_pool(pages, self.kv_heads, self.page_size, self.head_dim, self.dtype, sharding)

    def abstract(self, pages: int, placement: Placement) -> jax.ShapeDtypeStruct:
        """Return the abstract segment that `make` makes."""
        size = (self.kv_heads, self.page_size, self.head_dim)
        (segment,) = abstract_pool(pages, *size, self.dtype, placement.platform)
        return jax.ShapeDtypeStruct(segment.shape, segment.dtype, sharding=placement.sharding(POOL_AXES))


class PoolPrograms:
    """The programs on pools, by the sharding of the pools. Pools of several instances may share them."""

    def __init__(self) -> None:
        self._programs: dict[tuple[str, NamedSharding], Program] = {}

    def move(self, sharding: NamedSharding) -> Program:
        """Return (pool, sources, targets) -> pool, for `kernels.move_pages` in place."""
        return self._program("move_pages", sharding, move_pages, (sharding.spec, REPLICATED, REPLICATED))

    def release(self, sharding: NamedSharding) -> Program:
        """Return (pool, first and last page) -> pool, for `kernels.release_pages` in place."""
        return self._program("release_pages", sharding, release_pages, (sharding.spec, REPLICATED))

    def take(self, sharding: NamedSharding) -> Program:
        """Return (pool, pages) -> their contents."""
        inputs = sharding.spec, REPLICATED
        return self._program("take_pages", sharding, take_pages, inputs, in_place=False)

    def put(self, sharding: NamedSharding) -> Program:
        """Return (pool, contents, pages) -> pool with these contents, in place."""
        return self._program("put_pages", sharding, put_pages, (sharding.spec, sharding.spec, REPLICATED))

    def _program(
        self,
        name: str,
        sharding: NamedSharding,
        operation: Callable[..., Any],
        inputs: tuple[PartitionSpec, ...],
        in_place: bool = True,
    ) -> Program:
        """Return a program that works on each device's own part of a pool."""
        if (name, sharding) not in self._programs:
            if sharding.mesh.size > 1:
                # Custom calls do not declare how their outputs vary, so that cannot be checked.
                operation = jax.shard_map(
                    operation, mesh=sharding.mesh, in_specs=inputs, out_specs=sharding.spec, check_vma=False
                )
            donated = 0 if in_place else ()
            jitted = jax.jit(operation, donate_argnums=donated, out_shardings=sharding)
            self._programs[name, sharding] = Program(name, jitted)
        return self._programs[name, sharding]


class Pools:
    """The KV pools of an instance's decoder layers, in order, and the executables that shrink them in place.

    All pools have segments of the same sizes. Methods that change them are called between two steps and only dispatch:
    steps that were dispatched before use the pages as they were.
    """

    def __init__(
        self,
        make: Sequence[Callable[[int], Pool]],
        sizes: Sequence[int],
        programs: PoolPrograms | None = None,
        pools: Sequence[Pool] | None = None,
    ):
        """Make the first segment of every pool, or take existing `pools` of one or several segments.

        `make[layer](pages)` returns a segment of a layer. `sizes` holds the pages of all segments that a pool may have.
        """
        self._make, self.sizes = tuple(make), tuple(sizes)
        self.programs = programs or PoolPrograms()
        self._pools = [make(self.sizes[0]) for make in self._make] if pools is None else list(pools)
        for pool in self._pools:
            assert pages_of(pool) == self.sizes[: len(pool)], "segments are taken in order"

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
        return len(self._pools[0]) if self._pools else 1

    @property
    def nbytes(self) -> int:
        """The bytes of all segments, summed over devices."""
        segments = chain.from_iterable(self._pools)
        return sum(map(bytes_held, segments))

    def prepare(self, pages: int) -> Growth:
        """Allocate and return the segments that are missing for `pages` pages in every pool.

        Any thread may call this. Steps do not see the segments before `extend`.
        """
        sizes = self.sizes[self.segments : segments_covering(self.sizes, pages)]
        growth: Growth = []
        try:
            for layer in range(len(self)):
                growth.append(())
                for size in sizes:
                    growth[layer] += self._make[layer](size)
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
        pairs, batch, kept = list(moves.items()), MOVES[-1], segments_covering(self.sizes, pages)
        for layer in range(len(self)):  # copy in all layers before any page is released
            for start in range(0, len(pairs), batch):
                self._pools[layer] = self._move_batch(self._pools[layer], pairs[start : start + batch])
        for layer, pool in enumerate(self._pools):
            self._pools[layer] = self._release_from(pool[:kept], pages)
            free([pool[kept:]])

    def compile(self, layer: int, compiler: Compiler) -> None:
        """Start to compile the shrinking of a layer's pool, for the present and all larger numbers of segments."""
        pool = tuple(map(abstract, self._pools[layer]))
        move, release = self.programs.move(pool[0].sharding), self.programs.release(pool[0].sharding)
        for size in MOVES:
            ids = jax.ShapeDtypeStruct((size,), np.int32)
            for grown in (pool, *self.grown(layer)):
                compiler.compile(move, (pages_of(grown), size), grown, ids, ids)
        for kept in (pool, *self.grown(layer)):
            compiler.compile(release, pages_of(kept), kept, jax.ShapeDtypeStruct((2,), np.int32))

    def run_on_padding(self, layer: int) -> None:
        """Run the compiled programs of a layer's pool without effect: the null page moves and no page is released."""
        pool = self._pools[layer]
        for size in MOVES:
            pool = self._move_batch(pool, [(0, 0)] * size)
        self._pools[layer] = self._release_from(pool, pool[0].shape[0])
        for size in set(self.sizes[1:]):
            free([self._make[layer](size)])

    def grown(self, layer: int) -> list[AbstractPool]:
        """Return a layer's abstract pool with two segments, with three, and so on."""
        first = abstract(self._pools[layer][0])
        segments = tuple(
            jax.ShapeDtypeStruct((size, *first.shape[1:]), first.dtype, sharding=first.sharding) for size in self.sizes
        )
        return [segments[:count] for count in range(2, len(segments) + 1)]

    def give_up(self) -> None:
        """Forget all pools, whose memory belongs to others from now on."""
        self._pools = []

    def take_over(self, other: "Pools") -> None:
        """Take the pools of another object on the same devices, which has none afterwards."""
        self._pools = other._pools
        other.give_up()

    def close(self) -> None:
        """Free the memory of all pools."""
        free(self._pools)

    def _move_batch(self, pool: Pool, pairs: list[tuple[int, int]]) -> Pool:
        size = smallest_holding(MOVES, len(pairs))
        ids = np.zeros((2, size), np.int32)
        ids[:, : len(pairs)] = np.transpose(pairs)
        return self.programs.move(pool[0].sharding).at((pages_of(pool), size))(pool, *ids)

    def _release_from(self, pool: Pool, pages: int) -> Pool:
        release = self.programs.release(pool[0].sharding).at(pages_of(pool))
        return release(pool, np.array([pages, pool[0].shape[0]], np.int32))


def pages_of(pool: Pool | AbstractPool) -> tuple[int, ...]:
    """Return the pages of each segment of a pool."""
    return tuple(segment.shape[0] for segment in pool)


def free(pools: Iterable[Pool]) -> None:
    """Free the memory of segments after everything that was dispatched for them has run."""
    for segment in chain.from_iterable(pools):
        segment.delete()
