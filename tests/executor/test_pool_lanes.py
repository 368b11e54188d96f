"""Pools with a lane for each member of a group: the members' arrays hold pages under the ids of the group."""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
import pytest

from jaxserve.compilation.cache import CompileCounter
from jaxserve.compilation.programs import Compiler
from jaxserve.executor.page_copies import copy_pages
from jaxserve.executor.pools import MOVES, PoolPrograms, Pools
from jaxserve.kernels import GRANULE, committed_bytes, is_elastic
from jaxserve.kernels.native import kv as native
from jaxserve.kvcache import JoinedIds
from jaxserve.parallel.placement import Placement

LAYERS = 2


@pytest.fixture
def segmented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools that grow by segments, as they do on GPU."""
    monkeypatch.setattr(native, "supports_elastic_pools", lambda: False)


class Group:
    """The pools of members on one device, and one object that has all of their arrays as lanes."""

    def __init__(self, sizes: Sequence[int], count: int, *, segments: int = 1):
        placement = Placement((jax.devices()[0],))
        make = partial(PoolPrograms, placement, kv_heads=2, page_size=16, head_dim=8, dtype="float32")
        self.programs, self.sizes, self.count = (make(),) * LAYERS, tuple(sizes), count
        self.members = [self._member(segments) for _ in range(count)]
        self.contents: dict[tuple[int, int], np.ndarray] = {}

    def _member(self, segments: int) -> Pools:
        pools = Pools(self.programs, self.sizes)
        pools.extend(pools.prepare(sum(self.sizes[:segments])))
        return pools

    def fill(self, pages: Sequence[int]) -> None:
        """Write random contents to the same pages of every member."""
        rng = np.random.default_rng(0)
        ids = np.array(pages, np.int32)
        for member, pools in enumerate(self.members):
            for layer in range(LAYERS):
                values = rng.normal(size=(len(ids), *pools[layer][0].shape[1:])).astype(np.float32)
                pools.put(layer, values, ids)
                joined = (JoinedIds.of_equal(self.count).joined(member, page) for page in pages)
                self.contents |= {(layer, page): value for page, value in zip(joined, values, strict=True)}

    def joined(self) -> Pools:
        """Return the pools whose lanes are the members' arrays."""
        pools = [
            [array for segment in zip(*(own[layer] for own in self.members), strict=True) for array in segment]
            for layer in range(LAYERS)
        ]
        for own in self.members:
            own.give_up()
        return Pools(self.programs, self.sizes, [tuple(pool) for pool in pools], lanes=self.count)

    def check(self, pools: Pools, moved: dict[int, int] | None = None) -> None:
        """Check the contents of all pages, of which some were moved."""
        moved = moved or {}
        for layer in range(LAYERS):
            for page in {page for _, page in self.contents}:
                found = pools.take(layer, np.array([moved.get(page, page)], np.int32))[0]
                np.testing.assert_array_equal(found, self.contents[layer, page])


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_joined_pools_have_the_members_pages_and_grow_shrink_and_move_them(segmented, count: int) -> None:
    group = Group((10, 4, 4), count, segments=2)
    group.fill(range(1, 14))
    pools = group.joined()
    assert pools.pages == (*(10,) * count, *(4,) * count)
    group.check(pools)
    pools.extend(pools.prepare(15 * count))
    assert (pools.segments, pools.pages[2 * count :]) == (3, (4,) * count)
    group.check(pools)

    fourteenth = range(13 * count, 14 * count)
    moves = {page: page + 2 * count for page in fourteenth}
    pools.move(moves)
    group.check(pools, moves)
    back = {target: source for source, target in moves.items()}
    pools.shrink(back, 14 * count)
    assert pools.segments == 2
    group.check(pools)
    pools.close()


@pytest.mark.skipif(not is_elastic("cpu"), reason="needs the native library and Linux")
def test_elastic_lanes_take_memory_for_their_own_pages_and_release_their_tails() -> None:
    room, used, kept = 400_000, 40_000, 10_000
    group = Group((room,), 4)
    page = group.members[0][0][0].nbytes // room
    for start in range(1, used, MOVES[-1]):
        group.members[1].put(0, np.ones((MOVES[-1], *group.members[1][0][0].shape[1:])), start + np.arange(MOVES[-1]))
    pools = group.joined()
    at = [array.unsafe_buffer_pointer() for array in pools[0]]

    def committed() -> list[int]:
        return [committed_bytes((array,)) for array in pools[0]]

    assert committed()[1] >= used * page
    assert max(committed()[:1] + committed()[2:]) <= 2 * GRANULE, "the ends of the address space"
    source, target = JoinedIds.of_equal(4).joined(1, used - 1), JoinedIds.of_equal(4).joined(3, 5)
    pools.shrink({source: target}, 4 * kept)
    assert kept * page <= committed()[1] <= kept * page + 4 * GRANULE
    assert max(committed()[:1] + committed()[2:]) <= 4 * GRANULE
    assert (pools.take(0, np.array([target], np.int32)) == 1).all()
    assert [array.unsafe_buffer_pointer() for array in pools[0]] == at
    pools.close()


def test_pages_are_copied_between_pools_of_different_lanes(segmented) -> None:
    group = Group((100, 60), 2, segments=2)
    group.fill(range(1, 150))
    source = group.joined()
    target = Pools(group.programs, (200, 200), lanes=1)
    target.extend(target.prepare(400))
    pages = {page: 398 - page for page in range(2, 300)}
    copy_pages(source, target, pages)
    group.check(target, pages)
    again = Pools(group.programs, (90,), lanes=4)
    copy_pages(target, again, {page: page for page in range(60, 360)})
    for page in range(60, 360):
        values = [pools.take(1, np.array([page], np.int32)) for pools in (target, again)]
        np.testing.assert_array_equal(*values)


def test_programs_of_lanes_are_compiled_ahead(segmented) -> None:
    group = Group((10, 4, 4), 2)
    group.fill(range(1, 10))
    pools, compiler = group.joined(), Compiler()
    group.programs[0].compile(pools.lanes, 1, compiler)
    compiler.wait()
    counter = CompileCounter()
    pools.extend(pools.prepare(36))
    pools.shrink({18: 30}, 32)
    pools.run_on_padding(0)
    assert set(counter.counts.values()) == {0}
    counter.close()
