"""Shapes that steps are padded to, and the layout of a step's inputs in one int32 vector.

The tokens of a step are B decode rows of one token each, then N prefill tiles of Q tokens. The sampled rows are the
decode rows, then one row per chunk.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from jaxserve.core.numeric import ceil_div
from jaxserve.core.work import Work


@dataclass(frozen=True)
class StepShape:
    """Shape of a step. Every kind of block has one executable per shape, decoder layers one per `of_layers`."""

    decodes: int  # B: decode rows
    tiles: int  # N: prefill tiles
    tile: int  # Q: tokens of a tile
    width: int  # W: pages of a row of the page table
    rows: int  # R: sampled rows

    @property
    def tokens(self) -> int:
        """Number T of tokens, padding included."""
        return self.decodes + self.tiles * self.tile

    @cached_property
    def of_layers(self) -> "StepShape":
        """The shape as decoder layers see it, which do not know the sampled rows."""
        return replace(self, rows=0)

    @cached_property
    def fields(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Fields of the packed vector: name -> (slice of the vector, shape)."""
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
        """Return a writable view of a field of a packed vector."""
        place, shape = self.fields[name]
        return packed[place] if len(shape) == 1 else packed[place].reshape(shape)


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """Return low, 2 low, 4 low, ... below `high`, and `high` itself."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= 2
    return (*sizes, high)


def with_midpoints(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return powers of two together with 6, 12, 24, ...: the sizes halfway between two of them, from 4 on."""
    between = {low + low // 2 for low, high in pairwise(sizes) if low >= 4 and low + low // 2 < high}
    return tuple(sorted({*sizes, *between}))


def smallest_holding(sizes: tuple[int, ...], wanted: int) -> int:
    """Return the smallest of the sizes that is at least `wanted`."""
    return next(size for size in sizes if size >= wanted)


@dataclass(frozen=True)
class Buckets:
    """The grid of shapes that steps are padded to."""

    max_num_seqs: int
    max_tiles: int
    tile: int  # tokens of a prefill tile
    min_rows: int  # smallest padding of decode rows: on some platforms fewer rows are slower
    widths: tuple[int, ...]  # pages of a row of the page table
    # On a platform where products leave padded rows out: more sizes, as other operations cost the same for each row,
    # and no choice of the sampled rows.
    finer: bool = False

    def times(self, members: int) -> "Buckets":
        """Return the shapes of an instance that was merged of this many: it decodes as many sequences as all of them.

        A step has no more prompt tokens: each device would compute all of them outside of the split products.
        """
        return replace(self, max_num_seqs=members * self.max_num_seqs) if members > 1 else self

    @cached_property
    def decodes(self) -> tuple[int, ...]:
        """Numbers of decode rows that steps without prefill are padded to."""
        return self._sizes(min(self.min_rows, self.max_num_seqs), self.max_num_seqs)

    @cached_property
    def mixed_decodes(self) -> tuple[int, ...]:
        """Numbers of decode rows that steps with prefill are padded to: 0 or all, as unused rows cost little there."""
        return (0, self.max_num_seqs)

    @cached_property
    def tiles(self) -> tuple[int, ...]:
        """Numbers of prefill tiles that steps are padded to."""
        return self._sizes(1, self.max_tiles)

    @cached_property
    def _shapes(self) -> dict[tuple[int, int, int, int], StepShape]:
        # A cache, by decode rows, tiles, width and sampled rows: every step looks its shape up.
        return {}

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Numbers of sampled rows that steps are padded to."""
        return powers_of_two(self.min_rows, max(self.max_num_seqs + self.max_tiles, self.min_rows))

    def _sizes(self, low: int, high: int) -> tuple[int, ...]:
        sizes = powers_of_two(low, high)
        return with_midpoints(sizes) if self.finer else sizes

    def shape(self, decodes: int, tiles: int, pages: int, chunks: int | None = None) -> StepShape:
        """Return the smallest shape for a step with these numbers of decode rows, prefill tiles and pages per row.

        The tiles are those of `chunks` chunks, by default of one tile each.
        """
        sampled = decodes + (tiles if chunks is None else chunks)
        key = decodes, tiles, smallest_holding(self.widths, pages), sampled
        if key not in self._shapes:
            self._shapes[key] = self._shape(*key)
        return self._shapes[key]

    def _shape(self, decodes: int, tiles: int, width: int, sampled: int) -> StepShape:
        if tiles == 0:
            size = smallest_holding(self.decodes, decodes)
            return StepShape(size, 0, self.tile, width, smallest_holding(self.rows, size))
        size, tiles = smallest_holding(self.mixed_decodes, decodes), smallest_holding(self.tiles, tiles)
        rows = smallest_holding(self._mixed_rows(size + tiles), sampled)
        return StepShape(size, tiles, self.tile, width, rows)

    def _mixed_rows(self, most: int) -> tuple[int, ...]:
        """Return the numbers of sampled rows that steps with prefill are padded to, for at most `most` rows.

        They are all, and where padded rows are sampled like others also a quarter of them: mostly few sequences decode.
        """
        most = smallest_holding(self.rows, most)
        few = () if self.finer else [rows for rows in self.rows if rows <= most // 4][-1:]
        return (*few, most)

    def of(self, work: Work) -> StepShape:
        """Return the smallest shape for a step's work."""
        tiles = pages = 0
        for chunk in work.chunks:
            tiles += ceil_div(chunk.length, self.tile)
        if len(self.widths) > 1:
            pages = max(len(s.pages) for s in (*work.decodes, *(chunk.sequence for chunk in work.chunks)))
        return self.shape(len(work.decodes), tiles, pages, len(work.chunks))

    def all(self) -> tuple[StepShape, ...]:
        """Return every shape that `of` can return, largest first."""
        shapes = {self.shape(b, 0, w) for b in self.decodes for w in self.widths}
        shapes |= {
            replace(self.shape(b, n, w), rows=rows)
            for b in self.mixed_decodes
            for n in self.tiles
            for w in self.widths
            for rows in self._mixed_rows(b + n)
        }
        return tuple(sorted(shapes, key=lambda s: (s.tokens, s.width, s.rows), reverse=True))
