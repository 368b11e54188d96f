"""Transitions while requests run: nothing is lost, mixed up or compiled."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from jaxserve.actuator import Throttle
from jaxserve.build import build
from jaxserve.checkpoint import Checkpoint
from jaxserve.control.plan import Plan
from jaxserve.core.config import EngineConfig
from jaxserve.core.sampling import SamplingParams
from jaxserve.planning.resolve import resolve
from jaxserve.telemetry import Snapshot
from tests.actuator.adapted import (
    GREEDY,
    OPTIONS,
    PRECISIONS,
    Adapted,
    addresses,
    in_all_instances,
    prompt,
    target_of,
    with_layer_precisions,
)
from tests.actuator.mixed import MixedReference
from tests.support.internals import held_variants, wrap_block_reads
from tests.support.sizes import page_bytes
from tests.support.thorough import THOROUGH, some


def test_layer_swapped_during_an_answer_computes_the_following_tokens(adapted: Adapted, mixed: MixedReference) -> None:
    compiled = dict(adapted.built.compilations.counts)
    tokens: dict[str, tuple[int, ...]] = {}
    p = prompt(1, 50)
    long = replace(GREEDY, max_tokens=180)  # for an actuator that gets little of the machine
    request = adapted.add(p, long)
    adapted.run(tokens, [with_layer_precisions(adapted.plan, ("int4", "float32", "int8"))])
    assert adapted.built.compilations.counts == compiled
    assert len(tokens[request]) == 180
    mixed.check(adapted.runs[request], p, tokens[request])
    (run,) = adapted.runs[request]
    assert len({tuple(sorted(precisions.items())) for precisions in run.in_force}) > 1, "it did change"
    assert [outcome.error for outcome in adapted.outcomes] == [None, None]


def test_every_step_runs_the_precisions_of_one_plan(adapted: Adapted, mixed: MixedReference) -> None:
    """Layers used without a copy change between the same two steps, in both directions."""
    wanted = [
        with_layer_precisions(adapted.plan, precisions) for precisions in [("int4", "int8", "int4"), ("float32",) * 3]
    ]
    tokens, p = {}, prompt(41, 50)
    request = adapted.add(p, replace(GREEDY, max_tokens=180))
    adapted.run(tokens, list(wanted))
    (run,) = adapted.runs[request]
    ran = [tuple(precisions[f"layers.{layer}"] for layer in range(3)) for precisions in run.in_force]
    assert [each for each, _ in itertools.groupby(ran)] == [
        ("float32",) * 3,
        ("int4", "int8", "int4"),
        ("float32",) * 3,
    ]
    assert [outcome.error for outcome in adapted.outcomes] == [None] * 6
    mixed.check(adapted.runs[request], p, tokens[request])


targets = st.lists(
    st.tuples(st.tuples(*[st.sampled_from(PRECISIONS)] * 3), st.integers(25, 80)), min_size=1, max_size=12
)


@settings(
    max_examples=50 if THOROUGH else 10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(targets, st.sets(st.integers(0, 20)), st.integers(1, 6), st.lists(st.integers(0, 120)), st.integers(0, 2**16))
def test_answers_under_any_sequence_of_plans_match_the_reference(
    adapted: Adapted, mixed: MixedReference, wanted: list, failing: set, requests: int, leaving: list, seed: int
) -> None:
    """Some commits fail, and clients go away meanwhile. Requests share pages of their prompts."""
    rng, tokens, commits = np.random.default_rng(seed), {}, itertools.count()
    prompts = {}
    for number in range(requests):
        p = (*prompt(0, int(rng.choice([0, 40]))), *prompt(seed + number, int(rng.integers(1, 120))))
        prompts[adapted.add(p, replace(GREEDY, n=int(rng.choice([1, 1, 3]))))] = p
    gone = dict(zip(prompts, leaving, strict=False))
    plans = [with_layer_precisions(adapted.plan, precisions).with_kv_pages("0", pages) for precisions, pages in wanted]

    core, in_force = adapted.steps.core, adapted.built.in_force
    replan = core.replan

    def failing_replan(salt: str, plan_fields: Snapshot, *cost: Any) -> None:
        replan(salt, plan_fields, *cost)
        if plan_fields.plan_version > in_force.version and next(commits) in failing:  # it is not being undone
            raise MemoryError("none left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "replan", failing_replan)
        adapted.run(tokens, plans, gone)
        adapted.wait()
    for request, p in prompts.items():
        if request not in gone:
            assert len(tokens[request]) == 60
            mixed.check(adapted.runs[request], p, tokens[request])
    errors = {outcome.error for outcome in adapted.outcomes if outcome.error}
    # in use; beyond the budget; of a commit
    assert all("pages" in error or "budget" in error or "none left" in error for error in errors), errors
    scheduler = adapted.steps.core.scheduler
    assert scheduler.pages.used == 0
    assert scheduler.idle


def test_pool_resizes_do_not_change_tokens(adapted: Adapted) -> None:
    prompts = [prompt(seed, 30 + 10 * seed) for seed in range(6)]
    still: dict[str, tuple[int, ...]] = {}
    ids = [adapted.add(p, GREEDY) for p in prompts]
    adapted.run(still)
    moving: dict[str, tuple[int, ...]] = {}
    others = [adapted.add(p, GREEDY) for p in prompts]
    adapted.run(moving, [adapted.plan.with_kv_pages("0", pages) for pages in (80, 44, 61, 40, 72)])
    assert [moving[i] for i in others] == [still[i] for i in ids]


def test_pages_computed_after_a_pool_resize_are_shared(adapted: Adapted) -> None:
    p, tokens = prompt(21, 50), {}
    request = adapted.add(p, GREEDY)
    for _ in range(5):
        adapted.step(tokens)
    assert len(tokens[request]) < 14, "the fifth page is not full yet"
    adapted.run(tokens, [adapted.plan.with_kv_pages("0", 60)])
    adapted.add((*p, *tokens[request]), SamplingParams(max_tokens=1))
    while not (outputs := adapted.engine.step()):
        pass
    assert outputs[0].num_cached_tokens == 96, "all full pages of 110 tokens"
    assert adapted.plan.instances[0].kv_pages == 60


def test_quantised_layer_on_cpu_is_used_without_a_copy(adapted: Adapted) -> None:
    """The host is the device, so nothing is copied, and a replaced layer stays available for the next swap."""
    executor, used = adapted.steps.executor, []
    for _ in range(2):
        adapted.change(with_layer_precisions(adapted.plan, ("float32", "int4", "float32")))
        assert adapted.runs_in_place(executor.blocks[2])
        used.append(addresses(executor.blocks[2].leaves))
        adapted.change(adapted.start)
        assert not adapted.runs_in_place(executor.blocks[2])
    assert used[0] == used[1]


def test_swap_without_a_copy_is_paced(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python code of a swap would otherwise take a core from running steps."""
    paced = []
    monkeypatch.setattr(Throttle, "worked", lambda throttle: paced.append(throttle))
    adapted.change(with_layer_precisions(adapted.plan, ("int4", "int4", "int4")))
    assert len(paced) == 3 + 3, "before each layer is prepared, and after each is freed"


