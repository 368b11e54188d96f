"""PagePool against a model of it: random histories never leak, double-hand-out or mislabel a page."""

from hypothesis import given, strategies as st

from jaxserve.kvcache import NULL_PAGE, PagePool, page_hashes


def test_pages_come_back() -> None:
    pool = PagePool(9)
    pages = pool.allocate(8)
    assert pool.available == 0
    assert NULL_PAGE not in pages
    assert len(set(pages)) == 8
    pool.release(pages)
    assert (pool.available, pool.used) == (8, 0)


def test_a_shared_page_stays_until_its_last_holder_leaves() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.retain([page])
    pool.release([page])
    assert pool.used == 1
    pool.release([page])
    assert pool.used == 0


def test_a_released_prefix_is_found_again_until_its_page_is_needed() -> None:
    pool = PagePool(4)
    hashes = page_hashes(list(range(32)), 16, "salt")
    pages = pool.allocate(2)
    for page, digest in zip(pages, hashes, strict=True):
        pool.register(page, digest)
    pool.release(pages)
    assert pool.lookup(hashes) == pages
    pool.allocate(2)  # one free page, then the tail of the cached prefix
    assert pool.lookup(hashes) == pages[:1]


def test_hashes_depend_on_everything_before_and_on_the_salt() -> None:
    a = page_hashes([1, 2, 3, 4], 2, "salt")
    assert page_hashes([9, 2, 3, 4], 2, "salt")[1] != a[1]
    assert page_hashes([1, 2, 3, 4], 2, "other")[0] != a[0]
    assert page_hashes([1, 2, 3, 4, 5], 2, "salt") == a
    assert page_hashes([1, 2, 3, 4, 5, 6], 2, "salt", a) == page_hashes([1, 2, 3, 4, 5, 6], 2, "salt")


def test_without_caching_nothing_is_found() -> None:
    pool = PagePool(4, caching=False)
    (page,) = pool.allocate(1)
    pool.register(page, b"x")
    assert pool.lookup([b"x"]) == []


@given(st.lists(st.tuples(st.sampled_from("arsf"), st.integers(0, 6)), max_size=120))
def test_random_histories_keep_the_books(history: list[tuple[str, int]]) -> None:
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
