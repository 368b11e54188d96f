"""A simulated instance: a steady run equals its single steps, at the times of the real step loop."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.core.clock import VirtualClock
from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.step_load import StepLoad
from jaxserve.core.work import Work
from jaxserve.engine.loop import StepLoop
from jaxserve.sim.simulation import SimRequest
from tests.sim.clusters import PAGE, Formula, answered, cluster
from tests.sim.devices import VirtualDevice

prompts = st.one_of(st.none(), st.integers(0, 2))  # one of three shared prefixes, or none
gaps = st.integers(0, 8000)  # ms
lengths = st.tuples(gaps, st.integers(1, 30), st.integers(1, 30), prompts)


def requests(drawn: Sequence[tuple[int, int, int, int | None]]) -> list[SimRequest]:
    """Return requests made from gaps between arrivals, lengths and prefixes.

    Steps take whole milliseconds. Each request has microseconds of its own, so that none arrives just when a step ends,
    where the rounding of times would decide which step admits it.
    """
    made, milliseconds = [], 0
    for number, (gap, inputs, outputs, prefix) in enumerate(drawn):
        milliseconds += gap
        prompt = tuple(range(100 * (prefix or 0), 100 * (prefix or 0) + inputs))
        prompt = prompt if prefix is not None else (1000 + number,) * inputs
        made.append(SimRequest(milliseconds / 1000 + number / 1e6, inputs, outputs, prompt))
    return made


class Expected:
    """Expected times of steps (`InstanceCost`) that are not those of `Formula`."""

    def seconds(self, load: StepLoad) -> float:
        return 2 + 0.3 * load.tokens + 0.01 * load.context + 0.001 * load.prefill


@given(st.lists(lengths, min_size=1, max_size=25), st.integers(17, 40), st.booleans())
def test_steps_taken_at_once_are_the_steps_one_by_one(drawn, pages, caching):
    at_once = cluster(pages=pages, caching=caching, cost=Expected())
    one_by_one = cluster(pages=pages, caching=caching, alike=False, cost=Expected())
    found, expected = (answered(simulation, requests(drawn)) for simulation in (at_once, one_by_one))
    for answer, other in zip(found, expected, strict=True):
        assert answer.error is None
        assert len(answer.token_times) == answer.request.output_tokens
        assert answer.token_times == pytest.approx(other.token_times, abs=1e-9)
        assert (answer.first_token, answer.last_token) == (answer.token_times[0], answer.token_times[-1])
    schedulers = [simulation.front.instances["0"].core.scheduler for simulation in (at_once, one_by_one)]
    counts = [(s.num_preemptions, s.prefix_hits, s.pages.used) for s in schedulers]
    assert counts[0] == counts[1]
    snapshots = [simulation.front.instances["0"].core.snapshot for simulation in (at_once, one_by_one)]
    assert snapshots[0].steps == snapshots[1].steps
    assert snapshots[0].gap_seconds == pytest.approx(snapshots[1].gap_seconds)
    assert snapshots[0].busy_seconds == pytest.approx(snapshots[1].busy_seconds)
    assert snapshots[0].expected_seconds == pytest.approx(snapshots[1].expected_seconds)


class Ticks:
    """A control that only records all snapshots, at an interval in ms, at which no step ends."""

    def __init__(self, interval: int):
        self.interval, self.due, self.seen = interval / 1000, 0.0005, []
        self.instances: Sequence = ()
        self.before: Callable[[], None] = lambda: None

    def next_event(self) -> float:
        return self.due

    def advance(self) -> None:
        self.due += self.interval
        self.seen.append([instance.snapshot() for instance in self.instances])


@settings(max_examples=30)
@given(st.lists(lengths, min_size=1, max_size=12), st.integers(300, 9000))
def test_whoever_looks_sees_what_steps_one_by_one_have_done(drawn, interval):
    seen = []
    for alike in (True, False):
        ticks = Ticks(interval)
        simulation = cluster(alike=alike, control=ticks, cost=Expected())
        ticks.instances = list(simulation.front.instances.values())
        answers = answered(simulation, requests(drawn))
        seen.append((ticks.seen, [answer.last_token for answer in answers]))
    (looked, ends), (other, other_ends) = seen
    assert ends == pytest.approx(other_ends)  # snapshots change nothing
    for (snapshot,), (expected,) in zip(looked, other, strict=False):
        assert snapshot.generated_tokens == expected.generated_tokens
        assert snapshot.kv_pages_used == expected.kv_pages_used
        assert snapshot.steps == expected.steps
        assert snapshot.time == pytest.approx(expected.time)
        assert snapshot.busy_seconds == pytest.approx(expected.busy_seconds)
        assert snapshot.expected_seconds == pytest.approx(expected.expected_seconds)


def formula_seconds(work: Work) -> float:
    """Return the time of a step by `Formula`, with the load counted independently of `Loads`."""
    tiles = sum(-(-chunk.length // 8) for chunk in work.chunks)
    context = sum(sequence.num_computed for sequence in work.decodes)
    prefill = sum(chunk.length * (chunk.start + chunk.length + 1) for chunk in work.chunks)
    decodes = len(work.decodes)
    if tiles:
        rows, tokens = (4 if decodes else 0), 8 * next(n for n in (1, 2, 4) if n >= tiles)
    else:
        rows, tokens = next(n for n in (1, 2, 4) if n >= decodes), 0
    return Formula().seconds(StepLoad(rows + tokens, 0, decodes, context, prefill))


def test_an_instance_keeps_the_times_of_the_real_step_loop():
    asked = [SimRequest(0.0, 13, 9), SimRequest(0.0, 5, 20), SimRequest(0.0, 30, 3)]
    simulation = cluster(cost=Expected())
    found = answered(simulation, asked)

    clock = VirtualClock()
    core = cluster(cost=Expected()).front.instances["0"].core
    loop = StepLoop(core, VirtualDevice(clock, formula_seconds, dispatch_s=Formula().host), clock)
    for number, request in enumerate(asked):
        params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
        core.add(Request(str(number), (0,) * request.input_tokens, params, 0.0))
    times: dict[str, list[float]] = {}
    first = True
    while not loop.idle:
        for output in loop.step():
            times.setdefault(output.request_id, []).append(clock.time)
        if first:
            clock.time += Formula().host  # of the begin on an idle device
            first = False
    for number, answer in enumerate(found):
        assert answer.token_times == pytest.approx(times[str(number)])
    simulated = simulation.front.instances["0"].core.snapshot
    assert core.snapshot.busy_seconds == pytest.approx(simulated.busy_seconds)
    assert core.snapshot.expected_seconds == pytest.approx(simulated.expected_seconds)


def test_a_request_that_cannot_be_served_is_refused_with_the_limit():
    (answer,) = answered(cluster(), [SimRequest(0.0, 64, 4)])
    assert "max_model_len" in answer.error
    crowd = [SimRequest(0.0, 8, 8) for _ in range(12)]
    errors = [answer.error for answer in answered(cluster(max_queued=5), crowd)]
    assert [error is None for error in errors] == [True] * 5 + [False] * 7
    assert "max_queued_requests" in errors[-1]


def test_pages_of_a_shared_prompt_are_computed_once():
    shared = tuple(range(32))
    asked = [SimRequest(20.0 * number, 32, 4, shared) for number in range(2)]
    first, second = answered(cluster(caching=True), asked)
    assert second.first_token - 20.0 < first.first_token
    simulation = cluster(caching=True)
    answered(simulation, asked)
    assert simulation.front.instances["0"].core.scheduler.prefix_hits == 32 - PAGE