@pytest.mark.parametrize("start", ["float32", "int8"])
def test_ledger_counts_every_byte_of_a_layer_once(tiny_model: Path, start: str) -> None:
    """Layers in use count as weights, and kept layers next to them as variants.

    That holds too where layers start in fewer bits, which are not loaded a second time to be kept.
    """
    built = build(EngineConfig(model=tiny_model, warmup=False, layer_precision=f"0-1:{start}", **OPTIONS))
    adapted = Adapted(built)
    assignments = [(start, start, "float32"), ("int4", start, "int8"), ("int4",) * 3, ("float32",) * 3]
    for precisions in [*assignments, assignments[0]]:
        adapted.change(with_layer_precisions(adapted.plan, precisions))
        loaded_blocks = adapted.steps.executor.blocks
        running = {leaf.unsafe_buffer_pointer(): leaf.nbytes for loaded in loaded_blocks for leaf in loaded.leaves}
        held = [leaf for variant in held_variants(adapted.store).values() for leaf in jax.tree.leaves(dict(variant))]
        kept = {part.ctypes.data: part.nbytes for leaf in held for part in leaf.parts}
        entries = built.resolved.ledger.entries
        assert len(held_variants(adapted.store)) == 6
        assert entries["weights"] == sum(running.values())
        assert entries["weights"] + entries["variants"] == sum((running | kept).values())
        assert adapted.store.held_bytes == sum(kept.values())
        assert all(adapted.runs_in_place(loaded) == (loaded.precision in ("int8", "int4")) for loaded in loaded_blocks)
    assert [outcome.error for outcome in adapted.outcomes if outcome.error] == []
    adapted.close()
    built.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_layer_restored_to_full_precision_is_in_memory_once(tiny_model: Path, tp: int) -> None:
    """The arrays that were read become the block.

    Where the block is split there is room for both, which `Adapted` checks.
    """
    options = {"tp": tp, "max_num_seqs": 1, "max_num_batched_tokens": 1 + 32, "memory_gb": 8, "warmup": False}
    built = build(EngineConfig(model=tiny_model, **(OPTIONS | options)))
    adapted = Adapted(built)
    adapted.change(with_layer_precisions(adapted.plan, ("float32", "int4", "float32")))
    found = []

    def noted(read: Callable[..., Mapping[str, Any]]) -> Callable[..., Mapping[str, Any]]:
        def reading(*args: Any) -> Mapping[str, Any]:
            found.append(read(*args))
            return found[-1]

        return reading

    with pytest.MonkeyPatch.context() as patch:
        wrap_block_reads(patch, adapted.store, noted)
        adapted.change(adapted.start)
    assert [outcome.error for outcome in adapted.outcomes] == [None, None]
    if tp == 1:
        (arrays,) = found
        leaves = adapted.steps.executor.blocks[2].leaves
        assert {leaf.unsafe_buffer_pointer() for leaf in leaves} == {array.ctypes.data for array in arrays.values()}
    adapted.close()
    built.close()


