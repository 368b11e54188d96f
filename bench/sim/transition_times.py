"""How long transitions took in a real server, and how long in the simulator."""

import re
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxserve.engine.step_log import DecisionRecord, Recording

# What a transition leads from and to, in its text: precisions, numbers of pages, or numbers of sequences ("all").
CHANGE = re.compile(r"(\w+)(?: sequences)? -> (\w+)(?P<limit> sequences)?")
MORE, FEWER, LIMIT = "more pages", "fewer pages", "a limit on sequences"

Times = Mapping[str, Sequence[float]]  # seconds of transitions, by what they lead to


def real_times(recording: Recording) -> Times:
    """Return the seconds of the transitions in a step log that were carried out."""
    # At equal times, a tick's outcomes belong to earlier decisions.
    records = sorted((*recording.ticks, *recording.decisions), key=lambda record: (record.time, _decides(record)))
    waiting: deque[str] = deque()
    carried_out = []
    for record in records:
        if isinstance(record, DecisionRecord):
            waiting = deque(record.transitions if record.outcome == "started" else waiting)
            continue
        for error, seconds in record.outcomes:
            transition = waiting.popleft()
            if error is None:
                carried_out.append((transition, seconds))
    return by_change(carried_out)


def simulated_times(result: Mapping[str, Any]) -> Times:
    """Return the seconds of the transitions in a simulated result that were carried out."""
    done = (outcome for outcome in result["transitions"] if outcome["error"] is None)
    return by_change((outcome["transition"], outcome["seconds"]) for outcome in done)


def by_change(transitions: Iterable[tuple[str, float]]) -> Times:
    """Group the seconds of transitions, given as (text, seconds), by what they lead to."""
    found: dict[str, list[float]] = {}
    for text, seconds in transitions:
        match = CHANGE.search(text)
        assert match is not None, text
        before, after, limit = match.groups()
        if limit:
            change = LIMIT
        elif after.isdecimal():
            change = MORE if int(after) > int(before) else FEWER
        else:
            change = f"a layer to {after}"
        found.setdefault(change, []).append(seconds)
    return found


def table(rounds: Sequence[Sequence[Times]]) -> list[str]:
    """Return Markdown lines: for each change its number and median ms, in the columns that each round has."""
    columns = [_joined(times) for times in zip(*rounds, strict=True)]
    changes = dict.fromkeys(change for times in columns for change in times)
    return [f"| {change} | {' | '.join(_cell(times.get(change, ())) for times in columns)} |" for change in changes]


def _joined(rounds: Iterable[Times]) -> Times:
    joined: dict[str, list[float]] = {}
    for times in rounds:
        for change, seconds in times.items():
            joined.setdefault(change, []).extend(seconds)
    return joined


def _cell(seconds: Sequence[float]) -> str:
    return f"{len(seconds)} x {1e3 * statistics.median(seconds):.1f} ms" if seconds else "-"


def _decides(record: object) -> bool:
    return isinstance(record, DecisionRecord)
