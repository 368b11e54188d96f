"""Policy, controller and smoothing against a fluid queue under a virtual clock.

Loads rise and fall for two hours, in the worst rhythms and just at what full precision can serve.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.control import ResizeKVPool
from jaxserve.control.controller import Controller
from jaxserve.control.policies import ACCURACY, INT8, PERFORMANCE, MorphPolicy, MorphSettings
from jaxserve.control.resources import validate
from tests.support.control import TO_INT4, Fluid, VirtualActuator, home_plan, machine, swaps

TICK = 0.25  # s
TWO_HOURS = 7200.0  # s
ORDER = (7, 3, 11, 5, 9, 1, 13, 2, 14, 4, 6, 8, 10, 12, 0, 15)
HOME, MACHINE = home_plan(), machine()
LOW = 0.4  # of what full precision can serve
CACHE_BOUND, SLOT_BOUND = {}, {"max_seqs": 16}  # what is scarce: pages, or places in a step
Wave = Callable[[float], float]  # seconds -> load, as a share of what full precision can serve


@dataclass
class LoadResult:
    """The decisions of a policy under a load."""

    directions: list[str]  # "entry" or "release", one after the other
    late: list[float]  # times at which load had been low for more than 10 s, and a layer was not back

    @property
    def changes(self) -> int:
        """The number of times that entries follow a release, or releases an entry."""
        return sum(a != b for a, b in zip(["release", *self.directions], self.directions, strict=False))


def run(load: Wave, seconds: float, mode: MorphSettings, engine: dict[str, int]) -> LoadResult:
    """Serve a load, and check at each moment that plans fit and pools hold the pages in use."""
    fluid, actuator, result, low_for = Fluid(**engine), VirtualActuator(), LoadResult([], []), 0.0
    controller = Controller(HOME, MorphPolicy(MACHINE, ORDER, mode), MACHINE, actuator, tick=TICK)
    capacity = fluid.capacity(HOME.instances[0].kv_pages)
    for number in range(round(seconds / TICK)):
        actuator.now = now = number * TICK
        snapshot = fluid.step(now, TICK, load(now) * capacity, controller.plan)
        assert fluid.running * fluid.pages_each <= controller.plan.instances[0].kv_pages - 1 + 1e-6
        decided = len(actuator.started)
        controller.tick(now, [snapshot])
        if len(actuator.started) > decided:
            validate(controller.plan, MACHINE)
            transitions = actuator.started[-1]
            entered = any(swaps(transitions, precision) for precision in mode.precisions)
            result.directions.append("entry" if entered else "release")
            for transition in transitions:
                if isinstance(transition, ResizeKVPool) and transition.after < transition.before:
                    assert snapshot.kv_pages_used <= mode.release_usage * (transition.after - 1)
        calm = load(now) <= LOW and not snapshot.num_waiting and snapshot.kv_pages_used <= 0.5 * (401 - 1)
        low_for = low_for + TICK if calm else 0.0
        if low_for > 10 and controller.plan.instances != HOME.instances:
            result.late.append(now)
    assert {decision.outcome for decision in controller.decisions} <= {"done", "started"}
    return result


def square(period: float, low: float, high: float) -> Wave:
    return lambda t: high if t % period < period / 2 else low


def sine(period: float, low: float, high: float) -> Wave:
    return lambda t: (high + low) / 2 + (high - low) / 2 * math.sin(2 * math.pi * t / period)


ALL = [ACCURACY, TO_INT4, INT8, PERFORMANCE]
MODES = pytest.mark.parametrize("mode", ALL, ids=["accuracy", "to-int4", "int8", "performance"])
ENGINES = pytest.mark.parametrize("engine", [CACHE_BOUND, SLOT_BOUND], ids=["cache-bound", "slot-bound"])


@MODES
@ENGINES
def test_no_load_or_low_load_never_swaps_layers(mode: MorphSettings, engine: dict[str, int]) -> None:
    assert run(lambda _: 0.0, 600, mode, engine).directions == []
    assert run(lambda _: LOW, 600, mode, engine).directions == []


@MODES
@ENGINES
@pytest.mark.parametrize("load", [0.95, 1.05])
def test_steady_load_at_the_limit_does_not_oscillate(mode: MorphSettings, engine: dict[str, int], load: float) -> None:
    changes = run(lambda _: load, TWO_HOURS, mode, engine).changes
    assert changes <= 2 + 2 * TWO_HOURS / mode.relapse_memory


@MODES
@pytest.mark.parametrize(
    ("wave", "period", "low", "high", "engine"),
    [
        (square, 9, 0.0, 1.5, CACHE_BOUND),
        (sine, 30, 0.0, 1.5, SLOT_BOUND),
        (square, 60, 0.3, 1.1, SLOT_BOUND),
        (sine, 120, 0.6, 1.2, CACHE_BOUND),
        (square, 600, 0.9, 1.05, CACHE_BOUND),
        (sine, 1800, 0.0, 1.5, SLOT_BOUND),
    ],
)
def test_periodic_load_swaps_layers_at_most_once_per_period(
    wave: Callable[..., Wave], period: float, low: float, high: float, engine: dict[str, int], mode: MorphSettings
) -> None:
    result = run(wave(period, low, high), TWO_HOURS, mode, engine)
    assert result.changes <= 2 * TWO_HOURS / period + 2 * TWO_HOURS / mode.relapse_memory
    assert result.late == []


@MODES
@pytest.mark.parametrize("period", [1, 4])
def test_load_with_a_short_period_is_not_followed(mode: MorphSettings, period: float) -> None:
    seconds = 1800.0
    result = run(square(period, 0.0, 1.5), seconds, mode, CACHE_BOUND)
    assert result.changes <= 2 * seconds / (2 * mode.release_quiet)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.5, 60), st.floats(0, 2.5)), min_size=1, max_size=8),
    st.sampled_from(ALL),
    st.sampled_from([CACHE_BOUND, SLOT_BOUND]),
)
def test_full_precision_returns_after_any_load_ends(
    phases: list[tuple[float, float]], mode: MorphSettings, engine: dict[str, int]
) -> None:
    ends = [sum(length for length, _ in phases[: n + 1]) for n in range(len(phases))]

    def load(time: float) -> float:
        return next((level for end, (_, level) in zip(ends, phases, strict=True) if time < end), 0.0)

    result = run(load, ends[-1] + 120 + sum(length * level for length, level in phases), mode, engine)
    assert result.late == []
    assert not result.directions or result.directions[-1] == "release"
    assert result.changes <= 2 + 2 * ends[-1] / mode.release_quiet
