"""Plans: helpers, differences, limits, and their text."""

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from jaxserve.console.tables import Table
from jaxserve.control import LimitSequences, Plan, PlanInForce, ResizeKVPool, Resources, StagePlan, SwapPrecision
from jaxserve.control.diff import check_instances, diff, diff_all
from jaxserve.control.plan_yaml import from_yaml, plan_rows, to_yaml
from jaxserve.control.resources import validate
from jaxserve.core.errors import ConfigError, PlanError
from tests.support.control import LAYER, MB, PAGE, home_plan, machine

LAYERS = 6
MACHINE = machine(LAYERS, pp=2)
KEEPING = machine(LAYERS, pp=2, in_place=("int8", "int4"))  # a layer in one of these takes nothing more


@st.composite
def plans(draw: st.DrawFn, machine: Resources = MACHINE) -> Plan:
    """Return any plan of two instances with two stages that fits."""
    plan = home_plan(LAYERS, pp=2, dp=2)
    for instance in plan.instances:
        precisions = draw(st.lists(st.sampled_from(sorted(LAYER)), min_size=LAYERS, max_size=LAYERS))
        instance = instance.with_precisions({f"layers.{n}": p for n, p in enumerate(precisions)})
        instance = instance.with_kv_pages(draw(st.integers(machine.min_pages, machine.kv_capacity(instance))))
        plan = plan.with_instance(instance.with_max_num_seqs(draw(st.none() | st.integers(1, 9))))
    return plan


@pytest.mark.parametrize("machine", [MACHINE, KEEPING])
@given(st.data())
def test_diff_leads_to_the_target_and_every_intermediate_plan_fits(machine: Resources, data: st.DataObject) -> None:
    old, new = (data.draw(plans(machine)) for _ in range(2))
    validate(old, machine)
    validate(new, machine)
    reached, devices = [], {}
    for before, after in zip(old.instances, new.instances, strict=True):
        transitions, instance = diff(before, after, machine), before
        for transition in transitions:
            assert transition.instance == instance.name
            now, instance = instance, transition.apply(instance)
            validate(new.with_instance(instance), machine)
            change = max(machine.change(now, instance).values(), key=abs)
            assert change == transition.bytes_needed - transition.bytes_freed
            for device, size in transition.bytes_beside.items():
                devices[device] = max(devices.get(device, 0), size)
        needs = [transition.bytes_needed > 0 for transition in transitions if not is_limit(transition)]
        assert needs == sorted(needs), "frees before allocations"
        limits = [(n, t.lowers) for n, t in enumerate(transitions) if is_limit(t)]
        assert limits in ([], [(0, True)], [(len(transitions) - 1, False)]), "fewer sequences first, more last"
        reached.append(instance)
    assert tuple(reached) == new.instances
    assert devices.keys() <= {0, 1, 2, 3}
    assert max(devices.values(), default=0) <= LAYER["int8"], "what the swap buffer of `machine` has room for"
    assert diff_all(old, new, machine) == tuple(
        t for a, b in zip(old.instances, new.instances, strict=True) for t in diff(a, b, machine)
    )


def is_limit(transition: object) -> bool:
    return isinstance(transition, LimitSequences)


@given(plans())
def test_plan_survives_a_round_trip_through_yaml(plan: Plan) -> None:
    assert from_yaml(to_yaml(plan)) == plan


def test_diff_of_equal_plans_is_empty() -> None:
    plan = home_plan()
    assert diff(plan.instances[0], plan.instances[0], machine()) == ()
    assert diff_all(plan, replace(plan, version=9), machine()) == ()


def test_transitions_state_their_bytes_and_seconds() -> None:
    (old,) = home_plan().instances
    new = old.with_precisions({"layers.3": "int4"}).with_kv_pages(421).with_max_num_seqs(9)
    limit, swap, resize = diff(old, new, machine())
    assert swap == SwapPrecision("0", "layers.3", "bfloat16", "int4", (0,), 20 * MB, 5 * MB, 0.005)
    assert (swap.bytes_freed, swap.bytes_needed, swap.bytes_beside) == (15 * MB, 0, {0: 5 * MB})
    assert resize == ResizeKVPool("0", 401, 421, 20 * PAGE, 0.0)
    assert (resize.bytes_freed, resize.bytes_needed, resize.bytes_beside) == (0, 20 * PAGE, {})
    assert str(swap) == "instance 0: layers.3 bfloat16 -> int4 (frees 15.0 MB, about 5 ms)"
    assert str(resize) == "instance 0: KV 401 -> 421 pages (needs 10.0 MB)"
    assert str(limit) == "instance 0: at most all sequences -> 9 sequences at once"
    assert (limit.bytes_freed, limit.bytes_needed, limit.bytes_beside, limit.seconds) == (0, 0, {}, 0.0)
    back = diff(new, old, machine())
    assert back[0] == ResizeKVPool("0", 421, 401, -20 * PAGE, 20 * PAGE / (1000 * MB))
    assert back[1].bytes_needed == 15 * MB
    assert back[1].bytes_beside == {0: 5 * MB}, "the smaller of both, beside the larger plan"
    assert back[2] == LimitSequences("0", 9, None)


