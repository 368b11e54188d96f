"""Transfers over shared links, compared with a reference that divides the bytes of small time steps exactly."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf

import pytest
from hypothesis import given, strategies as st

from jaxserve.sim.hardware import Link
from jaxserve.sim.links import Priority, SharedLinks, Transfer

BANDWIDTH = 16  # bytes/s
LATENCY = 0.25  # s
NAMES = ("a", "b")


@dataclass(frozen=True)
class Wanted:
    """A transfer to make. Starts are eighths of a second, so that they are exact in links and reference."""

    link: str
    start: float
    size: int
    priority: int


def wanted(number: int = 20, names: Sequence[str] = NAMES) -> st.SearchStrategy[list[Wanted]]:
    starts = st.integers(0, 80).map(lambda eighths: eighths / 8)
    one = st.builds(Wanted, st.sampled_from(names), starts, st.integers(1, 40), st.sampled_from(Priority))
    return st.lists(one, max_size=number).map(lambda several: sorted(several, key=lambda w: w.start))


def shared(latency: float = LATENCY) -> SharedLinks:
    return SharedLinks({name: Link(BANDWIDTH, latency) for name in NAMES})


def send(
    several: Sequence[Wanted], *, latency: float = LATENCY, looks: Sequence[float] = ()
) -> tuple[list[Transfer], list[Transfer]]:
    """All transfers as they were asked for, and as they came. Advances at every event, and at `looks` too."""
    links, started, finished = shared(latency), [], []
    looks = sorted(looks)
    times = sorted([(w.start, 1, w) for w in several] + [(look, 0, None) for look in looks], key=lambda t: t[:2])
    for time, _, w in [*times, (inf, 0, None)]:
        while links.next_event() <= time and links.next_event() < inf:
            finished += links.advance(links.next_event())
        if w is not None:
            started.append(links.start(time, w.link, w.size, w.priority))
        elif time < inf:
            finished += links.advance(time)
    return started, finished


def ends(several: Sequence[Wanted], **options: float) -> list[float]:
    started, _ = send(several, **options)
    assert all(transfer.end is not None for transfer in started)
    return [transfer.end or 0.0 for transfer in started]


STEP = Fraction(1, 8)  # s


def small_steps(several: Sequence[Wanted]) -> list[Fraction]:
    """At the end of which step each was sent. A step's bytes go to the highest class, in equal shares; what one of them
    does not need goes to the others, and what the class does not need to the next one.
    """
    left = [Fraction(w.size) for w in several]
    sent: list[Fraction | None] = [None] * len(several)
    now = Fraction(0)
    while None in sent:
        for link in NAMES:
            budget = BANDWIDTH * STEP
            for priority in Priority:
                open_ = [
                    i
                    for i, w in enumerate(several)
                    if sent[i] is None and (w.link, w.priority) == (link, priority) and w.start <= now
                ]
                open_.sort(key=lambda i: left[i])
                for place, i in enumerate(open_):  # the smallest first, so that the rest shares what it leaves
                    part = min(left[i], budget / (len(open_) - place))
                    left[i], budget = left[i] - part, budget - part
                    if left[i] == 0:
                        sent[i] = now + STEP
        now += STEP
    return [time or Fraction(0) for time in sent]


@given(wanted())
def test_transfers_end_in_the_step_in_which_the_reference_sends_them(several: list[Wanted]) -> None:
    for end, step in zip(ends(several), small_steps(several), strict=True):
        assert float(step - STEP) - 1e-9 <= end - LATENCY <= float(step) + 1e-9


@given(wanted())
def test_they_come_in_the_order_of_their_ends_and_all_of_them(several: list[Wanted]) -> None:
    started, finished = send(several)
    assert sorted(map(id, started)) == sorted(map(id, finished))
    times = [transfer.end for transfer in finished]
    assert times == sorted(times)


@given(wanted(names="a"))
def test_a_link_sends_at_its_bandwidth_whenever_it_has_something_to_send(several: list[Wanted]) -> None:
    """Bytes are conserved: the link's last end does not depend on priorities and shares."""
    done = 0.0
    for w in several:
        done = max(done, w.start) + w.size / BANDWIDTH
    last = max((end - LATENCY for end in ends(several)), default=0.0)
    assert last == pytest.approx(done)


@given(wanted(names="a"))
def test_no_link_is_ever_faster_than_its_bandwidth(several: list[Wanted]) -> None:
    sent = [end - LATENCY for end in ends(several)]
    for begin in {w.start for w in several}:
        for until in sent:
            inside = [w.size for w, end in zip(several, sent, strict=True) if begin <= w.start and end <= until]
            assert sum(inside) <= BANDWIDTH * max(0.0, until - begin) + 1e-6


