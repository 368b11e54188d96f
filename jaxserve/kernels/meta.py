"""AttentionMeta: which pages each row of a step attends to."""

from typing import NamedTuple

from jax import Array


class AttentionMeta(NamedTuple):
    """Where the context of a step's tokens lies in the pool: B decode rows, then N prefill tiles (each may be 0).

    The page of position p of a row is `pages[p // S]`. Entries of the table beyond the row's context may hold any
    valid page id (0 by custom), and so may entries that a sliding window has left behind.
    """

    decode_pages: Array  # i32 [B, W]
    decode_lengths: Array  # i32 [B]: context in tokens, the row's own token included; 0 = padding row
    tile_pages: Array  # i32 [N, W]
    tile_starts: Array  # i32 [N]: position of the tile's first token
    tile_lengths: Array  # i32 [N]: valid tokens of the tile; 0 = padding tile
