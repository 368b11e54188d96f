"""PagePool: which KV pages are free, shared or cached. A page id is valid in the pools of all layers alike."""

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

NULL_PAGE = 0  # padding rows write here; never handed out


class PagesInUse(ValueError):
    """More pages are to be taken away than are not in use now."""


class PagePool:
    """Reference-counted pages with a prefix cache.

    A page is *free* (holds nothing), *live* (reference count > 0) or *cached* (count 0, contents still named by a
    hash). `allocate` takes free pages first, then evicts the least recently released cached page.

    Pages are [0, num_pages), and their number changes at that end: `grow` adds free pages, `shrink` takes the tail away
    and says which contents have to move out of it. The lowest free page is handed out first, so that the tail is what
    is used last.
    """

    def __init__(self, num_pages: int, *, caching: bool = True, min_pages: int = 2, max_pages: int | None = None):
        """Numbers of pages include the null page; `least` and `most` are how few and how many there may ever be: as
        many as the longest sequence needs, and as many as the device's pools have room for (by default `num_pages`).
        """
        self.min_pages, self.max_pages = min_pages, num_pages if max_pages is None else max_pages
        assert 2 <= self.min_pages <= num_pages <= self.max_pages, (self.min_pages, num_pages, self.max_pages)
        self.num_pages = num_pages
        self.caching = caching
        self._fresh = NULL_PAGE + 1  # this page and those after it were never handed out: they are free, and on no list
        self._free: list[int] = []  # a heap
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * self._fresh
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def capacity(self) -> int:
        """Pages that sequences can hold."""
        return self.num_pages - 1

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out."""
        return self.num_pages - self._fresh + len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Pages held by sequences."""
        return self.capacity - self.available

    def references(self, page: int) -> int:
        """How many sequences hold the page."""
        return self._references[page] if page < self._fresh else 0

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages with one reference each. The caller has checked `available`. Mutates."""
        assert count <= self.available, (count, self.available)
        pages = []
        for _ in range(count):
            page = heapq.heappop(self._free) if self._free else self._take_fresh() or self._evict()
            self._references[page] = 1
            pages.append(page)
        return pages

    def _take_fresh(self) -> int | None:
        """The lowest page that was never handed out, if there is one. Mutates."""
        if self._fresh == self.num_pages:
            return None
        self._references.append(0)
        self._fresh += 1
        return self._fresh - 1

    def retain(self, pages: Sequence[int]) -> None:
        """Adds a reference to each page, reviving cached ones. Mutates."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Gives back one reference to each page. Mutates.

        Released from the tail, so that eviction shortens a cached prefix instead of beheading it.
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
        """The pages of the longest cached prefix; not retained."""
        pages = []
        for digest in hashes:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def register(self, page: int, digest: bytes) -> None:
        """Names the contents of a full live page. A page whose contents already have a page stays private. Mutates."""
        if self.caching and digest not in self._page_of:
            self._page_of[digest] = page
            self._hash_of[page] = digest

    def clear_cache(self) -> None:
        """Forgets all hashes: for contents that are no longer valid. Mutates."""
        self._free.extend(self._cached)
        heapq.heapify(self._free)
        self._cached.clear()
        self._hash_of.clear()
        self._page_of.clear()

    def grow(self, count: int) -> None:
        """Adds `count` free pages. Raises ValueError where the device's pools have no room. Mutates."""
        size = self.num_pages + count
        if count < 0 or size > self.max_pages:
            raise ValueError(f"{self.num_pages} pages cannot grow by {count}, there is room for {self.max_pages}")
        self.num_pages = size

    def shrink(self, count: int, move: Callable[[Mapping[int, int]], None] | None = None) -> dict[int, int]:
        """Takes the last `count` pages away; returns which pages take over from those of them that hold something.

        Cached pages go, the least recently released first, as far as what is left would not hold them all; every other
        page keeps its references, its hash and its turn. `move` copies the contents of each key to its value on the
        device; the caller rewrites whatever names the keys, before the next step. No value is a key.

        Raises `PagesInUse` where fewer pages are not in use, ValueError where fewer than the least would be left, and
        whatever `move` raises; then nothing has changed but that some cached pages are gone. Mutates.
        """
        size = self.num_pages - count
        if count < 0 or size < self.min_pages:
            raise ValueError(f"{self.num_pages} pages cannot shrink by {count}: at least {self.min_pages} must be left")
        if count > self.available:
            raise PagesInUse(f"{self.num_pages} pages cannot shrink by {count}: {self.available} are not in use")
        self._free.extend(range(self._fresh, self.num_pages))  # larger than all others: it stays a heap
        self._references.extend([0] * (self.num_pages - self._fresh))
        self._fresh = self.num_pages
        while len(self._free) < count:
            heapq.heappush(self._free, self._evict())
        tail = set(range(size, self.num_pages))
        moves = dict(zip(sorted(tail.difference(self._free)), sorted(set(self._free) - tail), strict=False))
        if move is not None:
            move(moves)
        self._free = sorted(set(self._free) - tail - set(moves.values()))  # sorted: a heap
        self._rename(moves)
        del self._references[size:]
        self.num_pages = self._fresh = size
        return moves

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


_DIGEST = 16  # bytes: a collision needs about 2**64 pages


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a page holding `tokens` behind the page named `parent` (or behind the salt)."""
    return hashlib.blake2b(parent + np.asarray(tokens, np.int32).tobytes(), digest_size=_DIGEST).digest()


def page_hashes(tokens: Sequence[int], page_size: int, salt: str, known: Sequence[bytes] = ()) -> list[bytes]:
    """Hashes of all full pages of `tokens`; `known` are the hashes of the first pages, not computed again."""
    hashes = list(known)
    parent = hashes[-1] if hashes else chain_hash(salt.encode(), ())
    for start in range(len(hashes) * page_size, len(tokens) - page_size + 1, page_size):
        parent = chain_hash(parent, tokens[start : start + page_size])
        hashes.append(parent)
    return hashes
