"""Changes of the set of instances by hand: what they lead to, and why some are impossible."""

from dataclasses import replace

import pytest

from jaxserve.control import Plan
from jaxserve.control.degree_limits import DegreeLimits
from jaxserve.control.plan_edits import PlanEdit, PlanEditor
from jaxserve.core.errors import PlanError
from jaxserve.core.step_shapes import Buckets
from tests.support.control import home_plan, machine

START = home_plan(dp=4)
SHAPES = Buckets(max_num_seqs=256, max_tiles=8, tile=32, min_rows=1, widths=(1,))


def limits(tp: int) -> DegreeLimits:
    return DegreeLimits(tp, 16 * 400 * tp, 2, 4000, 401 * tp, 4000, (), SHAPES)


def editor(*degrees: int, used: tuple[str, ...] = ()) -> PlanEditor:
    resources = replace(machine(max_pages=4000), devices=6, degrees=tuple(map(limits, degrees or (1, 2, 4))))
    return PlanEditor(START, resources, used)


def edited(plan: Plan, action: str, *names: str, **options: object) -> Plan:
    return editor().edited(plan, PlanEdit(action, names, **options))  # type: ignore[arg-type]


def devices(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {instance.name: instance.stages[0].devices for instance in plan.instances}


def test_a_merged_instance_gets_the_next_name_and_the_order_of_devices_that_is_compiled() -> None:
    assert devices(edited(START, "merge", "1", "0")) == {"4": (0, 1), "2": (2,), "3": (3,)}
    assert devices(edited(START, "merge", "0", "1", "2", "3")) == {"4": (0, 2, 1, 3)}
    assert devices(edited(START, "merge", "0", "3")) == {"4": (0, 3), "1": (1,), "2": (2,)}


def test_a_merged_instance_gets_the_pages_that_its_smaller_weights_free() -> None:
    (whole,) = edited(START, "merge", "0", "1", "2", "3").instances
    assert whole.kv_pages >= 4 * START.instances[0].kv_pages


def test_a_split_returns_to_the_pages_of_the_start() -> None:
    merged = edited(START, "merge", "0", "1")
    split = edited(merged, "split", "4")
    assert devices(split) == {"5": (0,), "6": (1,), "2": (2,), "3": (3,)}
    assert [instance.kv_pages for instance in split.instances] == [401] * 4
    whole = edited(START, "merge", "0", "1", "2", "3")
    assert devices(edited(whole, "split", "4", into=4)) == {"5": (0,), "6": (2,), "7": (1,), "8": (3,)}
    assert devices(edited(whole, "split", "4")) == {"5": (0, 1), "6": (2, 3)}


def test_names_of_instances_that_have_ended_are_not_given_again() -> None:
    fewer = edited(START, "remove", "2", "3")
    changed = editor(used=("0", "1", "2", "3", "8")).edited(fewer, PlanEdit("add"))
    assert devices(changed) == {"0": (0,), "1": (1,), "9": (2,)}


def test_an_instance_is_added_on_the_first_free_devices_or_on_given_ones() -> None:
    assert devices(edited(START, "add"))["4"] == (4,)
    assert devices(edited(START, "add", devices=(5,)))["4"] == (5,)
    pair = edited(START, "add", devices=(4, 5))
    assert devices(pair)["4"] == (4, 5)
    assert pair.instance("4").kv_pages == editor().resources.kv_capacity(pair.instance("4"))


def test_draining_and_its_end() -> None:
    draining = edited(START, "drain", "1", "2")
    assert [instance.draining for instance in draining.instances] == [False, True, True, False]
    assert edited(draining, "undrain", "1", "2") == START


@pytest.mark.parametrize(
    ("action", "names", "options", "message"),
    [
        ("merge", ("0",), {}, "merge takes two instances or more: given is 0"),
        ("merge", ("1", "9"), {}, "unknown instance '9': the instances are 4, 1, 2, 3"),
        ("merge", ("1", "1"), {}, "instance 1 is named twice"),
        ("merge", ("4", "1"), {}, "only instances on equally many devices merge: 4 on 2, 1 on 1"),
        ("merge", ("1", "2", "3"), {}, "an instance has 3 devices: it must have one of 1, 2, 4"),
        ("split", ("1",), {}, "instance 1 has 1 device: it cannot split into 2"),
        ("split", ("4",), {"into": 4}, "instance 4 has 2 devices: it cannot split into 4"),
        ("split", ("4", "1"), {}, "split takes one instance: given is 4 1"),
        ("add", ("1",), {}, "add takes no instance: given is 1"),
        ("add", (), {"devices": (5, 5)}, "an instance cannot have devices 5, 5"),
        ("add", (), {"devices": (4, 5, 6)}, "an instance has 3 devices: it must have one of 1, 2, 4"),
        ("remove", ("4", "1", "2", "3"), {}, "the last instance cannot be removed"),
        ("remove", (), {}, "remove takes one instance or more: given is none"),
        ("drain", (), {}, "drain takes one instance or more: given is none"),
        ("shuffle", ("1",), {}, "unknown action 'shuffle': choose from merge, split"),
    ],
)
def test_the_error_says_what_is_impossible(action: str, names: tuple[str, ...], options: dict, message: str) -> None:
    pair = replace(START.instance("0"), name="4")
    (stage,) = pair.stages
    pair = replace(pair, stages=(replace(stage, devices=(0, 4)),))
    with pytest.raises(PlanError, match=message):
        edited(Plan(1, (pair, *START.instances[1:])), action, *names, **options)


def test_nothing_is_added_without_free_devices() -> None:
    full = edited(edited(START, "add"), "add")
    with pytest.raises(PlanError, match="an instance needs 1 of the machine's 6 devices: 0 are free"):
        edited(full, "add")


def test_instances_of_one_degree_alone_do_not_merge() -> None:
    with pytest.raises(PlanError, match="neither merge nor split here: start the server with a larger max_tp"):
        editor(1).edited(START, PlanEdit("merge", ("0", "1")))


def test_an_edit_is_described_in_words() -> None:
    assert str(PlanEdit("merge", ("0", "1"))) == "merge 0 1"
    assert str(PlanEdit("split", ("4",), 2)) == "split 4 into 2"
    assert str(PlanEdit("add", devices=(2, 3))) == "add on devices 2 3"
