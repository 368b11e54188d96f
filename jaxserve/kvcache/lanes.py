"""Lanes: the arrays of a pool that holds the pages of several members under the ids of one pool.

A pool with n lanes has n arrays of equal size for each of its segments, and page p of member i is page n * p + i
(`JoinedIds`). Row p of lane i holds it, so that the members' own arrays become lanes without any copy. Kernels number
the pages of a pool array by array, and call this number the page's id (`kernels.pool_segments`). Here it is the page's
*place*. With one lane, places and page ids are the same.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from jaxserve.core.kv_layout import segments_covering
from jaxserve.core.numeric import ceil_div


@dataclass(frozen=True)
class Lanes:
    """The lanes of a pool, and the places of its pages. Segments that are added later change no place."""

    sizes: tuple[int, ...]  # pages of one lane in each segment that the pool may have
    count: int = 1

    def arrays(self, segments: int) -> tuple[int, ...]:
        """Return the pages of each array of the first segments, in the order of places."""
        return tuple(size for size in self.sizes[:segments] for _ in range(self.count))

    def segments_covering(self, pages: int) -> int:
        """Return how many segments are needed to hold pages 0 to `pages` - 1; all of them if they hold fewer."""
        return segments_covering(self.sizes, ceil_div(pages, self.count))

    def rows_below(self, pages: int, segments: int) -> list[int]:
        """Return how many rows of each array of the first segments are among pages 0 to `pages` - 1."""
        rows = [ceil_div(pages - lane, self.count) for lane in range(self.count)]
        starts = zip(self._starts[:segments].tolist(), self.sizes, strict=False)
        return [min(max(row - start, 0), size) for start, size in starts for row in rows]

    def places(self, pages: ArrayLike) -> np.ndarray:
        """Return the places of pages, which must be within the sizes."""
        ids: np.ndarray = np.asarray(pages, np.int64)
        if self.count == 1:
            return ids
        rows, lanes = np.divmod(ids, self.count)
        segments = np.searchsorted(self._ends, rows, side="right")
        starts = self._starts[segments]
        places: np.ndarray = self.count * starts + lanes * self._sizes[segments] + rows - starts
        return places

    @cached_property
    def _sizes(self) -> np.ndarray:
        return np.array(self.sizes, np.int64)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self._sizes)

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum(np.array([0, *self.sizes[:-1]], np.int64))


ONE_LANE = Lanes(())  # of any pool whose pages are at their own ids
