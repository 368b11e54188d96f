"""Variants in pinned memory: kept once for all instances, copied from there, and pageable where pinning fails.

CPU devices list pinned memory as GPUs do. These tests tell them to use it.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxserve.actuator import LayerSource, pinned_memory, pinned_store
from jaxserve.actuator.pinned import PINNED, PinnedStore
from jaxserve.build import build
from jaxserve.calibration.pipeline import QuantizationSettings
from jaxserve.calibration.run import run
from jaxserve.checkpoint import Checkpoint, open_checkpoint
from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.config import EngineConfig
from jaxserve.core.sampling import SamplingParams
from tests.actuator.adapted import Adapted, in_all_instances
from tests.support.internals import layer_source_of, variants_in_memory, wrap_layer_reads

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


@pytest.mark.parametrize("degrees", [{}, {"tp": 2, "pp": 2}, {"dp": 2}, {"tp": 2, "dp": 2}])
def test_layers_swap_from_pinned_memory_while_requests_run(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, degrees: dict[str, int]
) -> None:
    """Layers change to another plan and back during answers. Variants are read once and freed at the end."""
    reads: Counter[tuple[str, str]] = Counter()

    def count_reads(read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(source: LayerSource, block: str, precision: str) -> Any:
            reads[block, precision] += 1
            return read(source, block, precision)

        return counted

    wrap_layer_reads(monkeypatch, count_reads)
    built = build(EngineConfig(model=tiny_model, **(OPTIONS | degrees)), host_memory=pinned)
    adapted, source = Adapted(built), layer_source_of(built.actuators["0"])
    kept = {(block, p): source.parameters(block, p) for block in BLOCKS for p in ("float32", "int4")}
    arrays = [leaf for variant in kept.values() for leaf in leaves(variant)]
    assert {leaf.sharding.memory_kind for leaf in arrays} == {PINNED}
    assert source.nbytes == sum(leaf.nbytes for leaf in arrays)

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
            assert loaded.owned == loaded.leaves, "a copy of what is kept, which is freed with the block"
            expected = {leaf.tobytes() for leaf in map(np.asarray, leaves(kept[loaded.block, "int4"]))}
            assert {np.asarray(leaf).tobytes() for leaf in loaded.leaves} == expected
    adapted.change(start)
    assert not any(leaf.is_deleted() for leaf in arrays)
    assert reads == Counter(kept.keys()), "each once, for all instances"
    built.close()
    assert all(leaf.is_deleted() for leaf in arrays)


def test_copy_from_pinned_memory_is_paced_after_each_array(tiny_model: Path) -> None:
    built = build(EngineConfig(model=tiny_model, **OPTIONS), host_memory=pinned)
    copied: list[int] = []
    parameters = layer_source_of(built.actuators["0"]).parameters("layers.1", "int4")
    loaded = built.instances[0].executor.prepare("layers.1", parameters, "int4", copied=copied.append)
    assert sorted(copied) == sorted(leaf.nbytes for leaf in leaves(parameters))
    loaded.free()
    assert not any(leaf.is_deleted() for leaf in leaves(parameters))
    built.close()


def test_variants_on_cpu_are_not_pinned(tiny_model: Path) -> None:
    for degrees, kind in (({}, jax.Array), ({"dp": 2}, np.ndarray)):
        built = build(EngineConfig(model=tiny_model, **(OPTIONS | degrees)))
        kept = leaves(layer_source_of(built.actuators["0"]).parameters("layers.0", "int4"))
        assert kept
        for leaf in kept:
            assert isinstance(leaf, kind)
            assert kind is np.ndarray or leaf.sharding.memory_kind == "device"
        built.close()


def test_unusable_pinned_memory_falls_back_to_pageable_memory(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        built = build(EngineConfig(model=tiny_model, **OPTIONS), host_memory=lambda device: "nowhere")
    assert caplog.text.count("variants stay in pageable memory, not in nowhere") == 1
    kept = leaves(layer_source_of(built.actuators["0"]).parameters("layers.0", "int4"))
    assert kept
    assert all(isinstance(leaf, np.ndarray) for leaf in kept)
    adapted = Adapted(built)
    adapted.change(adapted.plan.with_precisions("0", dict.fromkeys(BLOCKS, "int4")))
    assert [outcome.error for outcome in adapted.outcomes] == [None] * 3
    built.close()


def test_full_pinned_memory_leaves_remaining_variants_pageable(caplog: pytest.LogCaptureFixture) -> None:
    """Pinning is not tried for the remaining variants, and the log says so once."""
    tried = []

    def place(block: str, parameters: Mapping[str, Any], precision: str, memory: str) -> Mapping[str, Any]:
        tried.append(block)
        if len(tried) == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of pinned memory")
        return jax.device_put(dict(parameters), SingleDeviceSharding(jax.devices()[0], memory_kind=memory))

    keep = PinnedStore(place, PINNED)
    with caplog.at_level(logging.WARNING):
        kept = [keep(block, {"weight": np.ones(8)}, "int4")["weight"] for block in BLOCKS]
    assert [type(leaf) is np.ndarray for leaf in kept] == [False, True, True]
    assert tried == ["layers.0", "layers.1"]
    assert caplog.text.count("RESOURCE_EXHAUSTED") == len(caplog.records) == 1


def test_pinned_variants_leave_pinned_memory_for_transfers(caplog: pytest.LogCaptureFixture) -> None:
    keep = PinnedStore(lambda block, parameters, *where: jax.device_put(dict(parameters)), PINNED, 100)
    with caplog.at_level(logging.WARNING):
        kept = [keep(block, {"weight": np.ones(6)}, "int4")["weight"] for block in BLOCKS]
    assert [type(leaf) is np.ndarray for leaf in kept] == [False, False, True]
    assert "too little pinned memory for transfers" in caplog.text


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with prepared variants in int4."""
    model = tmp_path_factory.mktemp("prepared") / "model"
    shutil.copytree(bundled_model_path(), model, ignore=shutil.ignore_patterns("variants"))
    run(model, QuantizationSettings(("int4",), "rtn", 64))
    return model


