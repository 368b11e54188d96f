"""Limits by degree: what instances may hold that are merged from others, and what their pools have room for."""

from dataclasses import replace

import pytest

from jaxserve.control import InstancePlan, Plan
from jaxserve.control.resources import validate
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError, MemoryBudgetError, PlanError
from jaxserve.core.numeric import ceil_div
from jaxserve.core.step_load import StepLoad
from jaxserve.planning.kv_pages import of_degree
from jaxserve.planning.memory import MemoryPlan
from jaxserve.sim.cluster import resolve_cluster
from jaxserve.sim.hardware import Hardware
from jaxserve.sim.shape import ModelShape
from tests.sim.machines import CPU, GPU, resolved

# On a device of 20 GB its weights leave room for few pages, and a quarter of them for many.
LARGE_CPU = replace(CPU, memory=16 << 30)
LLAMA = ModelShape.load("llama-3-8b")
MORPH = {"policy": "morph", "variants": ("int8", "int4")}
CHUNK = 512  # pages, on GPUs
LOAD = StepLoad(tokens=8, rows=8, sequences=8, context=4000, prefill=0)


def memory_of(**options) -> MemoryPlan:
    config = EngineConfig(**{"dp": 4, "max_tp": 4, "memory_gb": 20} | options)
    return resolve_cluster(config, LLAMA, GPU, elastic=options.get("max_kv_pages") == 600).memory


def instance_of(memory: MemoryPlan, degree: int, pages: int | None = None) -> InstancePlan:
    start = memory.plan.instances[0]
    pages = memory.config.degrees.members(degree) * start.kv_pages if pages is None else pages
    return of_degree(start, degree).with_kv_pages(pages)


@pytest.mark.parametrize(
    "options", [{}, MORPH, {"kv_pages": 300}, {"kv_pages": 300} | MORPH, {"kv_pages": 300, "max_kv_pages": 600}]
)
def test_a_merge_changes_no_byte_of_the_pools(options: dict) -> None:
    memory = memory_of(**options)
    limits = memory.limits
    for degree in (2, 4):
        assert memory.segments(degree) == tuple(degree * pages for pages in memory.segments(1))
        for pages in (memory.plan.instances[0].kv_pages, memory.min_pages(1), memory.max_pages(1)):
            one, merged = instance_of(memory, 1, pages), instance_of(memory, degree, degree * pages)
            before, after = (limits.stage_entries(instance.stages[0])["kv"] for instance in (one, merged))
            assert before == after
            assert degree * pages <= memory.max_pages(degree) <= sum(memory.segments(degree))


