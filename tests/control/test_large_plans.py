"""Plans of a thousand instances: their YAML, and a table that a terminal can show."""

from dataclasses import replace

import yaml

from jaxserve.console.tables import Table
from jaxserve.control import Plan, block_chain, parallel_plan
from jaxserve.control.plan_yaml import MAX_RANGES, from_yaml, plan_rows, to_yaml
from tests.support.control import home_plan

PRECISIONS = ["bfloat16", "int4"] * 16


def large_plan(instances: int = 1000, tp: int = 1) -> Plan:
    chain = block_chain("bfloat16", PRECISIONS, "bfloat16")
    return parallel_plan(chain, kv_pages=1000, tp=tp, pp=1, dp=instances, devices=instances * tp)


def test_plan_of_a_thousand_instances_survives_yaml() -> None:
    plan = large_plan().with_precisions("500", {"layers.3": "int8"}).with_kv_pages("999", 17)
    plan = replace(plan.with_instance(plan.instance("7").with_max_num_seqs(3)), version=1)
    text = to_yaml(plan)
    assert from_yaml(text) == plan
    assert text.startswith("version: 1\ninstances:\n- name: '0'\n  stages:\n")


def test_yaml_is_the_same_with_and_without_the_library_in_c() -> None:
    plan = large_plan(3)
    assert to_yaml(plan) == yaml.safe_dump(yaml.safe_load(to_yaml(plan)), sort_keys=False)


def table(plan: Plan) -> list[str]:
    return Table(*plan_rows(plan)).lines()


def test_table_shows_instances_that_are_alike_as_one() -> None:
    plan = home_plan(2, dp=1000)
    plan = plan.with_precisions("998", {"layers.1": "int4"}).with_kv_pages("3", 20)
    rows = [line.split() for line in table(plan)[1:]]
    assert rows == [
        ["0-2,4-997,999", "0", "0-2,4-997,999", "401", "embed", "bfloat16"],
        ["layers.0-1", "bfloat16"],
        ["head", "bfloat16"],
        ["3", "0", "3", "20", "embed", "bfloat16"],
        ["layers.0-1", "bfloat16"],
        ["head", "bfloat16"],
        ["998", "0", "998", "401", "embed", "bfloat16"],
        ["layers.0", "bfloat16"],
        ["layers.1", "int4"],
        ["head", "bfloat16"],
    ]


def test_table_of_alternating_instances_stays_narrow() -> None:
    plan = home_plan(1, dp=100)
    for index in range(0, 100, 2):
        plan = plan.with_kv_pages(str(index), 20)
    even, *_, odd = (line for line in table(plan) if "embed" in line)
    assert even.startswith("0,2,4,6,8,10,12,14 and 42 more")
    assert odd.startswith("1,3,5,7,9,11,13,15 and 42 more")
    assert MAX_RANGES == 8


def test_table_has_the_limits_on_sequences_if_there_are_any() -> None:
    plan = home_plan(1, dp=2)
    assert "sequences" not in table(plan)[0]
    plan = plan.with_instance(plan.instance("1").with_max_num_seqs(4))
    rows = [line.split()[:2] for line in table(plan) if "embed" in line]
    assert rows == [["0", "-"], ["1", "4"]]


def test_names_of_instances_need_not_be_numbers() -> None:
    plan = home_plan(1, dp=2)
    plan = replace(plan, instances=tuple(replace(each, name=f"gpu{each.name}") for each in plan.instances))
    assert "gpu0,gpu1" in table(plan)[1]