def test_transition_applied_to_a_different_plan_is_refused() -> None:
    (old,) = home_plan().instances
    new = old.with_precisions({"layers.3": "int4"}).with_kv_pages(421).with_max_num_seqs(9)
    for transition in diff(old, new, machine()):
        with pytest.raises(PlanError, match=r"instance 0 .*the change starts from"):
            transition.apply(new)


def test_kv_capacity_is_what_the_budget_leaves_to_the_page() -> None:
    plan, resources = home_plan(), machine()
    assert resources.kv_capacity(plan.instances[0]) == 401
    smaller = plan.with_precisions("0", {"layers.0": "int4", "layers.9": "int8"}).instances[0]
    assert resources.kv_capacity(smaller) == 401 + 25 * MB // PAGE
    assert replace(resources, max_pages=410).kv_capacity(smaller) == 410


def test_pinned_layer_in_use_takes_no_further_bytes() -> None:
    plan, resources = home_plan(), machine(in_place=("int8", "int4"))
    small = plan.with_precisions("0", {"layers.0": "int4", "layers.9": "int8"})
    assert resources.kv_capacity(plan.instances[0]) == 401
    assert resources.kv_capacity(small.instances[0]) == 401 + 40 * MB // PAGE, "both layers' bytes, to the page"
    assert diff(plan.instances[0], small.instances[0], resources) == (
        SwapPrecision("0", "layers.0", "bfloat16", "int4", (0,), 20 * MB, 0, 0.0),
        SwapPrecision("0", "layers.9", "bfloat16", "int8", (0,), 20 * MB, 0, 0.0),
    )
    assert diff(small.instances[0], small.with_precisions("0", {"layers.9": "int4"}).instances[0], resources) == (
        SwapPrecision("0", "layers.9", "int8", "int4", (0,), 0, 0, 0.0),
    )
    assert diff(small.instances[0], plan.instances[0], resources)[0] == SwapPrecision(
        "0", "layers.0", "int4", "bfloat16", (0,), 0, 20 * MB, 0.020
    )


def stage_of(plan: Plan, **changes: object) -> Plan:
    """Return the plan with its last stage changed."""
    (instance,) = plan.instances
    last = replace(instance.stages[-1], **changes)  # type: ignore[arg-type]
    return replace(plan, instances=(replace(instance, stages=(*instance.stages[:-1], last)),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: replace(p, instances=p.instances * 2), "2 instances: it must have 1 (dp)"),
        (
            lambda p: replace(p, instances=(replace(p.instances[0], name="7"),)),
            "unknown instance '0': the instances are 7",
        ),
        (lambda p: stage_of(p, devices=(7,)), "stage 1 is on devices 7: it must stay on 1"),
        (lambda p: stage_of(p, blocks=p.instances[0].stages[1].blocks[::-1]), "has blocks head, layers.5"),
        (lambda p: stage_of(p, kv_pages=300), "stages of 300, 401 KV pages"),
        (
            lambda p: p.with_precisions("0", {"layers.1": "int3"}),
            "layers.1 cannot have precision 'int3': choose from bf",
        ),
        (
            lambda p: p.with_precisions("0", {"head": "int8"}),
            "head is bfloat16 and cannot change to 'int8': only decoder layers can",
        ),
        (
            lambda p: replace(p, instances=(replace(p.instances[0], stages=p.instances[0].stages[:1]),)),
            "1 stages: it must",
        ),
    ],
)
def test_diff_of_plans_that_no_transition_connects_is_refused(change: Callable[[Plan], Plan], message: str) -> None:
    plan = home_plan(LAYERS, pp=2)
    with pytest.raises(PlanError, match=re.escape(message)):
        diff_all(plan, change(plan), MACHINE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: p.with_kv_pages("0", 402),
            "device 0 needs 0.260 GB (kv 0.100, fixed 0.100, weights 0.060), 0.2 MB more than the budget",
        ),
        (lambda p: p.with_kv_pages("0", 16), "16 KV pages: it must be from 17 (max_model_len) to 2000 (max_kv_pages)"),
        (lambda p: p.with_kv_pages("0", 2001), "2001 KV pages: it must be from 17"),
        (lambda p: stage_of(p, kv_pages=300), "stage 1 has 300 KV pages: it must have 401, as many as stage 0"),
        (
            lambda p: stage_of(p, devices=(0,)),
            "device 0 needs 0.520 GB (kv 0.200, fixed 0.200, weights 0.120), 260.2 MB",
        ),
        (lambda p: p.with_precisions("0", {"layers.1": "fp8"}), "cannot have precision 'fp8'"),
    ],
)
def test_plan_that_the_machine_cannot_hold_is_refused(change: Callable[[Plan], Plan], message: str) -> None:
    changed = change(home_plan(LAYERS, pp=2))
    with pytest.raises(PlanError, match=re.escape(message)):
        validate(changed, MACHINE)


