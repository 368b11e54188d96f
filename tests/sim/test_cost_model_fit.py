"""A fit recovers the hardware from which the times of steps were made, despite outliers."""

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.control import block_chain, parallel_plan
from jaxserve.control.plan_yaml import to_dict
from jaxserve.core.errors import ConfigError
from jaxserve.core.step_shapes import Buckets
from jaxserve.engine.step_log import PlanRecord, Recording, Step
from jaxserve.sim.cost_model import RooflineModel, StepLoad
from jaxserve.sim.cost_model_fit import MeasuredStep, fit, fit_frontend, measured_steps, non_negative, robust_fit
from jaxserve.sim.hardware import Curve, Hardware, Overheads, from_yaml, to_yaml
from jaxserve.sim.shape import ModelShape

SHAPE = ModelShape(
    "small", vocab_size=4096, hidden_size=256, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=32,
    intermediate_size=768, max_position=2048, tie_embeddings=True,
)  # fmt: skip
BUCKETS = Buckets(max_num_seqs=32, max_tiles=16, tile=32, min_rows=1, widths=(128,))
NOMINAL = Hardware(
    name="here",
    source="a test",
    measured=False,
    platform="cpu",
    memory=10**10,
    bandwidth=1e10,
    rates={"bfloat16": 1e11, "int4": 1e11},
    efficiency={name: Curve(((1, 1.0),)) for name in ("bfloat16", "int4", "attention")},
    devices_per_host=1,
    tile=32,
    prefill_tokens=512,
    max_num_seqs=32,
    min_rows=1,
)
TRUTH = replace(
    NOMINAL,
    efficiency={
        "bfloat16": Curve(tuple((n, 0.9 - 0.04 * i) for i, n in enumerate((1, 2, 4, 8, 16, 32, 64, 128, 256, 544)))),
        "int4": Curve(tuple((n, 0.5 - 0.02 * i) for i, n in enumerate((1, 2, 4, 8, 16, 32, 64, 128, 256, 544)))),
        "head": Curve(((1, 0.8), (8, 0.7), (48, 0.6))),
        "attention": Curve(((1, 0.3),)),
        "prefill": Curve(((1, 0.2),)),
    },
    overheads=Overheads(step=4e-4, sequence=3e-5, host=6e-4),
)


def plan(int4: int = 0):
    chain = block_chain("bfloat16", ["int4"] * int4 + ["bfloat16"] * (SHAPE.num_layers - int4), "bfloat16")
    return parallel_plan(chain, kv_pages=400, tp=1, pp=1, dp=1, devices=1)


