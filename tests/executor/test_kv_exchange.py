"""Pools of instances that merge and split: contents and memory stay, errors are undone, and later changes work."""

import mmap
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.compilation.cache import CompileCounter
from jaxserve.compilation.programs import Compiler
from jaxserve.executor.apart import ApartPlacement
from jaxserve.executor.kv_exchange import KVExchange, Side
from jaxserve.executor.page_copies import copy_pages
from jaxserve.executor.pools import MOVES, PoolPrograms, Pools
from jaxserve.kernels import committed_bytes, is_elastic
from jaxserve.kernels.native import kv as native
from jaxserve.parallel.placement import POOL_AXES, Placement
from tests.support.internals import wrap_exchange_calls
from tests.support.thorough import some

LAYERS = 3
MEMBERS = {  # of 4 kv heads, so that the last one has a head for each device
    "2x1": [(0,), (1,)],
    "2x2": [(0, 1), (2, 3)],
    "4x1": [(0,), (3,), (2,), (1,)],
}
DTYPES = ("float32", "bfloat16", "int8")


def on(devices: Sequence[int]) -> Placement:
    return Placement(tuple(jax.devices()[index] for index in devices))


class Setup:
    """Members with random pages, and their exchange."""

    def __init__(
        self,
        members: Sequence[Sequence[int]],
        sizes: Sequence[int] = (90,),
        *,
        segments: int = 1,
        dtype: str = "float32",
        kv_heads: int = 4,
    ):
        self.count = len(members)
        self.sizes = tuple(sizes)
        self.programs = programs = partial(PoolPrograms, kv_heads=kv_heads, page_size=16, head_dim=8, dtype=dtype)
        interleaved = [devices[j] for j in range(len(members[0])) for devices in members]
        self.sides = [Side((programs(on(devices)),) * LAYERS, self.sizes) for devices in members]
        self.merged = Side((programs(on(interleaved)),) * LAYERS, tuple(self.count * size for size in sizes))
        self.exchange = KVExchange(self.sides, self.merged)
        self.pools = [self._new(side, segments) for side in self.sides]
        self.contents: dict[tuple[int, int, int], np.ndarray] = {}

    def _new(self, side: Side, segments: int) -> Pools:
        pools = Pools(side.programs, side.sizes)
        pools.extend(pools.prepare(sum(side.sizes[:segments])))
        return pools

    def fill(self, pages: Sequence[Sequence[int]]) -> None:
        """Write random contents to pages of each member."""
        random = np.random.default_rng(0)
        for member, own in enumerate(pages):
            for layer in range(LAYERS):
                shape = (len(own), *self.pools[member][layer][0].shape[1:])
                dtype = self.pools[member][layer][0].dtype
                values = random.integers(0, 100, shape).astype(dtype)
                programs = self.pools[member].programs[layer]
                self.pools[member][layer] = programs.put(self.pools[member][layer], values, np.array(own, np.int32))
                self.contents |= {(member, layer, page): value for page, value in zip(own, values, strict=True)}

    @property
    def groups(self) -> list[int]:
        return sorted({page for _, _, page in self.contents})

    def check_members(self, pools: Sequence[Pools], *, except_pages: Sequence[int] = ()) -> None:
        for (member, layer, page), value in self.contents.items():
            if page not in except_pages:
                np.testing.assert_array_equal(page_of(pools[member], layer, page), value)

    def check_merged(self, merged: Pools) -> None:
        for (member, layer, page), value in self.contents.items():
            np.testing.assert_array_equal(page_of(merged, layer, self.count * page + member), value)


def page_of(pools: Pools, layer: int, page: int) -> np.ndarray:
    """Return the contents of a page."""
    for segment in pools[layer]:
        if page < segment.shape[0]:
            return np.asarray(segment)[page]
        page -= segment.shape[0]
    raise AssertionError("beyond the pool")


