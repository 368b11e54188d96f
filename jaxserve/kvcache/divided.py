"""DividedPool: the pages of instances that are becoming one, or of one that is becoming several."""

from collections.abc import Sequence
from typing import NoReturn

from jaxserve.kvcache.joined_ids import JoinedIds
from jaxserve.kvcache.pages import PagePool


class DividedPool(PagePool):
    """The pools of n sides under the ids that their pages have in the joined pool: page p of side i is n * p + i.

    All pages of a sequence are on one side. A new sequence gets the side with most available pages. The number of pages
    does not change meanwhile.
    """

    def __init__(self, sides: Sequence[PagePool]):
        """Take the sides' pools, which are equally large. They go on being used."""
        self.sides = tuple(sides)
        self._ids = JoinedIds.of_equal(len(sides))
        self.num_pages = sum(side.num_pages for side in sides)
        self.caching = sides[0].caching
        self.min_pages = self.max_pages = self.num_pages
        self.away = set()

    @property
    def capacity(self) -> int:
        return sum(side.capacity for side in self.sides)

    @property
    def available(self) -> int:
        return sum(side.available for side in self.sides)

    def available_beside(self, pages: Sequence[int]) -> int:
        return self.sides[self._side_for(pages)].available

    def may_take_from(self, pages: Sequence[int], other: Sequence[int]) -> bool:
        return not other or self._side_for(pages) == self._side_of(other[0])

    def references(self, page: int) -> int:
        return self.sides[self._side_of(page)].references(self._own(page))

    def allocate(self, count: int, beside: Sequence[int] = ()) -> list[int]:
        side = self._side_for(beside)
        return [self._joined(side, page) for page in self.sides[side].allocate(count)]

    def retain(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.sides[self._side_of(page)].retain([self._own(page)])

    def release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self.sides[self._side_of(page)].release([self._own(page)])

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest prefix that one side has cached."""
        found = [side.lookup(hashes) for side in self.sides]
        side = max(range(len(found)), key=lambda side: len(found[side]))
        return [self._joined(side, page) for page in found[side]]

    def register(self, page: int, digest: bytes) -> None:
        self.sides[self._side_of(page)].register(self._own(page), digest)

    def clear_cache(self) -> None:
        for side in self.sides:
            side.clear_cache()

    @property
    def unused(self) -> list[int]:
        return [self._joined(index, page) for index, side in enumerate(self.sides) for page in side.unused]

    def grow(self, count: int) -> NoReturn:
        raise ValueError("a pool does not grow while it is divided")

    def shrink(self, count: int, move: object = None) -> NoReturn:
        raise ValueError("a pool does not shrink while it is divided")

    def _side_for(self, pages: Sequence[int]) -> int:
        """Return the side of a sequence with these pages, or for a new one the side with most room."""
        if pages:
            return self._side_of(pages[0])
        return max(range(len(self.sides)), key=lambda side: self.sides[side].available)

    def _side_of(self, page: int) -> int:
        return page % len(self.sides)

    def _own(self, page: int) -> int:
        return self._ids.own(self._side_of(page), page)

    def _joined(self, side: int, page: int) -> int:
        return self._ids.joined(side, page)