def steps(count: int, int4: int = 0, *, seed: int = 0, noise: float = 0.05, spikes: float = 0.0) -> list[MeasuredStep]:
    """Return steps as a server has them: batches of any size and context, alone and next to prefill chunks."""
    rng, time = np.random.default_rng(seed), RooflineModel(SHAPE, TRUTH).of(plan(int4).instances[0])
    layers = {name: n for name, n in (("int4", int4), ("bfloat16", SHAPE.num_layers - int4)) if n}
    found = []
    for _ in range(count):
        decodes = int(rng.choice([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32]))
        length = int(rng.integers(1, 512)) if decodes == 0 or rng.random() < 0.4 else 0
        start = 512 * int(rng.integers(0, 3)) if length else 0
        shape = BUCKETS.shape(decodes, -(-length // 32), 0)
        context, pairs = decodes * int(rng.integers(20, 1000)), length * (start + length + 1)
        load = StepLoad(shape.tokens, shape.rows, decodes, context, pairs)
        idle = bool(rng.random() < 0.1)
        seconds = (time.seconds(load) + idle * TRUTH.overheads.host) * rng.lognormal(0, noise)
        if rng.random() < spikes:
            seconds += rng.uniform(0.005, 0.1)
        chunk = (start, length) if length and not decodes else None
        found.append(MeasuredStep(load, layers, "bfloat16", idle, seconds, chunk))
    return found


def error_of(hardware: Hardware, int4: int = 0) -> float:
    """Return the worst relative error of steps without noise that were not part of the fit."""
    time = RooflineModel(SHAPE, hardware).of(plan(int4).instances[0])
    clean = [step for step in steps(300, int4, seed=99, noise=0) if not step.idle]
    return max(abs(time.seconds(step.load) / step.seconds - 1) for step in clean)


def test_steps_take_on_the_fitted_hardware_what_they_took():
    found = fit(steps(4000), SHAPE, NOMINAL)
    assert found.median_error < 0.05
    assert found.total == pytest.approx(1, abs=0.01)
    assert error_of(found.hardware) < 0.05
    assert found.hardware.overheads.host == pytest.approx(TRUTH.overheads.host, rel=0.2)


def test_without_noise_the_fit_is_all_but_exact():
    found = fit(steps(4000, noise=0), SHAPE, NOMINAL)
    assert found.p90_error < 0.01
    assert error_of(found.hardware) < 0.02


def test_layers_of_two_precisions_are_told_apart_and_mixtures_follow():
    found = fit([*steps(3000), *steps(3000, SHAPE.num_layers, seed=1)], SHAPE, NOMINAL)
    assert error_of(found.hardware, SHAPE.num_layers) < 0.05
    assert error_of(found.hardware, 3) < 0.05


def test_a_machine_that_does_something_else_now_and_then_bends_nothing():
    quiet, busy = (fit(steps(4000, spikes=spikes), SHAPE, NOMINAL) for spikes in (0.0, 0.03))
    assert error_of(quiet.hardware) < 0.05
    assert error_of(busy.hardware) < 0.08


def test_the_fit_is_a_hardware_file():
    found = fit(steps(2000), SHAPE, NOMINAL).hardware
    assert found.measured
    read = from_yaml(to_yaml(found))
    assert read == replace(found, rates=dict(found.rates), efficiency=dict(found.efficiency))
    assert set(read.rates) == {"bfloat16"}  # no step had layers in int4


def test_knots_are_the_sizes_of_steps_and_say_how_many_were_behind_them():
    given = steps(2000)
    found = fit(given, SHAPE, NOMINAL)
    assert [tokens for tokens, _ in found.hardware.efficiency["bfloat16"].knots] == sorted(
        {s.load.tokens for s in given}
    )
    assert found.seen["bfloat16", 1] == sum(step.load.tokens == 1 for step in given)
    assert found.held_out == 400


def test_chunks_alone_give_kunserves_cost():
    found = fit(steps(4000), SHAPE, NOMINAL)
    assert found.chunk_cost is not None
    assert found.chunk_error < 0.25  # KunServe's model ignores padding
    assert fit([replace(s, chunk=None) for s in steps(500)], SHAPE, NOMINAL).chunk_cost is None


def test_too_few_steps_are_an_error():
    with pytest.raises(ConfigError, match="20 steps are too few"):
        fit(steps(20), SHAPE, NOMINAL)


def test_a_precision_without_a_rate_is_an_error():
    with pytest.raises(ConfigError, match="rates lack 'int4'"):
        fit(steps(100, 8), SHAPE, replace(NOMINAL, rates={"bfloat16": 1e11}))


# -- from a log


def step(number: int, begun: float, ended: float, **more: int) -> Step:
    values = {"tokens": 4, "rows": 4, "sequences": 3, "context": 90, "prefill": 0, "chunks": 0, "prompt_tokens": 0}
    return Step(0, number, begun, begun + 0.001, ended, *(values | more).values(), 1)


def recording(*made: Step, tp: int = 1) -> Recording:
    chain = block_chain("bfloat16", ["int4", "bfloat16"], "int8")
    facts = {"plan": to_dict(parallel_plan(chain, kv_pages=9, tp=tp, pp=1, dp=1, devices=tp))}
    return Recording(facts, steps=made, plans=(PlanRecord(0, 1, {"int4": 1, "bfloat16": 1}, 8),))


def test_a_step_takes_from_the_end_of_the_one_before_or_from_its_begin_on_an_idle_device():
    prompt = {"sequences": 0, "chunks": 1, "prefill": 40 * (64 + 40 + 1), "prompt_tokens": 40}
    found = measured_steps(recording(step(0, 1.0, 1.5), step(1, 1.1, 2.25), step(2, 4.0, 4.5, **prompt)))
    assert [(s.seconds, s.idle) for s in found] == [(0.5, True), (0.75, False), (0.5, True)]
    assert [s.chunk for s in found] == [None, None, (64, 40)]
    assert found[0].layers == {"int4": 1, "bfloat16": 1}
    assert found[0].head == "int8"
    assert found[0].load == StepLoad(4, 4, 3, 90, 0)


def test_a_chunk_beside_decodes_is_none_alone():
    both = {"chunks": 1, "prefill": 40 * 41, "prompt_tokens": 40}
    assert measured_steps(recording(step(0, 1.0, 1.5, **both)))[0].chunk is None


def test_several_devices_are_refused():
    with pytest.raises(ConfigError, match="tp and pp must be 1"):
        measured_steps(recording(step(0, 1.0, 1.5), tp=2))


# -- time outside of the engine


def test_what_a_request_its_tokens_and_the_answers_beside_it_take_outside_of_the_engine():
    alone = [(tokens, 0, 2e-3 + 5e-6 * tokens) for tokens in (16, 256, 512) for _ in range(9)]
    beside = [(64, streams, 2e-3 + 5e-6 * 64 + 3e-4 * streams) for streams in range(20)]
    assert fit_frontend(alone + beside) == pytest.approx((2e-3, 5e-6, 3e-4), rel=1e-3)
    assert fit_frontend([*alone, *beside, (16, 0, 1.0)]) == pytest.approx((2e-3, 5e-6, 3e-4), rel=0.05)
    assert fit_frontend([(8, 0, 3e-3), (9, 0, 2e-3)])[1:] == (0, 0)


# -- least squares


def test_non_negative_squares_are_those_of_all_subsets():
    from jaxserve.scheduler.chunk_cost import non_negative_by_subsets as by_subsets

    rng = np.random.default_rng(0)
    for _ in range(50):
        columns, wanted = rng.normal(size=(12, 5)), rng.normal(size=12)
        found = non_negative(columns.T @ columns, columns.T @ wanted)
        assert found == pytest.approx(by_subsets(columns, wanted), abs=1e-6)


def test_a_robust_fit_predicts_the_mean_and_not_less():
    wanted = np.random.default_rng(0).lognormal(0, 0.3, 4000)
    (found,) = robust_fit(np.ones((4000, 1)), wanted, np.zeros((0, 1)))
    assert found == pytest.approx(wanted.mean(), rel=0.02)


def test_a_robust_fit_does_not_mind_a_few_that_are_far_off():
    wanted = np.random.default_rng(0).normal(1, 0.02, 1000)
    wanted[:50] += 30
    (found,) = robust_fit(np.ones((1000, 1)), wanted, np.zeros((0, 1)))
    assert found == pytest.approx(1, abs=0.01)
