"""Bytes by device: any placement of a model's blocks, and the largest plans that fit."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from jaxserve.control import BlockPlan, InstancePlan, Plan, SizeTable, StagePlan
from jaxserve.control.diff import diff
from jaxserve.control.resources import validate, validate_instance
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import PlanError
from jaxserve.sim.cluster import resolve_cluster
from jaxserve.sim.shape import ModelShape
from tests.sim.machines import CPU, GPU, resolved

MEMORY = resolved(GPU, variants=("int8", "int4"), memory_gb=2.0).memory
RESOURCES = replace(MEMORY.resources(1e9), devices=6)
CHAIN = MEMORY.plan.instances[0].blocks
SMALL = ModelShape("small", 32_000, 1024, 12, 16, 8, 64, 2816, 4096, True)
UNEVEN = ModelShape("uneven", 151_936, 1024, 8, 16, 8, 64, 3072, 4096, False)


@st.composite
def placed(draw: st.DrawFn) -> InstancePlan:
    """Return an instance with any stages, precisions of layers and numbers of devices, which stages may share."""
    count = draw(st.integers(1, 4))
    cuts = sorted(draw(st.lists(st.integers(1, len(CHAIN) - 1), min_size=count - 1, max_size=count - 1, unique=True)))
    pages = draw(st.integers(RESOURCES.min_pages, RESOURCES.max_pages))
    stages = []
    for first, last in zip((0, *cuts), (*cuts, len(CHAIN)), strict=True):
        blocks = tuple(
            replace(block, precision=draw(st.sampled_from(RESOURCES.precisions(block.block) or (block.precision,))))
            for block in CHAIN[first:last]
        )
        tp = draw(st.sampled_from([1, 2, 4]))
        devices = draw(st.permutations(range(6)))[:tp]
        stages.append(StagePlan(blocks, tuple(devices), pages))
    return InstancePlan(tuple(stages))


@given(st.lists(placed(), min_size=1, max_size=3))
def test_a_devices_bytes_are_the_sums_over_the_stages_that_it_takes_part_in(instances: list[InstancePlan]) -> None:
    sums = {device: Counter() for device in range(6)}
    for stage in (stage for instance in instances for stage in instance.stages):
        for device in stage.devices:
            sums[device].update(RESOURCES.stage_entries(stage))
    used = {device: dict(sizes) for device, sizes in sums.items() if sizes}
    assert RESOURCES.device_entries(*instances) == used
    process = replace(RESOURCES, runtime=7).device_bytes(*instances)
    assert process == {device: 7 + sum(sizes.values()) for device, sizes in used.items()}, "the process counts once"


@given(placed(), placed())
def test_a_change_gives_and_takes_what_the_devices_of_both_plans_have(one: InstancePlan, other: InstancePlan) -> None:
    change, before, after = RESOURCES.change(one, other), *map(RESOURCES.device_bytes, (one, other))
    assert change.keys() == before.keys() | after.keys()
    assert all(after.get(device, 0) == before.get(device, 0) + size for device, size in change.items())
    assert RESOURCES.change(other, one) == {device: -size for device, size in change.items()}


@given(placed())
def test_capacity_is_what_the_fullest_device_holds_to_the_page(instance: InstancePlan) -> None:
    def with_pages(pages: int) -> InstancePlan:
        return InstancePlan(tuple(replace(stage, kv_pages=pages) for stage in instance.stages))

    limits = replace(RESOURCES, min_pages=1, max_pages=10**6, segments=())
    most = limits.kv_capacity(instance)
    if most:
        validate_instance(with_pages(most), limits)
    needs = limits.device_bytes(with_pages(most + 1))
    fullest = max(needs, key=lambda device: needs[device])
    message = rf"device {fullest} needs .* more than the budget of 2\.000 GB: {most or 'no'} KV pages fit"
    with pytest.raises(PlanError, match=message):
        validate_instance(with_pages(most + 1), limits)


@given(placed())
def test_numbers_of_a_recording_answer_like_the_sizes_they_are_from(instance: InstancePlan) -> None:
    table = replace(RESOURCES, sizes=SizeTable.of(RESOURCES.sizes, instance))
    small = RESOURCES.smallest(instance)
    for plan in (instance, small):
        assert table.device_bytes(plan) == RESOURCES.device_bytes(plan)
        assert table.kv_capacity(plan) == RESOURCES.kv_capacity(plan)
    assert table.max_capacity(instance) == RESOURCES.max_capacity(instance)


def test_a_device_may_have_several_stages_as_long_as_their_bytes_fit() -> None:
    (instance,) = resolved(GPU, pp=2, memory_gb=1.5).memory.plan.instances
    both = InstancePlan(tuple(replace(stage, devices=(3,), kv_pages=20) for stage in instance.stages))
    limits = replace(RESOURCES, min_pages=1)
    needed = limits.device_bytes(both)[3]
    validate(Plan(1, (both,)), replace(limits, budget=needed))
    with pytest.raises(PlanError, match=r"^device 3 needs .*, 0\.0 MB more than"):
        validate(Plan(1, (both,)), replace(limits, budget=needed - 1))
    with pytest.raises(PlanError, match=r"^device 3 needs"):
        validate(Plan(1, (both, both)), replace(limits, budget=needed))


def test_precision_that_a_layer_cannot_have_is_refused() -> None:
    (stage,) = MEMORY.plan.instances[0].stages
    blocks = (*stage.blocks[:3], BlockPlan("layers.2", "int3"), *stage.blocks[4:])
    with pytest.raises(PlanError, match=r"layers\.2 cannot have precision 'int3': choose from bfloat16, int8, int4"):
        validate_instance(InstancePlan((replace(stage, blocks=blocks),)), RESOURCES)


@pytest.mark.parametrize("pp", [2, 4])
def test_every_stage_of_a_pipeline_has_the_pages_of_the_fullest_and_a_ledger_of_its_own(pp: int) -> None:
    """Embedding and head are half of this model, so that the stages in between have room left."""
    config = EngineConfig(pp=pp, memory_gb=2.0, max_num_seqs=256)
    memory = resolve_cluster(config, UNEVEN, GPU).memory
    (instance,) = memory.plan.instances
    assert {stage.kv_pages for stage in instance.stages} == {instance.kv_pages}
    for stage in instance.stages:
        (device,) = stage.devices
        assert memory.ledgers[device].entries == memory.limits.stage_entries(stage)
    used = {device: ledger.used for device, ledger in memory.ledgers.items()}
    page = max(memory.limits.page_bytes(stage) for stage in instance.stages)
    assert memory.ledger.free < page, "the fullest one is full"
    assert max(used.values()) == memory.ledger.used
    if pp == 4:
        assert used[1] < used[3], "the head's device"
        assert memory.ledgers[1].free > 100 * page


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "segments"])
@pytest.mark.parametrize("hardware", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    "options",
    [{}, {"tp": 2}, {"pp": 3}, {"dp": 2}, {"tp": 2, "pp": 2, "dp": 2}, {"kv_pages": 40}, {"max_kv_pages": 100_000}],
    ids=str,
)
def test_the_largest_plan_can_be_reached_and_one_more_page_is_refused(elastic: bool, hardware, options: dict) -> None:
    config = EngineConfig(policy="morph", memory_gb=2.5, max_num_seqs=512, **options)
    memory = resolve_cluster(config, SMALL, hardware, elastic=elastic).memory
    resources, start = memory.resources(1e9), memory.plan
    small = tuple(map(resources.smallest, start.instances))
    (most,) = set(map(resources.max_capacity, start.instances))
    assert start.instances[0].kv_pages < most <= memory.reserved_kv_pages
    largest = replace(start, instances=small)
    for instance in small:
        largest = largest.with_kv_pages(instance.name, most)
    for instance in start.instances:
        reached = instance
        for transition in diff(instance, largest.instance(instance.name), resources):
            reached = transition.apply(reached)
            validate_instance(reached, resources)
            memory.ledgers.update(instance.name, memory.device_entries(reached))
        assert reached == largest.instance(instance.name)
    with pytest.raises(PlanError, match=rf"device \d+ needs .* {most} KV pages fit|it must be from \d+ .* to {most} "):
        validate(largest.with_kv_pages("0", most + 1), resources)
