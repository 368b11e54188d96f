"""A divided pool hands out the pages of its sides under the ids that they have when the sides are joined."""

import pytest
from hypothesis import given, strategies as st

from jaxserve.kvcache import DividedPool, PagePool


def divided(sides: int = 2, pages: int = 9) -> DividedPool:
    return DividedPool([PagePool(pages) for _ in range(sides)])


def test_a_new_sequence_gets_pages_of_the_side_with_most_room() -> None:
    pool = divided()
    first = pool.allocate(3)
    assert {page % 2 for page in first} == {0}
    second = pool.allocate(2)
    assert {page % 2 for page in second} == {1}
    assert {page % 2 for page in pool.allocate(2, first)} == {0}, "further pages are on the sequence's own side"
    assert (pool.available_beside(first), pool.available_beside(second), pool.available) == (3, 6, 9)


def test_only_sequences_of_one_side_can_take_each_others_pages() -> None:
    pool = divided()
    first, second = pool.allocate(2), pool.allocate(2)
    assert pool.may_take_from(first, first)
    assert not pool.may_take_from(first, second)


def test_the_longest_prefix_that_one_side_has_is_found() -> None:
    pool = divided()
    first, second = pool.allocate(3), pool.allocate(3)
    for page, digest in zip(first[:2], (b"a", b"b"), strict=True):
        pool.register(page, digest)
    for page, digest in zip(second, (b"a", b"b", b"c"), strict=True):
        pool.register(page, digest)
    assert pool.lookup([b"a", b"b", b"c", b"d"]) == second
    assert pool.lookup([b"x"]) == []


@pytest.mark.parametrize("change", ["grow", "shrink"])
def test_a_divided_pool_keeps_its_size(change: str) -> None:
    with pytest.raises(ValueError, match="while it is divided"):
        getattr(divided(), change)(1)


@given(st.lists(st.tuples(st.sampled_from(["new", "more", "end", "share"]), st.integers(0, 5)), max_size=60))
def test_its_sides_join_to_a_pool_with_the_same_pages(history: list[tuple[str, int]]) -> None:
    pool, held = divided(3, 12), []
    for action, choice in history:
        own = held[choice % len(held)] if held else []
        if action == "new" and pool.available_beside([]) >= 1 + choice:
            held.append(pool.allocate(1 + choice))
        elif action == "more" and own and pool.available_beside(own):
            own += pool.allocate(1, own)
        elif action == "share" and own:
            pool.retain(own[:1])
            held.append(own[:1])
        elif action == "end" and own:
            held.remove(own)
            pool.release(own)
    for own in held:
        assert len({page % 3 for page in own}) == 1
    whole = PagePool.joined(pool.sides, min_pages=2, max_pages=36)
    pages = [page for own in held for page in own]
    assert [whole.references(page) for page in range(36)] == [pages.count(page) for page in range(36)]
    assert pool.used == len(set(pages))