def buffers(*pools: Pools) -> set[int]:
    arrays = [segment for own in pools for pool in own[:] for segment in pool]
    return {shard.data.unsafe_buffer_pointer() for array in arrays for shard in array.addressable_shards}


def committed(*pools: Pools) -> int:
    return sum(committed_bytes(pool) for own in pools for pool in own[:])


@pytest.fixture
def segmented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools that grow by segments, as they do on GPU."""
    monkeypatch.setattr(native, "supports_elastic_pools", lambda: False)


@pytest.mark.parametrize(("members", "dtype"), some(product(MEMBERS, DTYPES), 5))
def test_merged_pool_has_every_page_and_the_split_gives_it_back(members, dtype) -> None:
    members = MEMBERS[members]
    setup = Setup(members, dtype=dtype)
    setup.fill([[*range(1 + member, 90, 1 + member)] for member in range(setup.count)])
    at = buffers(*setup.pools)
    merged = setup.exchange.merge(setup.pools, setup.groups)
    setup.check_merged(merged)
    assert buffers(merged) == at, "in place"
    assert [pool[0].sharding.spec for pool in merged[:]] == [on((0,)).sharding(POOL_AXES).spec] * LAYERS
    assert all(len(own) == 0 for own in setup.pools), "the members' pools are empty"
    parts = setup.exchange.split(merged, setup.groups)
    setup.check_members(parts)
    assert buffers(*parts) == at
    assert len(merged) == 0
    for own in parts:
        own.close()


@pytest.mark.parametrize("members", MEMBERS.values(), ids=MEMBERS)
def test_layers_of_a_merged_instance_are_joined_and_parted_one_by_one(members) -> None:
    setup = Setup(members)
    setup.fill([range(1, 90)] * setup.count)
    place = ApartPlacement(setup.merged.placements[0], setup.count)
    at = buffers(*setup.pools)
    apart = [place.join_pools([own[layer] for own in setup.pools]) for layer in range(LAYERS)]
    pools = Pools(setup.merged.programs, setup.merged.sizes, apart)
    for layer in range(LAYERS):
        setup.exchange.join(pools, layer, setup.groups)
    setup.check_merged(pools)
    assert buffers(pools) == at, "in place"
    for layer in reversed(range(LAYERS)):
        setup.exchange.part(pools, layer, setup.groups)
    shardings = [side.placements[0].sharding(POOL_AXES) for side in setup.sides]
    parts = zip(*(place.part_pool(pool, shardings) for pool in pools[:]), strict=True)
    setup.check_members([Pools(side.programs, side.sizes, own) for side, own in zip(setup.sides, parts, strict=True)])
    assert buffers(pools) == at


def test_error_while_a_layer_is_joined_or_parted_is_undone(monkeypatch) -> None:
    setup = Setup(MEMBERS["2x1"])
    setup.fill([PAGES, PAGES])
    place = ApartPlacement(setup.merged.placements[0], 2)
    apart = [place.join_pools([own[layer] for own in setup.pools]) for layer in range(LAYERS)]
    pools, faults = Pools(setup.merged.programs, setup.merged.sizes, apart), Faults(monkeypatch, setup.exchange)
    for call in (1, 2, 3):
        with faults.at(call):
            setup.exchange.join(pools, 0, PAGES)
    setup.exchange.join(pools, 0, PAGES)
    for call in (1, 2, 3):
        with faults.at(call):
            setup.exchange.part(pools, 0, PAGES)
    for layer in range(1, LAYERS):
        setup.exchange.join(pools, layer, PAGES)
    setup.check_merged(pools)


def test_any_pages_in_any_segments_are_exchanged_and_no_others(segmented) -> None:
    """Other pages are as before after two exchanges, bit for bit."""
    setup = Setup(MEMBERS["2x1"], (20, 7, 8), segments=3)
    setup.fill([range(1, 35), range(1, 35)])

    @settings(max_examples=15)
    @given(st.lists(st.integers(1, 34), unique=True))
    def exchange(groups: list[int]) -> None:
        merged = setup.exchange.merge(setup.pools, groups)
        for member, layer, page in setup.contents:
            if page in groups:
                expected = setup.contents[member, layer, page]
                np.testing.assert_array_equal(page_of(merged, layer, 2 * page + member), expected)
        setup.pools = setup.exchange.split(merged, groups)
        setup.check_members(setup.pools)

    exchange()


@pytest.mark.skipif(not is_elastic("cpu"), reason="needs the native library and Linux")
@pytest.mark.parametrize(("members", "kv_heads"), [(MEMBERS["2x1"], 2), (MEMBERS["2x2"], 8)])
def test_exchange_commits_no_memory_of_an_elastic_pool(members, kv_heads: int) -> None:
    setup = Setup(members, (200_000,), kv_heads=kv_heads)
    setup.fill([range(150), range(150)])
    before = committed(*setup.pools)
    merged = setup.exchange.merge(setup.pools, range(1, 150))
    at_its_end = LAYERS * 2 * len(members[0]) * mmap.PAGESIZE  # where padding is read, but not written
    assert 0 <= committed(merged) - before <= at_its_end
    parts = setup.exchange.split(merged, range(1, 150))
    assert 0 <= committed(*parts) - before <= at_its_end
    for own in parts:
        own.shrink({}, 50)
    assert committed(*parts) < before / 2
    for own in parts:
        own.close()


@pytest.mark.parametrize("members", MEMBERS.values(), ids=MEMBERS)
def test_exchange_needs_temporary_memory_of_two_chunks(members) -> None:
    setup = Setup(members, (4000,))
    for program, (size, groups), arguments in setup.exchange.calls():
        stats = program.lower(*arguments).compile().memory_analysis()
        (array, _) = arguments
        share = array.size * array.dtype.itemsize // len(setup.merged.placements[0].devices)
        assert stats.alias_size_in_bytes == share
        assert stats.temp_size_in_bytes <= 2 * groups * share // size + 8192, "and a few indices"


class Faults:
    """Lets one call of an exchange fail, and counts the calls."""

    def __init__(self, patch: pytest.MonkeyPatch, exchange: KVExchange):
        self.failing, self.calls = 0, 0
        wrap_exchange_calls(patch, exchange, self._wrap)

    def at(self, call: int) -> Any:
        """Return a context in which a call has to fail, the first being 1."""
        self.failing, self.calls = call, 0
        return pytest.raises(jax.errors.JaxRuntimeError, match="the link is down")

    def _wrap(self, run: Callable) -> Callable:
        def counted(*arguments: Any) -> None:
            self.calls += 1
            if self.calls == self.failing:
                raise jax.errors.JaxRuntimeError("INTERNAL: the link is down")
            run(*arguments)

        return counted


CALLS = range(1, 1 + 3 * LAYERS)  # three for the 89 pages of each layer
PAGES = range(1, 1 + 16 + 64 + 9)


def test_error_in_any_call_of_a_merge_is_undone(monkeypatch) -> None:
    setup = Setup(MEMBERS["2x1"], (90,))
    setup.fill([PAGES, PAGES])
    at, faults = buffers(*setup.pools), Faults(monkeypatch, setup.exchange)
    for call in CALLS:
        with faults.at(call):
            setup.exchange.merge(setup.pools, PAGES)
        assert faults.calls == 2 * call - 1, "each call before is undone by one"
        setup.check_members(setup.pools)
        assert buffers(*setup.pools) == at
    setup.check_merged(setup.exchange.merge(setup.pools, PAGES))


def test_error_in_any_call_of_a_split_is_undone(monkeypatch) -> None:
    setup = Setup(MEMBERS["2x1"], (90,))
    setup.fill([PAGES, PAGES])
    at, merged = buffers(*setup.pools), setup.exchange.merge(setup.pools, PAGES)
    faults = Faults(monkeypatch, setup.exchange)
    for call in CALLS:
        with faults.at(call):
            setup.exchange.split(merged, PAGES)
        assert faults.calls == 2 * call - 1, "each call before is undone by one"
        setup.check_merged(merged)
        assert buffers(merged) == at
    setup.check_members(setup.exchange.split(merged, PAGES))


def test_pools_grow_shrink_and_move_pages_after_an_exchange(segmented) -> None:
    setup = Setup(MEMBERS["2x1"], (20, 8, 8))
    setup.fill([range(1, 20), range(1, 20)])
    merged = setup.exchange.merge(setup.pools, setup.groups)
    assert merged.sizes == (40, 16, 16)
    merged.extend(merged.prepare(60))
    assert [segment.shape[0] for segment in merged[0]] == [40, 16, 16]
    merged.shrink({38: 70, 39: 41}, 72)
    for layer in range(LAYERS):
        np.testing.assert_array_equal(page_of(merged, layer, 70), setup.contents[0, layer, 19])
        np.testing.assert_array_equal(page_of(merged, layer, 41), setup.contents[1, layer, 19])
    merged.shrink({70: 38, 41: 39}, 40)
    assert merged.segments == 1
    parts = setup.exchange.split(merged, setup.groups)
    setup.check_members(parts)
    for own in parts:
        own.extend(own.prepare(36))
        own.shrink({19: 30}, 36)
        assert own.segments == 3
    for layer in range(LAYERS):
        np.testing.assert_array_equal(page_of(parts[1], layer, 30), setup.contents[1, layer, 19])


def test_pools_that_do_not_fit_are_refused(segmented) -> None:
    setup = Setup(MEMBERS["2x1"], (20, 8))
    setup.pools[0].extend(setup.pools[0].prepare(28))
    with pytest.raises(ValueError, match=r"segments of \(20, 8\), \(20,\) pages cannot be exchanged"):
        setup.exchange.merge(setup.pools, [])
    assert all(len(own) == LAYERS for own in setup.pools)


@pytest.mark.parametrize("members", [MEMBERS["2x1"], MEMBERS["2x2"]])
def test_exchange_compiles_nothing_after_its_programs_are_ready(members) -> None:
    setup = Setup(members)
    setup.fill([range(1, 90)] * setup.count)
    assert not setup.exchange.is_warm
    compiler = Compiler()
    setup.exchange.compile(compiler)
    compiler.wait()
    assert setup.exchange.is_warm
    counter = CompileCounter()
    merged = setup.exchange.merge(setup.pools, setup.groups)
    setup.exchange.split(merged, setup.groups)
    assert set(counter.counts.values()) == {0}
    counter.close()
    assert len(setup.groups) > 16, "more than one call"


COPIES = [((0,), (1,)), ((0, 1), (2, 3)), ((0, 1), (1, 0)), ((0, 1), (5,))]


@pytest.mark.parametrize(("dtype", "source", "target"), some([(d, *copy) for d in DTYPES for copy in COPIES], 5))
def test_pages_are_copied_to_the_pools_of_other_devices(source, target, dtype) -> None:
    setup = Setup([source, (6, 7)[: len(source)]], (200,), dtype=dtype)
    (old, _) = setup.pools
    there = setup.programs(on(target))
    new = setup._new(Side((there,) * LAYERS, (150, 100)), 2 if not is_elastic("cpu") else 1)
    setup.fill([range(1, 140), ()])
    pages = {page: 149 - page for page in range(1, 140)}
    assert len(pages) > MOVES[-1]
    compiler = Compiler()
    old.programs[0].compile(old.lanes, old.segments, compiler, copies=True)
    there.compile(new.lanes, new.segments, compiler, copies=True)
    compiler.wait()
    at, counter = buffers(new), CompileCounter()
    copy_pages(old, new, pages)
    assert buffers(new) == at
    assert set(counter.counts.values()) == {0}
    counter.close()
    for layer in range(LAYERS):
        for page, copy in pages.items():
            np.testing.assert_array_equal(page_of(new, layer, copy), setup.contents[0, layer, page])
    setup.check_members([old])
