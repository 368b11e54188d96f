"""The scheduler of a pipeline under random load: no sequence has two tokens in flight, and steps get equal work."""

import random
from collections import deque
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.core.request import Sequence
from jaxserve.core.step_load import StepLoad
from jaxserve.core.work import Work
from jaxserve.kvcache import PagePool, PageTable
from jaxserve.scheduler import SchedulerLimits
from jaxserve.scheduler.chunk_cost import ChunkCost
from jaxserve.scheduler.pipelined import PipelinedScheduler
from tests.scheduler.test_scheduler import PAGE, TILE, CheckedScheduler

COST = ChunkCost(a=1e-3, b=1.0, g=8.0)


class CheckedPipeline(CheckedScheduler):
    """A pipelined scheduler with several steps in flight, of which the oldest returns its tokens first."""

    def __init__(
        self, *, microbatches: int = 3, seqs: int = 4, tiles: int = 3, by_tokens: bool = False, **options: int | bool
    ):
        super().__init__(seqs=seqs, tiles=tiles, **options)
        self.microbatches = microbatches
        self.scheduler = PipelinedScheduler(
            SchedulerLimits(seqs, tiles, TILE, PAGE),
            self.pages,
            PageTable(seqs, 64),
            microbatches=microbatches,
            cost=COST,
            by_tokens=by_tokens,
        )
        self.in_flight: deque[Work] = deque()
        self.depth = microbatches

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self.in_flight

    def step(self) -> Work:
        work = self.scheduler.schedule(self.steps, self.steps)
        self.steps += 1
        self.check(work)
        if work:
            tokens = [*work.decodes, *(chunk.sequence for chunk in work.chunks if chunk.last)]
            assert all(sequence.num_inflight == 1 for sequence in tokens)
            assert len(set(map(id, tokens))) == len(tokens)
            self.in_flight.append(work)
        assert work or self.in_flight or self.scheduler.num_preemptions, "there is work, and nothing is computed"
        if self.in_flight and (not work or len(self.in_flight) == self.depth):
            self.give_tokens(self.in_flight.popleft())
            self.scheduler.ended()
        return work


def served(checked: CheckedPipeline) -> bool:
    return all(len(sequence.tokens) == sequence.max_total for sequence in checked.sequences)


REQUESTS = st.tuples(st.integers(1, 60), st.integers(1, 25), st.integers(1, 3), st.integers(0, 2))


@settings(max_examples=60)
@given(
    st.lists(REQUESTS, min_size=1, max_size=14),
    st.integers(25, 60),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(2, 5),
    st.booleans(),
)
def test_every_request_gets_its_tokens(
    requests: list[tuple[int, int, int, int]], pages: int, seqs: int, tiles: int, microbatches: int, by_tokens: bool
) -> None:
    checked = CheckedPipeline(pages=pages, seqs=seqs, tiles=tiles, microbatches=microbatches, by_tokens=by_tokens)
    prompt = list(range(100, 160))
    for number, (length, answer, n, priority) in enumerate(requests):
        start = number % 2  # every second one shares its beginning with others
        checked.add(prompt[start : start + length] or prompt[:1], answer, n=n, priority=priority)
        for _ in range(number % 3):
            checked.step()
    checked.run()
    assert served(checked)
    assert checked.pages.used == 0


@pytest.mark.parametrize("seed", range(5))
def test_requests_that_end_early_or_move_leave_no_page(seed: int) -> None:
    rng, checked = random.Random(seed), CheckedPipeline(pages=40, seqs=5)
    for _ in range(12):
        checked.add([rng.randrange(50) for _ in range(rng.randint(1, 50))], rng.randint(1, 30), n=rng.randint(1, 2))
        for _ in range(rng.randint(0, 4)):
            checked.step()
        alive = [s for s in checked.sequences if len(s.tokens) < s.max_total and s.status.name != "FINISHED"]
        if rng.random() < 0.3 and alive:
            checked.scheduler.finish(rng.choice(alive))
    while not checked.idle:
        checked.step()
    assert checked.pages.used == 0


@pytest.mark.parametrize("by_tokens", [False, True])
def test_decodes_are_divided_equally_among_the_steps_in_flight(by_tokens: bool) -> None:
    checked = CheckedPipeline(pages=100, seqs=12, tiles=12, by_tokens=by_tokens)
    for _ in range(12):
        checked.add([1], 40)
    steps = [checked.step() for _ in range(40)]
    assert {len(step.decodes) for step in steps[12:]} == {4}


