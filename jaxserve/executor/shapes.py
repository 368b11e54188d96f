"""The static shape of a step, and how its inputs lie in one int32 vector. Imports no JAX: a simulator needs it too.

Tokens of a step, in order: B decode rows of one token each, then N prefill tiles of Q tokens. Sampled rows, in order:
the decode rows, then one row per chunk.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import numpy as np


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
