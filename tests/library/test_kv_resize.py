"""KV pools that grow and shrink between two steps while requests run."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from jaxserve import ConfigError, MemoryBudgetError
from jaxserve.build import BuiltEngine, build
from jaxserve.core.config import EngineConfig
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import TokensPrompt
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.executor.pools import MOVES
from jaxserve.kernels import GRANULE, committed_bytes, is_elastic
from jaxserve.kernels.native import kv as native
from jaxserve.planning.resolve import resolve
from tests.support.canary import Canary
from tests.support.internals import move_program_of
from tests.support.sizes import page_bytes
from tests.support.thorough import some

OPTIONS = {"load_format": "dummy", "max_num_seqs": 4, "max_num_batched_tokens": 4 + 32, "memory_gb": 8}
PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def prompts(count: int) -> list[TokensPrompt]:
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 499, 40).tolist()
    return [TokensPrompt((*shared, *rng.integers(3, 499, 7 * i + 1).tolist())) for i in range(count)]


class Resized:
    """A built engine whose KV pools change their size."""

    def __init__(self, built: BuiltEngine, *, watched: bool = True):
        (steps,) = built.instances
        self.held: list[int] = []  # pages that no request gets
        self.canary = Canary(steps, self.held) if watched else None
        self.pages, self.scheduler, self.executor = steps.core.scheduler.pages, steps.core.scheduler, steps.executor
        self.engine = SyncEngine(built.loops, built.info, None, built.clock)
        self.moved = 0

    def resize(self, pages: int) -> None:
        change = pages - self.pages.num_pages
        if change >= 0:
            self.scheduler.grow(change)
            self.executor.pools.extend(self.executor.pools.prepare(pages))
        else:
            self.scheduler.shrink(-change, lambda moves: self.move(moves, pages))

    def move(self, moves: Mapping[int, int], pages: int) -> None:
        self.executor.shrink_pools(moves, pages)
        self.moved += len(moves)

    def hold(self, count: int) -> None:
        self.held += self.pages.allocate(count)

    def let_go(self) -> None:
        self.pages.release(self.held)
        self.held.clear()

    def run(self, *, resizing: bool = False) -> list[tuple[int, ...]]:
        """Run requests to their ends and return their tokens.

        With `resizing` the pools grow before one step, which then takes its pages from the tail, and shrink before the
        next. They shrink only as far as nobody has to wait for pages.
        """
        tokens = {self.engine.add(prompt, PARAMS): () for prompt in prompts(12)}
        while not self.engine.idle:
            if resizing and self.held:
                self.let_go()
                self.resize(self.pages.used + 24)
            elif resizing:
                self.resize(161)
                self.hold(70)
            for output in self.engine.step():
                tokens[output.request_id] += output.outputs[0].token_ids
        if resizing:
            self.let_go()
        if self.canary is not None:
            self.canary.check()
        return list(tokens.values())


@pytest.fixture
def not_elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools take memory in segments, as on GPU."""
    monkeypatch.setattr(native, "supports_elastic_pools", lambda: False)


@pytest.mark.parametrize(
    "options", some([{"tp": 2, "pp": 2}, {}, {"prefix_caching": False}, {"kv_cache_dtype": "int8"}], 2), ids=str
)
def test_pool_resizes_change_no_token_and_compile_nothing(tiny_model: Path, options: dict) -> None:
    config = EngineConfig(model=tiny_model, kv_pages=80, max_kv_pages=160, **(OPTIONS | options))
    built = build(config)
    resized, compiled = Resized(built), dict(built.compilations.counts)
    expected = resized.run()
    resized.pages.clear_cache()
    pools = [] if "tp" in options else [pool.unsafe_buffer_pointer() for (pool,) in resized.executor.pools]
    assert resized.run(resizing=True) == expected
    assert resized.moved > 30
    assert built.compilations.counts == compiled
    assert pools == [pool.unsafe_buffer_pointer() for (pool,) in resized.executor.pools[: len(pools)]]
    assert resized.pages.used == 0
    built.close()