def test_snapshot_and_ledger_follow_the_plan(adapted: Adapted) -> None:
    core, ledger = adapted.steps.core, adapted.ledger
    full = dict(ledger.entries)
    freed = adapted.resources.kv_capacity(with_layer_precisions(adapted.plan, ("int4",) * 3).instances[0])
    adapted.change(with_layer_precisions(adapted.plan, ("int4",) * 3).with_kv_pages("0", freed))
    assert core.snapshot.layers_by_precision == {"int4": 3}
    assert core.snapshot.kv_pages_total == freed - 1
    assert core.snapshot.plan_version == adapted.plan.version
    assert core.snapshot.weight_bytes == sum(loaded.nbytes for loaded in adapted.steps.executor.blocks)
    assert ledger.entries["weights"] < full["weights"]
    assert ledger.entries["weights"] == core.snapshot.weight_bytes
    adapted.change(adapted.start)
    assert ledger.entries == full


@pytest.mark.parametrize("dp", [1, 2])
def test_pool_grows_by_exactly_the_pages_that_swapped_layers_free(tiny_model: Path, dp: int) -> None:
    """A layer frees all its bytes, because its replacement is used without a copy."""
    room = {"max_kv_pages": None, "max_num_seqs": 8, "max_num_batched_tokens": 8 + 32}
    resolved = resolve(EngineConfig(model=tiny_model, dp=dp, **(OPTIONS | room)))
    resources, start = resolved.resources(copy_rate=1e9), resolved.plan
    small = replace(start, instances=with_layer_precisions(start, ("int4",) * 3).instances[:1] * dp)

    def beside_pages(plan: Plan) -> int:
        entries = resolved.device_entries(plan.instances[0])[0]
        return sum(entries.values()) - entries["kv"]

    freed, sizes = beside_pages(start) - beside_pages(small), resolved.layer_bytes
    assert freed == 3 * sizes["layers.0", "float32"]
    assert resources.kv_capacity(start.instances[0]) == 41
    assert resources.kv_capacity(small.instances[0]) == 41 + freed // page_bytes(resolved)
    assert resources.max_pages == resources.kv_capacity(small.instances[0]), "and have room for as many"


