"""Reasoning sections, with which the answers of some models begin."""

from dataclasses import dataclass

from jaxserve.parsing.events import ReasoningDelta
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.text_output import Trimmed


@dataclass(frozen=True)
class ReasoningFormat:
    """The tags around a model's reasoning.

    `always`: an answer is reasoning from its beginning, even without a tag. `starts`, `ends`: other spellings of the
    tags that the model uses.
    """

    name: str
    start: str = "<think>"
    end: str = "</think>"
    always: bool = False
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that the parser must see. Those that are special would be left out of the text otherwise."""
        return (self.start, self.end, *self.starts, *self.ends)

    def after(self, prompt: str) -> "ReasoningSection | None":
        """Return the section of answers to a prompt, None if the prompt itself ends the reasoning."""
        prompt = prompt.rstrip()
        if prompt.endswith((self.end, *self.ends)):
            return None
        return ReasoningSection(self, begun=self.always or prompt.endswith((self.start, *self.starts)))

    def inside(self, answer: str) -> "ReasoningSection | None":
        """Return the section of the continuation of an answer, None if its reasoning is complete or it has none."""
        if _last(answer, (self.start, *self.starts)) > _last(answer, (self.end, *self.ends)):
            return ReasoningSection(self, begun=True)
        return None if answer.strip() else self.after("")


@dataclass(frozen=True)
class ReasoningSection:
    """The section of one answer. `begun`: the answer begins inside; otherwise it begins with the tag or has none."""

    form: ReasoningFormat
    begun: bool = False


def reasoning(source: Source, section: ReasoningSection) -> Parsing[None]:
    """Yield the reasoning with which an answer begins, without the white space at its edges and after it."""
    form = section.form
    if not (yield from source.attempt(_start(source, (form.start, *form.starts)))) and not section.begun:
        return
    yield from source.space()
    text, done = Trimmed(), False
    while not done:
        piece, _, done = yield from source.piece((form.end, *form.ends))
        yield ReasoningDelta(text.add(piece))
    yield from source.space()


def _last(text: str, tags: tuple[str, ...]) -> int:
    """Return the position of the last of the tags, -1 if there is none."""
    return max(text.rfind(tag) for tag in tags)


def _start(source: Source, tags: tuple[str, ...]) -> Parsing[bool | None]:
    """Take white space and one of the tags, None if none comes next."""
    yield from source.space()
    for tag in tags:
        if (yield from source.literal(tag)):
            return True
    return None