@given(wanted())
def test_a_higher_class_never_waits_for_a_lower_one(several: list[Wanted]) -> None:
    for lowest in Priority:
        higher = [w for w in several if w.priority <= lowest]
        beside = [end for w, end in zip(several, ends(several), strict=True) if w.priority <= lowest]
        assert ends(higher) == pytest.approx(beside)


def test_a_transfer_that_ends_as_a_higher_priority_starts_does_not_wait_for_it() -> None:
    """Three transfers share the link, so that what was sent of the third at 2.875 s is a rounded sum."""
    kv = [Wanted("a", start, size, Priority.KV) for start, size in ((0.25, 30), (0.5, 15), (1.0, 10))]
    weights = [Wanted("a", start, 10, Priority.WEIGHTS) for start in (1.125, 2.625)]
    several = [*kv, *weights, Wanted("a", 2.875, 27, Priority.ACTIVATIONS)]
    assert ends(several)[2] == pytest.approx(2.875 + LATENCY)


@given(wanted(), wanted())
def test_links_do_not_know_of_each_other(several: list[Wanted], others: list[Wanted]) -> None:
    own = [Wanted("a", w.start, w.size, w.priority) for w in several]
    both = sorted([*own, *(Wanted("b", w.start, w.size, w.priority) for w in others)], key=lambda w: w.start)
    beside = [end for w, end in zip(both, ends(both), strict=True) if w.link == "a"]
    assert beside == ends(own)


@given(wanted(), st.lists(st.floats(0, 60), max_size=20))
def test_it_makes_no_difference_how_often_one_looks(several: list[Wanted], looks: list[float]) -> None:
    assert ends(several, looks=looks) == pytest.approx(ends(several))  # what is left is a rounded sum
    late = shared()
    started = [late.start(w.start, w.link, w.size, w.priority) for w in several]
    late.advance(1e6)
    assert [transfer.end for transfer in started] == pytest.approx(ends(several))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=10), st.sampled_from(Priority))
def test_transfers_that_start_together_end_by_their_sizes(sizes: list[int], priority: int) -> None:
    """With n of them the k-th smallest, s_k, ends at (s_1 + ... + s_k + (n - k) s_k) / bandwidth."""
    together = ends([Wanted("a", 1.0, size, priority) for size in sizes])
    for size, end in zip(sizes, together, strict=True):
        assert end == pytest.approx(1.0 + sum(min(size, other) for other in sizes) / BANDWIDTH + LATENCY)


def test_one_that_joins_halves_the_share_of_the_other() -> None:
    links = SharedLinks({"pcie": Link(100.0, 0.5)})
    first = links.start(0.0, "pcie", 200, Priority.KV)
    assert links.next_event() == 2.5
    second = links.start(1.0, "pcie", 50, Priority.KV)  # 50 bytes/s each
    assert links.next_event() == 2.5
    assert links.advance(2.4) == []
    assert second.end is None
    assert links.advance(2.5) == [second]
    assert links.next_event() == 3.0
    assert links.advance(10.0) == [first]
    assert (second.end, first.end) == (2.5, 3.0)
    assert links.next_event() == inf


def test_weights_stand_still_while_activations_pass() -> None:
    links = SharedLinks({"pcie": Link(100.0, 0.0)})
    weights = links.start(0.0, "pcie", 1000, Priority.WEIGHTS)
    activations = [links.start(time, "pcie", 100, Priority.ACTIVATIONS) for time in (2.0, 2.5, 8.0)]
    assert links.advance(20.0) == [*activations, weights]
    assert [transfer.end for transfer in activations] == [3.5, 4.0, 9.0]
    assert weights.end == 13.0


def test_many_transfers_of_any_size_lose_no_precision() -> None:
    """A link that was busy for hours is as exact as a new one, because an empty class is removed."""
    links = SharedLinks({"pcie": Link(25e9, 0.0)})
    now = 0.0
    for _ in range(20_000):
        links.start(now, "pcie", 25_000_000_000, Priority.WEIGHTS)
        now += 1.0
        assert links.next_event() == now
        assert len(links.advance(now)) == 1


def test_nothing_takes_the_latency_alone_and_waits_for_higher_classes() -> None:
    links = SharedLinks({"rdma": Link(100.0, 0.5)})
    alone = links.start(0.0, "rdma", 0, Priority.WEIGHTS)
    assert links.advance(0.5) == [alone]
    above = links.start(1.0, "rdma", 100, Priority.KV)
    below = links.start(1.0, "rdma", 0, Priority.WEIGHTS)
    assert links.advance(2.5) == [above, below]
    assert (alone.end, above.end, below.end) == (0.5, 2.5, 2.5)


def test_time_does_not_go_back() -> None:
    links = shared()
    links.start(2.0, "a", 1, Priority.KV)
    with pytest.raises(AssertionError):
        links.start(1.0, "a", 1, Priority.KV)