@pytest.mark.parametrize(("change", "steps"), [("swap", 1), ("shrink", 2)])
def test_replaced_arrays_are_freed_after_the_steps_that_use_them(adapted: Adapted, change: str, steps: int) -> None:
    """A shrink also waits for the step that the device runs after giving the memory back."""
    adapted.change(adapted.plan.with_kv_pages("0", 80))
    ledger, old, tokens = adapted.ledger, adapted.steps.executor.blocks[2], {}
    entries, wanted = dict(ledger.entries), target_of(change, adapted.plan)
    less = entries | adapted.built.resolved.device_entries(wanted.instances[0])[0]
    request = adapted.add(prompt(37, 60), GREEDY)
    adapted.commit_behind_a_step(wanted, tokens)
    for _ in range(steps):
        assert not adapted.settled()
        assert not any(leaf.is_deleted() for leaf in old.leaves)
        assert ledger.entries == entries
        adapted.step(tokens)
    while change == "shrink" and not adapted.settled():  # the actuator may learn late that a step has ended
        adapted.step(tokens)
    adapted.wait()
    assert [leaf.is_deleted() for leaf in old.leaves] == [change == "swap"] * len(old.leaves)
    assert ledger.entries == less
    adapted.run(tokens)
    assert len(tokens[request]) == 60


@pytest.mark.parametrize("degrees", some([{"tp": 2, "pp": 2}, {"dp": 2}], 1))
def test_layers_swap_under_tensor_pipeline_and_data_parallelism(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, degrees: dict[str, int]
) -> None:
    """Every instance changes to another plan and back during answers, without compiling.

    Each quantised layer is read once for all instances, and nothing is copied.
    """
    reads: Counter[str] = Counter()
    variant = Checkpoint.variant

    def counted(checkpoint: Checkpoint, block: str, precision: str, *args: Any) -> dict[str, Any]:
        reads[block] += precision == "int4"
        return variant(checkpoint, block, precision, *args)

    monkeypatch.setattr(Checkpoint, "variant", counted)
    options = OPTIONS | {"memory_gb": 8, "max_num_seqs": 1, "max_num_batched_tokens": 1 + 32, "variants": ("int4",)}
    built = build(EngineConfig(model=tiny_model, **(options | degrees)))
    built.warm.wait()
    adapted, compiled = Adapted(built), dict(built.compilations.counts)
    start, small = adapted.start, {f"layers.{layer}": "int4" for layer in range(3)}
    layers = [
        [block.block for block in stage.blocks if block.block.startswith("layers.")]
        for instance in start.instances
        for stage in instance.stages
    ]
    once = Counter({block for stage in layers for block in stage})
    assert +reads == once
    reads.clear()
    other = in_all_instances(start, lambda instance: instance.with_precisions(small).with_kv_pages(55))
    tokens: dict[str, tuple[int, ...]] = {}
    ids = [adapted.add(prompt(seed, 40), GREEDY) for seed in range(6)]
    adapted.run(tokens, [other, start])
    assert {len(tokens[request]) for request in ids} == {60}
    assert [outcome.error for outcome in adapted.outcomes if outcome.error] == []
    adapted.close()
    assert adapted.plan.instances == start.instances
    assert +reads == Counter(), "what is held is not read"
    assert built.compilations.counts == compiled
    for steps in built.instances:
        assert steps.core.snapshot.layers_by_precision == {"float32": 3}
        assert steps.core.scheduler.pages.num_pages == 41
        assert steps.core.scheduler.pages.used == 0
    built.close()
