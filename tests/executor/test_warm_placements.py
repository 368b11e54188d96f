"""Instances of equal kind share compiled programs, and placements are warmed before any instance uses them."""

from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest

from jaxserve.build import BuiltEngine, build
from jaxserve.compilation.programs import Program
from jaxserve.control import InstancePlan
from jaxserve.control.regroup import merged_plan
from jaxserve.core.block_names import is_layer
from jaxserve.core.config import EngineConfig
from jaxserve.executor import warm_placements
from jaxserve.executor.apart import ApartPlacement
from jaxserve.executor.executor import BlockExecutor
from jaxserve.executor.warmup import warm_variants
from tests.support.internals import run_on_padding
from tests.support.thorough import some

OPTIONS = {"load_format": "dummy", "max_num_seqs": 2, "max_num_batched_tokens": 2 + 32, "memory_gb": 4}


def moved(plan: InstancePlan, *devices: tuple[int, ...]) -> InstancePlan:
    """Return the plan of an instance like this one with its stages on other devices."""
    stages = (replace(stage, devices=at) for stage, at in zip(plan.stages, devices, strict=True))
    return replace(plan, name="moved", stages=tuple(stages))


def make(built: BuiltEngine, plan: InstancePlan) -> BlockExecutor:
    """Return the warm executor of an instance that is made while the engine serves."""
    executor = cast(BlockExecutor, built.maker.make(plan, built.maker.load(plan)).executor)
    executor.warm()
    warm_variants(executor, built.resolved.padded_model, plan, built.resolved.variants)
    return executor


