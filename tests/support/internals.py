"""Private parts of jaxserve's objects that tests look at or replace.

Only this module reaches for them: when an attribute is renamed, one line here changes and no test.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.core import EngineCore
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.executor.block_store import BlockStore

# -- engines


def engine_of(llm: Any) -> SyncEngine:
    """Return the `SyncEngine` of an `LLM`."""
    return llm._engine


def instances_of(llm: Any) -> list[StepLoop]:
    """Return the step loops of an `LLM`, one for each instance."""
    return list(engine_of(llm).loops.values())


def core_of(llm: Any) -> EngineCore:
    """Return the `EngineCore` of an `LLM`'s first instance."""
    return instances_of(llm)[0].core


def executor_of(llm: Any) -> Any:
    """Return the executor of an `LLM`'s first instance."""
    return instances_of(llm)[0].executor


def call_thread_of(llm: Any) -> Any:
    """Return the `EngineThread` that carries out an `LLM`'s calls."""
    return llm._thread


def requests_in(core: Any) -> Mapping[str, Any]:
    """Return the unfinished requests of an `EngineCore` by id."""
    return core._requests


def assert_no_request_left(llm: Any) -> None:
    """Fail if an `LLM` of one instance still holds anything of a request."""
    engine, worker = engine_of(llm), call_thread_of(llm)._worker
    (steps,) = engine.loops.values()
    assert engine.idle
    assert_no_record_left(engine)
    assert requests_in(steps.core) == {}
    assert steps.core.scheduler.pages.used == 0
    assert worker._jobs == []
    assert worker._owners == {}


def directory_of(engine: Any) -> Any:
    """Return the `Directory` of an engine's requests."""
    return engine._directory


def assert_no_record_left(engine: Any) -> None:
    """Fail if the directory of an engine still holds anything of a request."""
    directory = directory_of(engine)
    assert len(directory) == 0
    assert len(directory._queue) == directory._queue.tokens == 0
    assert not any(directory._router._outstanding)


def between_steps(engine: Any) -> AbstractContextManager[Any]:
    """Return the lock of a `SyncEngine` that excludes steps and commits."""
    return engine._turn


def run_pending_calls(engine: Any) -> None:
    """Run what waits for a moment between two steps of a `SyncEngine`."""
    engine._run_calls()


def instance_threads_of(engine: Any) -> list[Any]:
    """Return the threads of an `AsyncEngine`, one for each instance."""
    return list(engine._instances.threads.values())