@pytest.mark.parametrize("options", some([{"tp": 2}, {}, {"kv_cache_dtype": "int8"}], 1), ids=str)
def test_segmented_pool_resizes_change_no_token_and_compile_nothing(
    tiny_model: Path, not_elastic: None, options: dict
) -> None:
    config = EngineConfig(model=tiny_model, kv_pages=80, max_kv_pages=160, **(OPTIONS | options))
    built = build(config)
    resized, compiled = Resized(built), dict(built.compilations.counts)
    pools, limits = resized.executor.pools, built.resolved.limits
    page = page_bytes(built.resolved)
    assert pools.sizes == (81, 20, 20, 20, 20)
    expected = resized.run()
    resized.pages.clear_cache()
    assert resized.run(resizing=True) == expected
    assert resized.moved > 30
    assert built.compilations.counts == compiled
    for pages, taken in ((161, 161), (102, 121), (101, 101), (50, 81)):
        resized.resize(pages)
        assert pools.nbytes == taken * page * config.tp
        (instance,) = built.resolved.plan.with_kv_pages("0", pages).instances
        entries = limits.device_entries(instance)
        assert [sizes["kv"] for sizes in entries.values()] == [taken * page] * config.tp
    built.close()


def test_cached_pages_are_found_after_a_move(tiny_model: Path) -> None:
    built = build(EngineConfig(model=tiny_model, kv_pages=100, max_kv_pages=100, warmup=False, **OPTIONS))
    resized = Resized(built)
    expected = resized.run()
    resized.pages.clear_cache()
    resized.hold(30)  # so that all that follow are in the tail
    assert resized.run() == expected
    resized.let_go()
    resized.resize(60)
    assert resized.moved > 20
    hits = resized.scheduler.prefix_hits
    assert resized.run() == expected
    assert resized.scheduler.prefix_hits - hits >= 12 * 32
    built.close()


def test_ledger_covers_the_memory_that_elastic_pools_hold(tiny_model: Path) -> None:
    if not is_elastic("cpu"):
        pytest.skip("needs the native library and Linux, where pools take memory page by page")
    built = build(EngineConfig(model=tiny_model, kv_pages=200, max_kv_pages=100_000, warmup=False, **OPTIONS))
    resized, page = Resized(built, watched=False), page_bytes(built.resolved)
    pools = resized.executor.pools
    assert pools.nbytes == 100_001 * page
    assert built.resolved.ledger.entries["kv"] == 201 * page + len(pools) * GRANULE
    resized.run()
    held = sum(committed_bytes(pool) for pool in pools)
    assert 50 * page < held <= built.resolved.ledger.entries["kv"]
    resized.resize(25)
    assert sum(committed_bytes(pool) for pool in pools) < held
    built.close()


def test_ledger_counts_whole_segments(tiny_model: Path, not_elastic: None) -> None:
    config = EngineConfig(model=tiny_model, kv_pages=20, max_kv_pages=60, max_model_len=128, **OPTIONS)
    resolved = resolve(config)
    assert resolved.segments(1) == (21, 10, 10, 10, 10)
    assert resolved.ledger.entries["kv"] == 21 * page_bytes(resolved)
    most = resolve(EngineConfig(model=tiny_model, kv_pages=20, max_kv_pages=10_000_000, max_model_len=128, **OPTIONS))
    room = most.ledger.free + most.ledger.entries["kv"]
    assert most.reserved_kv_pages == room // page_bytes(most), "no more than may ever fit"
    with pytest.raises(MemoryBudgetError, match="kv needs"):
        resolve(EngineConfig(model=tiny_model, kv_pages=10_000_000, max_model_len=128, **OPTIONS))


def test_kv_pages_and_max_kv_pages_set_the_first_and_the_largest_pool(tiny_model: Path) -> None:
    base = {"model": tiny_model, "max_model_len": 128} | OPTIONS
    fixed = resolve(EngineConfig(kv_pages=20, **base))
    assert (fixed.plan.instances[0].stages[0].kv_pages, fixed.reserved_kv_pages) == (21, 21)
    capped = resolve(EngineConfig(max_kv_pages=25, **base))
    assert (capped.plan.instances[0].stages[0].kv_pages, capped.reserved_kv_pages) == (26, 26)
    with pytest.raises(ConfigError, match=r"max_kv_pages is 10: it must be at least kv_pages \(20\)"):
        resolve(EngineConfig(kv_pages=20, max_kv_pages=10, **base))


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}, {"page_size": 64}])
def test_page_moves_fit_into_the_workspace(tiny_model: Path, options: dict) -> None:
    built = build(EngineConfig(model=tiny_model, warmup=False, **(OPTIONS | options)))
    executor, workspace = built.instances[0].executor, built.resolved.ledger.entries["workspace"]
    move = move_program_of(executor.pools)
    ids = np.zeros(MOVES[-1], np.int32)
    assert move.lower(executor.pools[0], ids, ids).compile().memory_analysis().temp_size_in_bytes < workspace
    built.close()
