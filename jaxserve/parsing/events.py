"""The events of an answer - text, reasoning and tool calls - and the message that they add up to."""

from collections.abc import Iterable
from dataclasses import dataclass, field


# Not frozen: one is made for every token, and making a frozen one takes three times as long.
@dataclass(slots=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(slots=True)
class ReasoningDelta:
    """More of the model's reasoning."""

    text: str


@dataclass(slots=True)
class CallBegun:
    """The beginning of a call of the tool `name`."""

    name: str


@dataclass(slots=True)
class ArgumentsDelta:
    """More of the arguments, as JSON text, of the call that began last."""

    text: str


Event = TextDelta | ReasoningDelta | CallBegun | ArgumentsDelta


@dataclass(slots=True)
class Text:
    """A stretch of an answer's text."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """A stretch of the model's reasoning."""

    text: str


@dataclass(slots=True)
class Call:
    """A call of a tool. `arguments` are JSON, which is incomplete if the answer breaks off in it."""

    name: str
    arguments: str = ""


Part = Text | Reasoning | Call


@dataclass(slots=True)
class ParsedMessage:
    """An answer in its parts, in their order. It is the sum of the same events that a stream sends."""

    parts: list[Part] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> "ParsedMessage":
        """Return the message that the events add up to."""
        message = cls()
        for event in events:
            message.add(event)
        return message

    def add(self, event: Event) -> Part:
        """Add an event and return the part that it belongs to, which is new or has grown."""
        last = self.parts[-1] if self.parts else None
        match event:
            case TextDelta() if isinstance(last, Text):
                last.text += event.text
            case ReasoningDelta() if isinstance(last, Reasoning):
                last.text += event.text
            case ArgumentsDelta():
                assert isinstance(last, Call), "arguments without a call"
                last.arguments += event.text
            case TextDelta():
                self.parts.append(Text(event.text))
            case ReasoningDelta():
                self.parts.append(Reasoning(event.text))
            case CallBegun():
                self.parts.append(Call(event.name))
        return self.parts[-1]

    @property
    def text(self) -> str:
        """The answer without reasoning and calls."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def calls(self) -> list[Call]:
        """All calls of tools."""
        return [part for part in self.parts if isinstance(part, Call)]
