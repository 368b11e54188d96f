"""The content blocks of Anthropic's messages, as the events of a stream."""

from collections.abc import Collection, Iterator
from typing import Any

from pydantic_core import from_json

from jaxserve.engine.tool_messages import INVALID
from jaxserve.parsing.events import ArgumentsDelta, CallBegun, Event, ReasoningDelta, TextDelta
from jaxserve.parsing.parser import AnswerFormat
from jaxserve.server.http.json_text import to_json

StreamEvent = dict[str, Any]
# Clients demand a signature of thinking, and some leave out blocks whose signature is empty.
SIGNATURE = "unsigned"


class ContentBlocks:
    """The blocks of one answer: thinking, text and tool use, one after the other.

    Clients raise an error at input of a tool that is not JSON. Input is therefore held back until it is complete and
    has been checked, unless a grammar makes it valid or the tool is one of `eager_tools`. Meanwhile empty deltas show
    that the answer goes on.

    `thinking`: "summarized" shows it, "omitted" leaves its text out, and "none" its blocks too.
    """

    def __init__(self, form: AnswerFormat, thinking: str, eager_tools: Collection[str]):
        self.num_calls = 0
        self._form, self._thinking, self._eager_tools = form, thinking, eager_tools
        self._valid = form.tool_use is not None and form.tool_use.constrained
        self._parser = form.parser()
        self._index = -1
        self._open: str | None = None  # type of the block that has begun and not ended
        self._held: list[str] | None = None  # input of a tool that has not been checked

    def push(self, text: str) -> Iterator[StreamEvent]:
        """Yield the events for more of the answer."""
        for event in self._parser.push(text):
            yield from self._events(event)

    def finish(self, *, cut: bool) -> Iterator[StreamEvent]:
        """Yield the last events of the answer. `cut`: it has not been ended by the model."""
        for event in self._parser.finish():
            yield from self._events(event)
        yield from self._end(cut=cut)

    def _events(self, event: Event) -> Iterator[StreamEvent]:
        match event:
            case TextDelta(text):
                yield from self._continue("text", text="")
                yield self._delta("text_delta", text=text)
            case ReasoningDelta(text) if self._thinking != "none":
                yield from self._continue("thinking", thinking="", signature="")
                if self._thinking != "omitted":
                    yield self._delta("thinking_delta", thinking=text)
            case CallBegun(name):
                yield from self._end()
                call_id = self._form.new_call_id(name, self.num_calls)
                self.num_calls += 1
                self._held = None if self._valid or name in self._eager_tools else []
                yield from self._continue("tool_use", id=call_id, name=name, input={})
            case ArgumentsDelta(text):
                if self._held is not None:
                    self._held.append(text)
                    text = ""
                yield self._delta("input_json_delta", partial_json=text)

    def _continue(self, kind: str, **empty: Any) -> Iterator[StreamEvent]:
        """Begin a block of a type unless the open one has it."""
        if self._open == kind:
            return
        yield from self._end()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **empty}}

    def _end(self, *, cut: bool = False) -> Iterator[StreamEvent]:
        """End the open block, if any."""
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=SIGNATURE)
        elif self._held:
            yield self._delta("input_json_delta", partial_json=_checked("".join(self._held), cut))
        self._held, self._open = None, None
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, kind: str, **more: str) -> StreamEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **more}}


def input_of(arguments: str) -> dict[str, Any]:
    """Return the object that JSON text says, as far as it goes, or an object that holds text that is not JSON.

    Clients read the input of a tool in the same way.
    """
    found = _object_in(arguments or "{}", partial=True)
    return {INVALID: arguments} if found is None else found


def _checked(arguments: str, cut: bool) -> str:
    """Return valid JSON text for the input of a tool. Of input that has been `cut`, what is complete remains."""
    if _object_in(arguments) is not None:
        return arguments
    return to_json(input_of(arguments) if cut else {INVALID: arguments}).decode()


def _object_in(text: str, *, partial: bool = False) -> dict[str, Any] | None:
    """Return the object that JSON text says, or with `partial` the members that are complete; None for other text."""
    try:
        value = from_json(text, allow_inf_nan=False, allow_partial=partial)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
