"""The scheduler under random load, with an executor that only checks.

Every token is computed once, in order, in pages that no other sequence writes, and every page is released.
"""

import random
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.core.request import Request, Sequence, SequenceStatus
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.work import Work
from jaxserve.kvcache import NULL_PAGE, PagePool, PageTable, page_hashes
from jaxserve.scheduler import Scheduler, SchedulerLimits

PAGE, TILE = 4, 8


class CheckedScheduler:
    """A scheduler with the part of the engine that returns tokens, one step late."""

    def __init__(
        self,
        *,
        pages: int = 40,
        seqs: int = 4,
        tiles: int = 3,
        caching: bool = True,
        least: int = 2,
        most: int = 100,
        overlap: bool = True,
    ):
        """`overlap`: a step is scheduled before the tokens of the one before it are known."""
        self.overlap = overlap
        self.pages = PagePool(pages, caching=caching, min_pages=least, max_pages=most)
        limits = SchedulerLimits(seqs, tiles, TILE, PAGE)
        self.scheduler = Scheduler(limits, self.pages, PageTable(seqs, 64))
        self.written: dict[int, list[int]] = {}  # page -> tokens in it, since it was allocated
        allocate = self.pages.allocate

        def allocate_and_note(count: int, *beside: object) -> list[int]:
            pages = allocate(count)
            self.written.update({page: [] for page in pages})
            return pages

        self.pages.allocate = allocate_and_note  # type: ignore[method-assign]
        self.sequences: list[Sequence] = []
        self.steps = 0
        self.ahead: Work | None = None  # the step whose tokens are not known yet
        self.steady = 0  # what `steady_steps` said right after the last step was scheduled

    def add(
        self, prompt: list[int], max_tokens: int, *, n: int = 1, priority: int = 0, salt: str = ""
    ) -> list[Sequence]:
        params = SamplingParams(n=n, max_tokens=max_tokens)
        request = Request(str(len(self.sequences)), tuple(prompt), params, len(self.sequences), priority=priority)
        group: list[Sequence] = []
        for index in range(n):
            total = len(prompt) + max_tokens
            group.append(Sequence(request, index, 0, total, salt=salt, parent=group[0] if group else None))
            self.scheduler.add(group[-1])
        self.sequences += group
        return group

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and self.ahead is None

    def run(self, limit: int = 3000) -> None:
        while not self.idle:
            self.step()
            assert self.steps < limit, "the scheduler makes no progress"

    def step(self) -> Work:
        """Schedule a step, and give the tokens of the step before: afterwards with `overlap`, else first."""
        if self.ahead and not self.overlap:
            self.give_tokens(self.ahead)
        work = self.scheduler.schedule(self.steps, self.steps)
        all_decode = not work.chunks and len(work.decodes) == len(self.scheduler.running)
        self.steady = self.scheduler.steady_steps() if all_decode else 0
        self.steps += 1
        self.check(work)
        if self.ahead and self.overlap:
            self.give_tokens(self.ahead)
        self.ahead = work if work else None
        return work

    def repeat(self, count: int) -> None:
        """Do with `Scheduler.repeat` what `count` calls of `step` do without `overlap`."""
        computed = [(sequence, sequence.num_computed) for sequence in self.scheduler.running]
        self.scheduler.repeat(count - 1)
        for sequence, _ in computed:
            sequence.tokens += [self.token(sequence, len(sequence.tokens) + n) for n in range(count)]
            self.scheduler.register_full_pages(sequence)
        self.scheduler.repeat(1)
        self.steps += count
        for sequence, start in computed:
            self.write(sequence, start, count)

    def resize(self, change: int) -> None:
        """Grow by `change` pages, or shrink as far as possible."""
        pages = self.pages
        if change >= 0:
            self.scheduler.grow(min(change, pages.max_pages - pages.num_pages))
            return
        self.scheduler.shrink(min(-change, pages.available, pages.num_pages - pages.min_pages), self.move)
        self.written = {page: content for page, content in self.written.items() if page < pages.num_pages}

    def move(self, moves: Mapping[int, int]) -> None:
        self.written |= {new: self.written[old] for old, new in moves.items()}

    def check(self, work: Work) -> None:
        assert sum(-(-c.length // TILE) for c in work.chunks) <= self.scheduler.limits.max_tiles
        assert len(self.scheduler.running) <= self.scheduler.limits.max_num_seqs
        slots = [s.slot for s in self.scheduler.running]
        assert len(set(slots)) == len(slots)
        for sequence in work.decodes:
            self.write(sequence, sequence.num_computed - 1, 1)
        for chunk in work.chunks:
            self.write(chunk.sequence, chunk.start, chunk.length)

    def write(self, sequence: Sequence, start: int, length: int) -> None:
        row = self.scheduler.table.rows[sequence.slot]
        for position in range(start, start + length):
            page, offset = int(row[position // PAGE]), position % PAGE
            assert page == sequence.pages[position // PAGE] != NULL_PAGE
            content = self.written[page]
            assert len(content) == offset, "positions are computed in order, and never again in a shared page"
            content.append(self.token(sequence, position))
        for position in range(start + length):  # what attention will read
            content = self.written[sequence.pages[position // PAGE]]
            assert content[position % PAGE] == self.token(sequence, position)

    @staticmethod
    def token(sequence: Sequence, position: int) -> int:
        """Return the token of a position, in which generated tokens differ by request and answer."""
        if position < sequence.num_prompt:
            return sequence.tokens[position]
        return 1000 + int(sequence.request.id) * 100_000 + sequence.index * 10_000 + position

    def give_tokens(self, work: Work) -> None:
        for sequence in (*work.decodes, *(c.sequence for c in work.chunks if c.last)):
            sequence.num_inflight -= 1
            if sequence.status is SequenceStatus.FINISHED:
                continue
            sequence.tokens.append(self.token(sequence, len(sequence.tokens)))
            if len(sequence.tokens) >= sequence.max_total:
                self.scheduler.finish(sequence)
            else:
                self.scheduler.register_full_pages(sequence)


@pytest.fixture
def checked() -> Iterator[CheckedScheduler]:
    checked = CheckedScheduler()
    yield checked
    assert checked.pages.used == 0


requests = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(1, 3), st.integers(0, 2), st.sampled_from("ab")),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(requests, st.integers(24, 60), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 2**32))
def test_random_load_finishes_and_frees_every_page(load, pages, seqs, tiles, caching, seed) -> None:
    checked = CheckedScheduler(pages=pages, seqs=seqs, tiles=tiles, caching=caching)
    rng = random.Random(seed)
    shared = [rng.randrange(100) for _ in range(60)]
    for length, max_tokens, n, priority, salt in load:
        prompt = shared[: rng.randrange(length)]
        prompt += [rng.randrange(100) for _ in range(length - len(prompt))]
        checked.add(prompt, max_tokens, n=n, priority=priority, salt=salt)
    checked.run()
    assert all(s.status is SequenceStatus.FINISHED and len(s.tokens) == s.max_total for s in checked.sequences)
    assert checked.pages.used == 0
    assert checked.scheduler.table.free_slots == seqs
    assert (checked.scheduler.num_waiting, checked.scheduler.waiting_tokens) == (0, 0)


@settings(max_examples=80, deadline=None)
@given(requests, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), max_size=10))
def test_aborts_at_random_steps_leak_no_page_or_slot(load, aborts) -> None:
    checked = CheckedScheduler(pages=30)
    for i, (length, max_tokens, n, priority, _) in enumerate(load):
        checked.add([i] * length, max_tokens, n=n, priority=priority)
    due: dict[int, list[int]] = {}
    for step, number in aborts:
        due.setdefault(step, []).append(number)
    original = checked.scheduler.schedule

    def schedule(step: int, now: float) -> Work:
        for number in due.get(step, []):
            victim = checked.sequences[number % len(checked.sequences)]
            for sequence in [s for s in checked.sequences if s.request is victim.request]:
                sequence.children.clear()
                if sequence.status is not SequenceStatus.FINISHED:
                    checked.scheduler.finish(sequence)
        return original(step, now)

    checked.scheduler.schedule = schedule  # type: ignore[method-assign]
    checked.run()
    assert checked.pages.used == 0
    assert checked.scheduler.table.free_slots == 4
    assert checked.scheduler.num_waiting == 0


@settings(max_examples=150, deadline=None)
@given(requests, st.lists(st.tuples(st.integers(0, 60), st.integers(-40, 40)), max_size=20), st.booleans())
def test_pool_resizes_at_random_steps_change_no_answer(load, resizes, caching) -> None:
    checked = CheckedScheduler(pages=40, caching=caching, least=24)  # the longest sequence has 90 tokens
    for length, max_tokens, n, priority, salt in load:
        checked.add([ord(salt)] * length, max_tokens, n=n, priority=priority, salt=salt)
    due: dict[int, list[int]] = {}
    for step, change in resizes:
        due.setdefault(step, []).append(change)
    original = checked.scheduler.schedule

    def schedule(step: int, now: float) -> Work:
        for change in due.get(step, []):
            checked.resize(change)
        return original(step, now)

    checked.scheduler.schedule = schedule  # type: ignore[method-assign]
    checked.run()
    assert all(s.status is SequenceStatus.FINISHED and len(s.tokens) == s.max_total for s in checked.sequences)
    assert checked.pages.used == 0
    assert sorted(checked.pages.allocate(checked.pages.available)) == list(range(1, checked.pages.num_pages))


def state_of(checked: CheckedScheduler) -> list[tuple]:
    """Return everything about the sequences that does not depend on which pages they hold."""
    return [
        (s.status, s.tokens, s.num_computed, s.num_inflight, len(s.pages), s.num_cached, s.preemptions)
        for s in checked.sequences
    ]


@settings(max_examples=150, deadline=None)
@given(requests, st.integers(24, 60), st.integers(1, 4), st.booleans())
def test_repeat_equals_scheduling_as_many_steps(load, pages, seqs, caching) -> None:
    stepped, repeated = (CheckedScheduler(pages=pages, seqs=seqs, caching=caching, overlap=False) for _ in range(2))
    for checked in (stepped, repeated):
        for length, max_tokens, n, priority, salt in load:
            checked.add([ord(salt)] * length, max_tokens, n=n, priority=priority, salt=salt)
    while not stepped.idle:
        stepped.step(), repeated.step()
        if count := repeated.steady:
            running = list(stepped.scheduler.running)
            for _ in range(count):
                assert stepped.step().decodes == tuple(running), "only the sequences running before decode"
            repeated.repeat(count)
        assert state_of(repeated) == state_of(stepped)
        assert repeated.pages.available == stepped.pages.available
    assert repeated.idle


@settings(max_examples=100, deadline=None)
@given(requests, st.integers(24, 60), st.integers(1, 4))
def test_sequences_are_admitted_by_priority_then_arrival(load, pages, seqs) -> None:
    checked = CheckedScheduler(pages=pages, seqs=seqs)
    for length, max_tokens, n, priority, salt in load:
        checked.add([ord(salt)] * length, max_tokens, n=n, priority=priority, salt=salt)

    def place(sequence: Sequence) -> tuple[int, float, int]:
        return sequence.request.priority, sequence.request.arrival, sequence.index

    while not checked.idle:
        before = set(checked.scheduler.running)
        checked.step()
        admitted = [place(s) for s in checked.scheduler.running if s not in before]
        waiting = [place(s) for s in checked.sequences if s.status is SequenceStatus.WAITING and s.parent is None]
        assert not admitted or not waiting or max(admitted) < min(waiting)


def test_answers_of_one_request_share_the_prompts_full_pages(checked: CheckedScheduler) -> None:
    group = checked.add(list(range(22)), 4, n=3)
    checked.scheduler.schedule(0, 0.0)
    while any(s.status is SequenceStatus.WAITING for s in group):
        checked.scheduler.schedule(0, 0.0)
    full = 22 // PAGE
    assert all(s.pages[:full] == group[0].pages[:full] for s in group)
    for sequence in group:
        checked.scheduler.finish(sequence)


def test_prefix_is_shared_under_the_same_salt_only(checked: CheckedScheduler) -> None:
    prompt = list(range(20))
    checked.add(prompt, 1)
    checked.run()
    (same,) = checked.add(prompt, 1)
    (other,) = checked.add(prompt, 1, salt="tenant")
    checked.run()
    assert same.num_cached == 16  # the last token is always computed
    assert other.num_cached == 0


@pytest.mark.parametrize(("renamed", "shared"), [("a", 7), ("b", 5)])
def test_pages_computed_after_a_rename_are_not_shared(checked: CheckedScheduler, renamed: str, shared: int) -> None:
    (sequence,) = checked.add(list(range(20)), 12, salt="a")
    work = checked.scheduler.schedule(0, 0.0)
    checked.check(work), checked.give_tokens(work)
    checked.scheduler.set_salt(sequence, renamed)
    checked.run()
    assert len(checked.pages.lookup(page_hashes(sequence.tokens, PAGE, "a"))) == shared


def test_prefill_and_decode_share_a_step(checked: CheckedScheduler) -> None:
    checked.add([1] * 5, 20)
    ahead = checked.scheduler.schedule(0, 0.0)
    checked.add([2] * 50, 2)
    mixed = checked.scheduler.schedule(1, 1.0)
    assert len(mixed.decodes) == 1
    assert [c.length for c in mixed.chunks] == [24]
    assert not mixed.chunks[0].last
    checked.check(ahead), checked.check(mixed)
    checked.give_tokens(ahead), checked.give_tokens(mixed)
    checked.run()


def test_newest_sequence_of_the_lowest_priority_is_preempted() -> None:
    checked = CheckedScheduler(pages=13, seqs=3)
    first, second, third = (checked.add([i] * 14, 20, priority=p)[0] for i, p in enumerate((0, 1, 0)))
    checked.run()
    assert second.preemptions > 0
    assert (first.preemptions, third.preemptions <= second.preemptions) == (0, True)


def test_preempted_sequence_waits_since_its_preemption() -> None:
    checked = CheckedScheduler(pages=13, seqs=2)
    first, second = (checked.add([i] * 14, 20)[0] for i in range(2))
    assert checked.scheduler.waiting_since == first.request.arrival
    step, ahead = 100, Work(0)
    while not second.preemptions:
        work = checked.scheduler.schedule(step, float(step))
        checked.give_tokens(ahead)
        step, ahead = step + 1, work
        assert checked.scheduler.waiting_since is None or second.preemptions
    assert checked.scheduler.waiting_since == step - 1
    checked.scheduler.finish(second)
    assert checked.scheduler.waiting_since is None


def test_waiting_since_counts_the_sequence_that_waited_longest() -> None:
    checked = CheckedScheduler(seqs=1)
    running, patient = (checked.add([i] * 5, 5, priority=1)[0] for i in range(2))
    checked.scheduler.schedule(0, 0.0)
    (urgent,) = checked.add([2] * 5, 5, priority=0)
    assert checked.scheduler.waiting_since == patient.request.arrival
    checked.scheduler.finish(running)
    checked.scheduler.schedule(1, 50.0)
    assert urgent.status is SequenceStatus.RUNNING
    assert checked.scheduler.waiting_since == patient.request.arrival
    checked.scheduler.finish(patient)
    assert checked.scheduler.waiting_since is None


def test_waiting_siblings_do_not_starve_the_head_of_the_queue() -> None:
    checked = CheckedScheduler(pages=30)
    checked.add([0] * 48, 14)
    checked.add([1] * 57, 1, n=2)
    checked.run()
    assert checked.pages.used == 0
