"""The static shape of a step, and how its inputs lie in one int32 vector. Imports no JAX: a simulator needs it too.

Tokens of a step, in order: B decode rows of one token each, then N prefill tiles of Q tokens. Sampled rows, in order:
the decode rows, then one row per chunk.
"""

from dataclasses import dataclass
from functools import cached_property
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
    def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Name -> (offset, shape) in the packed vector."""
        shapes = {
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
        offsets = np.cumsum([0, *(prod(shape) for shape in shapes.values())])
        return {name: (int(at), shape) for at, (name, shape) in zip(offsets, shapes.items(), strict=False)}

    @property
    def size(self) -> int:
        """Length of the packed vector."""
        offset, shape = self.fields["tile_lengths"]
        return offset + prod(shape)

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views of the fields of a packed numpy vector."""
        return {name: packed[at : at + prod(shape)].reshape(shape) for name, (at, shape) in self.fields.items()}
