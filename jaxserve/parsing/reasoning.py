"""Reasoning sections, with which the answers of some models begin."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.core.reasoning import ReasoningSection
from jaxserve.parsing.events import ReasoningDelta
from jaxserve.parsing.source import Parsing, Source
from jaxserve.parsing.text_output import Trimmed


@dataclass(frozen=True)
class Calls:
    """The calls that may come in reasoning that has not ended.

    `triggers`: the texts at which they begin. `begin`: take one and the head of a call, and return whether both come.
    """

    triggers: tuple[str, ...]
    begin: Callable[[], Parsing[bool]]


@dataclass(frozen=True)
class ReasoningFormat:
    """The tags around a model's reasoning.

    `always`: an answer is reasoning from its beginning, even without a tag. `other_starts`, `other_ends`: other
    spellings of the tags that the model uses.
    """

    name: str
    start: str = "<think>"
    end: str = "</think>"
    always: bool = False
    other_starts: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()

    def section(self, *, begun: bool = False) -> ReasoningSection:
        """Return the section of an answer. `begun`: it begins inside, without the start tag."""
        return ReasoningSection(self.start, self.end, begun, other_starts=self.other_starts, other_ends=self.other_ends)

    def after(self, prompt: str) -> ReasoningSection | None:
        """Return the section of answers to a prompt, None if the prompt itself ends the reasoning."""
        prompt, section = prompt.rstrip(), self.section()
        if prompt.endswith(section.ends):
            return None
        return self.section(begun=self.always or prompt.endswith(section.starts))

    def inside(self, answer: str) -> ReasoningSection | None:
        """Return the section of the continuation of an answer, None if its reasoning is complete or it has none."""
        section = self.section(begun=True)
        if _last(answer, section.starts) > _last(answer, section.ends):
            return section
        return None if answer.strip() else self.after("")


def reasoning(source: Source, section: ReasoningSection, calls: Calls | None = None) -> Parsing[None]:
    """Yield the reasoning with which an answer begins, without the white space at its edges and after it.

    It ends at its end tag. Without one, it ends at the first of `calls`, so that a call in it waits for the end tag or
    the end of the answer.
    """
    if not (yield from source.attempt(_start(source, section.starts))) and not section.begun:
        return
    yield from source.space()
    text, triggers = Trimmed(), calls.triggers if calls else ()
    while True:
        piece, mark, done = yield from source.piece((*section.ends, *triggers))
        yield ReasoningDelta(text.add(piece))
        if calls and mark in triggers:
            source.back(len(mark))
            if (yield from source.look(calls.begin())):
                if not (yield from source.look(source.until(section.ends))):
                    return
                triggers = ()
            yield ReasoningDelta(text.add(source.take(len(mark))))
        elif done:
            break
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
