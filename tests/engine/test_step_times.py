"""An instance counts the time of its steps, and the time that the cost of the plan in force expected of them."""

from collections.abc import Callable

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.step_load import StepLoad
from jaxserve.core.work import Work
from jaxserve.engine.loop import StepLoop
from tests.sim.clusters import cluster
from tests.sim.devices import VirtualDevice


class Cost:
    """Expected times of steps (`InstanceCost`): a time for each token, and one for each token of context."""

    def __init__(self, per_token: float, per_context: float = 0.0):
        self.per_token, self.per_context = per_token, per_context

    def seconds(self, load: StepLoad) -> float:
        return self.per_token * load.tokens + self.per_context * load.context


def loop_on(seconds_of: Callable[[Work], float], cost: Cost | None, **options: bool) -> tuple[StepLoop, VirtualClock]:
    clock = VirtualClock()
    return StepLoop(
        cluster(cost=cost).front.instances["0"].core, VirtualDevice(clock, seconds_of), clock, **options
    ), clock


def ask(loop: StepLoop, name: str, prompt: int, answer: int) -> None:
    loop.add(Request(name, (7,) * prompt, SamplingParams(max_tokens=answer, ignore_eos=True), arrival=0.0))


def serve(loop: StepLoop) -> None:
    while not loop.idle:
        loop.step()


@pytest.mark.parametrize("overlap", [True, False])
def test_time_between_requests_is_not_busy(overlap: bool) -> None:
    loop, clock = loop_on(lambda work: 10.0 if work.chunks else 1.0, Cost(0.5), overlap=overlap)
    for name in ("a", "b"):
        ask(loop, name, 8, 4)
        serve(loop)
        clock.time += 1000
    snapshot = loop.core.snapshot
    assert snapshot.busy_seconds == pytest.approx(2 * (10 + 3 * 1))
    assert snapshot.expected_seconds == pytest.approx(2 * 0.5 * (8 + 3))


def test_context_is_expected_as_it_was_when_the_step_began() -> None:
    loop, _ = loop_on(lambda work: 1.0, Cost(0.0, 1.0))
    ask(loop, "a", 8, 4)
    serve(loop)
    assert loop.core.snapshot.expected_seconds == pytest.approx(9 + 10 + 11)


def test_a_new_plan_has_its_own_cost_from_the_next_step_on() -> None:
    loop, _ = loop_on(lambda work: 1.0, Cost(1.0))
    core = loop.core
    ask(loop, "a", 8, 11)
    for _ in range(4):
        loop.step()
    assert core.snapshot.expected_seconds == pytest.approx(8 + 2)
    core.replan(core.salt, core.plan_fields, Cost(100.0))
    loop.step()
    assert core.snapshot.expected_seconds == pytest.approx(8 + 3), "this step was dispatched under the plan before"
    serve(loop)
    assert core.snapshot.expected_seconds == pytest.approx(8 + 3 + 7 * 100)


def test_without_known_costs_nothing_is_expected() -> None:
    loop, clock = loop_on(lambda work: 2.0, None)
    ask(loop, "a", 8, 4)
    serve(loop)
    assert (loop.core.snapshot.busy_seconds, loop.core.snapshot.expected_seconds) == (clock.time, 0.0)
