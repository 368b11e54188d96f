"""Transitions of a real server and of the simulator are matched with their seconds, by what they lead to."""

import pytest

from bench.sim.transition_times import real_times, simulated_times, table
from jaxserve.control import LimitSequences
from jaxserve.engine.step_log import DecisionRecord, Recording, Tick

TO_INT4 = "instance 0: layers.3 bfloat16 -> int4 (frees 1.2 MB, about 0 ms)"
TO_FULL = "instance 0: layers.3 int4 -> bfloat16 (needs 1.2 MB, about 5 ms)"
GROWS, SHRINKS = "instance 0: KV 161 -> 197 pages (needs 2.4 MB)", "instance 0: KV 197 -> 161 pages (frees 2.4 MB)"


def decision(time: float, *transitions: str, outcome: str = "started") -> DecisionRecord:
    return DecisionRecord(time, "morph", "pressure", 1, 1 + len(transitions), transitions, outcome)


def tick(time: float, *outcomes: tuple[str | None, float]) -> Tick:
    return Tick(time, False, (), outcomes)


def test_outcomes_belong_to_the_decision_before_them():
    ticks = (tick(1.0), tick(1.1, (None, 0.01), (None, 0.01)), tick(1.2, (None, 0.02)), tick(2.0, (None, 0.03)))
    decisions = (decision(1.0, TO_INT4, TO_INT4, GROWS), decision(1.2, TO_FULL))
    found = real_times(Recording({}, ticks=ticks, decisions=decisions))
    assert found == {"a layer to int4": [0.01, 0.01], "more pages": [0.02], "a layer to bfloat16": [0.03]}


def test_what_failed_or_was_dropped_or_rejected_took_no_time():
    ticks = (tick(1.1, ("PagesInUse", 0.3)), tick(3.1, (None, 0.04)))
    decisions = (decision(1.0, SHRINKS, TO_FULL), decision(2.0, outcome="rejected: no room"), decision(3.0, SHRINKS))
    assert real_times(Recording({}, ticks=ticks, decisions=decisions)) == {"fewer pages": [0.04]}


def test_simulated_transitions_are_grouped_alike():
    done = [{"transition": text, "error": None, "seconds": 0.1} for text in (TO_INT4, SHRINKS, TO_INT4)]
    failed = {"transition": GROWS, "error": "PagesInUse", "seconds": 0.3}
    found = simulated_times({"transitions": [*done, failed]})
    assert found == {"a layer to int4": [0.1, 0.1], "fewer pages": [0.1]}


def test_a_table_has_the_median_over_all_rounds_of_each_column():
    rounds = [
        ({"more pages": [0.01, 0.02]}, {"more pages": [0.03]}),
        ({"more pages": [0.06]}, {"fewer pages": [0.001]}),
    ]
    assert table(rounds) == ["| more pages | 3 x 20.0 ms | 1 x 30.0 ms |", "| fewer pages | - | 1 x 1.0 ms |"]


def test_no_rounds_have_no_lines():
    assert table([(), ()]) == []


@pytest.mark.parametrize(
    ("text", "change"),
    [
        (TO_INT4, "a layer to int4"),
        (GROWS, "more pages"),
        (str(LimitSequences("0", None, 4)), "a limit on sequences"),
        (str(LimitSequences("0", 8, 4)), "a limit on sequences"),
        (str(LimitSequences("0", 4, None)), "a limit on sequences"),
    ],
)
def test_the_controllers_texts_are_understood(text: str, change: str):
    assert simulated_times({"transitions": [{"transition": text, "error": None, "seconds": 1.0}]}) == {change: [1.0]}
