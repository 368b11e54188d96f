"""Drop plans: which instances share their layers, as in KunServe (figure 6)."""

from hypothesis import given, strategies as st

from jaxserve.control.drop_plan import drop_plan


def groups_of(*sizes: int) -> list[tuple[str, ...]]:
    names = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJ")
    return [tuple(next(names) for _ in range(size)) for size in sizes]


def plan(sizes: list[int], required: int, each: int = 10, max_size: int = 99):
    return drop_plan(groups_of(*sizes), required, lambda one, two: each, max_size)


def test_nothing_is_dropped_if_nothing_is_required() -> None:
    assert plan([1, 1, 1], 0).groups == groups_of(1, 1, 1)


def test_the_two_smallest_groups_are_joined_as_in_the_paper() -> None:
    assert plan([1, 2, 3], 5).groups == [("d", "e", "f"), ("a", "b", "c")]


def test_as_few_instances_as_possible_share_their_layers() -> None:
    found = plan([1, 1, 1, 1], 10)
    assert [len(group) for group in found.groups] == [1, 1, 2]
    assert found.suffices


def test_groups_are_joined_further_when_all_instances_are_in_one() -> None:
    assert [len(group) for group in plan([1, 1, 1, 1], 20).groups] == [2, 2]
    assert [len(group) for group in plan([1, 1, 1, 1], 21).groups] == [4]


def test_a_plan_that_does_not_suffice_says_so() -> None:
    found = plan([1, 1], 11)
    assert (found.freed, found.suffices) == (10, False)


def test_no_group_gets_too_large() -> None:
    assert [len(group) for group in plan([1, 1, 1, 1], 99, max_size=2).groups] == [2, 2]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=9), st.integers(0, 100), st.integers(1, 8))
def test_every_instance_is_in_one_group(sizes: list[int], required: int, max_size: int) -> None:
    groups = groups_of(*sizes)
    found = drop_plan(groups, required, lambda one, two: 7, max_size)
    before, after = (sorted(name for group in each for name in group) for each in (groups, found.groups))
    assert before == after
    assert found.freed == 7 * (len(groups) - len(found.groups))
    assert all(len(group) <= max_size or group in groups for group in found.groups)
