"""Regroups: which instances end and begin, in which order devices merge, and what must be equal before."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from jaxserve.control import InstancePlan, Plan
from jaxserve.control.buddies import buddy_groups, in_buddy_order, placements_of
from jaxserve.control.regroup import (
    Kind,
    has_same_instances,
    kind_of,
    merged_devices,
    merged_plan,
    new_names,
    split_plans,
    structural_change,
)
from jaxserve.core.errors import PlanError
from tests.support.control import home_plan, machine

MACHINE = machine(max_pages=4000)
FOUR = home_plan(dp=4)


def instances_of(plan: Plan, *names: str) -> list[InstancePlan]:
    return [plan.instance(name) for name in names]


def plan_of(*instances: InstancePlan) -> Plan:
    return Plan(1, instances)


def test_a_merge_interleaves_the_devices_of_its_members() -> None:
    assert merged_devices([(0,), (1,)]) == (0, 1)
    assert merged_devices([(0, 1), (2, 3)]) == (0, 2, 1, 3), "each device keeps half of its shard"


def test_a_merged_instance_has_the_pages_of_all_members() -> None:
    members = instances_of(FOUR, "0", "1")
    whole = merged_plan(members, "4")
    assert (whole.name, whole.kv_pages, whole.stages[0].devices) == ("4", 802, (0, 1))
    assert kind_of(members, [whole]) is Kind.MERGE


@given(degree=st.sampled_from([1, 2, 4]), count=st.sampled_from([2, 4]))
def test_a_split_is_the_reverse_of_a_merge(degree: int, count: int) -> None:
    parts = [
        replace(
            FOUR.instances[0],
            name=str(index),
            stages=tuple(
                replace(stage, devices=tuple(range(index * degree, (index + 1) * degree)))
                for stage in FOUR.instances[0].stages
            ),
        )
        for index in range(count)
    ]
    whole = merged_plan(parts, "whole")
    assert split_plans(whole, [part.name for part in parts]) == tuple(parts)
    assert kind_of([whole], parts) is Kind.SPLIT


def test_pages_that_cannot_be_divided_are_refused() -> None:
    whole = merged_plan(instances_of(FOUR, "0", "1"), "4").with_kv_pages(801)
    with pytest.raises(PlanError, match="801 KV pages: these cannot be divided among 2 instances"):
        split_plans(whole, ["5", "6"])


def test_instances_on_other_devices_are_copied() -> None:
    (member,) = instances_of(home_plan(dp=1), "0")
    elsewhere = replace(member, name="9", stages=tuple(replace(stage, devices=(7,)) for stage in member.stages))
    assert kind_of([member], [elsewhere]) is Kind.COPY
    assert kind_of([], [elsewhere]) is Kind.COPY
    swapped = replace(
        merged_plan(instances_of(FOUR, "0", "1"), "4"),
        stages=tuple(replace(stage, devices=(0, 2)) for stage in member.stages),
    )
    assert kind_of(instances_of(FOUR, "0", "1"), [swapped]) is Kind.COPY


def test_only_instances_that_differ_take_part() -> None:
    whole = merged_plan(instances_of(FOUR, "0", "1"), "4")
    change = structural_change(FOUR, plan_of(whole, *instances_of(FOUR, "2", "3")), MACHINE)
    (regroup,) = change.regroups
    assert (regroup.before, regroup.after) == (("0", "1"), (whole,))
    assert (change.align, change.finish) == ({}, {})
    assert str(regroup) == "instance 0 and 1 -> 4 (devices 0, 1)"


def test_removals_come_before_additions() -> None:
    added = replace(
        FOUR.instances[0], name="9", stages=tuple(replace(s, devices=(8,)) for s in FOUR.instances[0].stages)
    )
    change = structural_change(FOUR, plan_of(added, *instances_of(FOUR, "1", "2", "3")), MACHINE)
    assert [str(regroup) for regroup in change.regroups] == ["remove instance 0", "add instance 9 (devices 8)"]


def test_members_get_the_precisions_of_the_merged_instance_first() -> None:
    swapped = FOUR.with_precisions("1", {"layers.3": "int4"})
    whole = merged_plan(instances_of(FOUR, "0", "1"), "4")
    change = structural_change(swapped, plan_of(whole, *instances_of(FOUR, "2", "3")), MACHINE)
    assert change.align == {"1": FOUR.instance("1")}


def test_members_get_equal_pages_first_and_the_merged_instance_the_rest_afterwards() -> None:
    uneven = FOUR.with_kv_pages("1", 301)
    whole = merged_plan(instances_of(FOUR, "0", "1"), "4").with_kv_pages(900)
    change = structural_change(uneven, plan_of(whole, *instances_of(FOUR, "2", "3")), MACHINE)
    assert change.align == {"0": FOUR.instance("0").with_kv_pages(301)}
    assert change.regroups[0].after == (whole.with_kv_pages(602),)
    assert change.finish == {"4": whole}


def test_an_instance_shrinks_to_the_pages_of_its_parts_before_it_splits() -> None:
    whole = merged_plan(instances_of(FOUR, "0", "1"), "4").with_kv_pages(901)
    parts = split_plans(whole.with_kv_pages(802), ["5", "6"])
    change = structural_change(plan_of(whole), plan_of(*parts), MACHINE)
    assert change.align == {"4": whole.with_kv_pages(802)}
    assert change.regroups[0].after == parts
    assert change.finish == {}


def test_changes_of_other_instances_are_made_at_the_end() -> None:
    whole = merged_plan(instances_of(FOUR, "0", "1"), "4")
    draining = FOUR.instance("2").with_draining(True)
    change = structural_change(FOUR, plan_of(whole, draining, FOUR.instance("3")), MACHINE)
    assert change.finish == {"2": draining}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (plan_of(FOUR.instance("0"), FOUR.instance("0")), "the plan names an instance twice: 0"),
        (plan_of(FOUR.instance("0"), replace(FOUR.instance("0"), name="7")), "instances 0 and 7 are both on device 0"),
    ],
)
def test_plans_without_a_meaning_are_refused(wanted: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        structural_change(FOUR, wanted, MACHINE)


def test_plans_with_equal_places_have_the_same_instances() -> None:
    assert has_same_instances(FOUR, FOUR.with_kv_pages("2", 300))
    assert not has_same_instances(FOUR, plan_of(*FOUR.instances[:3]))


def test_new_names_were_never_given() -> None:
    assert new_names(FOUR, 2) == ("4", "5")
    assert new_names(FOUR, 1, ["7", "spare"]) == ("8",)


def test_each_group_of_devices_has_one_order_step_by_step_or_at_once() -> None:
    start = home_plan(dp=8)
    groups = buddy_groups(start, 8)
    assert groups[2] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert groups[4][0] == (0, 2, 1, 3)
    for degree, devices in ((4, groups[4][0]), (8, groups[8][0])):
        members = in_buddy_order([plan for plan in start.instances if plan.devices <= set(devices)], devices)
        assert merged_plan(members, "9").stages[0].devices == devices, degree


def test_there_is_a_placement_for_each_merged_group() -> None:
    merged = placements_of(home_plan(dp=4), 4)
    assert [plan.stages[0].devices for plan in merged] == [(0, 1), (2, 3), (0, 2, 1, 3)]
    assert placements_of(home_plan(dp=4), 1) == ()
    assert [plan.stages[0].devices for plan in placements_of(home_plan(dp=3), 4)] == [(0, 1)], "the third has no buddy"
