"""Pools that take memory as their pages are written. Memory is counted by pages of the system, not by process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.kernels import elastic
from jaxserve.kernels.elastic import GRANULE, committed_bytes, move_pages, put_pages, release_pages, reserve, take_pages
from jaxserve.kernels.native import kv as native

PAGE = (2, 2, 16, 64)  # 8192 bytes of uint16
PAGE_BYTES = 8192
DTYPE = jnp.uint16

move = jax.jit(move_pages, donate_argnums=0)
release = jax.jit(release_pages, donate_argnums=0)
put = jax.jit(put_pages, donate_argnums=0)
take = jax.jit(take_pages)
write = jax.jit(lambda pool, pages, value: pool.at[pages].set(value, mode="drop"), donate_argnums=0)


@pytest.fixture
def elastic_cpu(native_kernels) -> None:
    """Skip the test where pools on CPU do not take memory page by page."""
    if not elastic.is_elastic("cpu"):
        pytest.skip("needs the native library and Linux, where pools take memory page by page")


def span(first: int, last: int) -> np.ndarray:
    """Return the range of pages of a pool of one segment."""
    return np.array([[first, last]], np.int32)


def test_untouched_pool_takes_no_memory(elastic_cpu) -> None:
    pool = reserve((1 << 19, *PAGE), DTYPE)
    assert pool.nbytes == 1 << 32
    assert committed_bytes((pool,)) <= 2 * GRANULE  # its ends


@pytest.mark.parametrize("size", [1, 63, 1024, 5000, 100_000, 3_000_000])
def test_pool_in_reused_memory_is_zero(elastic_cpu, size: int) -> None:
    dirty = [jnp.full((1, size), jnp.nan, jnp.float32) for _ in range(8)]
    jax.block_until_ready(dirty)
    del dirty
    pools = [reserve((1, size), jnp.float32) for _ in range(8)]
    assert not any(np.asarray(pool).any() for pool in pools)


def test_pool_memory_grows_with_writes_and_shrinks_with_releases(elastic_cpu) -> None:
    def committed(pages: int, ranges: int) -> bool:
        """Return whether the pool takes the memory of `pages` pages.

        The ends of each of `ranges` ranges may take a granule more.
        """
        return 0 <= committed_bytes((pool,)) - pages * PAGE_BYTES <= 2 * ranges * GRANULE

    pool = reserve((50_000, *PAGE), DTYPE)
    pool = write(pool, np.arange(10_000, 20_000), 7)
    assert committed(10_000, ranges=1)
    at = pool.unsafe_buffer_pointer()
    (pool,) = release((pool,), span(12_000, 20_000))
    assert pool.unsafe_buffer_pointer() == at
    assert committed(2_000, ranges=1)
    assert (pool[10_000:12_000] == 7).all()
    pool = write(pool, np.arange(15_000, 16_000), 9)
    assert committed(3_000, ranges=2)
    assert (pool[15_000:16_000] == 9).all()


def test_each_segment_takes_memory_for_its_own_pages_alone(elastic_cpu) -> None:
    """Pages are read, written and moved in segments 1 and 3, and the others stay untouched."""
    size, count = 20_000, 1000
    pool = tuple(reserve((size, *PAGE), DTYPE) for _ in range(5))
    ids = np.arange(size, size + count, dtype=np.int32)
    contents = jnp.arange(count, dtype=DTYPE)[:, None, None, None, None] + jnp.zeros(PAGE, DTYPE)
    pool = put(pool, contents, ids)
    pool = move(pool, ids, ids + 2 * size)
    assert (take(pool, ids + 2 * size) == contents).all()
    used = [committed_bytes((segment,)) for segment in pool]
    assert all(0 <= used[index] - count * PAGE_BYTES <= 4 * GRANULE for index in (1, 3))
    assert max(used[index] for index in (0, 2, 4)) <= 2 * GRANULE  # their ends

    kept = [[size, size], [count // 2, size], [size, size], [0, size], [size, size]]
    pool = release(pool, np.array(kept, np.int32))
    used = [committed_bytes((segment,)) for segment in pool]
    assert used[1] - count // 2 * PAGE_BYTES <= 4 * GRANULE
    assert max(used[:1] + used[2:]) <= 4 * GRANULE
    assert (take(pool, ids[: count // 2]) == contents[: count // 2]).all()


@pytest.mark.parametrize("page", [-1, 12])
def test_pages_outside_an_elastic_pool_are_refused(elastic_cpu, page: int) -> None:
    pool = tuple(reserve((size, *PAGE), DTYPE) for size in (4, 3, 5))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"page {page} is outside a pool of 12 pages"):
        jax.block_until_ready(take(pool, np.array([0, page], np.int32)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 3000))
def test_release_leaves_all_other_pages_unchanged(first: int, count: int, page_bytes: int) -> None:
    last = min(first + count, 40)
    first = min(first, last)
    whole = jnp.full((40, page_bytes), 5, jnp.uint8)
    (pool,) = release((whole,), span(first, last))  # pages smaller than the system's
    others = np.delete(np.asarray(pool), np.arange(first, last), axis=0)
    assert (others == 5).all()


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (3, 2), (2, 6)])
def test_release_of_pages_outside_the_pool_is_refused(elastic_cpu, first: int, last: int) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"pages {first} to {last} are outside a segment of 5 pages"):
        jax.block_until_ready(release((reserve((5, *PAGE), DTYPE),), span(first, last)))


def test_pools_without_the_native_library_are_ordinary_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "supports_elastic_pools", lambda: False)
    assert not elastic.is_elastic("cpu")
    pool = reserve((4, *PAGE), DTYPE)
    assert not pool.any()
    assert committed_bytes((pool,)) == pool.nbytes
    (pool,) = jax.jit(lambda *args: release_pages(*args), donate_argnums=0)((pool.at[:].set(3),), span(1, 4))
    assert (pool == 3).all()


def test_pools_on_other_platforms_are_not_elastic() -> None:
    assert not elastic.is_elastic("gpu")
    assert not elastic.is_elastic("tpu")


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(["uint16", "float32", "int8", "bfloat16"]), st.sampled_from([(), (5,), (3, 4, 10)]))
def test_page_moves_read_all_pages_before_they_write_any(
    data: st.DataObject, dtype: str, cuts: tuple[int, ...]
) -> None:
    pages, count = 12, 8
    pool = np.random.default_rng(0).integers(0, 100, (pages, 3, 4)).astype(jnp.dtype(dtype))
    live = data.draw(st.lists(st.integers(1, pages - 1), max_size=count))
    targets = data.draw(st.permutations(range(1, pages)))[: len(live)]
    padding = [0] * (count - len(live))
    segments = tuple(jnp.asarray(pool[a:b]) for a, b in zip((0, *cuts), (*cuts, pages), strict=True))
    moved = move(segments, np.array(live + padding, np.int32), np.array(targets + padding, np.int32))
    expected = pool.copy()
    expected[targets] = pool[live]
    np.testing.assert_array_equal(np.concatenate(moved), expected)


@pytest.mark.parametrize("dtype", ["uint16", "float32", "int8"])
@pytest.mark.parametrize("operation", ["move", "release"])
@pytest.mark.parametrize("segments", [1, 8])
def test_page_moves_and_releases_are_in_place_at_any_size(operation: str, dtype: str, segments: int) -> None:
    sizes = []
    for pages in (4096, 65_536):
        pool = (jax.ShapeDtypeStruct((pages // segments, *PAGE), dtype),) * segments
        ids = jax.ShapeDtypeStruct((16,) if operation == "move" else (segments, 2), jnp.int32)
        lowered = move.lower(pool, ids, ids) if operation == "move" else release.lower(pool, ids)
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes == sum(segment.size * segment.dtype.itemsize for segment in pool)
        sizes.append(memory.temp_size_in_bytes)
    moved = 16 * PAGE_BYTES * 2 if operation == "move" else 0
    assert max(sizes) <= moved + 4096
    assert sizes[0] == sizes[1]
