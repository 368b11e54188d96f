"""Policy, controller and smoothing against a fluid queue under a virtual clock.

Loads rise and fall for two hours, in the worst rhythms and just at what full precision can serve. Fewer bits are faster
or slower, and the policy's costs say so or are wrong.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.control import InstancePlan, PlanInForce, SwapPrecision, Transition
from jaxserve.control.controller import Controller
from jaxserve.control.policies import ACCURACY, INT8, PERFORMANCE, MorphPolicy, MorphSettings
from jaxserve.control.resources import validate
from tests.support.control import LAYER, TO_INT4, Fluid, VirtualActuator, home_plan, machine
from tests.support.thorough import THOROUGH, some

TICK = 0.5  # s
HOUR, TWO_HOURS = 3600.0, 7200.0  # s
ORDER = (7, 3, 11, 5, 9, 1, 13, 2, 14, 4, 6, 8, 10, 12, 0, 15)
HOME = home_plan()
LOW = 0.4  # of what full precision can serve
CACHE_BOUND, SLOT_BOUND = 64, 16  # sequences at once: pages are scarce, or places in a step
Wave = Callable[[float], float]  # seconds -> load, as a share of what full precision can serve


@dataclass
class LoadResult:
    """The result of a policy under a load."""

    directions: list[str] = field(default_factory=list)  # of changes of layers: "entry" or "release", in their order
    late: list[float] = field(
        default_factory=list
    )  # times at which load had been low for 10 s, and a layer was not back
    away: float = 0.0  # s with layers in fewer bits
    decisions: int = 0  # of any kind

    @property
    def changes(self) -> int:
        """The number of times that entries follow a release, or releases an entry."""
        return sum(a != b for a, b in zip(["release", *self.directions], self.directions, strict=False))


def run(load: Wave, seconds: float, mode: MorphSettings, fluid: Fluid) -> LoadResult:
    """Serve a load, and check at each moment that plans fit and pools hold the pages in use."""
    resources = machine(max_num_seqs=fluid.max_seqs, costs=fluid.costs())
    actuator, result, low_for, home = VirtualActuator(PlanInForce(HOME)), LoadResult(), 0.0, HOME.instances[0]
    policy = MorphPolicy(resources, ORDER, mode)
    controller = Controller(actuator.in_force, policy, resources, {"0": actuator}, tick=TICK)
    capacity = fluid.capacity(home.kv_pages)
    for number in range(round(seconds / TICK)):
        actuator.now = now = number * TICK
        before = actuator.in_force.instance("0")
        snapshot = fluid.step(now, TICK, load(now) * capacity, before)
        assert fluid.running * fluid.pages_each <= before.kv_pages - 1 + 1e-6
        controller.tick(now, {"0": snapshot})
        if len(actuator.started) > result.decisions:
            result.decisions += 1
            validate(controller.plan, resources)
            result.directions += direction(actuator.started[-1])
            after, reason = actuator.in_force.instance("0"), controller.decisions[-1].reason
            check_room(snapshot.kv_pages_used, before, after, reason, mode)
        result.away += TICK * (before.layer_precisions != home.layer_precisions)
        calm = load(now) <= LOW and not snapshot.num_waiting and snapshot.kv_pages_used <= 0.5 * (home.kv_pages - 1)
        low_for = low_for + TICK if calm else 0.0
        if low_for > 10 and before != home:
            result.late.append(now)
    assert {decision.outcome for decision in controller.decisions} <= {"done", "started"}
    return result


def direction(transitions: Sequence[Transition]) -> list[str]:
    """Return whether layers get smaller ("entry") or larger ("release"), or nothing if no layer changes."""
    growth = [LAYER[t.after] - LAYER[t.before] for t in transitions if isinstance(t, SwapPrecision)]
    assert all(size < 0 for size in growth) or all(size > 0 for size in growth)
    return ["entry" if growth[0] < 0 else "release"] if growth else []


def check_room(used: int, before: InstancePlan, after: InstancePlan, reason: str, mode: MorphSettings) -> None:
    """Check that a pool which shrinks in a quiet time keeps its margin."""
    if after.kv_pages < before.kv_pages and reason.startswith("quiet"):
        assert used <= mode.release_usage * (after.kv_pages - 1)


def square(period: float, low: float, high: float) -> Wave:
    return lambda t: high if t % period < period / 2 else low


def sine(period: float, low: float, high: float) -> Wave:
    return lambda t: (high + low) / 2 + (high - low) / 2 * math.sin(2 * math.pi * t / period)


MODES = {"accuracy": ACCURACY, "to-int4": TO_INT4, "int8": INT8, "performance": PERFORMANCE}
SPEEDUPS = (0.5, 0.8, 1.0, 1.6, 2.0)
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
every_engine = pytest.mark.parametrize("max_seqs", [CACHE_BOUND, SLOT_BOUND], ids=["cache-bound", "slot-bound"])


def max_changes(seconds: float, mode: MorphSettings, period: float = math.inf) -> float:
    """Return how often entries and releases may take turns: once in a period, and when a mistake is forgotten."""
    return 2 + 2 * seconds / period + 2 * seconds / mode.relapse_memory


@every_mode
@every_engine
@pytest.mark.parametrize("load", [0.0, LOW])
def test_no_load_or_low_load_changes_nothing(mode: MorphSettings, max_seqs: int, load: float) -> None:
    assert run(lambda _: load, 300, mode, Fluid(max_seqs)).decisions == 0


STEADY = [
    (load, mode, max_seqs, speedup)
    for load, mode in [(0.95, ACCURACY), (1.05, PERFORMANCE)]
    for speedup in [0.5, 1.0, 1.6]
    for max_seqs in [CACHE_BOUND, SLOT_BOUND]
]


@pytest.mark.parametrize(("load", "mode", "max_seqs", "speedup"), some(STEADY, 2))
def test_steady_load_at_the_limit_does_not_oscillate(
    load: float, mode: MorphSettings, max_seqs: int, speedup: float
) -> None:
    result = run(lambda _: load, TWO_HOURS, mode, Fluid(max_seqs, speedup=speedup))
    assert result.changes <= max_changes(TWO_HOURS, mode)


WAVES = [
    (square, 9, 0.0, 1.5, CACHE_BOUND),
    (sine, 30, 0.0, 1.5, SLOT_BOUND),
    (square, 60, 0.3, 1.1, SLOT_BOUND),
    (sine, 120, 0.6, 1.2, CACHE_BOUND),
    (square, 600, 0.9, 1.05, CACHE_BOUND),
    (sine, 1800, 0.0, 1.5, SLOT_BOUND),
]


@pytest.mark.parametrize(
    ("wave", "period", "low", "high", "max_seqs", "speedup"),
    some([(*wave, speedup) for wave in WAVES for speedup in [0.5, 1.0, 1.6]], 3),
)
def test_periodic_load_changes_layers_at_most_once_per_period(
    wave: Callable[..., Wave], period: float, low: float, high: float, max_seqs: int, speedup: float
) -> None:
    mode = list(MODES.values())[(round(period) + SPEEDUPS.index(speedup)) % len(MODES)]
    seconds = TWO_HOURS if period > 60 else HOUR / 2  # 30 periods or more are enough
    result = run(wave(period, low, high), seconds, mode, Fluid(max_seqs, speedup=speedup))
    assert result.changes <= max_changes(seconds, mode, period)
    assert result.late == []


@every_mode
@pytest.mark.parametrize("period", some([1, 4], 1))
def test_load_with_a_short_period_is_not_followed(mode: MorphSettings, period: float) -> None:
    seconds = 1800.0
    result = run(square(period, 0.0, 1.5), seconds, mode, Fluid(CACHE_BOUND))
    assert result.changes <= 2 * seconds / (2 * mode.release_quiet)


SHORT_SLOTS = list(product(MODES.values(), [sine(120, 0.6, 1.4), lambda _: 1.05], [0.5, 0.8, 1.0]))


@pytest.mark.parametrize(("mode", "load", "speedup"), some(SHORT_SLOTS, 4))
def test_short_slots_change_nothing_if_fewer_bits_are_not_faster(
    mode: MorphSettings, speedup: float, load: Wave
) -> None:
    assert run(load, 1200, mode, Fluid(SLOT_BOUND, speedup=speedup)).decisions == 0


WRONG = [
    (mode, *engine)
    for mode in (ACCURACY, PERFORMANCE)
    for engine in [(SLOT_BOUND, 0.5), (SLOT_BOUND, 0.7), (CACHE_BOUND, 0.5)]
]


@pytest.mark.parametrize(("mode", "max_seqs", "truth"), some(WRONG, 2))
def test_wrong_belief_in_faster_steps_is_left_and_remembered(mode: MorphSettings, max_seqs: int, truth: float) -> None:
    result = run(sine(120, 0.4, 1.3), HOUR, mode, Fluid(max_seqs, speedup=truth, believed=1.6))
    assert 2 <= result.changes <= max_changes(HOUR, mode) + 6, "the way back may have to wait for pages"
    assert result.away < HOUR / 8
    assert result.late == []


@every_mode
@pytest.mark.parametrize("truth", some([1.6, 2.0], 1))
def test_wrong_belief_in_slower_steps_leaves_full_precision_alone(mode: MorphSettings, truth: float) -> None:
    result = run(sine(120, 0.4, 1.3), 1200, mode, Fluid(SLOT_BOUND, speedup=truth, believed=0.7))
    assert result.decisions == 0


@settings(max_examples=100 if THOROUGH else 10, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.5, 60), st.floats(0, 2.5)), min_size=1, max_size=8),
    st.sampled_from(list(MODES.values())),
    st.sampled_from([CACHE_BOUND, SLOT_BOUND]),
    st.sampled_from(SPEEDUPS),
    st.sampled_from([None, 0.6, 1.8]),
)
def test_full_precision_returns_after_any_load_ends(
    phases: list[tuple[float, float]], mode: MorphSettings, max_seqs: int, speedup: float, believed: float | None
) -> None:
    ends = [sum(length for length, _ in phases[: n + 1]) for n in range(len(phases))]

    def load(time: float) -> float:
        return next((level for end, (_, level) in zip(ends, phases, strict=True) if time < end), 0.0)

    served_after = sum(length * level for length, level in phases) / min(1.0, speedup)
    fluid = Fluid(max_seqs, speedup=speedup, believed=believed)
    result = run(load, ends[-1] + 120 + served_after, mode, fluid)
    assert result.late == []
    assert not result.directions or result.directions[-1] == "release"
    assert result.changes <= 2 + 2 * ends[-1] / mode.release_quiet