def wrap_take_commands(thread: Any, wrap: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
    """Replace the method with which an instance's thread takes its commands."""
    thread._take_commands = wrap(thread._take_commands)


# -- pages


def free_pages(pool: Any) -> list[int]:
    """Return the free list of a `PagePool` itself, without the pages that were never handed out."""
    return pool._free


def unused_pages(pool: Any) -> list[int]:
    """Return all free pages of a `PagePool`, including those that were never handed out."""
    return [*pool._free, *range(pool._fresh, pool.num_pages)]


def cached_pages(pool: Any) -> Mapping[int, None]:
    """Return the pages of a `PagePool` that only the prefix cache holds, least recently used first."""
    return pool._cached


def hashes_of_pages(pool: Any) -> dict[int, bytes]:
    """Return the hash of each page that the prefix cache can find."""
    return pool._hash_of


def pages_of_hashes(pool: Any) -> dict[bytes, int]:
    """Return the page of each hash in the prefix cache."""
    return pool._page_of


def wrap_rename(patch: pytest.MonkeyPatch, pool: Any, wrap: Callable[[Callable], Callable]) -> None:
    """Replace the method that gives moved pages of a `PagePool` their new ids."""
    patch.setattr(pool, "_rename", wrap(pool._rename))


def wrap_move_batch(patch: pytest.MonkeyPatch, pools: Any, wrap: Callable[[Callable], Callable]) -> None:
    """Replace the method that moves pages of one layer's pool on the device."""
    for programs in set(pools.programs):
        patch.setattr(programs, "move", wrap(programs.move))


def move_program_of(pools: Any) -> Any:
    """Return the only program with which an executor's pools move pages."""
    (programs,) = set(pools.programs)
    return programs._move


def wrap_pool_maker(patch: pytest.MonkeyPatch, pools: Any, layer: int, wrap: Callable[[Callable], Callable]) -> None:
    """Replace the function that allocates segments for one layer."""
    makers = list(pools._make)
    makers[layer] = wrap(makers[layer])
    patch.setattr(pools, "_make", tuple(makers))


# -- executors


@dataclass
class StageOnPadding:
    """The first stage of an executor, and what its blocks are called with in a step that computes only padding."""

    stage: Any
    tokens: Any
    rows: Any
    context: list[Any]  # cos, sin, slots and the attention's metadata
    x: Any  # after the embedding


def stages_of(executor: Any) -> Any:
    """Return the pipeline stages of an executor."""
    return executor._stages


def stage_on_padding(executor: Any, shape: Any) -> StageOnPadding:
    """Run the first stage up to its first layer on a step of padding."""
    stage = stages_of(executor)[0]
    tokens, rows, *context = executor._inputs[stage.placement](np.zeros(shape.size, np.int32), shape)
    x = stage.embed.executable(tokens, executor.sampler.newest, *stage.embed.leaves)
    return StageOnPadding(stage, tokens, rows, context, x)


def wrap_stages(executor: Any, wrap: Callable[[Any], Any]) -> None:
    """Let an executor run each stage of a step by what `wrap` makes of the function that did so."""
    executor._run_stage = wrap(executor._run_stage)


def run_on_padding(executor: Any, shape: Any) -> None:
    """Run all stages on a step of padding."""
    packed, x = np.zeros(shape.size, np.int32), None
    for stage in range(len(executor._stages)):
        x, _ = executor._run_stage(stage, shape, packed, x)


def fused_tier_of(executor: Any) -> Any:
    """Return the `FusedTier` of an executor, or None."""
    return executor._fused


def fused_keys(tier: Any) -> set[Any]:
    """Return the keys of all executables that a `FusedTier` has compiled or is compiling."""
    return set(tier._compiled)


def watch_blocks(executor: Any, called: Callable[[Any], None]) -> None:
    """Call `called` with the shape of each step of a stage that runs block by block."""
    run = executor._run_blocks

    def watched(index: int, stage: Any, shape: Any, *rest: Any) -> Any:
        called(shape)
        return run(index, stage, shape, *rest)

    executor._run_blocks = watched


def sought_keys(tier: Any) -> set[Any]:
    """Return the keys for which a `FusedTier` has or has looked for executables."""
    return {*tier._ready, *tier._missing}


def saved_programs_of(warm: Any) -> Any:
    """Return the `SavedPrograms` of an engine, given its `WarmPlacements`."""
    return warm._saved


def sampling_calls(sampler: Any, logits: Any) -> list[tuple[Any, tuple]]:
    """Return every program that a `DeviceSampler` may run for these logits, with its arguments."""
    return list(sampler._calls(logits))


def index_file_of(programs: Any) -> Path:
    """Return the file in which `SavedPrograms` keeps its index."""
    return programs._file


# -- layers in several precisions


def store_of(executor: Any) -> BlockStore:
    """Return the `BlockStore` that holds an executor's parameters."""
    return executor._builder._store


def held_variants(store: BlockStore) -> Mapping[tuple[str, str], Mapping[str, Any]]:
    """Return the variants that a `BlockStore` holds in the host's memory, by block and precision."""
    held = store._held
    return {name: list(held.cuts(*name).values())[-1] for name in held.names}


def held_degrees(store: BlockStore, block: str, precision: str) -> set[int]:
    """Return the degrees that a `BlockStore` holds cuts of a variant for."""
    return set(store._held.cuts(block, precision))


def references_in(store: BlockStore) -> dict[tuple[str, str, Any], int]:
    """Return the number of references to each device copy of a `BlockStore`, by block, precision and placement.

    Copies that are only kept are left out.
    """
    return {key: len(copy.references) for key, copy in store._copies.items() if copy.references}


def wrap_block_reads(patch: pytest.MonkeyPatch, store: Any, wrap: Callable[[Callable], Callable]) -> None:
    """Replace the method with which a `BlockStore`, or all of the class, reads blocks from the checkpoint."""
    patch.setattr(store, "_read", wrap(store._read))
    if isinstance(store, BlockStore):
        patch.setattr(store._held, "_read", store._read)


def wrap_shard_copies(patch: pytest.MonkeyPatch, store: BlockStore, wrap: Callable[[Callable], Callable]) -> None:
    """Replace the method with which a `BlockStore` makes the shares of one device from copies on devices."""
    patch.setattr(store._copier, "_share", wrap(store._copier._share))


def wrap_exchange_calls(patch: pytest.MonkeyPatch, exchange: Any, wrap: Callable[[Callable], Callable]) -> None:
    """Replace the method with which a `KVExchange` runs a program on a segment."""
    patch.setattr(exchange, "_call", wrap(exchange._call))


# -- instances that come and go


def regrouping_of(built: Any) -> Any:
    """Return the procedure by which an engine with a control plane regroups its instances."""
    return built.control._controller._regrouper._regrouping


EXCHANGE_CALL = "_call"  # the method with which a `KVExchange` runs a program on a segment
MAKE_POOLS = "_pools"  # the method with which an `InstanceMaker` makes pools
RUN_BLOCKS = "_run_blocks"  # the method with which a `BlockExecutor` runs a stage that is not fused


def do_not_pace_copies(built: Any) -> None:
    """Let the copies for new instances never wait for steps."""
    built.host._throttle._busy = lambda: False


# -- telemetry


def kept_snapshots(smoother: Any) -> Any:
    """Return the snapshots that a `Smoother` remembers."""
    return [observation.snapshot for observation in (*smoother._kept, smoother._latest)]


# -- functions of modules


def example_prompt(client: Any) -> Any:
    """Return the prompt of the example request that `jaxserve serve` prints."""
    from jaxserve.cli import main

    return main._example_prompt(client)


def choose_devices(config: Any, model: Any) -> None:
    """Set the environment of XLA as `resolve` does."""
    from jaxserve.planning import resolve

    resolve._devices(resolve._num_devices(config), xla_multiplies=not resolve._native_multiplies_all(config, model))


def budget_on(config: Any, *devices: Any) -> int:
    """Return the memory budget (bytes) of a configuration for each of these devices."""
    from jaxserve.planning import resolve

    return resolve._budget(config, devices)


def ragged_matmul(x: Any, w: Any, sizes: Any) -> Any:
    """Return a grouped product computed by XLA's ragged dot."""
    from jaxserve.kernels.grouped_matmul import _ragged

    return _ragged(x, w, sizes)


def uniform_numbers(seeds: Any, positions: Any) -> Any:
    """Return the uniform number that XLA draws for each seed and position."""
    import jax

    from jaxserve.sampling.drawing import uniform

    return jax.vmap(uniform)(seeds, positions)


def native_library_path() -> Any:
    """Return the cached function that finds, or compiles, the native library."""
    from jaxserve.kernels.native import library

    return library._library


def wrap_file_reads(patch: pytest.MonkeyPatch, wrap: Callable[[Callable], Callable]) -> None:
    """Replace the function that reads bytes of safetensors files."""
    from jaxserve.checkpoint import safetensors

    patch.setattr(safetensors, "_read", wrap(safetensors._read))


def replace_lowered_kernels(patch: pytest.MonkeyPatch, kernels: dict) -> None:
    """Replace the table of the Pallas kernels that were lowered before."""
    from pallas_kernels import once

    patch.setattr(once, "_lowered", kernels)


def simulated_devices(built: Any) -> Mapping[str, Any]:
    """Return the `SimDevice`s of a simulation, by instance."""
    return {name: logged.wraps.device for name, logged in built.control._host.actuators.items()}


def masked_as_on_a_gpu(weights: Any, k: Any, p: Any) -> Any:
    """Return weights after top_k and top_p, with thresholds that are found as on a GPU."""
    from unittest.mock import patch

    from jaxserve.sampling import drawing

    def default(*operands: Any, default: Any, **_: Any) -> Any:
        return default(*operands)

    with patch.object(drawing.lax, "platform_dependent", default):
        return drawing.top_p_mask(drawing.top_k_mask(weights, k), p)


def pretend_gpu(monkeypatch: Any, on_gpu: bool) -> None:
    """Let products be traced as if JAX's default device were a GPU, or not."""
    from jaxserve.kernels import matmul

    monkeypatch.setattr(sys.modules[matmul.__module__], "runs_on_gpu", lambda: on_gpu)
