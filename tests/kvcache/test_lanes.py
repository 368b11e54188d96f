"""The places of pages in pools with several lanes."""

from itertools import accumulate

import numpy as np
from hypothesis import given, strategies as st

from jaxserve.kvcache import JoinedIds, Lanes, PageTable

counts = st.integers(1, 8)
sizes = st.lists(st.integers(1, 20), min_size=1, max_size=5).map(tuple)


@given(sizes, counts)
def test_page_of_a_member_is_its_own_row_of_the_members_lane(sizes: tuple[int, ...], count: int) -> None:
    lanes = Lanes(sizes, count)
    arrays = np.split(np.arange(count * sum(sizes)), list(accumulate(lanes.arrays(len(sizes))))[:-1])
    for member in range(count):
        places = np.concatenate(arrays[member::count])  # the member's own pool, as it was before
        pages = [JoinedIds.of_equal(count).joined(member, page) for page in range(sum(sizes))]
        np.testing.assert_array_equal(lanes.places(pages), places)


@given(sizes, counts)
def test_every_page_has_a_place_of_its_own_and_the_null_page_stays(sizes: tuple[int, ...], count: int) -> None:
    pages = np.arange(count * sum(sizes))
    places = Lanes(sizes, count).places(pages)
    assert sorted(places) == pages.tolist()
    assert places[0] == 0


@given(sizes, st.integers(1, 20), counts)
def test_another_segment_moves_no_page(sizes: tuple[int, ...], more: int, count: int) -> None:
    pages = np.arange(count * sum(sizes))
    np.testing.assert_array_equal(Lanes((*sizes, more), count).places(pages), Lanes(sizes, count).places(pages))


@given(sizes, counts, st.data())
def test_rows_below_a_page_are_those_of_the_pages_below_it(
    sizes: tuple[int, ...], count: int, data: st.DataObject
) -> None:
    lanes, pages = Lanes(sizes, count), data.draw(st.integers(0, count * sum(sizes)))
    segments = lanes.segments_covering(pages)
    ends = list(accumulate(lanes.arrays(segments)))
    places = lanes.places(np.arange(pages))
    assert lanes.rows_below(pages, segments) == np.histogram(places, [0, *ends])[0].tolist()
    assert places.size == 0 or places.max() < ends[-1]


@given(sizes, st.lists(st.integers(0, 10_000), max_size=5))
def test_places_of_one_lane_are_page_ids(sizes: tuple[int, ...], pages: list[int]) -> None:
    assert Lanes(sizes).places(pages).tolist() == pages
    assert Lanes(sizes).arrays(len(sizes)) == sizes


def test_page_table_holds_places() -> None:
    lanes = Lanes((4, 3), 2)
    table = PageTable(2, 4, lanes)
    pages = [2, 5, 9]
    slot = table.take_slot(pages)
    table.append(slot, 3, [12])
    assert table.rows[slot].tolist() == lanes.places([*pages, 12]).tolist() == [1, 6, 11, 10]
    table.replace_pages({9: 3, 12: 7})
    assert table.rows[slot].tolist() == lanes.places([2, 5, 3, 7]).tolist()
    table.give_slot(slot)
    assert not table.rows.any()
