"""Exchanges of KV pages: which rows go when, and what is counted."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.control.exchange import PageExchange, RowCost
from jaxserve.control.transitions import EachBetweenSteps, Sleep, Waits

LANES = 2


class Core:
    """A core as exchanges see it: sequences, each with its pages, and the pages in use."""

    def __init__(self, sequences: Sequence[Sequence[int]], cached: Sequence[int] = ()):
        running = [SimpleNamespace(pages=list(pages), num_computed=100, tokens=[0] * 101) for pages in sequences]
        pages = SimpleNamespace(occupied={page for s in running for page in s.pages} | set(cached))
        self.scheduler = SimpleNamespace(
            running=running,
            pages=pages,
            num_held=0,
            waiting_tokens=0,
            limits=SimpleNamespace(max_tiles=4, tile=10),
        )
        self.cost = SimpleNamespace(seconds=lambda load: 0.02 + 0.001 * (load.tokens - load.sequences))
        self.away: set[int] = set()
        self.lost = False

    def withhold(self, pages: set[int]) -> None:
        self.away = set(pages)
        self._count()

    def arrive(self, pages: set[int]) -> None:
        assert pages <= self.away
        self.away -= pages
        self._count()

    def lose(self, now: float) -> None:
        self.lost, self.away = True, set()

    def _count(self) -> None:
        self.scheduler.num_held = sum(not self.away.isdisjoint(s.pages) for s in self.scheduler.running)


class Host:
    """A host that notes what is sent, and on which chunks come a second after they were sent."""

    def __init__(self, service: "Exchanging"):
        self.service = service
        self.sent: list[list[int]] = []
        self.most_under_way = 0
        self.under_way: list[Any] = []
        self.fails_at = -1
        self.ended = False

    def send(self, instances: Sequence[Any], index: int, rows: Sequence[int]) -> Any:
        if len(self.sent) == self.fails_at:
            raise RuntimeError("a link is down")
        self.sent.append(list(rows))
        self.under_way.append(rows)
        self.most_under_way = max(self.most_under_way, sum(map(len, self.under_way)))
        return rows, self.service.now + 1.0

    def arrival(self, sent: Sequence[Any]) -> Waits[None]:
        yield Sleep(max(end for _, end in sent))

    def receive(self, instances: Sequence[Any], index: int, sent: Sequence[Any]) -> None:
        self.under_way.remove(sent[index][0])

    def end_exchange(self, instances: Sequence[Any]) -> None:
        self.ended = True


class Exchanging:
    """An exchange in virtual time."""

    def __init__(self, cores: Sequence[Core], *, seconds: float = 0.001, most: int = 16, stages: int = 2):
        self.now, self.cores, self.boundaries = 0.0, cores, 0
        self.host = Host(self)
        self.exchange = PageExchange(self.host, LANES, stages, RowCost(seconds, 1000, most), lambda: self.now)
        self.exchange.begin([str(i) for i in range(len(cores))], [SimpleNamespace(core=core) for core in cores])

    def run(self) -> "Exchanging":
        for wait in self.waits():
            match wait:
                case EachBetweenSteps():
                    self.boundaries += 1
                    self.now += 0.01
                case Sleep():
                    self.now = max(self.now, wait.until)
        return self

    def waits(self) -> Iterator[Any]:
        procedure, error = self.exchange.carry_out(), None
        while True:
            try:
                wait = next(procedure) if error is None else procedure.throw(error)
            except StopIteration:
                return
            error = None
            yield wait
            if isinstance(wait, EachBetweenSteps):
                try:
                    for function in wait.functions.values():
                        function()
                except RuntimeError as failure:
                    error = failure


def pages_of(rows: range) -> list[int]:
    return [row * LANES for row in rows]


def test_rows_go_in_the_order_of_the_sequences_and_cached_ones_last() -> None:
    core = Core([pages_of(range(20, 30)), pages_of(range(5, 12))], cached=[2 * LANES])
    sent = [row for chunk in Exchanging([core]).run().host.sent for row in chunk]
    assert sent == [*range(20, 30), *range(5, 12), 2]
    assert not core.away


def test_a_chunk_takes_as_long_as_the_step_of_a_stage() -> None:
    run = Exchanging([Core([pages_of(range(100))])], seconds=0.001, most=1000).run()
    assert {len(chunk) for chunk in run.host.sent} == {10}, "0.02 s of two stages, 0.001 s for each row"


def test_a_chunk_is_larger_while_steps_compute_prompts() -> None:
    core = Core([pages_of(range(100))])
    core.scheduler.waiting_tokens = 500
    run = Exchanging([core], seconds=0.001, most=1000).run()
    assert len(run.host.sent[0]) == 30, "0.02 s and 0.04 s for a step's most tokens, of two stages"


def test_chunks_on_their_way_fit_into_the_memory() -> None:
    run = Exchanging([Core([pages_of(range(100))])], seconds=1e-6, most=16).run()
    assert {len(chunk) for chunk in run.host.sent} == {4}
    assert run.host.most_under_way == 16


def test_a_chunk_larger_than_the_memory_goes_alone() -> None:
    run = Exchanging([Core([pages_of(range(5))])], seconds=1.0, most=1).run()
    assert [len(chunk) for chunk in run.host.sent] == [1] * 5
    assert run.host.most_under_way == 1


def test_at_most_one_chunk_is_sent_between_two_steps() -> None:
    run = Exchanging([Core([pages_of(range(100))])], seconds=1e-6, most=16).run()
    assert len(run.host.sent) <= run.boundaries


def test_members_exchange_together() -> None:
    cores = [Core([pages_of(range(8))]), Core([pages_of(range(4, 12))])]
    run = Exchanging(cores, most=64).run()
    assert sorted({row for chunk in run.host.sent for row in chunk}) == list(range(12))
    assert not any(core.away for core in cores)


def test_an_exchange_counts_what_it_has_done() -> None:
    core = Core([pages_of(range(4)), pages_of(range(4, 8))])
    done = Exchanging([core], seconds=0.01, most=1).run().exchange.done
    assert (done.chunks, done.bytes) == (8, 8000)
    assert done.held_seconds == pytest.approx(4 * 1.0 * 2 + 4 * 1.0, rel=0.05), "two sequences, then one"
    assert done.seconds == pytest.approx(8.0, rel=0.05)


def test_pages_are_lost_if_a_chunk_cannot_be_sent() -> None:
    core = Core([pages_of(range(100))])
    exchanging = Exchanging([core], most=16)
    exchanging.host.fails_at = 3
    exchanging.run()
    assert core.lost
    assert exchanging.host.ended
