"""The split of an instance's requests into sides: every request finds its own pages on its side."""

import random
from collections import Counter
from collections.abc import Mapping
from itertools import count

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.core.request import Request, Sequence, SequenceStatus
from jaxserve.core.sampling import SamplingParams
from jaxserve.kvcache import PagePool
from jaxserve.scheduler.partition import Partition, SideLimits, partition

ROOMY = SideLimits(pages=20, slots=8, tokens=1000)


class Instance:
    """A pool, requests that hold its pages, and the contents of the device."""

    def __init__(self, num_pages: int):
        self.pool = PagePool(num_pages)
        self.requests: dict[str, list[Sequence]] = {}
        self.device: dict[int, int] = {}
        self.names = count()

    def add(self, pages: int, *, n: int = 1, tokens: int = 10, shared: list[int] | None = None) -> Sequence:
        """Add a request whose n running answers have `pages` pages each, the first of which are `shared`."""
        name = f"r{next(self.names)}"
        request = Request(name, (1,) * tokens, SamplingParams(max_tokens=1000, n=n), 0.0)
        self.requests[name] = [Sequence(request, index, 0, tokens + 1000) for index in range(n)]
        for sequence in self.requests[name]:
            held = list(shared or ())[:pages]
            self.pool.retain(held)
            sequence.pages = held + self.pool.allocate(pages - len(held))
            if sequence.pages:
                sequence.status = SequenceStatus.RUNNING
            self.device.update({page: len(self.device) for page in sequence.pages if page not in self.device})
        return self.requests[name][0]

    def split(self, sides: int, limits: SideLimits) -> tuple[Partition, tuple[PagePool, ...]]:
        """Split the requests, move their pages, and return the pools of the sides."""
        wanted = {s.id: [self.device[page] for page in s.pages] for of in self.requests.values() for s in of}
        result = partition(self.requests, self.pool, sides, limits)
        for name in (*result.recompute, *result.too_long):
            for sequence in self.requests[name]:
                self.pool.release(sequence.pages)
                sequence.pages = []
                wanted[sequence.id] = []
        result.carry_out(self.pool, self.requests, self.move)
        assert {s.id: [self.device[page] for page in s.pages] for of in self.requests.values() for s in of} == wanted
        assert {page % sides for page in range(sides) if self.pool.references(page)} == set()
        for name, side in result.sides.items():
            for sequence in self.requests[name]:
                assert all(page % sides == side and page < sides * limits.pages for page in sequence.pages)
        self.pool.shrink(self.pool.num_pages - sides * limits.pages, self.move)
        return result, self.pool.parted(sides, min_pages=2, max_pages=limits.pages)

    def move(self, moves: Mapping[int, int]) -> None:
        in_use = {page for of in self.requests.values() for s in of for page in s.pages}
        assert not in_use & set(moves.values())
        before = dict(self.device)
        self.device |= {target: before.get(source, -1) for source, target in moves.items()}


def test_sides_get_about_the_same_number_of_pages() -> None:
    instance = Instance(40)
    for pages in (9, 5, 4, 3, 3):
        instance.add(pages)
    result, pools = instance.split(2, ROOMY)
    assert [pool.used for pool in pools] == [12, 12]
    assert (result.recompute, result.too_long) == ((), ())


def test_requests_without_pages_go_where_fewer_sequences_are() -> None:
    instance = Instance(40)
    instance.add(2, n=3), instance.add(2)
    for _ in range(4):
        instance.add(0)
    result, _ = instance.split(2, ROOMY)
    counts = Counter(dict.fromkeys(range(2), 0))
    for name, side in result.sides.items():
        counts[side] += len(instance.requests[name])
    assert counts == {0: 4, 1: 4}


def test_answers_of_one_request_stay_together() -> None:
    instance = Instance(40)
    for _ in range(3):
        instance.add(4, n=2)
    result, pools = instance.split(2, ROOMY)
    assert set(result.sides.values()) == {0, 1}
    assert sorted(pool.used for pool in pools) == [8, 16]


def test_requests_that_share_pages_go_to_one_side_if_the_sides_stay_balanced() -> None:
    instance = Instance(40)
    first, second = instance.add(4), instance.add(4)
    instance.add(4, shared=first.pages[:2]), instance.add(4, shared=second.pages[:2])
    result, pools = instance.split(2, ROOMY)
    assert result.sides["r0"] == result.sides["r2"] != result.sides["r1"] == result.sides["r3"]
    assert [pool.used for pool in pools] == [6, 6]


