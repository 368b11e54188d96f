"""Pages of pools that take memory in segments."""

from hypothesis import given, strategies as st

from jaxserve.core.kv_layout import GROWTH_SEGMENTS, pages_covered, pages_filling, segments_covering, segments_for

pages = st.integers(1, 10_000)


@given(pages, pages)
def test_growth_segments_are_equal_and_add_up_to_the_maximum(first: int, more: int) -> None:
    sizes = segments_for(first, first + more)
    assert (sizes[0], sum(sizes)) == (first, first + more)
    assert len(sizes) == 1 + min(more, GROWTH_SEGMENTS)
    assert max(sizes[1:]) - min(sizes[1:]) <= 1


def test_pool_that_cannot_grow_has_one_segment() -> None:
    assert segments_for(7, 7) == (7,)


@given(pages, pages, st.data())
def test_covered_segments_are_the_fewest_that_hold_the_pages(first: int, more: int, data: st.DataObject) -> None:
    sizes = segments_for(first, first + more)
    wanted = data.draw(st.integers(1, first + more))
    count = segments_covering(sizes, wanted)
    assert sum(sizes[: count - 1]) < wanted <= sum(sizes[:count]) == pages_covered(sizes, wanted)
    assert (
        pages_covered(sizes, pages_filling(sizes, wanted))
        == max(pages_filling(sizes, wanted), first)
        <= max(wanted, first)
    )
    assert (
        pages_filling(sizes, wanted) == wanted
        if wanted < first
        else pages_covered(sizes, wanted + 1) > wanted or wanted == sum(sizes)
    )
