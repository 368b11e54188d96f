"""Variants in pinned memory: held once for all instances, copied from there, and pageable where pinning fails.

CPU devices list pinned memory as GPUs do. These tests tell them to use it.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.build import build
from jaxserve.core.config import EngineConfig
from jaxserve.core.sampling import SamplingParams
from jaxserve.executor.block_store import BlockStore
from jaxserve.executor.host_memory import PINNED, HostShards, PinnedMemory, pinned_memory
from jaxserve.parallel.placement import Placement
from tests.actuator.adapted import Adapted, in_all_instances
from tests.support.internals import held_variants, store_of, wrap_block_reads
from tests.support.thorough import some

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1 + 32,
    "memory_gb": 8,
    "kv_pages": 40,
    "max_model_len": 128,
    "policy": "manual",
    "variants": ("int4",),
    "warmup": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
BLOCKS = ("layers.0", "layers.1", "layers.2")


def pinned(device: jax.Device) -> str:
    return PINNED


def leaves(parameters: Mapping[str, Any]) -> list[Any]:
    return jax.tree.leaves(dict(parameters))


@pytest.mark.parametrize(
    ("platform", "kinds", "expected"),
    [
        ("gpu", ("device", "pinned_host"), PINNED),
        ("tpu", ("device", "pinned_host", "unpinned_host"), PINNED),
        ("gpu", ("device",), None),
        ("cpu", ("device", "pinned_host", "unpinned_host"), None),
    ],
)
def test_pinned_memory_is_used_where_the_device_is_not_the_host(platform, kinds, expected):
    memories = [SimpleNamespace(kind=kind) for kind in kinds]
    assert pinned_memory(SimpleNamespace(platform=platform, addressable_memories=lambda: memories)) == expected


@pytest.mark.parametrize("degrees", some([{}, {"tp": 2, "pp": 2}, {"dp": 2}, {"tp": 2, "dp": 2}], 2))
def test_layers_swap_from_pinned_memory_while_requests_run(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, degrees: dict[str, int]
) -> None:
    """Layers change to another plan and back during answers. Variants are read once and freed at the end."""
    reads: Counter[tuple[str, str]] = Counter()

    def count_reads(read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(store: BlockStore, block: str, precision: str, *between: Any) -> Any:
            reads[block, precision] += block in BLOCKS
            return read(store, block, precision, *between)

        return counted

    wrap_block_reads(monkeypatch, BlockStore, count_reads)
    built = build(EngineConfig(model=tiny_model, **(OPTIONS | degrees)), host_memory=pinned)
    # The ledger is that of a CPU without pinned memory, where instances share the variants.
    adapted = Adapted(built, bytes_checked=False)
    kept = held_variants(adapted.store)
    assert kept.keys() == {(block, precision) for block in BLOCKS for precision in ("float32", "int4")}
    arrays = [leaf for variant in kept.values() for leaf in leaves(variant)]
    assert {leaf.sharding.memory_kind for leaf in arrays} == {PINNED}
    assert adapted.store.held_bytes == sum(leaf.nbytes for leaf in arrays)

    start, small = adapted.start, dict.fromkeys(BLOCKS, "int4")
    other = in_all_instances(start, lambda instance: instance.with_precisions(small))
    tokens: dict[str, tuple[int, ...]] = {}
    ids = [adapted.add(tuple(range(3 + seed, 43 + seed)), GREEDY) for seed in range(3)]
    adapted.run(tokens, [other, start])
    assert {len(tokens[request]) for request in ids} == {30}
    adapted.change(other)
    assert [outcome.error for outcome in adapted.outcomes if outcome.error] == []
    for steps in built.instances:
        loaded_blocks = [loaded for loaded in steps.executor.blocks if loaded.block in BLOCKS]
        assert len(loaded_blocks) == len(BLOCKS)
        assert {loaded.precision for loaded in loaded_blocks} == {"int4"}
        for loaded in loaded_blocks:
            assert {leaf.sharding.memory_kind for leaf in loaded.leaves} == {"device"}
            assert all(leaf.sharding.device_set == set(loaded.placement.devices) for leaf in loaded.leaves)
            expected = {leaf.tobytes() for leaf in map(np.asarray, leaves(kept[loaded.block, "int4"]))}
            assert {np.asarray(leaf).tobytes() for leaf in loaded.leaves} == expected
    adapted.change(start)
    assert not any(leaf.is_deleted() for leaf in arrays)
    assert +reads == Counter(kept.keys()), "each once, for all instances"
    built.close()
    assert all(leaf.is_deleted() for leaf in arrays)


def test_copy_from_pinned_memory_is_paced_after_each_array(tiny_model: Path) -> None:
    built = build(EngineConfig(model=tiny_model, **OPTIONS), host_memory=pinned)
    copied: list[int] = []
    executor = built.instances[0].executor
    held = leaves(held_variants(store_of(executor))["layers.1", "int4"])
    loaded = executor.prepare("layers.1", "int4", copied=copied.append)
    assert sorted(copied) == sorted(leaf.nbytes for leaf in held)
    loaded.free()
    assert all(leaf.is_deleted() for leaf in loaded.leaves)
    assert not any(leaf.is_deleted() for leaf in held)
    built.close()


def test_variants_on_cpu_are_not_pinned(tiny_model: Path) -> None:
    built = build(EngineConfig(model=tiny_model, **OPTIONS))
    held = leaves(held_variants(store_of(built.instances[0].executor))["layers.0", "int4"])
    assert held
    assert all(isinstance(leaf, HostShards) for leaf in held)
    built.close()


def test_unusable_pinned_memory_falls_back_to_pageable_memory(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        built = build(EngineConfig(model=tiny_model, **OPTIONS), host_memory=lambda device: "nowhere")
    assert caplog.text.count("variants stay in pageable memory, not in nowhere") == 1
    kept = leaves(held_variants(store_of(built.instances[0].executor))["layers.0", "int4"])
    assert kept
    assert all(isinstance(leaf, np.ndarray) for leaf in kept)
    adapted = Adapted(built)
    adapted.change(adapted.plan.with_precisions("0", dict.fromkeys(BLOCKS, "int4")))
    assert [outcome.error for outcome in adapted.outcomes] == [None] * 3
    built.close()


SHARDINGS = {"weight": Placement((jax.devices()[0],)).sharding()}


def test_full_pinned_memory_leaves_remaining_variants_pageable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pinning is not tried for the remaining variants, and the log says so once."""
    tried, put = [], jax.device_put

    def second_fails(*args: Any) -> Any:
        tried.append(args)
        if len(tried) == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of pinned memory")
        return put(*args)

    monkeypatch.setattr(jax, "device_put", second_fails)
    memory = PinnedMemory(PINNED)
    with caplog.at_level(logging.WARNING):
        kept = [memory.pin({"weight": np.ones(8)}, SHARDINGS)["weight"] for _ in BLOCKS]
    assert [type(leaf) is np.ndarray for leaf in kept] == [False, True, True]
    assert len(tried) == 2
    assert caplog.text.count("RESOURCE_EXHAUSTED") == len(caplog.records) == 1


def test_pinned_variants_leave_pinned_memory_for_transfers(caplog: pytest.LogCaptureFixture) -> None:
    memory = PinnedMemory(PINNED, max_bytes=100)
    with caplog.at_level(logging.WARNING):
        kept = [memory.pin({"weight": np.ones(6)}, SHARDINGS)["weight"] for _ in BLOCKS]
    assert [type(leaf) is np.ndarray for leaf in kept] == [False, False, True]
    assert "too little pinned memory for transfers" in caplog.text


@pytest.mark.parametrize("degrees", [{"pp": 2, "dp": 2}, {"tp": 2, "dp": 2}])
def test_pinned_memory_reaches_all_placements_of_instances(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, degrees: dict[str, int]
) -> None:
    built = build(EngineConfig(model=tiny_model, **(OPTIONS | degrees)), host_memory=pinned)
    assert "pageable" not in caplog.text
    built.close()
