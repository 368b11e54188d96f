"""Levels of the ladder, for any settings, order of layers, pool and plan at the start."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, strategies as st

from jaxserve.control import InstancePlan, Resources
from jaxserve.control.policies import ACCURACY, MorphSettings
from jaxserve.control.policies.ladder import Ladder
from jaxserve.control.resources import validate_instance
from tests.support.control import LAYER, home_plan, machine

LAYERS = 8
HOME = home_plan(LAYERS).instances[0]
precisions = st.sampled_from(["int8", "int4"])
settings_of_ladders = st.builds(
    MorphSettings,
    precision=precisions,
    most_layers=st.floats(0.05, 1.0),
    rest=st.sampled_from(["", "int8", "int4"]),
    escalate=st.sampled_from(["", "int4"]),
    last_resort=st.sampled_from(["", "int4"]),
)
machines = st.sampled_from(
    [
        machine(LAYERS),
        machine(LAYERS, max_pages=500),
        machine(LAYERS, max_pages=731, segments=(401, 100, 230)),
        machine(LAYERS, in_place=("int4",)),
    ]
)
orders = st.permutations(range(LAYERS)).flatmap(
    lambda order: st.integers(0, LAYERS).map(lambda count: tuple(order[:count]))
)
starts = st.dictionaries(st.sampled_from([f"layers.{n}" for n in range(LAYERS)]), precisions, max_size=3).map(
    HOME.with_precisions
)


def size(plan: InstancePlan) -> int:
    """Return the bytes of all layers."""
    return sum(LAYER[precision] for precision in plan.layer_precisions)


@given(settings_of_ladders, machines, orders, starts)
def test_levels_take_fewer_bytes_and_have_no_fewer_pages(
    settings: MorphSettings, resources: Resources, order: Sequence[int], start: InstancePlan
) -> None:
    ladder = Ladder(start.with_kv_pages(resources.kv_capacity(start)), resources, order, settings)
    plans = [ladder.plan(level) for level in range(ladder.top + 1)]
    assert plans[0] is ladder.initial
    for lower, higher in pairwise(plans):
        changed = [(a.precision, b.precision) for a, b in zip(lower.blocks, higher.blocks, strict=True) if a != b]
        assert len(changed) == 1, "a level changes one layer"
        assert size(higher) < size(lower)
        assert higher.kv_pages >= lower.kv_pages
        validate_instance(higher, resources)


@given(settings_of_ladders, machines, orders, starts)
def test_level_of_a_level_is_that_level(
    settings: MorphSettings, resources: Resources, order: Sequence[int], start: InstancePlan
) -> None:
    ladder = Ladder(start, resources, order, settings)
    for level in range(ladder.top + 1):
        assert ladder.level_of(ladder.plan(level)) == level
        assert ladder.level_of(ladder.plan(level).with_kv_pages(100).with_max_num_seqs(3)) == level


@given(settings_of_ladders, orders, st.data())
def test_plan_between_two_levels_has_the_level_that_covers_all_its_changes(
    settings: MorphSettings, order: Sequence[int], data: st.DataObject
) -> None:
    """Some of the changes from one level to another have failed."""
    ladder = Ladder(HOME, machine(LAYERS), order, settings)
    levels = st.integers(0, ladder.top)
    low, high = sorted((data.draw(levels), data.draw(levels)))
    before, after = ladder.plan(low), ladder.plan(high)
    changed = [b.block for a, b in zip(before.blocks, after.blocks, strict=True) if a != b]
    done = data.draw(st.sets(st.sampled_from(changed))) if changed else set()
    between = before.with_precisions({block: after.precision(block) for block in done})
    level = ladder.level_of(between)
    assert low <= level <= high
    assert done != set(changed) or level == high
    covering = ladder.plan(level)
    assert all(
        LAYER[a.precision] <= LAYER[b.precision]
        for a, b in zip(covering.blocks, between.blocks, strict=True)
        if a.block.startswith("layers")
    )
    assert level == low or has_more_bits(ladder.plan(level - 1), between), "no lower level covers it"


def has_more_bits(plan: InstancePlan, other: InstancePlan) -> bool:
    """Return whether some layer has more bits than in another plan."""
    layers = zip(plan.layer_precisions, other.layer_precisions, strict=True)
    return any(LAYER[a] > LAYER[b] for a, b in layers)


@given(st.integers(0, LAYERS))
def test_floor_of_quality_cuts_the_ladder(allowed: int) -> None:
    settings = replace(ACCURACY, most_layers=1.0, max_quality_loss=float(allowed))

    def loss(layers: Sequence[str]) -> float:
        return float(list(layers).count("int4"))

    ladder = Ladder(HOME, machine(LAYERS), range(LAYERS), settings, loss)
    assert ladder.top == allowed


def test_layers_change_in_the_order_of_the_stages() -> None:
    settings = MorphSettings(most_layers=0.25, rest="int8", escalate="int4")
    ladder = Ladder(HOME, machine(LAYERS), (7, 6, 5, 4), settings)
    names = [
        [f"{n}:{p}" for n, p in enumerate(ladder.plan(level).layer_precisions) if p != "bfloat16"]
        for level in range(ladder.top + 1)
    ]
    assert names == [
        [],
        ["7:int4"],
        ["6:int4", "7:int4"],
        ["5:int8", "6:int4", "7:int4"],
        ["4:int8", "5:int8", "6:int4", "7:int4"],
        ["4:int8", "5:int4", "6:int4", "7:int4"],
        ["4:int4", "5:int4", "6:int4", "7:int4"],
    ]


def test_levels_run_all_sequences_although_the_start_had_a_limit() -> None:
    ladder = Ladder(HOME.with_max_num_seqs(8), machine(LAYERS), range(LAYERS), ACCURACY)
    assert ladder.plan(0).max_num_seqs == 8
    assert {ladder.plan(level).max_num_seqs for level in range(1, ladder.top + 1)} == {None}
