"""The static shape of a step, and how its inputs lie in one int32 vector. Imports no JAX: a simulator needs it too.

Tokens of a step, in order: B decode rows of one token each, then N prefill tiles of Q tokens. Sampled rows, in order:
the decode rows, then one row per chunk.
"""

from dataclasses import dataclass
from functools import cache
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

    @property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Name -> (offset, shape) in the packed vector."""
        return _fields(self)

    @property
    def size(self) -> int:
        """Length of the packed vector."""
        offset, shape = self.fields["tile_lengths"]
        return offset + prod(shape)

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views of the fields of a packed numpy vector."""
        return {name: packed[at : at + prod(shape)].reshape(shape) for name, (at, shape) in self.fields.items()}


@cache  # every step asks, and each has a shape of its own that equals others
def _fields(shape: StepShape) -> dict[str, tuple[int, tuple[int, ...]]]:
    sizes = {
        "tokens": (shape.tokens,),
        "positions": (shape.tokens,),
        "slots": (shape.tokens,),
        "rows": (shape.rows,),
        "decode_pages": (shape.decodes, shape.width),
        "decode_lengths": (shape.decodes,),
        "tile_pages": (shape.tiles, shape.width),
        "tile_starts": (shape.tiles,),
        "tile_lengths": (shape.tiles,),
    }
    offsets = np.cumsum([0, *(prod(size) for size in sizes.values())])
    return {name: (int(at), size) for at, (name, size) in zip(offsets, sizes.items(), strict=False)}
