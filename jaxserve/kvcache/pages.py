"""Bookkeeping of KV pages, which are free, shared or cached. A page id is valid in the pools of all layers."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest

from jaxserve.kvcache.joined_ids import JoinedIds

NULL_PAGE = 0  # padding rows write to it, and it is never handed out


class PagesInUse(ValueError):
    """Raised when more pages are to be removed than are free or cached."""


class PagePool:
    """Reference-counted pages with a prefix cache.

    A page is *free* (holds nothing), *live* (reference count > 0) or *cached* (count 0, contents known by a hash).
    `allocate` takes free pages first, then evicts the least recently released cached page.

    Page ids are [0, num_pages). `grow` adds free pages at the end. `shrink` takes pages away at the end, and returns
    which contents have to move. The lowest free page is handed out first, so that the last pages are rarely in use.
    """

    def __init__(self, num_pages: int, *, caching: bool = True, min_pages: int = 2, max_pages: int | None = None):
        """Make a pool of free pages. All numbers of pages include the null page.

        `caching`: released pages stay in the prefix cache. `min_pages`: the smallest number of pages, which the longest
        sequence needs. `max_pages`: the number of pages that the device's pools have room for (default: `num_pages`).
        """
        self.min_pages, self.max_pages = min_pages, num_pages if max_pages is None else max_pages
        assert 2 <= self.min_pages <= num_pages <= self.max_pages, (self.min_pages, num_pages, self.max_pages)
        self.num_pages = num_pages
        self.caching = caching
        # Pages from this one on were never handed out. They are free, and not in `_free`.
        self._fresh = NULL_PAGE + 1
        self._free: list[int] = []  # a heap
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * self._fresh
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self.away: set[int] = set()  # pages whose contents are not there yet; see `withhold`

    @property
    def capacity(self) -> int:
        """Number of pages that sequences can hold."""
        return self.num_pages - 1

    @property
    def available(self) -> int:
        """Number of pages that `allocate` can hand out."""
        return self.num_pages - self._fresh + len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Number of pages held by sequences."""
        return self.capacity - self.available

    def references(self, page: int) -> int:
        """Return how many sequences hold the page."""
        return self._references[page] if page < self._fresh else 0

    def available_beside(self, pages: Sequence[int]) -> int:
        """Return the number of pages that `allocate` can hand out to a sequence that holds `pages`."""
        return self.available

    def may_take_from(self, pages: Sequence[int], other: Sequence[int]) -> bool:
        """Return whether a sequence that holds `pages` can get those that another one gives back."""
        return not (self.away and other) or not self.away.issuperset(other)

    def allocate(self, count: int, beside: Sequence[int] = ()) -> list[int]:
        """Take `count` pages, with one reference each, for a sequence that holds the pages `beside`.

        At most `available_beside` are there.
        """
        assert count <= self.available, (count, self.available)
        pages = []
        for _ in range(count):
            page = heapq.heappop(self._free) if self._free else self._take_fresh() or self._evict()
            self._references[page] = 1
            pages.append(page)
        return pages

    def _take_fresh(self) -> int | None:
        """Take the lowest page that was never handed out, or return None if all have been."""
        if self._fresh == self.num_pages:
            return None
        self._references.append(0)
        self._fresh += 1
        return self._fresh - 1

    def retain(self, pages: Sequence[int]) -> None:
        """Add a reference to each page, reviving cached ones."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference to each page.

        The last page is released first, so that eviction shortens a cached prefix at its end.
        """
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    heapq.heappush(self._free, page)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest cached prefix whose contents are there. They are not retained."""
        pages = []
        for digest in hashes:
            page = self._page_of.get(digest)
            if page is None or page in self.away:
                break
            pages.append(page)
        return pages

    def register(self, page: int, digest: bytes) -> None:
        """Cache the contents of a full live page under a hash, unless another page is cached under it."""
        if self.caching and digest not in self._page_of:
            self._page_of[digest] = page
            self._hash_of[page] = digest

    def clear_cache(self) -> None:
        """Drop all hashes, because the contents of pages are no longer valid."""
        self._free.extend(self._cached)
        heapq.heapify(self._free)
        self._cached.clear()
        self._hash_of.clear()
        self._page_of.clear()

    # -- pages whose contents are on their way to other devices

    def withhold(self, pages: Iterable[int]) -> None:
        """Hold pages, free ones too, until their contents have come (`arrive`): none is handed out meanwhile.

        Sequences keep those that they have, and may give them back. Lookups do not find them.
        """
        pages = set(pages)
        self._list_fresh_below(max(pages, default=0) + 1)
        self._free = sorted(set(self._free) - pages)
        for page in pages:
            self._cached.pop(page, None)
            self._references[page] += 1
        self.away |= pages

    def arrive(self, pages: Iterable[int]) -> None:
        """End the hold on pages, whose contents are there now."""
        pages = sorted(self.away.intersection(pages))
        self.away.difference_update(pages)
        self.release(pages)

    def forget(self, pages: Iterable[int]) -> None:
        """Take pages out of the prefix cache that sequences or a hold have, because their contents are lost."""
        for page in pages:
            assert self._references[page] > 0, page
            digest = self._hash_of.pop(page, None)
            if digest is not None:
                del self._page_of[digest]

    def grow(self, count: int) -> None:
        """Add `count` free pages. Raise `ValueError` beyond `max_pages`."""
        size = self.num_pages + count
        if count < 0 or size > self.max_pages:
            raise ValueError(f"{self.num_pages} pages cannot grow by {count}: at most {self.max_pages} fit")
        self.num_pages = size

    def shrink(self, count: int, move: Callable[[Mapping[int, int]], None] | None = None) -> dict[int, int]:
        """Take the last `count` pages away, and return a mapping from each page that moves to its new page.

        If the remaining pages cannot hold all contents, cached pages are evicted, the least recently released first.
        Every other page keeps its references, its hash and its place in the order of eviction. `move` gets the mapping
        and copies the contents on the device. Before the next step, the caller replaces old page ids by new ones. No
        new page is also an old one.

        Raise `PagesInUse` if fewer than `count` pages are free or cached, `ValueError` if fewer than `min_pages` would
        remain, and whatever `move` raises. After an error, nothing has changed except that cached pages may be gone.
        """
        size = self.num_pages - count
        if count < 0 or size < self.min_pages:
            raise ValueError(f"{self.num_pages} pages cannot shrink by {count}: at least {self.min_pages} must remain")
        if count > self.available:
            raise PagesInUse(f"{self.num_pages} pages cannot shrink by {count}: only {self.available} are not in use")
        self._list_fresh()
        while len(self._free) < count:
            heapq.heappush(self._free, self._evict())
        tail = set(range(size, self.num_pages))
        moves = dict(zip(sorted(tail.difference(self._free)), sorted(set(self._free) - tail), strict=False))
        if move is not None:
            move(moves)
        self._free = sorted(set(self._free) - tail - set(moves.values()))  # a sorted list is a heap
        self._rename(moves)
        del self._references[size:]
        self.num_pages = self._fresh = size
        return moves

    def relocate(self, moves: Iterable[tuple[int, int, int]]) -> None:
        """Move references from live pages to unused ones: (source, target, number of references) each.

        The caller has copied the contents. A target that was cached loses its hash. The hash of a source stays as long
        as references stay, and goes along with the last one. The source is then free.
        """
        moves = list(moves)
        self._list_fresh()
        free = set(self._free).difference(target for _, target, _ in moves)
        for source, target, count in moves:
            assert 0 < count <= self._references[source], (source, count)
            assert self._references[target] == 0, f"page {target} is in use"
            if target in self._cached:
                del self._cached[target], self._page_of[self._hash_of.pop(target)]
            self._references[source] -= count
            self._references[target] = count
            if self._references[source] == 0:
                free.add(source)
                if source in self._hash_of:
                    digest = self._hash_of[target] = self._hash_of.pop(source)
                    self._page_of[digest] = target
        self._free = sorted(free)

    @property
    def unused(self) -> list[int]:
        """The pages that no sequence holds, in the order in which `allocate` takes them."""
        return [*sorted(self._free), *range(self._fresh, self.num_pages), *self._cached]

    @property
    def occupied(self) -> list[int]:
        """The pages with contents to keep: those that sequences hold, and cached ones."""
        return [page for page in range(1, self._fresh) if self._references[page] or page in self._cached]

    # -- pools that become one, and one that becomes several

    @classmethod
    def joined(
        cls, pools: Sequence["PagePool"], *, min_pages: int, max_pages: int, lanes: Sequence[int] | None = None
    ) -> "PagePool":
        """Return one pool with the pages of several, which stay as they are, under the ids of `JoinedIds`.

        `lanes` are those of each pool (default: one each). Pools with fewer rows than others get free ones. Pages keep
        their references and hashes. Of pages with the same hash one keeps it: one in use, or else the one to be evicted
        last. The order of eviction takes a page of each pool in turn. The null pages of all pools but the first are
        free.
        """
        ids, first = JoinedIds(tuple(lanes or (1,) * len(pools))), pools[0]
        rows = max(pool.num_pages // own for pool, own in zip(pools, ids.lanes, strict=True))
        assert all(pool.num_pages % own == 0 for pool, own in zip(pools, ids.lanes, strict=True))
        whole = cls(ids.count * rows, caching=first.caching, min_pages=min_pages, max_pages=max_pages)
        whole._fresh = max(ids.joined(part, pool._fresh - 1) + 1 for part, pool in enumerate(pools))
        whole._references = [0] * whole._fresh
        hash_of: dict[int, bytes] = {}
        for part, pool in enumerate(pools):
            for lane in range(min(ids.lanes[part], pool._fresh)):
                references = pool._references[lane :: ids.lanes[part]]
                begin = ids.first_lanes[part] + lane
                end = begin + (len(references) - 1) * ids.count + 1
                whole._references[begin : end : ids.count] = references
            hash_of.update((ids.joined(part, page), digest) for page, digest in pool._hash_of.items())
        turns = zip_longest(*(pool._cached for pool in pools))
        cached = [ids.joined(part, page) for turn in turns for part, page in enumerate(turn) if page is not None]
        live = [page for page in hash_of if whole._references[page]]
        for page in (*live, *reversed(cached)):
            whole.register(page, hash_of[page])  # unless a page before it has the same hash
        whole._set_unused(cached)
        return whole

    def parted(self, n: int, *, min_pages: int, max_pages: int) -> tuple["PagePool", ...]:
        """Return n pools of the same size with the pages of this one, which stays as it is. The reverse of `joined`.

        Page q is page q // n of pool q % n. Pages 1 to n - 1 become null pages, so that no sequence may hold them.
        """
        assert self.num_pages % n == 0, (self.num_pages, n)
        assert not any(self.references(page) for page in range(n)), "a null page cannot be in use"
        parts = []
        for side in range(n):
            part = PagePool(self.num_pages // n, caching=self.caching, min_pages=min_pages, max_pages=max_pages)
            part._references = self._references[side::n] or [0]
            part._fresh = len(part._references)
            for page, digest in self._hash_of.items():
                if page % n == side and page >= n:
                    part.register(page // n, digest)
            part._set_unused([page // n for page in self._cached if page % n == side])
            parts.append(part)
        return tuple(parts)

    def _set_unused(self, cached: Iterable[int]) -> None:
        """Set which pages are cached and free: those without references, cached if they have a hash."""
        self._cached = OrderedDict((page, None) for page in cached if page in self._hash_of)
        handed_out = range(NULL_PAGE + 1, self._fresh)
        self._free = [page for page in handed_out if not self._references[page] and page not in self._cached]

    def _list_fresh(self) -> None:
        """List the pages that were never handed out with the other free ones."""
        self._list_fresh_below(self.num_pages)

    def _list_fresh_below(self, end: int) -> None:
        self._free.extend(range(self._fresh, end))  # still a heap: these ids are the largest
        self._references.extend([0] * (end - self._fresh))
        self._fresh = max(self._fresh, end)

    def _rename(self, moves: dict[int, int]) -> None:
        for old, new in moves.items():
            self._references[new] = self._references[old]
            if old in self._hash_of:
                digest = self._hash_of[new] = self._hash_of.pop(old)
                self._page_of[digest] = new
        self._cached = OrderedDict((moves.get(page, page), None) for page in self._cached)

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        return page
