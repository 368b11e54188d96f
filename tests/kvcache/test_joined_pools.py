"""Pools that are joined and parted: no page is lost, handed out twice or taken for another one."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.kvcache import PagePool, Round, moves_to_sides
from tests.kvcache.test_pages import ACTIONS, PagePoolMachine
from tests.support.internals import cached_pages, unused_pages

SMALLEST, LARGEST = 3, 16  # pages of a pool that has not been joined


def cache(pool: PagePool, names: dict[int, bytes]) -> None:
    """Let pages of an unused pool be cached, the first of them to be evicted first."""
    pages = pool.allocate(max(names))
    for page, name in names.items():
        pool.register(page, name)
        pool.release([page])
    pool.release([page for page in pages if page not in names])


def joined(*pools: PagePool) -> PagePool:
    size = sum(pool.num_pages for pool in pools)
    return PagePool.joined(pools, min_pages=2, max_pages=size)


def test_page_of_a_member_becomes_a_page_of_the_joined_pool_with_its_references() -> None:
    a, b = PagePool(6), PagePool(6)
    a.allocate(2)
    b.retain(b.allocate(1))
    whole = joined(a, b)
    assert [whole.references(page) for page in range(12)] == [0, 0, 1, 2, 1, 0, 0, 0, 0, 0, 0, 0]
    assert (whole.used, whole.available) == (3, 8)
    assert whole.allocate(3) == [1, 5, 6], "the null page of the second member is free"


def test_joined_pool_evicts_the_oldest_page_of_each_member_in_turn() -> None:
    a, b = PagePool(6), PagePool(6)
    cache(a, {3: b"a3", 1: b"a1", 2: b"a2"})
    cache(b, {2: b"b2"})
    assert list(cached_pages(joined(a, b))) == [6, 5, 2, 4]


def test_of_two_pages_with_the_same_hash_the_one_in_use_keeps_it() -> None:
    a, b = PagePool(4), PagePool(4)
    cache(a, {1: b"same"})
    b.register(b.allocate(1)[0], b"same")
    whole = joined(a, b)
    assert whole.lookup([b"same"]) == [3]
    assert (whole.references(3), whole.available) == (1, 6)
    assert 2 in unused_pages(whole), "the other one is free"


def test_page_in_use_whose_hash_another_one_has_is_free_after_its_release() -> None:
    a, b = PagePool(4), PagePool(4)
    for pool in (a, b):
        pool.register(pool.allocate(1)[0], b"same")
    whole = joined(a, b)
    assert whole.lookup([b"same"]) == [2]
    whole.release([3])
    assert 3 in unused_pages(whole)
    whole.release([2])
    assert whole.lookup([b"same"]) == [2]


def test_of_two_cached_pages_with_the_same_hash_the_one_to_be_evicted_last_keeps_it() -> None:
    a, b = PagePool(4), PagePool(4)
    cache(a, {1: b"same", 2: b"other"})
    cache(b, {2: b"b2", 1: b"same"})
    whole = joined(a, b)
    assert whole.lookup([b"same"]) == [3]
    assert 2 in unused_pages(whole)


def test_parting_a_joined_pool_returns_its_members() -> None:
    members = [PagePool(6, max_pages=8) for _ in range(3)]
    cache(members[0], {3: b"a3", 1: b"a1"})
    cache(members[1], {2: b"b2", 4: b"b4"})
    held = [member.allocate(2) for member in members]
    whole = PagePool.joined(members, min_pages=6, max_pages=24)
    parts = whole.parted(3, min_pages=2, max_pages=8)
    for part, member, pages in zip(parts, members, held, strict=True):
        assert list(cached_pages(part)) == list(cached_pages(member))
        assert sorted(unused_pages(part)) == sorted(unused_pages(member))
        assert [part.references(page) for page in range(6)] == [member.references(page) for page in range(6)]
        part.release(pages)
        part.grow(2)
        assert part.shrink(5) is not None


def test_page_that_becomes_a_null_page_cannot_be_in_use() -> None:
    pool = PagePool(8)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="null page"):
        pool.parted(2, min_pages=2, max_pages=4)


def test_cached_page_that_becomes_a_null_page_is_forgotten() -> None:
    pool = PagePool(8)
    cache(pool, {1: b"one", 2: b"two"})
    first, second = pool.parted(2, min_pages=2, max_pages=4)
    assert (first.lookup([b"two"]), second.lookup([b"one"])) == ([1], [])
    assert (first.available, second.available) == (3, 3)


# -- moves before a pool is parted


def rounds_of(
    pool: PagePool, holders: Mapping[int, Iterable[int]], sides: int, pages_per_side: int
) -> tuple[Round, ...]:
    return moves_to_sides(pool, {page: frozenset(of_page) for page, of_page in holders.items()}, sides, pages_per_side)


def full_pool(num_pages: int, free: set[int]) -> PagePool:
    pool = PagePool(num_pages)
    pool.allocate(num_pages - 1)
    pool.release(sorted(free))
    return pool


def test_pages_that_lie_on_their_side_do_not_move() -> None:
    assert rounds_of(full_pool(8, {1, 6, 7}), {2: [0], 3: [1], 4: [0], 5: [1]}, 2, 4) == ()


def test_two_full_sides_exchange_pages_through_the_null_page_to_be() -> None:
    pool = full_pool(6, {1})
    rounds = rounds_of(pool, {2: [1], 3: [0], 4: [0], 5: [1]}, 2, 3)
    assert [[(move.source, move.target) for move in moves] for moves in rounds] == [[(2, 1)], [(3, 2)], [(1, 3)]]


def test_page_of_two_sides_is_copied_once_to_the_side_that_lacks_it() -> None:
    rounds = rounds_of(full_pool(8, {1, 5, 6, 7}), {2: [0, 1], 3: [1], 4: [0]}, 2, 4)
    assert [[(move.source, move.target, set(move.sides)) for move in moves] for moves in rounds] == [[(2, 5, {1})]]


def test_moves_take_free_pages_before_cached_ones_and_the_oldest_of_these_first() -> None:
    pool = PagePool(12)
    pages = pool.allocate(11)
    for page in (4, 6, 8):
        pool.register(page, bytes([page]))
    pool.release([8]), pool.release([4]), pool.release([6]), pool.release([10])
    holders = {page: [page % 2] for page in pages if page not in (4, 6, 8, 10)} | {3: [0], 5: [0]}
    (moves,) = rounds_of(pool, {page: side for page, side in holders.items() if page not in (1, 2)}, 2, 6)
    assert [(move.source, move.target) for move in moves] == [(3, 10), (5, 8)]


class Pools:
    """Pools that resize, join and part, each with its holders and the contents of its device."""

    def __init__(self) -> None:
        self.machines = [self.machine(PagePool(8, min_pages=SMALLEST, max_pages=LARGEST)) for _ in range(4)]
        self.members = [1] * 4  # of each pool
        self.writes = 0

    @staticmethod
    def machine(pool: PagePool) -> PagePoolMachine:
        machine = PagePoolMachine(LARGEST)
        machine.pool = pool
        return machine

    def act(self, action, number: int, which: int) -> None:
        machine = self.machines[which % len(self.machines)]
        machine.writes = self.writes  # contents and names differ in all pools
        action(machine, number)
        self.writes = machine.writes

    def join(self, number: int, which: int) -> None:
        """Join pools of one degree, after making them equally large."""
        degree = self.members[which % len(self.members)]
        chosen = [i for i, members in enumerate(self.members) if members == degree][: 2 + number % 3]
        machines = [self.machines[i] for i in chosen]
        size = max(machine.pool.num_pages for machine in machines)
        for machine in machines:
            machine.grow(size - machine.pool.num_pages)
        if len(machines) < 2:
            return
        n = len(machines)
        smallest, largest = (sum(getattr(m.pool, name) for m in machines) for name in ("min_pages", "max_pages"))
        whole = self.machine(PagePool.joined([m.pool for m in machines], min_pages=smallest, max_pages=largest))
        for i, machine in enumerate(machines):
            whole.device |= {n * page + i: contents for page, contents in machine.device.items()}
            whole.holders += [[n * page + i for page in holder] for holder in machine.holders]
            whole.wanted += machine.wanted
            whole.named |= machine.named
            whole.copied |= machine.copied
        self.replace(chosen, [whole], [degree * n])

    def part(self, number: int, which: int) -> None:
        """Part a pool, after moving each holder's pages to the side that `number` gives it if there is room."""
        which %= len(self.machines)
        machine, n = self.machines[which], self.members[which]
        if n == 1:
            return
        if machine.pool.num_pages % n:
            machine.grow(n - machine.pool.num_pages % n)
        pool, size = machine.pool, machine.pool.num_pages // n
        sides = [(number + i * number) % n for i in range(len(machine.holders))]
        holders: defaultdict[int, set[int]] = defaultdict(set)
        for side, holder in zip(sides, machine.holders, strict=True):
            for page in holder:
                holders[page].add(side)
        if max(Counter(side for of_page in holders.values() for side in of_page).values(), default=0) >= size:
            return
        machine.copied |= {machine.device[page] for page, of_page in holders.items() if len(of_page) > 1}
        for moves in rounds_of(pool, holders, n, size):
            self.carry_out(moves, machine, sides)
        machine.check()
        parts = []
        for side, part in enumerate(pool.parted(n, min_pages=SMALLEST, max_pages=LARGEST)):
            parts.append(self.machine(part))
            parts[-1].device = {page // n: kept for page, kept in machine.device.items() if page % n == side}
            mine = [i for i, of_holder in enumerate(sides) if of_holder == side]
            assert all(page % n == side for i in mine for page in machine.holders[i])
            parts[-1].holders = [[page // n for page in machine.holders[i]] for i in mine]
            parts[-1].wanted = [machine.wanted[i] for i in mine]
            parts[-1].named, parts[-1].copied = dict(machine.named), set(machine.copied)
            named = {contents: name for name, contents in machine.named.items()}
            for page in {page for holder in parts[-1].holders for page in holder}:
                if parts[-1].device[page] in named:  # a copy has no hash yet
                    part.register(page, named[parts[-1].device[page]])
        self.replace([which], parts, [1] * n)

    @staticmethod
    def carry_out(moves, machine: PagePoolMachine, sides: list[int]) -> None:
        in_use = {page for holder in machine.holders for page in holder}
        assert not in_use & {move.target for move in moves}
        assert len({move.source for move in moves}) == len({move.target for move in moves}) == len(moves)
        before, references = dict(machine.device), Counter()
        machine.device |= {move.target: before[move.source] for move in moves}
        targets = {(move.source, side): move.target for move in moves for side in move.sides}
        for i, holder in enumerate(machine.holders):
            new = [targets.get((page, sides[i]), page) for page in holder]
            references.update((a, b) for a, b in zip(holder, new, strict=True) if a != b)
            machine.holders[i] = new
        machine.pool.relocate((source, target, count) for (source, target), count in references.items())

    def replace(self, gone: list[int], new: list[PagePoolMachine], members: list[int]) -> None:
        for i in sorted(gone, reverse=True):
            del self.machines[i], self.members[i]
        self.machines += new
        self.members += members


MANY_ACTIONS = (*ACTIONS, PagePoolMachine.allocate, Pools.join, Pools.part, Pools.part)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(MANY_ACTIONS), st.integers(0, 12), st.integers(0, 3)), min_size=40, max_size=100)
)
def test_pages_keep_their_contents_for_random_histories_of_several_pools(history: list) -> None:
    pools = Pools()
    for action, number, which in history:
        if action in ACTIONS:
            pools.act(action, number, which)
        else:
            action(pools, number, which)
        for machine in pools.machines:
            machine.check()
    for machine in pools.machines:
        while machine.holders:
            machine.release(0)
        pool = machine.pool
        assert sorted(pool.allocate(pool.available)) == list(range(1, pool.num_pages))
