"""KV pools whose number of pages changes: they grow by segments, and shrink by moving pages out of the tail.

An elastic pool has address space for all pages that it may ever have, so that growing it changes nothing on the device.
Other pools take memory segment by segment (`kernels.pool_segments`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, overload

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.compilation.programs import Compiler, Program, abstract
from jaxserve.core.kv_layout import MAX_MOVED_PAGES, segments_covering
from jaxserve.core.step_shapes import smallest_holding
from jaxserve.kernels import Pool, move_pages, release_pages
from jaxserve.parallel.placement import bytes_held

MOVES = (16, MAX_MOVED_PAGES)  # pages that one call moves; padded with moves of the null page to itself

Growth = list[Pool]  # for each layer, the segments to extend its pool by
AbstractPool = tuple[jax.ShapeDtypeStruct, ...]


class Pools:
    """The KV pools of an instance's decoder layers, in order, and the executables that shrink them in place.

    All pools have segments of the same sizes. Methods that change them are called between two steps and only dispatch:
    steps that were dispatched before use the pages as they were.
    """

    def __init__(self, make: Sequence[Callable[[int], Pool]], sizes: Sequence[int]):
        """Make the first segment of every pool; `make[layer](pages)` returns a segment of a layer.

        `sizes` holds the pages of all segments that a pool may have.
        """
        self._make, self.sizes = tuple(make), tuple(sizes)
        self._pools = [make(self.sizes[0]) for make in self._make]
        shardings = {pool[0].sharding for pool in self._pools}
        self._move = {sharding: _on_each_device(move_pages, sharding, 2) for sharding in shardings}
        self._release = {sharding: _on_each_device(release_pages, sharding, 1) for sharding in shardings}

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
        move, release = self._move[pool[0].sharding], self._release[pool[0].sharding]
        for size in MOVES:
            ids = jax.ShapeDtypeStruct((size,), np.int32)
            for grown in (pool, *self.grown(layer)):
                compiler.compile(move, (len(grown), size), grown, ids, ids)
        for kept in (pool, *self.grown(layer)):
            compiler.compile(release, len(kept), kept, jax.ShapeDtypeStruct((2,), np.int32))

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

    def close(self) -> None:
        """Free the memory of all pools."""
        free(self._pools)

    def _move_batch(self, pool: Pool, pairs: list[tuple[int, int]]) -> Pool:
        sharding, size = pool[0].sharding, smallest_holding(MOVES, len(pairs))
        ids = np.zeros((2, size), np.int32)
        ids[:, : len(pairs)] = np.transpose(pairs)
        return self._move[sharding].at((len(pool), size))(pool, *ids)

    def _release_from(self, pool: Pool, pages: int) -> Pool:
        return self._release[pool[0].sharding].at(len(pool))(pool, np.array([pages, pool[0].shape[0]], np.int32))


def free(pools: Iterable[Pool]) -> None:
    """Free the memory of segments after everything that was dispatched for them has run."""
    for segment in chain.from_iterable(pools):
        segment.delete()


def _on_each_device(operation: Callable[..., Pool], sharding: NamedSharding, operands: int) -> Program:
    """Return a program (pool, operands) -> pool that works in place, on each device's own part of the pool."""
    name = operation.__name__
    if sharding.mesh.size > 1:
        replicated = (PartitionSpec(),) * operands
        operation = jax.shard_map(
            operation,
            mesh=sharding.mesh,
            in_specs=(sharding.spec, *replicated),
            out_specs=sharding.spec,
            check_vma=False,  # custom calls do not declare how their outputs vary
        )
    return Program(name, jax.jit(operation, donate_argnums=0, out_shardings=sharding))
