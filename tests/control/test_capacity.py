"""Estimates of what a plan can serve: which way they go with speed, room and prompts."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from jaxserve.control.capacity import DEFAULT_ANSWER, Capacity, Workload
from jaxserve.core.step_load import StepLoad
from jaxserve.telemetry import Snapshot
from tests.support.control import FakeCosts, Fluid, costs_of, home_plan, machine

HOME = home_plan().instances[0]
lengths = st.builds(Workload, prompt=st.integers(1, 4000), answer=st.floats(1, 1000), context=st.floats(1, 4000))


def capacity(*, step: float = 0.05, slots: int = 64, pages: int = 401) -> Capacity:
    """Return the capacity of a plan whose steps take `step` seconds."""
    shapes = machine(max_num_seqs=slots).shapes
    return Capacity.of(HOME.with_kv_pages(pages), shapes, 16, FakeCosts(lambda *_: 1.0, step))


@given(lengths, st.integers(1, 64), st.floats(1.01, 4))
def test_rate_grows_with_the_speed_of_steps(workload: Workload, sequences: int, factor: float) -> None:
    slow, fast = capacity(step=0.05 * factor), capacity(step=0.05)
    ratio = fast.tokens_per_s(workload, sequences) / slow.tokens_per_s(workload, sequences)
    assert ratio == pytest.approx(factor)


@given(lengths, st.integers(1, 128), st.integers(2, 2000))
def test_sequences_are_bounded_by_slots_and_pages(workload: Workload, slots: int, pages: int) -> None:
    sequences = capacity(slots=slots, pages=pages).sequences(workload)
    assert 1 <= sequences <= slots
    assert sequences == 1 or sequences * max(1.0, workload.context / 16) <= pages - 1
    assert sequences <= capacity(slots=slots, pages=2 * pages).sequences(workload)


def test_limit_of_the_plan_bounds_the_slots() -> None:
    limited = Capacity.of(HOME.with_max_num_seqs(7), machine(max_num_seqs=64).shapes, 16, None)
    assert limited.sequences(Workload(10, 10, 20)) == limited.slots == 7


def test_prompts_bound_the_rate_if_they_are_long() -> None:
    """A step computes at most 64 tiles of 32 tokens."""
    prompts = Workload(prompt=20480, answer=1, context=20480)
    rate = capacity(pages=100_000).tokens_per_s(prompts, 64)
    assert rate == pytest.approx(2048 / 20480 / 0.05, rel=0.1)
    assert capacity().tokens_per_s(Workload(1, 1000, 100), 40) == pytest.approx(40 / 0.05)


@given(lengths, st.integers(1, 64), st.integers(1, 64))
def test_waiting_sequences_with_room_start_with_their_prompts(workload: Workload, running: int, waiting: int) -> None:
    seconds = capacity().seconds_to_start(workload, running, waiting, running + waiting)
    steps = max(1.0, waiting * workload.prompt / 2048)
    assert seconds == pytest.approx(0.05 * steps, rel=1e-6)


@given(lengths, st.integers(1, 64), st.integers(1, 64), st.integers(0, 64))
def test_waiting_sequences_without_room_wait_for_ends(
    workload: Workload, room: int, waiting: int, too_many: int
) -> None:
    model = capacity()
    seconds = model.seconds_to_start(workload, room + too_many, waiting, room)
    ends = model.tokens_per_s(workload, room) / workload.answer  # per second
    assert seconds == pytest.approx((waiting + too_many) / ends)


@given(lengths, st.integers(0, 64), st.integers(0, 64), st.integers(1, 63))
def test_more_room_starts_no_sequence_later(workload: Workload, running: int, waiting: int, room: int) -> None:
    """Steps take equally long. What starts at once costs at most the time of its prompts."""
    model, seconds = capacity(), [0.0, 0.0]
    for index, size in enumerate((room, room + 1)):
        seconds[index] = model.seconds_to_start(workload, running, waiting, size)
    assert seconds[1] <= seconds[0] + 0.05 * max(1.0, math.ceil(workload.prompt / 2048)) * 1.01


def test_stages_of_a_pipeline_compute_different_steps_at_once() -> None:
    class TokenCost:
        """Every token takes a millisecond, in all stages together."""

        def seconds(self, load: StepLoad) -> float:
            return load.tokens / 1000

    stage = HOME.stages[0]
    halves = [replace(stage, blocks=stage.blocks[:16]), replace(stage, blocks=stage.blocks[16:], devices=(1,))]
    one, two = (
        Capacity(plan.with_kv_pages(4001), machine().shapes, 16, TokenCost())
        for plan in (HOME, replace(HOME, stages=tuple(halves)))
    )
    for workload in (Workload(1, 1000, 100), Workload(20480, 1, 20480)):
        assert two.tokens_per_s(workload, 32) == pytest.approx(2 * one.tokens_per_s(workload, 32), rel=0.02)
    assert two.seconds_to_start(workload, 8, 16, 24) < 0.6 * one.seconds_to_start(workload, 8, 16, 24)


def test_nothing_waiting_starts_at_once() -> None:
    assert capacity().seconds_to_start(Workload(10, 10, 10), 40, 0, 10) == 0.0


def test_costs_are_those_of_the_plan() -> None:
    workload, shapes = Workload(10, 100, 60), machine().shapes
    small = HOME.with_precisions({f"layers.{n}": "int4" for n in range(16)})
    full, fewer = (Capacity.of(plan, shapes, 16, costs_of(1.6)) for plan in (HOME, small))
    assert fewer.tokens_per_s(workload, 8) == pytest.approx(1.6 * full.tokens_per_s(workload, 8))


def test_workload_follows_from_counters_of_an_engine() -> None:
    """The fluid engine has sequences of 50 prompt tokens, 100 tokens of answers and 10 pages."""
    fluid, snapshots = Fluid(), []
    for number in range(600):
        snapshots.append(fluid.step(number / 10, 0.1, 6.0, HOME))
    workload = Workload.between(snapshots[299], snapshots[-1], 16)
    assert workload.prompt == pytest.approx(50, rel=0.05)
    assert workload.answer == pytest.approx(100, rel=0.1)
    assert workload.context == pytest.approx(160, rel=0.05)


def test_workload_before_anything_has_ended_knows_the_prompts_that_wait() -> None:
    workload = Workload.between(Snapshot(), Snapshot(num_waiting=4, waiting_tokens=400), 16)
    assert workload == Workload(100, DEFAULT_ANSWER, 100 + DEFAULT_ANSWER / 2)
    assert Workload.between(Snapshot(), Snapshot(), 16).prompt == 1.0
