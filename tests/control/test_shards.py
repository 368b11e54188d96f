"""The sources of a block's shares: the same device, else another one, else the host."""

import pytest
from hypothesis import given, strategies as st

from jaxserve.control.shards import ShardSource, shard_sources, share


def table(target: str, *copies: str, cuts: int = 4) -> list[str]:
    """Return each source as "device first-last from source"."""
    found = shard_sources(target, copies, cuts)
    return [f"{each.device} {each.first}-{each.last} {each.source or 'host'}" for each in found]


def test_merge_takes_every_share_from_the_device_itself() -> None:
    assert table("ab", "a", "b") == ["a 0-2 a", "b 2-4 b"]
    assert table("acbd", "ab", "cd") == ["a 0-1 a", "c 1-2 c", "b 2-3 b", "d 3-4 d"]


def test_split_takes_only_what_is_missing_from_the_partner() -> None:
    assert table("a", "ab") == ["a 0-2 a", "a 2-4 b"]
    assert table("b", "ab") == ["b 0-2 a", "b 2-4 b"]
    assert table("ab", "acbd") == ["a 0-1 a", "a 1-2 c", "b 2-3 b", "b 3-4 d"]
    assert table("b", "abcd") == ["b 0-1 a", "b 1-2 b", "b 2-3 c", "b 3-4 d"]


def test_new_instance_takes_whole_shares_and_divides_the_load() -> None:
    assert table("c", "a", "b") == ["c 0-4 a"]
    assert table("cd", "a", "b") == ["c 0-2 a", "d 2-4 b"]
    assert table("cd", "ab") == ["c 0-2 a", "d 2-4 b"]


def test_arrays_that_are_not_split_come_whole_to_each_device() -> None:
    assert table("ac", "ab", cuts=1) == ["a 0-1 a", "c 0-1 a"]
    assert table("ac", cuts=1) == ["a 0-1 host", "c 0-1 host"]


def test_host_gives_what_no_device_holds() -> None:
    assert table("ab") == ["a 0-2 host", "b 2-4 host"]


holders = st.lists(st.integers(0, 5), unique=True, min_size=1, max_size=4).map(tuple)


@given(holders, st.lists(holders, max_size=4), st.sampled_from([1, 12]))
def test_every_cut_comes_once_from_a_holder_and_never_over_a_link_if_it_is_there(
    target: tuple[int, ...], copies: list[tuple[int, ...]], cuts: int
) -> None:
    found = shard_sources(target, copies, cuts)
    for index, device in enumerate(target):
        taken = [cut for each in found if each.device == device for cut in range(each.first, each.last)]
        assert taken == list(range(*share(index, len(target), cuts)))
    for each in found:
        for cut in range(each.first, each.last):
            having = {
                (copy, holder)
                for copy, devices in enumerate(copies)
                for place, holder in enumerate(devices)
                if cut in range(*share(place, len(devices), cuts))
            }
            assert (each.copy, each.source) in having or (each.source is None and not having)
            assert each.is_local or each.device not in {holder for _, holder in having}


def test_degree_that_does_not_divide_the_cuts_is_an_error() -> None:
    with pytest.raises(AssertionError, match="4 cuts cannot be shared by 3 devices"):
        shard_sources("abc", (), 4)


def test_sources_say_which_copy_they_are_in() -> None:
    assert shard_sources("a", ["bc", "a"], 2) == [ShardSource("a", 0, 2, "a", 1, (0, 2))]
    (part,) = shard_sources("b", ["a"], 1)
    assert part.is_whole
    assert [each.is_whole for each in shard_sources("ab", ["a", "b"], 2)] == [False, False]
