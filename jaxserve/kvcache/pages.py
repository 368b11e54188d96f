"""PagePool: which KV pages are free, shared or cached. A page id is valid in the pools of all layers alike."""

from collections import OrderedDict
from collections.abc import Sequence

NULL_PAGE = 0  # padding rows write here; never handed out


class PagePool:
    """Reference-counted pages with a prefix cache.

    A page is *free* (holds nothing), *live* (reference count > 0) or *cached* (count 0, contents still named by a
    hash). `allocate` takes free pages first, then evicts the least recently released cached page.
    """

    def __init__(self, num_pages: int, *, caching: bool = True):
        """`num_pages` includes the null page."""
        assert num_pages >= 2
        self.num_pages = num_pages
        self.caching = caching
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def capacity(self) -> int:
        """Pages that sequences can hold."""
        return self.num_pages - 1

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Pages held by sequences."""
        return self.capacity - self.available

    def references(self, page: int) -> int:
        """How many sequences hold the page."""
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages with one reference each. The caller has checked `available`. Mutates."""
        assert count <= self.available, (count, self.available)
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._references[page] = 1
            pages.append(page)
        return pages

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
                    self._free.append(page)

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
        self._cached.clear()
        self._hash_of.clear()
        self._page_of.clear()

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        return page