def test_pages_that_all_requests_share_are_copied_to_every_side() -> None:
    instance = Instance(40)
    system = instance.add(4).pages[:3]
    for _ in range(3):
        instance.add(4, shared=system)
    _, pools = instance.split(2, ROOMY)
    assert [pool.used for pool in pools] == [5, 5]


def test_requests_that_lie_on_one_side_already_do_not_move() -> None:
    members = [PagePool(20) for _ in range(2)]
    instance = Instance(40)
    pages = [[2 * page + i for page in pool.allocate(5)] for i, pool in enumerate(members)]
    instance.pool = PagePool.joined(members, min_pages=2, max_pages=40)
    instance.device = {page: page for held in pages for page in held}
    for held in pages:
        instance.add(5, shared=held)
        instance.pool.release(held)
    result, pools = instance.split(2, ROOMY)
    assert result.rounds == ()
    assert [pool.used for pool in pools] == [5, 5]


@pytest.mark.parametrize(
    ("limits", "recompute"), [((11, 8), ("r4",)), ((7, 8), ("r4", "r3", "r2")), ((20, 2), ("r4",))]
)
def test_what_does_not_fit_is_computed_again_and_costs_least(limits: tuple[int, int], recompute: tuple) -> None:
    instance = Instance(40)
    for pages in (6, 5, 5, 4, 3):
        instance.add(pages)
    result, pools = instance.split(2, SideLimits(*limits, tokens=1000))
    assert result.recompute == recompute
    assert set(result.sides) == set(instance.requests), "these have a side too"
    assert all(pool.used < limits[0] for pool in pools)


def test_request_that_no_side_can_hold_is_too_long() -> None:
    instance = Instance(40)
    instance.add(3, tokens=30), instance.add(3, tokens=29)
    result, _ = instance.split(2, SideLimits(20, 8, tokens=30))
    assert (result.too_long, set(result.sides)) == (("r0",), {"r1"})


def test_failing_device_move_leaves_requests_and_pool_as_they_were() -> None:
    instance = Instance(40)
    for _ in range(3):
        instance.add(5)
    before = {name: list(sequences[0].pages) for name, sequences in instance.requests.items()}
    result = partition(instance.requests, instance.pool, 2, ROOMY)

    def fail(moves: object) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        result.carry_out(instance.pool, instance.requests, fail)
    assert {name: sequences[0].pages for name, sequences in instance.requests.items()} == before
    assert instance.pool.used == 15


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 4), st.integers(2, 12), st.integers(0, 4), st.integers(2, 8), st.integers(0, 2**32))
def test_every_request_reads_its_own_pages_on_its_side(
    sides: int, per_side: int, beyond: int, slots: int, seed: int
) -> None:
    rng = random.Random(seed)
    instance = Instance(sides * per_side + beyond)
    while instance.pool.available and rng.random() < 0.95:  # often until the pool is full
        shared = list(rng.choice(list(instance.requests.values()))[0].pages) if instance.requests else []
        instance.add(
            rng.randrange(min(5, instance.pool.available + 1)),
            n=1 if instance.pool.available < 10 else rng.randint(1, 2),
            tokens=rng.choice([10, 10, 10, 20]),
            shared=shared[: rng.randrange(4)] if rng.random() < 0.5 else [],
        )
        if rng.random() < 0.4:
            ended = instance.requests.pop(rng.choice(list(instance.requests)))
            for sequence in ended:
                for page in sequence.pages:
                    instance.pool.register(page, bytes([page])) if rng.random() < 0.5 else None
                instance.pool.release(sequence.pages)
    limits = SideLimits(per_side, slots, tokens=20)
    result, pools = instance.split(sides, limits)
    placed = {name: side for name, side in result.sides.items() if name not in result.recompute}
    assert sorted((*result.sides, *result.too_long)) == sorted(instance.requests)
    for side, pool in enumerate(pools):
        sequences = [s for name, of_side in placed.items() if of_side == side for s in instance.requests[name]]
        assert sum(s.status is SequenceStatus.RUNNING for s in sequences) <= slots
        held = Counter(page // sides for sequence in sequences for page in sequence.pages)
        assert [pool.references(page) for page in range(per_side)] == [held[page] for page in range(per_side)]
        assert pool.used + pool.available == per_side - 1
        assert sorted((*held, *pool.allocate(pool.available))) == list(range(1, per_side))