def test_unequal_microbatches_become_equal_in_one_round() -> None:
    checked = CheckedPipeline(pages=100, seqs=12, tiles=2)
    for length, count in ((1, 10), (40, 1), (40, 1)):  # the long prompts come when the others decode
        for _ in range(count):
            checked.add([length] * length, 40)
        for _ in range(9):
            checked.step()
    steps = [checked.step() for _ in range(12)]
    assert {len(step.decodes) for step in steps[3:]} <= {3, 4, 5}


def test_sequences_that_begin_apart_join_the_microbatches_of_others() -> None:
    """With a step more in flight than stages, as an engine has it."""
    checked = CheckedPipeline(pages=200, most=200, seqs=12, microbatches=2)
    checked.depth = 3
    for _ in range(12):
        checked.add([1], 90)
        for _ in range(3):
            checked.step()
    works = [checked.step() for _ in range(40)]
    assert {len(work.decodes) for work in works if work} <= {5, 6, 7}


def test_a_prompt_alone_is_in_several_stages_at_once() -> None:
    checked = CheckedPipeline(tiles=6)
    (sequence,) = checked.add(list(range(48)), 1)
    steps = [checked.step() for _ in range(3)]
    assert [chunk.start for step in steps for chunk in step.chunks] == [0, 16, 32]
    assert sequence.num_inflight == 1


def test_waiting_work_does_not_make_decodes_bunch_up_when_pages_are_missing() -> None:
    checked = CheckedPipeline(pages=16, seqs=8, tiles=6, caching=False)
    for _ in range(3):
        checked.add([1, 2, 3, 4, 5], 12)
    while (
        any(not s.decoding and not s.num_inflight for s in checked.scheduler.running) or not checked.scheduler.running
    ):
        checked.step()
    checked.add([9] * 48, 1)  # has no room before the others end
    assert max(len(checked.step().decodes) for _ in range(6)) == 1


def test_the_cost_follows_the_step_times_of_the_plan() -> None:
    scheduler = CheckedPipeline().scheduler
    assert isinstance(scheduler, PipelinedScheduler)

    def seconds(load: StepLoad) -> float:
        return 2e-3 + 3e-5 * load.tokens + 1e-8 * load.prefill

    scheduler.use_step_times(seconds)
    assert (scheduler.cost.a, scheduler.cost.b, scheduler.cost.g) == pytest.approx((1e-8, 3e-5, 2e-3))
    scheduler.use_step_times(None)
    assert scheduler.cost == replace(COST, tile=TILE)


def test_chunks_of_a_step_have_equal_cost_with_those_in_flight() -> None:
    checked = CheckedPipeline(pages=100, seqs=4, tiles=20)
    for length in (60, 57, 61, 59):
        checked.add([length] * length, 1)
    steps = [checked.step() for _ in range(3)]

    def cost(work: Work) -> float:
        return sum(COST.added(chunk.start, chunk.length) for chunk in work.chunks)

    costs = sorted(map(cost, steps))
    assert costs[-1] < 1.2 * costs[0], "a tile is a tenth of a microbatch"
    assert all(before.step < after.step for before, after in pairwise(steps))


def test_forced_tokens_are_computed_as_a_chunk() -> None:
    class Grammar:
        static = False

    checked = CheckedPipeline()
    (sequence,) = checked.add([1, 2, 3], 30)
    sequence.matcher = Grammar()  # type: ignore[assignment]
    checked.step()
    checked.step()
    known = len(sequence.tokens)
    sequence.tokens += [checked.token(sequence, known + number) for number in range(9)]  # more than its pages hold
    work = checked.step()
    assert [(chunk.start, chunk.length, chunk.last) for chunk in work.chunks] == [(known - 1, 10, True)]
    checked.run()
    assert isinstance(sequence, Sequence)
    assert len(sequence.tokens) == sequence.max_total


def test_a_cost_that_the_user_gives_stays() -> None:
    limits = SchedulerLimits(4, 4, TILE, PAGE)
    pages, table = PagePool(20), PageTable(4, 20)
    scheduler = PipelinedScheduler(limits, pages, table, microbatches=3, cost=COST, measured=False)
    scheduler.use_step_times(lambda load: 1.0 + load.tokens)
    assert scheduler.cost == replace(COST, tile=TILE)
