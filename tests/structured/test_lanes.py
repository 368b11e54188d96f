"""New grammars are compiled in turns: one client's do not delay another's, and known ones wait for nothing."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from hypothesis import given, strategies as st

from jaxserve.core.errors import QueueFull, RequestError
from jaxserve.core.structured import StructuredOutput
from jaxserve.structured import lanes as lanes_module
from jaxserve.structured.compiler import LLGrammarCompiler
from jaxserve.structured.lanes import Lanes, Unfinished
from jaxserve.structured.trial import CPU_SECONDS, Demand, GrammarTrials, Trials, Tried
from jaxserve.structured.turns import Turns, TurnsFull

WAIT = 60  # seconds after which a test fails
LONG = "long"  # in the texts of grammars whose trials do not end within a slice


class Gate:
    """Trials that begin when they are let through, and the order in which they begin, as (lane, text)."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []
        self._open = {"short": threading.Semaphore(0), "long": threading.Semaphore(0)}
        self._changed = threading.Condition()

    def compile(self, structured: StructuredOutput, trials: Trials, seconds: float) -> str:
        lane = "long" if seconds == CPU_SECONDS else "short"
        with self._changed:
            self.begun.append((lane, structured.text))
            self._changed.notify_all()
        assert self._open[lane].acquire(timeout=WAIT)
        if LONG in structured.text and lane == "short":
            raise Unfinished
        return structured.text

    def open(self, lane: str = "short", times: int = 100) -> None:
        """Let so many trials begin in a lane."""
        self._open[lane].release(times)

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, WAIT), self.begun


class NoTrials:
    def start(self) -> None: ...

    def run(self, *demands: Demand, seconds: float = CPU_SECONDS) -> list[Tried] | None:
        raise NotImplementedError


Submit = Callable[[str, str], Future[str]]


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def submit(gate: Gate) -> Submit:
    lanes: Lanes[str] = Lanes(lambda niceness: NoTrials(), gate.compile)
    return lambda text, client: lanes.submit(StructuredOutput(regex=text), client)


def test_a_client_waits_for_one_trial_of_another_one(gate: Gate, submit: Submit) -> None:
    many = [submit(f"a{i:02}", "a") for i in range(60)]
    gate.wait_for(1)
    one = submit("a grammar of another client, larger than the others", "b")
    gate.open(times=3)  # the one that has begun, and a turn of each client
    assert one.result(WAIT)
    gate.open()
    assert [each.result(WAIT) for each in many]
    assert gate.begun.index(("short", one.result())) == 2


def test_small_grammars_of_a_client_are_first(gate: Gate, submit: Submit) -> None:
    many = [submit(f"many {i}", "a") for i in range(5)]
    gate.wait_for(1)
    small = submit("s", "a")
    gate.open(times=2)
    assert small.result(WAIT) == "s"
    gate.open()
    assert [each.result(WAIT) for each in many]


def test_short_trials_do_not_wait_for_long_ones(gate: Gate, submit: Submit) -> None:
    many = [submit(f"{LONG} {i}", "a") for i in range(3)]
    gate.open(times=3)
    gate.wait_for(4)  # all slices are over, and the long lane is occupied
    one = submit("b", "b")
    gate.open(times=1)
    assert one.result(WAIT) == "b"
    gate.open("long")
    assert [each.result(WAIT) for each in many]
    assert [lane for lane, _ in gate.begun].count("long") == 3


def test_long_trials_of_a_client_do_not_wait_for_those_of_another_one(gate: Gate, submit: Submit) -> None:
    many = [submit(f"{LONG} {i}", "a") for i in range(5)]
    gate.open(times=5)
    gate.wait_for(6)  # one of them has begun in the long lane
    other = f"{LONG} of another client"
    one = submit(other, "b")
    gate.open(times=1)
    gate.wait_for(8)
    assert gate.begun[6:] == [("short", other), ("long", other)]
    gate.open("long")
    assert one.result(WAIT)
    assert [each.result(WAIT) for each in many]


def test_a_request_that_is_cancelled_leaves_its_place(monkeypatch, gate: Gate) -> None:
    monkeypatch.setattr(lanes_module, "MAX_SHORT_OF_CLIENT", 2)
    lanes: Lanes[str] = Lanes(lambda niceness: NoTrials(), gate.compile)

    def submit(text: str) -> Future[str]:
        return lanes.submit(StructuredOutput(regex=text), "a")

    first = submit("first")
    gate.wait_for(1)
    second, third = submit("second"), submit("third")
    with pytest.raises(QueueFull, match="2 are waiting for this client") as full:
        submit("fourth")
    assert full.value.status == 503
    assert full.value.retry_after
    assert second.cancel()
    fourth = submit("fourth")
    gate.open()
    assert [each.result(WAIT) for each in (first, third, fourth)] == ["first", "third", "fourth"]
    assert "second" not in dict(gate.begun).values()


