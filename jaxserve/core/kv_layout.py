"""Memory layout of KV pools: the segments they grow by, and the bytes of int8 rows."""

from collections.abc import Sequence
from itertools import accumulate

from jaxserve.core.numeric import ceil_div

MAX_MOVED_PAGES = 128  # pages that one call moves within a pool, through temporary memory
# Segments that a pool can grow by. More of them make growth finer, but each needs a set of programs at the start.
GROWTH_SEGMENTS = 4
SCALE_BYTES = 4
COPIED_BYTES = 16  # a GPU's bulk copy engine takes multiples of this


def segments_for(first: int, max_pages: int) -> tuple[int, ...]:
    """Return the pages of each segment: `first`, then equal segments up to `max_pages` in total."""
    growth = max_pages - first
    ends = [first + growth * index // GROWTH_SEGMENTS for index in range(1, GROWTH_SEGMENTS + 1)]
    return tuple(end - start for start, end in zip((0, first, *ends), (first, *ends), strict=False) if end > start)


def segments_covering(sizes: Sequence[int], pages: int) -> int:
    """Return how many segments are needed to hold `pages`; all of them if they hold fewer."""
    return next((count for count, end in enumerate(accumulate(sizes), 1) if end >= pages), len(sizes))


def pages_covered(sizes: Sequence[int], pages: int) -> int:
    """Return `pages` rounded up to whole segments; the pages of all segments if they hold fewer."""
    return sum(sizes[: segments_covering(sizes, pages)])


def pages_filling(sizes: Sequence[int], pages: int) -> int:
    """Return `pages` rounded down to whole segments; unchanged if they do not fill the first segment."""
    return max((end for end in accumulate(sizes) if end <= pages), default=pages)


def exchanged_pages(platform: str) -> int:
    """Return the pages of one layer that one call exchanges between devices when instances merge or split.

    The call needs temporary memory for twice as many. Each exchange of GPUs takes some 30 us before any byte moves.
    """
    return 64 if platform == "cpu" else 512


def int8_row_bytes(head_dim: int, platform: str) -> int:
    """Return the bytes of one row of an int8 pool: codes and their scale, padded on platforms other than "cpu"."""
    size = head_dim + SCALE_BYTES
    return size if platform == "cpu" else ceil_div(size, COPIED_BYTES) * COPIED_BYTES