@pytest.mark.parametrize("options", [{"policy": "manual", "variants": ("int4",)}, {"precision": "int4"}])
def test_variant_store_keeps_no_copy_of_variants_in_use(prepared: Path, options: dict[str, Any]) -> None:
    built = build(EngineConfig(model=prepared, warmup=False, max_num_seqs=1, memory_gb=2, **options))
    assert built.resolved.checkpoint.prepared is not None
    assert built.resolved.checkpoint.prepared.precisions == ("int4",)
    assert variants_in_memory(built.resolved.checkpoint.prepared) == {}
    built.close()


def test_pinned_prepared_variant_is_not_kept_in_the_store_too(prepared: Path) -> None:
    """The store keeps no second copy of a pinned variant."""
    checkpoint: Checkpoint = open_checkpoint(prepared)
    source = LayerSource(checkpoint, checkpoint.config, pin_full=True)
    assert checkpoint.prepared is not None
    first = checkpoint.prepared.layer(0, "int4")
    there = SingleDeviceSharding(jax.devices()[0], memory_kind=PINNED)
    keep = PinnedStore(lambda b, parameters, p, memory: jax.device_put(dict(parameters), there), PINNED)
    source.load("layers.0", "int4", keep)
    assert checkpoint.prepared.layer(0, "int4") is not first
    for kept, read in zip(leaves(source.parameters("layers.0", "int4")), leaves(first), strict=True):
        np.testing.assert_array_equal(kept, read)
    source.close()


def test_keeper_supports_all_placements_of_instances(tiny_model: Path) -> None:
    built = build(EngineConfig(model=tiny_model, **(OPTIONS | {"pp": 2, "dp": 2})))
    assert isinstance(pinned_store([steps.executor for steps in built.instances], PINNED), PinnedStore)
    built.close()
