"""Conversations in other words, for chat templates that refuse what clients send: parallel calls, other models' ids.

Each rewriting returns messages that mean the same as those given. All of them take linear time.
"""

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, groupby
from typing import Any

Message = Mapping[str, Any]
Rewriting = Callable[[Sequence[Message]], Iterator[Message]]

OTHERS = {"user": "assistant", "assistant": "user"}
ID_LENGTH = 9  # characters of the ids that Mistral's templates take


def rewritten(messages: Sequence[Message], rewritings: Sequence[Rewriting]) -> Sequence[Message]:
    """Return messages to which some rewritings have been applied, one after the other."""
    for rewriting in rewritings:
        messages = list(rewriting(messages))
    return messages


def system_in_user_turn(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages in which the text of a first system message begins the user's message after it."""
    match messages:
        case [{"role": "system"} as system, {"role": "user"} as user, *rest]:
            yield {**user, "content": _joined([system, user], "\n\n")}
            yield from rest
        case _:
            yield from messages


def calls_one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages with at most one call each, which its result follows. Their text stays with the first call."""
    waiting = deque(messages)
    while waiting:
        message = waiting.popleft()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        results: dict[str, deque[Message]] = defaultdict(deque)
        while waiting and waiting[0].get("role") == "tool":
            result = waiting.popleft()
            results[str(result.get("tool_call_id"))].append(result)
        for index, call in enumerate(calls):
            yield {**(message if index == 0 else {"role": message["role"], "content": ""}), "tool_calls": [call]}
            if answers := results.get(str(call.get("id"))):
                yield answers.popleft()
        for answers in results.values():
            yield from answers


def short_ids(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages in which the ids of calls have nine letters and digits, also of calls that had none.

    Calls without an id and results without one belong together in their order.
    """
    calls, results = count(), count()
    for message in messages:
        if given := message.get("tool_calls"):
            yield {**message, "tool_calls": [{**call, "id": _short(call.get("id"), calls)} for call in given]}
        elif message.get("role") == "tool":
            yield {**message, "tool_call_id": _short(message.get("tool_call_id"), results)}
        else:
            yield message


def _short(id: Any, numbers: Iterator[int]) -> str:
    """Return the nine characters that stand for an id, or for the next number if there is none."""
    text = str(id or next(numbers))
    if len(text) == ID_LENGTH and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:ID_LENGTH]


def taking_turns(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages in which the user and the assistant take turns, apart from calls and their results.

    Successive messages of one of them become one, which may end with calls. If one of them speaks twice with nothing
    but calls and results between, the other one has said nothing, which becomes an empty message.
    """
    speaker = ""
    for role, group in groupby(messages, key=lambda message: str(message.get("role"))):
        if role not in OTHERS:
            yield from group
            continue
        spoken: list[Message] = []
        for message in group:
            spoken.append(message)
            if message.get("tool_calls"):
                yield _one_of(spoken)
                spoken = []
        if spoken and speaker == role:
            yield {"role": OTHERS[role], "content": ""}
        if spoken:
            yield _one_of(spoken)
            speaker = role


def _one_of(messages: Sequence[Message]) -> Message:
    return messages[0] if len(messages) == 1 else {**messages[-1], "content": _joined(messages, "\n")}


def _joined(messages: Sequence[Message], separator: str) -> str:
    return separator.join(str(text) for message in messages if (text := message.get("content")))


# The ways in which messages may be rewritten, in the order in which they are applied.
REWRITINGS: tuple[Rewriting, ...] = (system_in_user_turn, calls_one_by_one, short_ids, taking_turns)
