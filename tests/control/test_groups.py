"""Groups: which device keeps which layers, what moves between devices, and the way back."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.control.groups import can_restore, group_placements, grouped_plan, restored_plans
from jaxserve.control.lane_moves import lane_moves, left_over, reverse, trades
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.regroup import Kind, kind_of, structural_change
from jaxserve.control.resources import validate
from jaxserve.core.block_names import is_layer
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import PlanError
from jaxserve.kvcache import JoinedIds
from jaxserve.sim.cluster import resolve_cluster
from jaxserve.sim.hardware import load_hardware
from jaxserve.sim.shape import ModelShape
from tests.sim.machines import GPU

MEMORY = resolve_cluster(EngineConfig(dp=8, memory_gb=24, max_pp=8), ModelShape.load("llama-3-8b"), GPU).memory
RESOURCES, START = MEMORY.limits, MEMORY.plan
ONE = START.instances[0]


def grouped(*members: InstancePlan, name: str = "g") -> InstancePlan:
    return grouped_plan(members, name, RESOURCES)


def layers(plan: InstancePlan) -> list[int]:
    return [sum(is_layer(block.block) for block in stage.blocks) for stage in plan.stages]


def devices(plan: InstancePlan) -> list[int]:
    return [device for stage in plan.stages for device in stage.devices]


def test_layers_are_divided_so_that_the_fullest_device_has_most_room() -> None:
    assert layers(grouped(*START.instances[:2])) == [16, 16]
    assert layers(grouped(*START.instances[:4])) == [8, 8, 8, 8]
    assert layers(grouped(*START.instances[:3])) == [10, 12, 10], "embedding and head need memory too"


def test_groups_that_join_keep_layers_that_they_have() -> None:
    pairs = [grouped(*START.instances[:2], name="8"), grouped(*START.instances[2:4], name="9")]
    whole = grouped(*pairs)
    assert devices(whole) == [0, 2, 1, 3]
    assert layers(whole) == [8, 8, 8, 8]
    assert (whole.lanes, whole.kv_pages) == (4, 4 * ONE.kv_pages)


def test_an_instance_joins_a_group_between_its_stages() -> None:
    whole = grouped(grouped(*START.instances[:2]), START.instances[2])
    assert devices(whole) == [0, 2, 1]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=3), st.data())
def test_every_layer_is_kept_once_and_every_lane_has_a_place(sizes: list[int], data: st.DataObject) -> None:
    instances = iter(data.draw(st.permutations(START.instances)))
    members = [
        next(instances) if size == 1 else grouped(*(next(instances) for _ in range(size)))
        for size in sizes
        if sum(sizes) <= 8
    ]
    if len(members) < 2:
        return
    whole = grouped(*members)
    assert [block for stage in whole.stages for block in stage.blocks] == list(ONE.blocks)
    assert kind_of(members, (whole,)) is Kind.DROP
    made = trades(lane_moves(members, whole))
    moved = [move for trade in made for move in (trade.move, trade.back) if move is not None]
    assert sorted(moved, key=str) == sorted(lane_moves(members, whole), key=str), "every move is in one trade"
    for trade in made:
        assert trade.back is None or (trade.back.source, trade.back.target) == (trade.move.target, trade.move.source)
    again = restored_plans(whole, [f"r{i}" for i in range(whole.lanes)], ONE)
    assert kind_of((whole,), again) is Kind.RESTORE
    assert {device for plan in again for device in plan.devices} == whole.devices
    back = reverse(lane_moves(again, whole))
    assert all(move.target == again[move.lane].stages[0].devices for move in back)


def test_equal_instances_trade_all_arrays_if_their_layers_divide() -> None:
    for count in (2, 4, 8):
        members = START.instances[:count]
        moves = lane_moves(members, grouped(*members))
        assert all(trade.back is not None for trade in trades(moves))
        assert left_over(moves, ONE, RESOURCES) == {}
    moves = lane_moves(START.instances[:3], grouped(*START.instances[:3]))
    layer = ONE.kv_pages * RESOURCES.page_bytes(ONE.stages[0]) // 32
    assert left_over(moves, ONE, RESOURCES) == {0: 2 * layer, 2: 2 * layer}
    assert left_over(reverse(moves), ONE, RESOURCES) == {1: 4 * layer}


def test_stages_have_equally_many_layers_if_these_divide() -> None:
    # The embedding and the head of this model take as much as several layers.
    config = EngineConfig(dp=8, memory_gb=36, max_pp=8)
    memory = resolve_cluster(config, ModelShape.load("qwen2.5-14b"), load_hardware("a800")).memory
    for count in (2, 4, 8):
        whole = grouped_plan(memory.plan.instances[:count], "g", memory.limits)
        assert layers(whole) == [48 // count] * count
        assert can_restore(whole, memory.plan.instances[0], memory.limits)


def test_a_group_cannot_be_restored_without_room_for_arrays_that_get_none_in_return() -> None:
    whole, full = grouped(*START.instances[:3]), ONE.with_kv_pages(RESOURCES.kv_capacity(ONE))
    assert layers(whole) == [10, 12, 10]
    assert not can_restore(whole, full, RESOURCES)


def test_a_plan_leads_to_a_group_and_back() -> None:
    whole = grouped(*START.instances[:2], name="8")
    whole = whole.with_kv_pages(RESOURCES.kv_capacity(whole) // 2 * 2)
    plan = Plan(2, (whole, *START.instances[2:]))
    validate(plan, RESOURCES)
    there = structural_change(START, plan, RESOURCES)
    assert (there.align, there.finish) == ({}, {}), "all pages are there at once"
    members = restored_plans(whole, ("9", "10"), ONE, ONE.kv_pages)
    back = structural_change(plan, Plan(3, (*members, *START.instances[2:])), RESOURCES)
    assert back.align == {"8": whole.with_kv_pages(2 * ONE.kv_pages)}


def test_a_group_keeps_the_precisions_that_its_devices_have() -> None:
    memory = resolve_cluster(
        EngineConfig(dp=2, memory_gb=24, max_pp=2, variants=("int4",), policy="manual"),
        ModelShape.load("llama-3-8b"),
        GPU,
    ).memory
    one, two = memory.plan.instances
    one, two = one.with_precisions({"layers.0": "int4"}), two.with_precisions({"layers.31": "int4", "layers.1": "int4"})
    whole = grouped_plan((one, two), "2", memory.limits)
    changed = {block for block, precision in whole.precisions.items() if precision == "int4"}
    assert changed == {"layers.0", "layers.31"}


def test_there_are_at_most_as_many_stages_as_layers() -> None:
    memory = resolve_cluster(EngineConfig(dp=4, kv_pages=60), ModelShape.load("llama-3-8b"), GPU).memory
    short = [plan.with_kv_pages(50) for plan in memory.plan.instances]
    one_layer = [
        InstancePlan(
            tuple(replace(stage, blocks=(stage.blocks[0], stage.blocks[1], stage.blocks[-1])) for stage in plan.stages),
            plan.name,
        )
        for plan in short
    ]
    with pytest.raises(PlanError, match="2 stages cannot divide 1 layers"):
        grouped_plan(one_layer[:2], "g", memory.limits)


def test_a_group_that_no_devices_can_make_is_refused() -> None:
    whole = grouped(*START.instances[:2], name="8")
    elsewhere = Plan(2, (whole, *START.instances[3:]))
    with pytest.raises(PlanError, match="has 2 lanes"):
        structural_change(Plan(1, (*START.instances[:1], *START.instances[2:])), elsewhere, RESOURCES)


def test_groups_are_foreseen_as_drop_plans_choose_them() -> None:
    found = group_placements(Plan(1, START.instances[:4]), 4, RESOURCES)
    assert [devices(plan) for plan in found] == [[0, 1], [2, 3], [0, 1, 2, 3]]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 200))
def test_joined_ids_can_be_reversed_and_keep_rows_together(lanes: list[int], page: int) -> None:
    ids = JoinedIds(tuple(lanes))
    for part, own in enumerate(lanes):
        joined = ids.joined(part, page)
        assert ids.own(part, joined) == page
        assert joined // ids.count == page // own


def test_an_instance_that_drains_joins_no_group_and_a_group_that_drains_becomes_instances_that_drain() -> None:
    first, second = START.instances[:2]
    with pytest.raises(PlanError, match=f"instance {second.name} is draining: .*undrain it first"):
        grouped(first, second.with_draining(True))
    parts = restored_plans(grouped(first, second).with_draining(True), ["a", "b"], first)
    assert [part.draining for part in parts] == [True, True]
