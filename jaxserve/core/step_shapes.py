"""The static shape of a step, and how its inputs lie in one int32 vector. Imports no JAX: a simulator needs it too.

Tokens of a step, in order: B decode rows of one token each, then N prefill tiles of Q tokens. Sampled rows, in order:
the decode rows, then one row per chunk.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from jaxserve.core.numeric import ceil_div
from jaxserve.core.work import Work


@dataclass(frozen=True)
class StepShape:
    """One executable of each kind per shape."""

    decodes: int  # B
    tiles: int  # N
    tile: int  # Q
    width: int  # W, pages
    rows: int  # R, sampled rows

    @property
    def tokens(self) -> int:
        """T."""
        return self.decodes + self.tiles * self.tile

    @cached_property
    def fields(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Name -> where it lies in the packed vector, and its shape."""
        sizes = {
            "tokens": (self.tokens,),
            "positions": (self.tokens,),
            "slots": (self.tokens,),
            "rows": (self.rows,),
            "decode_pages": (self.decodes, self.width),
            "decode_lengths": (self.decodes,),
            "tile_pages": (self.tiles, self.width),
            "tile_starts": (self.tiles,),
            "tile_lengths": (self.tiles,),
        }
        ends = accumulate(map(prod, sizes.values()), initial=0)
        return {name: (slice(*ends), size) for (name, size), ends in zip(sizes.items(), pairwise(ends), strict=True)}

    @cached_property
    def size(self) -> int:
        """Length of the packed vector."""
        return sum(prod(shape) for _, shape in self.fields.values())

    def view(self, packed: np.ndarray, name: str) -> np.ndarray:
        """A writable view of a field of a packed numpy vector."""
        place, shape = self.fields[name]
        return packed[place] if len(shape) == 1 else packed[place].reshape(shape)


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """low, 2 low, 4 low, ... up to and including high."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= 2
    return (*sizes, high)


def with_midpoints(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Powers of two with those sizes between them, from 6 on, that are half as large again as the one before."""
    between = {low + low // 2 for low, high in pairwise(sizes) if low >= 4 and low + low // 2 < high}
    return tuple(sorted({*sizes, *between}))


def smallest_holding(sizes: tuple[int, ...], wanted: int) -> int:
    """The smallest size that holds `wanted`."""
    return next(size for size in sizes if size >= wanted)


@dataclass(frozen=True)
class Buckets:
    """The grid of step shapes: B of pure decode steps; B and N of steps with prefill; W of the page tables."""

    max_num_seqs: int
    max_tiles: int
    tile: int
    min_rows: int  # smaller products are slower on some platforms than padded ones
    widths: tuple[int, ...]
    finer: bool = False  # rows and tiles also between powers of two: where padded rows may cost as much as others

    @cached_property
    def decodes(self) -> tuple[int, ...]:
        return self._sizes(min(self.min_rows, self.max_num_seqs), self.max_num_seqs)

    @cached_property
    def mixed_decodes(self) -> tuple[int, ...]:
        """None, or all: beside a tile of prefill, unused decode rows cost little."""
        return (0, self.max_num_seqs)

    @cached_property
    def tiles(self) -> tuple[int, ...]:
        return self._sizes(1, self.max_tiles)

    @cached_property
    def _shapes(self) -> dict[tuple[int, int, int], StepShape]:
        return {}  # by decode rows, tiles and width: every step asks

    @cached_property
    def rows(self) -> tuple[int, ...]:
        return powers_of_two(self.min_rows, max(self.max_num_seqs + self.max_tiles, self.min_rows))

    def _sizes(self, low: int, high: int) -> tuple[int, ...]:
        sizes = powers_of_two(low, high)
        return with_midpoints(sizes) if self.finer else sizes

    def shape(self, decodes: int, tiles: int, pages: int) -> StepShape:
        """The smallest shape that holds a step of so many decode rows, prefill tiles and pages per row."""
        key = decodes, tiles, smallest_holding(self.widths, pages)
        if key not in self._shapes:
            self._shapes[key] = self._shape(*key)
        return self._shapes[key]

    def _shape(self, decodes: int, tiles: int, width: int) -> StepShape:
        if tiles == 0:
            size = smallest_holding(self.decodes, decodes)
            return StepShape(size, 0, self.tile, width, smallest_holding(self.rows, size))
        size, tiles = smallest_holding(self.mixed_decodes, decodes), smallest_holding(self.tiles, tiles)
        return StepShape(size, tiles, self.tile, width, smallest_holding(self.rows, size + tiles))

    def of(self, work: Work) -> StepShape:
        """The shape for a step's work."""
        tiles = pages = 0
        for chunk in work.chunks:
            tiles += ceil_div(chunk.length, self.tile)
        if len(self.widths) > 1:
            pages = max(len(s.pages) for s in (*work.decodes, *(chunk.sequence for chunk in work.chunks)))
        return self.shape(len(work.decodes), tiles, pages)

    def all(self) -> tuple[StepShape, ...]:
        """Every shape that `of` can return, largest first."""
        shapes = {self.shape(b, 0, w) for b in self.decodes for w in self.widths}
        shapes |= {self.shape(b, n, w) for b in self.mixed_decodes for n in self.tiles for w in self.widths}
        return tuple(sorted(shapes, key=lambda s: (s.tokens, s.width), reverse=True))