def test_plan_that_names_an_instance_twice_is_refused() -> None:
    plan = home_plan(dp=2)
    with pytest.raises(PlanError, match="the plan names an instance twice: 0, 0"):
        check_instances(plan, replace(plan, instances=plan.instances[:1] * 2))


def test_diff_of_two_instances_is_refused() -> None:
    first, second = home_plan(dp=2).instances
    with pytest.raises(PlanError, match="the plan is that of instance 1: it must be that of instance 0"):
        diff(first, second, machine())


@pytest.mark.parametrize("count", [0, -1])
def test_plan_in_which_no_sequence_runs_is_refused(count: int) -> None:
    plan = home_plan()
    with pytest.raises(PlanError, match=f"instance 0 runs at most {count} sequences: it must be at least 1"):
        validate(plan.with_instance(plan.instances[0].with_max_num_seqs(count)), machine())


def test_instance_is_found_by_its_name() -> None:
    plan = home_plan(dp=3)
    changed = plan.with_kv_pages("1", 300)
    assert [instance.kv_pages for instance in changed.instances] == [401, 300, 401]
    assert changed.version == plan.version + 1
    assert changed.instance("1") is changed.instances[1]
    with pytest.raises(PlanError, match="unknown instance '3': the instances are 0, 1, 2"):
        plan.with_instance(replace(plan.instances[0], name="3"))


def test_plan_in_force_counts_transitions_of_all_instances() -> None:
    plan = home_plan(dp=2)
    in_force = PlanInForce(plan)
    assert in_force.plan is plan
    first, second = (in_force.instance(name).with_kv_pages(300) for name in ("0", "1"))
    assert in_force.commit(second, 2) == in_force.version == 3
    assert in_force.plan == Plan(3, (plan.instances[0], second))
    assert in_force.plan is in_force.plan
    assert in_force.commit(first, 1) == 4
    assert in_force.plan == Plan(4, (first, second))


def test_precision_of_an_unknown_block_is_refused() -> None:
    with pytest.raises(PlanError, match=re.escape("instance 0 has no block layers.16: its blocks are embed to head")):
        home_plan().with_precisions("0", {"layers.16": "int4"})


def test_plan_yaml_accepts_layer_ranges_of_any_granularity() -> None:
    text = to_yaml(home_plan(4))
    assert "layers.0-3: bfloat16" in text
    assert from_yaml(text.replace("layers.0-3: bfloat16", "layers.0: bfloat16\n      layers.1-3: bfloat16")) == (
        home_plan(4)
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version: 1", "version: one", "version is 'one': it must be an integer"),
        ("version: 1", "versoin: 1", "the plan has the unknown key 'versoin'"),
        ("kv_pages: 401", "kv_pages: true", "instances[0].stages[0].kv_pages is True"),
        ("kv_pages: 401", "kv_pages: -1", "instances[0].stages[0].kv_pages is -1"),
        ("kv_pages: 401\n", "\n", "instances[0].stages[0] lacks kv_pages"),
        ("layers.0-3: bfloat16", "layers.0-3: 4", "'layers.0-3' has precision 4: it must be a name"),
        ("layers.0-3: bfloat16", "layers.3-0: int4", "has 'layers.3-0': a range must increase"),
        (
            "layers.0-3: bfloat16",
            "layers.0-99999999: int4",
            "has 'layers.0-99999999': a range must increase and end below",
        ),
        ("layers.0-3: bfloat16", "layers.0-3: int4\n      layers.2: int4", "blocks names layers.2 twice"),
        ("layers.0-3: bfloat16", "7: int4", "blocks has 7: it must be a text"),
        ("instances:", "instances: 5\nversion2:", "the plan has the unknown key 'version2'"),
        ("version: 1", "version: [1", "the plan is not valid YAML"),
    ],
)
def test_error_for_an_invalid_plan_yaml_names_the_field(old: str, new: str, message: str) -> None:
    text = to_yaml(home_plan(4))
    assert old in text
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_yaml(text.replace(old, new))


