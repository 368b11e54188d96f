"""The ids that the pages of pools have in the pool that they are joined to.

A pool that others were joined to has their lanes: page q is in lane q % lanes, in row q // lanes. A pool that was never
joined has one lane. Pools of equally many rows are joined lane by lane, so that a group of rows, one of each lane, has
consecutive ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class JoinedIds:
    """The ids of pages in a joined pool, whose parts have these numbers of lanes."""

    lanes: tuple[int, ...]

    @classmethod
    def of_equal(cls, parts: int) -> "JoinedIds":
        """Return the ids of parts with one lane each: page p of part i of n is page n p + i."""
        return cls((1,) * parts)

    @property
    def count(self) -> int:
        """The lanes of the joined pool."""
        return sum(self.lanes)

    @cached_property
    def first_lanes(self) -> Sequence[int]:
        """The first lane of each part."""
        return tuple(accumulate(self.lanes, initial=0))[:-1]

    def joined(self, part: int, page: int) -> int:
        """Return the id in the joined pool of a part's page."""
        own = self.lanes[part]
        return page // own * self.count + self.first_lanes[part] + page % own

    def own(self, part: int, page: int) -> int:
        """Return the id in a part of one of its pages: the reverse of `joined`."""
        row, lane = divmod(page, self.count)
        return row * self.lanes[part] + lane - self.first_lanes[part]
