"""Reasoning sections, with which the answers of some models begin."""

from dataclasses import dataclass

from jaxserve.parsing.events import ReasoningDelta
from jaxserve.parsing.source import Parsing, Source


@dataclass(frozen=True)
class ReasoningFormat:
    """The tags around a model's reasoning. `always`: an answer is reasoning from its beginning, even without a tag."""

    name: str
    start: str = "<think>"
    end: str = "</think>"
    always: bool = False

    def after(self, prompt: str) -> "ReasoningSection | None":
        """Return the section of answers to a prompt, None if the prompt itself ends the reasoning."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.end):
            return None
        return ReasoningSection(self, begun=self.always or prompt.endswith(self.start))

    def inside(self, answer: str) -> "ReasoningSection | None":
        """Return the section of the continuation of an answer, None if its reasoning is complete or it has none."""
        if answer.rfind(self.start) > answer.rfind(self.end):
            return ReasoningSection(self, begun=True)
        return None if answer.strip() else self.after("")


@dataclass(frozen=True)
class ReasoningSection:
    """The section of one answer. `begun`: the answer begins inside; otherwise it begins with the tag or has none."""

    form: ReasoningFormat
    begun: bool = False


def reasoning(source: Source, section: ReasoningSection) -> Parsing[None]:
    """Yield the reasoning with which an answer begins, without the white space at its edges and after it."""
    source.mark()
    yield from source.space()
    tagged = yield from source.literal(section.form.start)
    if not tagged and not section.begun:
        source.go_back()
        return
    source.unmark()
    yield from source.space()
    held, done = "", False
    while not done:
        text, _, done = yield from source.piece((section.form.end,))
        text = held + text
        visible = text.rstrip()
        held = text[len(visible) :]
        if visible:
            yield ReasoningDelta(visible)
    yield from source.space()