def test_layer_number_with_thousands_of_digits_is_an_unknown_block() -> None:
    odd = "? layers.0-" + 5000 * "9" + "\n      : int4"  # as a key of more than 128 characters is written
    plan = from_yaml(to_yaml(home_plan()).replace("layers.0-15: bfloat16", odd))
    with pytest.raises(PlanError, match=r"has blocks embed, layers\.0-999"):
        diff_all(home_plan(), plan, machine())


@pytest.mark.parametrize("stages", [[["0-9999", "10000"]], [["0-5999"], ["0-5999"]], [["0-999"]] * 11])
def test_instance_with_too_many_blocks_is_refused(stages: list[list[str]]) -> None:
    blocks = [{f"layers.{run}": "int8" for run in runs} for runs in stages]
    plan = {"instances": [{"stages": [{"devices": [0], "kv_pages": 9, "blocks": some} for some in blocks]}]}
    with pytest.raises(ConfigError, match=rf"with 'layers\.{stages[-1][-1]}' the instance has more than 10000 blocks"):
        from_yaml(json.dumps(plan))


def test_plan_with_too_many_blocks_is_refused() -> None:
    instance = {"stages": [{"devices": [0], "kv_pages": 9, "blocks": {"layers.0-9998": "int8"}}]}
    with pytest.raises(ConfigError, match=r"instances\[20\]: with it the plan has more than 200000 blocks"):
        from_yaml(json.dumps({"instances": [instance] * 22}))


def test_names_and_limits_of_instances_are_read() -> None:
    text = to_yaml(home_plan(4, dp=2))
    assert from_yaml(text.replace("name: '0'", "name: first\n  max_num_seqs: 3")).instances[0] == replace(
        home_plan(4, dp=2).instances[0], name="first", max_num_seqs=3
    )
    assert from_yaml(text.replace("name: '1'\n  ", "")) == home_plan(4, dp=2), "by default it is the position"


@pytest.mark.parametrize("text", ["", "3", "- 1", "instances: []", "instances: {}", "instances: [{stages: 1}]"])
def test_yaml_that_is_not_a_plan_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        from_yaml(text)


def test_plan_table_has_one_row_per_run_of_equal_precision() -> None:
    plan = home_plan(6, pp=2, dp=2).with_precisions("1", {"layers.3": "int4", "layers.5": "int8"})
    assert Table(*plan_rows(plan)).lines() == [
        "instance  stage  devices  KV pages  blocks      precision",
        "0             0        0       401  embed       bfloat16",
        "                                    layers.0-2  bfloat16",
        "0             1        1       401  layers.3-5  bfloat16",
        "                                    head        bfloat16",
        "1             0        2       401  embed       bfloat16",
        "                                    layers.0-2  bfloat16",
        "1             1        3       401  layers.3    int4",
        "                                    layers.4    bfloat16",
        "                                    layers.5    int8",
        "                                    head        bfloat16",
    ]


def test_plan_table_shortens_consecutive_devices() -> None:
    stage = StagePlan(home_plan(1).instances[0].blocks, (0, 1, 2, 5), 20)
    plan = Plan(1, (replace(home_plan(1).instances[0], stages=(stage, replace(stage, devices=(6, 7, 8)))),))
    assert re.search(r"0-2,5.*6-8", "\n".join(Table(*plan_rows(plan)).lines()), re.DOTALL)


def test_plan_says_in_one_line_what_its_instances_run() -> None:
    plan = home_plan(6, dp=2).with_precisions("1", {"layers.3": "int4", "layers.5": "int4"})
    assert repr(plan) == (
        "<Plan 2: <InstancePlan '0' on devices 0, layers: 6 bfloat16, KV pages: 401>; "
        "<InstancePlan '1' on devices 1, layers: 4 bfloat16, 2 int4, KV pages: 401>>"
    )
    assert repr(home_plan(1, dp=100)).endswith("; and 96 more>")


def test_max_capacity_is_the_capacity_next_to_the_smallest_layers() -> None:
    resources, (instance,) = machine(), home_plan().instances
    smallest = home_plan().with_precisions("0", {f"layers.{n}": "int4" for n in range(16)}).instances[0]
    assert resources.max_capacity(instance) == resources.kv_capacity(smallest) == 401 + 16 * 30
    assert resources.max_capacity(smallest) == resources.max_capacity(instance) < resources.max_pages
    assert machine(max_pages=500).max_capacity(instance) == 500