class Told:
    """A compiler that compiles nothing, and knows what programs it was told."""

    def __init__(self) -> None:
        self.programs: set[Program] = set()

    def compile(self, program: Program, key: Hashable, *arguments: Any, static: tuple = ()) -> Any:
        """Take note of a program, and return its abstract results."""
        self.programs.add(program)
        return jax.eval_shape(lambda *arrays: program.function(*arrays, *static), *arguments)


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all programs that are lowered."""
    names: list[str] = []
    lower = Program.lower
    monkeypatch.setattr(Program, "lower", lambda self, *given: names.append(self.name) or lower(self, *given))
    return names


PLACED = {
    "pp": ({"pp": 2, "kv_cache_dtype": "int8"}, ((6,), (2,))),
    "one device": ({}, ((3,),)),
    "tp": ({"tp": 2}, ((5, 4),)),
    "tp and variants": ({"tp": 2, "variants": ("int4",)}, ((2, 7),)),
    "variants": ({"variants": ("int8",), "layer_precision": "1:int4"}, ((3,),)),
    "policy": ({"policy": "morph-performance"}, ((1,),)),
    "segments": ({"kernel_backend": "xla", "kv_pages": 20, "max_kv_pages": 40}, ((1,),)),
}


@pytest.mark.parametrize(("options", "devices"), some(PLACED.values(), 3), ids=some(PLACED, 3))
def test_instance_on_a_warm_placement_compiles_and_loads_nothing(
    tiny_model: Path, lowered: list[str], options: dict, devices: tuple[tuple[int, ...], ...]
) -> None:
    built = build(EngineConfig(model=tiny_model, **OPTIONS | options))
    (start,) = built.resolved.plan.instances
    other = moved(start, *devices)
    built.warm.wait()  # for page copies to other instances
    assert built.warm.is_warm(start)
    assert not built.warm.is_warm(other)
    before, arrays = dict(built.compilations.counts), len(jax.live_arrays())
    lowered.clear()
    built.warm.warm_in_background([other])
    built.warm.wait()
    assert built.warm.is_warm(other)
    assert lowered == [], "executables of the first placement are loaded for the other one"
    assert len(jax.live_arrays()) == arrays, "nothing is made or run on devices"
    counts = dict(built.compilations.counts)
    assert counts.pop("ahead") > before.pop("ahead")
    assert counts == before, "what runs in the background is counted apart"
    counts = dict(built.compilations.counts)
    executor = make(built, other)
    run_on_padding(executor, executor.buckets.all()[0])
    assert built.compilations.counts == counts
    executor.close()
    built.close()


def test_instance_that_is_made_again_compiles_and_loads_nothing(tiny_model: Path) -> None:
    built = build(EngineConfig(model=tiny_model, **OPTIONS))
    (plan,) = built.resolved.plan.instances
    make(built, moved(plan, (2,))).close()
    counts = dict(built.compilations.counts)
    make(built, moved(plan, (2,))).close()
    assert built.compilations.counts == counts
    built.close()


@pytest.mark.parametrize("cached", [True, False])
def test_further_instances_trace_nothing(tiny_model: Path, tmp_path: Path, lowered: list[str], cached: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", cached)
    try:
        config = EngineConfig(model=tiny_model, compile_cache=tmp_path, dp=3, **OPTIONS)
        built = build(config)
        counts = sum(built.compilations.counts.values())
        assert 0 < len(lowered) <= counts / 3
        built.close()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


def test_what_another_engine_has_traced_is_loaded_for_further_instances(
    tiny_model: Path, tmp_path: Path, lowered: list[str]
) -> None:
    other = build(EngineConfig(model=tiny_model, warmup=False, **OPTIONS))
    (plan,) = other.resolved.plan.instances
    executor = other.maker.make(plan, other.maker.load(plan)).executor
    for shape in executor.buckets.all():
        run_on_padding(executor, shape)
    logits = np.zeros((executor.buckets.rows[-1], executor.sampler.vocab), np.float32)
    executor.sampler.run_on_padding(jax.device_put(logits, executor.sampler.programs.sharding))
    executor.close()
    lowered.clear()
    built = build(EngineConfig(model=tiny_model, compile_cache=tmp_path, dp=3, **OPTIONS))
    assert 0 < len(lowered) == sum(built.compilations.counts.values()) / 3
    built.close()
    other.close()


def test_plans_wait_for_each_other_and_end_with_the_engine(tiny_model: Path) -> None:
    built = build(EngineConfig(model=tiny_model, **OPTIONS))
    (plan,) = built.resolved.plan.instances
    others = [moved(plan, (device,)) for device in range(1, 8)]
    built.warm.warm_in_background(others[:1])
    built.warm.warm_in_background(others[1:])
    built.close()
    assert not built.warm.is_warm(others[-1])


def test_what_failed_is_tried_again(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(EngineConfig(model=tiny_model, **OPTIONS))
    other = moved(built.resolved.plan.instances[0], (3,))
    with monkeypatch.context() as patch:
        patch.setattr(warm_placements, "_PatientCompiler", None)
        assert not built.warm.is_or_becomes_warm(other)
        built.warm.wait()
    assert not built.warm.is_or_becomes_warm(other)
    built.warm.wait()
    assert not built.warm.is_warm(other), "it is not tried again at once"
    with monkeypatch.context() as patch:
        patch.setattr(warm_placements, "RETRY_S", 0.0)
        patch.setattr(warm_placements, "_PatientCompiler", None)
        built.warm.warm_in_background([other])
        built.warm.wait()
    assert not built.warm.is_or_becomes_warm(other)
    built.warm.wait()
    assert built.warm.is_warm(other), "it is tried again after a while"
    built.close()


def test_merges_are_warm_for_the_precisions_that_layers_start_with(tiny_model: Path) -> None:
    """No layer may change its precision, so that there are no variants, and layers of one kind have several."""
    options = {"dp": 2, "max_tp": 2, "policy": "tp_transform", "layer_precision": "0:int8,1:int4", "warmup": False}
    built = build(EngineConfig(model=tiny_model, **OPTIONS | options))
    whole = merged_plan(built.resolved.plan.instances, "merged")
    (stage,) = whole.stages
    place, builder = ApartPlacement(built.maker.placement(stage), 2), built.maker.programs.builder
    told = Told()
    built.maker.compile_moves(whole, told)
    for block in stage.blocks:
        if is_layer(block.block):
            assert builder.apart_signature(block.block, block.precision, place).executable in told.programs
    built.close()
