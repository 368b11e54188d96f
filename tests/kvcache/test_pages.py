"""PagePool against a model of it: random histories never leak, hand out twice or mislabel a page."""

import pytest
from hypothesis import given, strategies as st

from jaxserve.kvcache import NULL_PAGE, PagePool, PagesInUse, PageTable, page_hashes


def test_released_pages_are_free_again() -> None:
    pool = PagePool(9)
    pages = pool.allocate(8)
    assert pool.available == 0
    assert NULL_PAGE not in pages
    assert len(set(pages)) == 8
    pool.release(pages)
    assert (pool.available, pool.used) == (8, 0)


def test_shared_page_is_freed_with_its_last_holder() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.retain([page])
    pool.release([page])
    assert pool.used == 1
    pool.release([page])
    assert pool.used == 0


def test_released_prefix_is_found_until_its_page_is_evicted() -> None:
    pool = PagePool(4)
    hashes = page_hashes(list(range(32)), 16, "salt")
    pages = pool.allocate(2)
    for page, digest in zip(pages, hashes, strict=True):
        pool.register(page, digest)
    pool.release(pages)
    assert pool.lookup(hashes) == pages
    pool.allocate(2)  # one free page, then the tail of the cached prefix
    assert pool.lookup(hashes) == pages[:1]


def test_page_hashes_depend_on_all_previous_tokens_and_the_salt() -> None:
    a = page_hashes([1, 2, 3, 4], 2, "salt")
    assert page_hashes([9, 2, 3, 4], 2, "salt")[1] != a[1]
    assert page_hashes([1, 2, 3, 4], 2, "other")[0] != a[0]
    assert page_hashes([1, 2, 3, 4, 5], 2, "salt") == a
    assert page_hashes([1, 2, 3, 4, 5, 6], 2, "salt", a) == page_hashes([1, 2, 3, 4, 5, 6], 2, "salt")


def test_pool_without_caching_finds_no_page() -> None:
    pool = PagePool(4, caching=False)
    (page,) = pool.allocate(1)
    pool.register(page, b"x")
    assert pool.lookup([b"x"]) == []


@given(st.lists(st.tuples(st.sampled_from("arsf"), st.integers(0, 6)), max_size=120))
def test_pool_accounting_holds_for_random_histories(history: list[tuple[str, int]]) -> None:
    pool = PagePool(12)
    holders: list[list[int]] = []
    contents: dict[bytes, int] = {}
    for step, (action, number) in enumerate(history):
        if action == "a" and number <= pool.available:
            pages = pool.allocate(number)
            held = {page for holder in holders for page in holder}
            assert not held & set(pages), "a page in use was handed out"
            contents = {digest: page for digest, page in contents.items() if page not in pages}
            holders.append(pages)
        elif action == "r" and holders:
            pool.release(holders.pop(number % len(holders)))
        elif action == "s" and holders:
            pages = list(holders[number % len(holders)])
            pool.retain(pages)
            holders.append(pages)
        elif action == "f" and holders and holders[number % len(holders)]:
            page, digest = holders[number % len(holders)][0], str(step).encode()
            if page not in contents.values():
                pool.register(page, digest)
                contents[digest] = page
        assert pool.used == len({page for holder in holders for page in holder})
        for digest, page in contents.items():
            assert pool.lookup([digest]) == [page]
    for holder in holders:
        pool.release(holder)
    assert pool.used == 0


def test_grow_adds_free_pages_up_to_the_maximum() -> None:
    pool = PagePool(4, max_pages=6)
    held = pool.allocate(3)
    pool.grow(2)
    assert (pool.num_pages, pool.available) == (6, 2)
    assert pool.allocate(2) == [4, 5]
    assert held == [1, 2, 3]
    with pytest.raises(ValueError, match="6 pages cannot grow by 1: at most 6 fit"):
        pool.grow(1)


def test_allocate_returns_the_lowest_free_pages_first() -> None:
    pool = PagePool(9)
    pages = pool.allocate(6)
    pool.release([5, 2, 4])
    assert pages == [1, 2, 3, 4, 5, 6]
    assert pool.allocate(4) == [2, 4, 5, 7]


def test_shrink_of_a_free_tail_moves_no_page() -> None:
    pool = PagePool(9)
    pool.allocate(3)
    assert pool.shrink(5) == {}
    assert (pool.num_pages, pool.available, pool.used) == (4, 0, 3)


def test_shrink_moves_live_pages_with_their_references_and_hashes() -> None:
    pool = PagePool(9)
    pages = pool.allocate(8)
    pool.register(8, b"eight")
    pool.retain([8])
    pool.release([1, 3, 4])
    moves = pool.shrink(2)
    assert moves == {7: 1, 8: 3}
    assert pool.references(3) == 2
    assert pool.lookup([b"eight"]) == [3]
    pool.release([3, 3])
    assert pool.lookup([b"eight"]) == [3], "released, it stays in the cache"
    pool.release([moves.get(page, page) for page in pages if page not in (1, 3, 4, 8)])
    assert pool.used == 0


def test_shrink_with_a_failing_device_move_changes_nothing() -> None:
    pool = PagePool(9)
    pages = pool.allocate(8)
    pool.register(8, b"eight")
    pool.release(pages[:4])

    def fail(moves: object) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        pool.shrink(3, fail)
    assert (pool.num_pages, pool.available, pool.lookup([b"eight"])) == (9, 4, [8])
    pool.release(pages[4:])
    assert sorted(pool.allocate(8)) == pages