@pytest.mark.parametrize("options", [{}, MORPH, {"max_num_seqs": 8}])
def test_merged_instances_fill_their_devices_with_pages(options: dict) -> None:
    memory = memory_of(**options)
    limits, useful = memory.limits, memory.buckets.max_num_seqs * ceil_div(8192, 16)
    for degree in memory.degrees:
        instance = instance_of(memory, degree)
        entries = limits.stage_entries(instance.stages[0])
        free = limits.budget - sum(size for name, size in entries.items() if name != "kv")
        fitting = min(free // limits.page_bytes(instance.stages[0]), degree * useful + 1)
        found = limits.kv_capacity(instance)
        assert found <= fitting
        assert found >= 0.97 * fitting or degree == 1, "but for what whole segments leave"
        assert limits.max_capacity(instance) >= found
        full = Plan(1, (instance.with_kv_pages(found),))
        validate(full, limits)


def test_a_sequence_that_no_device_holds_alone_fits_into_a_merged_instance() -> None:
    memory = memory_of(kv_pages=100)
    assert [memory.max_len(degree) for degree in memory.degrees] == [1600, 8192, 8192]
    assert memory.max_model_len == 1600
    assert [memory.min_pages(degree) for degree in memory.degrees] == [101, 513, 513]
    assert memory_of(kv_pages=100, max_model_len=8000).max_len(4) == 8000
    with pytest.raises(ConfigError, match=r"max_model_len is 8000: it must be at most 1600, .* \(kv_pages\)"):
        memory_of(kv_pages=100, max_model_len=8000, max_tp=1)
    with pytest.raises(ConfigError, match=r"max_model_len is 8000: it must be at most 6384, .* in 399 KV pages"):
        memory_of(kv_pages=99, max_kv_pages=99, max_model_len=8000)
    with pytest.raises(MemoryBudgetError, match="--max-model-len"):
        memory_of(max_model_len=8000, memory_gb=6)


@pytest.mark.parametrize("hardware", [LARGE_CPU, GPU])
@pytest.mark.parametrize("options", [{}, {"policy": "morph"}, {"max_num_seqs": 512}])
def test_what_instances_hold_at_the_start_fits_when_they_have_merged(hardware: Hardware, options: dict) -> None:
    """With many slots, a step of a merged instance needs more memory than a small model gains by being split."""
    runtime = resolved(hardware, dp=2, max_tp=2, memory_gb=8, **options).memory.limits.runtime / 1e9
    tight = resolved(hardware, dp=2, max_tp=2, memory_gb=runtime + 0.15, **options).memory
    validate(tight.plan, tight.limits)
    needed = tight.limits.device_bytes(instance_of(tight, 2))
    assert max(needed.values()) <= tight.limits.budget
    assert tight.limits.kv_capacity(instance_of(tight, 2)) >= instance_of(tight, 2).kv_pages
    assert tight.max_len(2) >= tight.max_len(1) >= 16


def test_plans_keep_the_limits_of_their_degree() -> None:
    memory = memory_of(kv_pages=100)
    limits = memory.resources(1e9)
    validate(memory.plan, limits)
    with pytest.raises(PlanError, match="has 404 KV pages: it must be from 513"):
        validate(Plan(1, (instance_of(memory, 4),)), limits)
    validate(Plan(1, (instance_of(memory, 4, 513),)), limits)
    with pytest.raises(PlanError, match=r"has 513 KV pages: it must be from 101 .* to 101"):
        validate(Plan(1, (instance_of(memory, 1, 513),)), limits)
    with pytest.raises(PlanError, match=r"has 8 devices: it must have one of 1, 2, 4 \(tp, max_tp\)"):
        validate(Plan(1, (of_degree(memory.plan.instances[0], 8),)), limits)


def test_pages_that_the_user_chose_grow_only_by_what_a_merge_frees() -> None:
    memory = memory_of(kv_pages=100)
    limits, four = memory.resources(1e9), instance_of(memory, 4)
    entries = [limits.stage_entries(instance_of(memory, degree).stages[0]) for degree in (1, 4)]
    freed = sum(entries[0].values()) - sum(entries[1].values())
    assert limits.kv_capacity(four) <= 404 + freed // limits.page_bytes(four.stages[0])
    assert limits.kv_capacity(four) > 404 + 0.97 * freed // limits.page_bytes(four.stages[0])


def test_a_merged_instance_has_the_slots_of_its_members() -> None:
    memory = memory_of(max_num_seqs=6)
    assert [memory.buckets_of(degree).max_num_seqs for degree in memory.degrees] == [6, 12, 24]
    assert len({memory.buckets_of(degree).max_tiles for degree in memory.degrees}) == 1
    scheduler, table = memory.scheduler(instance_of(memory, 4))
    assert (scheduler.limits.max_num_seqs, table.rows.shape) == (24, (24, 512))
    assert (scheduler.pages.min_pages, scheduler.pages.max_pages) == (memory.min_pages(4), memory.max_pages(4))


def test_the_ledger_has_room_for_the_parts_that_move_while_instances_merge() -> None:
    memory = memory_of()
    sizes, stage = memory.sizes, instance_of(memory, 1).stages[0]
    head = sizes.block("head", "bfloat16", 2)
    assert head > sizes.block("layers.0", "bfloat16", 2)
    page = memory.limits.page_bytes(stage) // LLAMA.num_layers
    assert memory.ledger.entries["exchange"] == head + 2 * CHUNK * page
    assert "exchange" not in memory_of(max_tp=None).ledger.entries


def test_one_degree_has_the_numbers_of_an_engine_that_never_merges() -> None:
    for options in ({}, MORPH, {"kv_pages": 300, "max_kv_pages": 600}):
        alone, named = memory_of(max_tp=None, **options), memory_of(max_tp=1, **options)
        assert alone.plan == named.plan
        assert alone.ledger.entries == named.ledger.entries
        for memory in (alone, named):
            assert memory.limits.degrees == ()
            limits = memory.limits.limits_of(1)
            assert (limits.min_pages, limits.max_pages) == (memory.limits.min_pages, memory.limits.max_pages)
            assert limits.max_len == memory.max_model_len


def test_costs_of_steps_are_known_at_every_degree() -> None:
    cluster = resolve_cluster(EngineConfig(dp=4, max_tp=4, memory_gb=20), LLAMA, GPU)
    one, four = (cluster.costs.of(instance_of(cluster.memory, degree)) for degree in (1, 4))
    assert 0 < four.seconds(LOAD) < one.seconds(LOAD)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "morph"},
        {"kv_pages": 40},
        {"kv_pages": 40, "policy": "morph"},
        {"kv_pages": 40, "max_kv_pages": 90},
        {"precision": "int4"},
    ],
)
@pytest.mark.parametrize("spare", [0.08, 1.0])
def test_limits_by_degree_are_those_of_the_real_engine(options: dict, spare: float) -> None:
    """A simulated device has the memory for arrays that a real one has, `spare` GB."""
    from jaxserve.planning.resolve import resolve  # loads JAX, which the simulator does not

    config = EngineConfig(dp=2, max_tp=2, memory_gb=8, **options)
    runtime = resolved(LARGE_CPU, **vars(config)).memory.ledger.entries["runtime"] / 1e9
    simulated = resolved(LARGE_CPU, **vars(config) | {"memory_gb": spare + runtime}).memory
    runtime = resolve(config).ledger.entries["runtime"] / 1e9
    real = resolve(replace(config, memory_gb=2 * (spare + runtime) + 1e-9))
    if not real.granule:
        pytest.skip("the native kernels are not there: pools are not elastic")
    assert simulated.limits.degrees == real.limits.degrees
    for degree in (1, 2):
        entries = [memory.limits.stage_entries(instance_of(memory, degree).stages[0]) for memory in (simulated, real)]
        assert entries[0] == entries[1]
