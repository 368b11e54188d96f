"""AttentionMeta: the pages that each row of a step attends to."""

from typing import NamedTuple

from jax import Array


class AttentionMeta(NamedTuple):
    """The location of each row's context in the pool, for B decode rows and N prefill tiles (B or N may be 0).

    The page of position p of a row is `pages[p // S]`. Entries beyond the row's context, or before its sliding window,
    may hold any valid page id (0 by convention).
    """

    decode_pages: Array  # i32 [B, W]
    decode_lengths: Array  # i32 [B]: tokens of the context, the row's own token included; 0 = padding row
    tile_pages: Array  # i32 [N, W]
    tile_starts: Array  # i32 [N]: position of the tile's first token
    tile_lengths: Array  # i32 [N]: valid tokens of the tile; 0 = padding tile