def test_shrink_keeps_the_most_recently_released_cached_pages() -> None:
    pool = PagePool(9)
    pages = pool.allocate(8)
    for page in pages:
        pool.register(page, bytes([page]))
    for page in (1, 5, 2, 3, 8, 7):  # 4 and 6 stay in use
        pool.release([page])
    assert pool.shrink(4) == {6: 1, 7: 2, 8: 3}
    assert [pool.lookup([bytes([page])]) for page in range(1, 9)] == [[], [], [], [4], [], [1], [2], [3]]
    pool.allocate(1)
    assert pool.lookup([bytes([8])]) == [], "8 was released before 7, wherever they are now"
    assert pool.lookup([bytes([7])]) == [2]


class PagePoolMachine:
    """A pool with holders of pages and the contents of the device, followed through random histories."""

    def __init__(self, most: int):
        self.pool = PagePool(most // 2, min_pages=3, max_pages=most)
        self.holders: list[list[int]] = []
        self.device: dict[int, int] = {}  # page -> what was last written there
        self.wanted: list[list[int]] = []  # by holder: what its pages must hold
        self.named: dict[bytes, int] = {}  # hash -> contents
        self.copied: set[int] = set()  # contents that several pages may hold, of which only one has the name
        self.writes = 0

    def allocate(self, number: int) -> None:
        pages = self.pool.allocate(min(number, self.pool.available))
        assert not {page for holder in self.holders for page in holder} & set(pages), "a page in use was handed out"
        for page in pages:
            self.writes += 1
            self.device[page] = self.writes
        self.holders.append(pages)
        self.wanted.append([self.device[page] for page in pages])

    def release(self, number: int) -> None:
        if self.holders:
            self.pool.release(self.holders.pop(number % len(self.holders)))
            self.wanted.pop(number % len(self.wanted))

    def share(self, number: int) -> None:
        if self.holders:
            self.holders.append(list(self.holders[number % len(self.holders)]))
            self.wanted.append(list(self.wanted[number % len(self.wanted)]))
            self.pool.retain(self.holders[-1])

    def name(self, number: int) -> None:
        if self.holders and self.holders[number % len(self.holders)]:
            page = self.holders[number % len(self.holders)][0]
            if all(self.device[page] != contents for contents in self.named.values()):
                self.named[str(self.writes).encode()] = self.device[page]
                self.pool.register(page, str(self.writes).encode())
            self.writes += 1

    def grow(self, number: int) -> None:
        self.pool.grow(min(number, self.pool.max_pages - self.pool.num_pages))

    def shrink(self, number: int) -> None:
        count = min(number, self.pool.available, self.pool.num_pages - self.pool.min_pages)
        size = self.pool.num_pages - count
        moves = self.pool.shrink(count)
        assert set(moves) <= set(range(size, size + count))
        assert set(moves.values()) <= set(range(1, size))
        assert len(set(moves.values())) == len(moves)
        before = dict(self.device)
        self.device |= {new: before[old] for old, new in moves.items()}
        for page in range(size, size + count):
            self.device.pop(page, None)  # its memory is gone
        self.holders = [[moves.get(page, page) for page in holder] for holder in self.holders]

    def check(self) -> None:
        pool, held = self.pool, {page for holder in self.holders for page in holder}
        assert pool.used == len(held)
        assert pool.used + pool.available == pool.num_pages - 1
        assert [[self.device[page] for page in holder] for holder in self.holders] == self.wanted
        for page in range(pool.num_pages):
            assert pool.references(page) == sum(holder.count(page) for holder in self.holders)
        for digest, contents in self.named.items():
            assert [self.device[page] for page in pool.lookup([digest])] in ([], [contents])
            if contents not in self.copied and any(contents in wanted for wanted in self.wanted):
                assert pool.lookup([digest]), "what is in use keeps its name"


ACTIONS = (
    PagePoolMachine.allocate,
    PagePoolMachine.release,
    PagePoolMachine.share,
    PagePoolMachine.name,
    PagePoolMachine.grow,
    PagePoolMachine.shrink,
)


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 8)), max_size=80))
def test_pages_keep_their_contents_for_random_histories_with_resizes(history: list) -> None:
    machine = PagePoolMachine(24)
    for action, number in history:
        action(machine, number)
        machine.check()
    while machine.holders:
        machine.release(0)
    pool = machine.pool
    assert sorted(pool.allocate(pool.available)) == list(range(1, pool.num_pages))


def test_shrink_below_used_pages_or_the_minimum_is_refused() -> None:
    pool = PagePool(9, min_pages=4)
    pages = pool.allocate(6)
    with pytest.raises(PagesInUse, match="9 pages cannot shrink by 3: only 2 are not in use"):
        pool.shrink(3)
    pool.release(pages)
    with pytest.raises(ValueError, match="9 pages cannot shrink by 6: at least 4 must remain") as refused:
        pool.shrink(6)
    assert not isinstance(refused.value, PagesInUse), "to wait for pages would not help"
    assert (pool.num_pages, pool.available) == (9, 8)
    assert pool.shrink(5) == {}


def test_page_table_rename_changes_all_rows() -> None:
    table = PageTable(3, 4)
    table.take_slot([1, 9, 3])
    table.take_slot([9, 2])
    table.replace_pages({9: 4, 200: 5})
    assert table.rows.tolist() == [[1, 4, 3, 0], [4, 2, 0, 0], [0, 0, 0, 0]]
    table.replace_pages({})
    assert table.rows.tolist() == [[1, 4, 3, 0], [4, 2, 0, 0], [0, 0, 0, 0]]