def test_the_long_lane_refuses_what_it_has_no_room_for(monkeypatch, gate: Gate) -> None:
    monkeypatch.setattr(lanes_module, "MAX_LONG_OF_CLIENT", 1)
    lanes: Lanes[str] = Lanes(lambda niceness: NoTrials(), gate.compile)
    first = lanes.submit(StructuredOutput(regex=f"{LONG} 0"), "a")
    gate.open(times=3)
    gate.wait_for(2)
    others = [lanes.submit(StructuredOutput(regex=f"{LONG} {i}"), "a") for i in (1, 2)]
    with pytest.raises(QueueFull):
        others[1].result(WAIT)
    gate.open("long")
    assert first.result(WAIT)
    assert others[0].result(WAIT)


def test_known_grammars_and_refusals_wait_for_nothing(tokenizer, monkeypatch) -> None:
    compiler = LLGrammarCompiler(tokenizer, tokenizer.eos_token_ids)
    known = compiler.compile(StructuredOutput(json_object=True))
    refused = StructuredOutput(regex="(")
    with pytest.raises(RequestError):
        compiler.compile(refused)
    monkeypatch.setattr(Lanes, "submit", lambda *arguments: pytest.fail("a known grammar waits"))
    assert compiler.submit(StructuredOutput(json_object=True), "b").result(0) is known
    with pytest.raises(RequestError, match="here cannot be used"):
        compiler.compile(StructuredOutput(regex="(", place="here"))


def test_requests_for_one_new_grammar_compile_it_once(tokenizer, monkeypatch) -> None:
    compiler = LLGrammarCompiler(tokenizer, tokenizer.eos_token_ids)
    futures = [compiler.submit(StructuredOutput(regex="[ab]{3}"), str(i)) for i in range(10)]
    assert len({id(future.result(WAIT)) for future in futures}) == 1


def test_what_takes_long_is_tried_in_a_slice_and_then_in_the_long_lane(tokenizer, monkeypatch) -> None:
    compiler = LLGrammarCompiler(tokenizer, tokenizer.eos_token_ids)
    seen = []
    original = compiler.compile_within
    monkeypatch.setattr(lanes_module, "SLICE_SECONDS", 0.02)
    compiler._lanes = Lanes(
        lambda niceness: compiler_trials(tokenizer, niceness),
        lambda structured, trials, seconds: seen.append(seconds) or original(structured, trials, seconds),
    )
    compiler.compile(StructuredOutput(choice=[f"value {i}" for i in range(10_000)]))
    assert seen == [0.02, CPU_SECONDS]
    compiler.compile(StructuredOutput(regex="a"))
    assert seen[2:] == [0.02]


def compiler_trials(tokenizer, niceness: int) -> Trials:
    return GrammarTrials(tokenizer.vocab_size, tokenizer.special_tokens, tokenizer.eos_token_ids[0], niceness)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=40))
def test_between_two_turns_of_a_client_each_other_one_has_at_most_one(work: list[tuple[str, int]]) -> None:
    turns: Turns[tuple[str, int]] = Turns(100, 100)
    for client, size in work:
        turns.add(client, size, (client, size))
    taken = [item for _ in work if (item := turns.take()) is not None]
    assert sorted(taken) == sorted(work)
    assert turns.take() is None
    for client in "abc":
        own = [size for name, size in taken if name == client]
        assert own == sorted(own)
        places = [index for index, (name, _) in enumerate(taken) if name == client]
        for first, second in zip([-1, *places], places, strict=False):
            between = [name for name, _ in taken[first + 1 : second]]
            assert len(between) == len(set(between))


def test_a_client_may_have_no_turn_now() -> None:
    turns: Turns[str] = Turns(9, 9)
    for item in ("a1", "a2", "b1"):
        turns.add(item[0], 1, item)
    assert [turns.take({"a"}), turns.take({"a"}), turns.take(), turns.take({"b"})] == ["b1", None, "a1", "a2"]


def test_turns_are_bounded_and_what_is_removed_makes_room() -> None:
    turns: Turns[str] = Turns(3, 2)
    turns.add("a", 1, "a1")
    turns.add("a", 1, "a2")
    with pytest.raises(TurnsFull, match="2 are waiting for this client"):
        turns.add("a", 1, "a3")
    turns.add("b", 1, "b1")
    with pytest.raises(TurnsFull, match=r"3 are waiting$"):
        turns.add("c", 1, "c1")
    turns.remove("a", "a1")
    turns.remove("x", "none")
    turns.add("c", 1, "c1")
    assert [turns.take() for _ in range(4)] == ["a2", "b1", "c1", None]
