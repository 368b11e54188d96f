"""Measured costs add up, are interpolated between measured sizes, and say which precisions are slow."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from jaxserve.control import InstancePlan, block_chain, parallel_plan
from jaxserve.control.costs import Curve, LayerCosts, MeasuredCosts, slow_precisions
from jaxserve.core.errors import ConfigError
from jaxserve.core.step_load import StepLoad

FULL, INT4 = Curve(((1, 0.010), (32, 0.041))), Curve(((1, 0.004), (32, 0.035)))
DENSE = LayerCosts({"bfloat16": FULL, "int4": INT4}, per_context=1e-5, per_prefill=1e-6)
WINDOW = LayerCosts({"bfloat16": FULL}, per_context=1e-6, per_prefill=1e-7)
COSTS = MeasuredCosts(
    ("dense", "dense", "window", "dense"), {"dense": DENSE, "window": WINDOW}, Curve(((1, 0.1), (4, 0.4))), 0.001
)


def instance(*layers: str, pp: int = 1) -> InstancePlan:
    chain = block_chain("bfloat16", layers, "bfloat16")
    return parallel_plan(chain, kv_pages=9, tp=1, pp=pp, dp=1, devices=pp).instances[0]


@pytest.mark.parametrize("pp", [1, 2])
def test_layers_attention_and_the_rest_add_up(pp: int) -> None:
    cost = COSTS.of(instance("bfloat16", "int4", "bfloat16", "int4", pp=pp))
    load = StepLoad(tokens=32, rows=4, sequences=3, context=500, prefill=1000)
    layers = 2 * 0.041 + 2 * 0.035
    attention = 500 * (3 * 1e-5 + 1e-6) + 1000 * (3 * 1e-6 + 1e-7)
    assert cost.seconds(load) == pytest.approx(0.4 + 28 * 0.001 + layers + attention)
    assert cost.seconds(load) == cost.seconds(load)


def test_a_precision_that_was_not_measured_is_named() -> None:
    with pytest.raises(ConfigError, match="costs of int4 layers are unknown: measured were bfloat16"):
        COSTS.of(instance("bfloat16", "bfloat16", "int4", "bfloat16"))


times = st.lists(st.floats(0, 1e3), min_size=1, max_size=6).map(sorted)


@given(times, st.data())
def test_a_curve_rises_wherever_its_points_do(seconds: list[float], data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 1000), min_size=len(seconds), max_size=len(seconds), unique=True))
    curve = Curve(tuple(zip(sorted(sizes), seconds, strict=True)))
    small, large = sorted(data.draw(st.tuples(st.floats(1, 3000), st.floats(1, 3000))))
    assert curve(small) <= curve(large) + 1e-9
    for size, value in curve.points:
        assert curve(size) == pytest.approx(value)


def test_a_curve_goes_on_as_between_its_last_points() -> None:
    curve = Curve(((4, 1.0), (8, 2.0), (16, 6.0)))
    assert [curve(size) for size in (1, 6, 12, 20)] == pytest.approx([1.0, 1.5, 4.0, 8.0])
    assert Curve(((8, 3.0),))(1000) == 3.0


@pytest.mark.parametrize("points", [(), ((4, 1.0), (2, 1.0)), ((2, 1.0), (2, 2.0)), ((1, -1.0),), ((1, float("nan")),)])
def test_a_curve_of_impossible_points_is_refused(points: tuple) -> None:
    with pytest.raises(ValueError, match="of a curve are"):
        Curve(points)


def test_costs_are_read_as_they_were_written() -> None:
    assert MeasuredCosts.from_dict(json.loads(json.dumps(COSTS.to_dict()))) == COSTS


@pytest.mark.parametrize(
    "change", [{"kinds": ["sparse"]}, {"rest": {"points": []}}, {"layers": []}, {"per_token": None}, {"rest": 3}]
)
def test_values_that_are_no_costs_are_refused(change: dict) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        MeasuredCosts.from_dict(COSTS.to_dict() | change)


def test_precisions_that_gain_no_speed_are_named_with_how_slow_they_are() -> None:
    slow, mixed = Curve(((1, 0.05), (4, 0.042), (32, 0.0615))), Curve(((1, 0.05), (4, 0.042), (32, 0.0205)))
    layers = {
        "dense": LayerCosts(
            {"bfloat16": Curve(((1, 0.01), (32, 0.041))), "int8": INT4, "int3": mixed, "int4": slow}, 0, 0
        )
    }
    costs = MeasuredCosts(("dense", "dense"), layers, Curve(((1, 0.1),)), 0.0)
    assert slow_precisions(costs, "bfloat16", 32) == [
        "layers in int4 take 3.23x the time of bfloat16 at 4 decode rows here (5.00x at 1, 1.50x at 32): "
        "adaptation can gain KV pages, but no speed"
    ]
    assert slow_precisions(costs, "float32", 32) == [], "full precision was not measured"


def test_fused_steps_tell_which_precisions_gain_no_speed() -> None:
    fused = {("bfloat16",) * 4: Curve(((4, 0.2),)), ("bfloat16", "int8") * 2: Curve(((4, 0.4),))}
    costs = replace(COSTS, kinds=("dense",) * 4, layers={"dense": DENSE}, fused=fused)
    assert slow_precisions(costs, "bfloat16", 4) == [], "all layers in int4 are not fused"
    costs = replace(costs, fused=fused | {("int4",) * 4: Curve(((1, 0.22), (4, 0.3)))})
    (sentence,) = slow_precisions(costs, "bfloat16", 4)
    assert "steps in int4 take 1.50x the time of bfloat16 at 4 decode rows here (1.10x at 1" in sentence


def test_fused_steps_take_the_time_that_was_measured_for_them() -> None:
    assignment = ("bfloat16", "int4", "bfloat16", "int4")
    costs = replace(COSTS, fused={assignment: Curve(((1, 0.2), (4, 0.5)))})
    fused, other = costs.of(instance(*assignment)), costs.of(instance(*["bfloat16"] * 4))
    decodes, prompt = StepLoad(4, 4, 4, 500, 0), StepLoad(32, 4, 0, 0, 1000)
    attention = 500 * (3 * 1e-5 + 1e-6)
    assert fused.seconds(decodes) == pytest.approx(0.5 + attention)
    assert other.seconds(decodes) == COSTS.of(instance(*["bfloat16"] * 4)).seconds(decodes)
    assert fused.seconds(prompt) == COSTS.of(instance(*assignment)).seconds(prompt)
    assert MeasuredCosts.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
