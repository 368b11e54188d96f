"""How KV pools lie in memory: segments of pages, and rows in int8."""

from collections.abc import Sequence
from itertools import accumulate

from jaxserve.core.numeric import ceil_div

MAX_MOVED_PAGES = 128  # pages that one call moves within a pool; it reads them into temporary memory
GROWTH_SEGMENTS = 4  # each one more makes a start longer by a set of programs; each one less, steps of growth coarser


def segments_for(first: int, most: int) -> tuple[int, ...]:
    """Pages of each segment: the first, and equal ones up to the most pages that a pool may have."""
    more = most - first
    ends = [first + more * number // GROWTH_SEGMENTS for number in range(1, GROWTH_SEGMENTS + 1)]
    return tuple(end - start for start, end in zip((0, first, *ends), (first, *ends), strict=False) if end > start)


def segments_covering(sizes: Sequence[int], pages: int) -> int:
    """How many of the segments hold so many pages; all of them at most."""
    return next((count for count, end in enumerate(accumulate(sizes), 1) if end >= pages), len(sizes))


def pages_covered(sizes: Sequence[int], pages: int) -> int:
    """The pages of the segments that hold so many."""
    return sum(sizes[: segments_covering(sizes, pages)])


def pages_filling(sizes: Sequence[int], pages: int) -> int:
    """The most pages, up to so many, that leave no part of a segment unused; in a part of the first one, so many."""
    return max((end for end in accumulate(sizes) if end <= pages), default=pages)


SCALE_BYTES = 4
COPIED_BYTES = 16  # a GPU's bulk copy engine takes multiples of this


def int8_row_bytes(head_dim: int, platform: str) -> int:
    """Return the bytes of one int8 row: codes and their scale, padded except on "cpu"."""
    size = head_dim + SCALE_BYTES
    return size if platform == "cpu" else ceil_div(size, COPIED_BYTES) * COPIED_BYTES
