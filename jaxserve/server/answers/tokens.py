"""The tokens of an answer: the text of each of them, and how many belong to the reasoning."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

from jaxserve.core.reasoning import ReasoningSection
from jaxserve.core.request import CompletionOutput, Detokenizer, TokenLogprobs
from jaxserve.parsing.events import Event, ReasoningDelta
from jaxserve.parsing.parser import AnswerFormat


@dataclass
class TokenTexts:
    """Divides the text of an answer at its tokens, however many of them arrive at once.

    `detokenizer`: a new one, which shows the same special tokens as the text. A token without visible text has the
    text "". What cannot be divided, such as a text that a stop string has cut, is one piece at the end.
    """

    detokenizer: Detokenizer
    _waiting: deque[tuple[int, TokenLogprobs | None]] = field(default_factory=deque)  # tokens whose text has not come
    _length: int | None = None  # of the text of the first of them, None if it is not known yet
    _text: str = ""
    _at: int = 0  # where the text that has not been divided begins

    def split(self, new: CompletionOutput) -> Iterator[tuple[str, list[TokenLogprobs], int]]:
        """Yield (text, log-probabilities, number of tokens) of each piece that is complete."""
        if len(new.token_ids) == 1 and not self._waiting and self._at == len(self._text):  # nearly all of a stream
            self._length = len(self.detokenizer.push(new.token_ids))
            if self._length == len(new.text):
                self._length = None
                yield new.text, [*(new.logprobs or ())], 1
                return
        self._waiting.extend(zip_longest(new.token_ids, new.logprobs or ()))
        self._text, self._at = self.rest + new.text, 0
        while self._waiting and self._at + (length := self._next_length()) <= len(self._text):
            _, logprobs = self._waiting.popleft()
            start, self._at, self._length = self._at, self._at + length, None
            yield self._text[start : self._at], [] if logprobs is None else [logprobs], 1
        if new.finish_reason and (self.rest or self._waiting):
            rest = [logprobs for _, logprobs in self._waiting if logprobs is not None]
            yield self.rest, rest, len(self._waiting)

    @property
    def rest(self) -> str:
        """The text that has not been divided, also if not all pieces of `split` have been taken."""
        return self._text[self._at :]

    def _next_length(self) -> int:
        if self._length is None:
            self._length = len(self.detokenizer.push((self._waiting[0][0],)))
        return self._length


@dataclass
class TextLogprobs:
    """Finds the log-probabilities of the tokens that a piece of parsed text consists of."""

    _recent: list[tuple[int, TokenLogprobs]] = field(default_factory=list)  # since the last text, with lengths

    def add(self, text: str, logprobs: list[TokenLogprobs]) -> None:
        """Add the next tokens, whose text is `text`."""
        for index, entry in enumerate(logprobs):
            self._recent.append((len(text) if index == 0 else 0, entry))

    def take(self, text: str) -> list[TokenLogprobs]:
        """Return those of the last tokens that cover `text`, and forget what came before them."""
        needed, start = len(text), len(self._recent)
        while needed > 0 and start > 0:
            start -= 1
            needed -= self._recent[start][0]
        taken = [entry for _, entry in self._recent[start:]]
        self._recent.clear()
        return taken


@dataclass
class ReasoningTokens:
    """Counts the tokens of the reasoning with which an answer begins, including those of its tags."""

    section: ReasoningSection | None
    count: int = 0
    ended: bool = False
    _found: bool = False  # some reasoning, even if empty
    _tail: str = ""

    def add(self, text: str, tokens: int, events: list[Event]) -> None:
        """Add the next tokens and the events that their text completes."""
        if self.ended or self.section is None:
            return
        self._tail += text
        end = any(tag in self._tail for tag in self.section.ends)
        self._tail = self._tail[-max(map(len, self.section.ends)) :]
        self._found |= end or any(isinstance(event, ReasoningDelta) for event in events)
        self.ended = end or not all(isinstance(event, ReasoningDelta) for event in events)
        if self._found or not self.ended:
            self.count += tokens
        else:
            self.count = 0


class AnswerParser:
    """Parses an answer while it arrives, and counts the tokens of its reasoning.

    `new_detokenizer`: as that of `TokenTexts`. It is used only while the answer may be reasoning.
    """

    def __init__(self, form: AnswerFormat, new_detokenizer: Callable[[], Detokenizer]):
        self._form, self._new_detokenizer = form, new_detokenizer
        self._parser = form.parser()
        self._reasoning = ReasoningTokens(form.section)
        self._texts = None if form.section is None else TokenTexts(new_detokenizer())

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of the reasoning so far."""
        return self._reasoning.count

    def push(self, new: CompletionOutput) -> list[Event]:
        """Add new output, and return the events that it completes: all of them if the answer ends with it."""
        events = self._divided(new) if self._texts else self._parser.push(new.text)
        return events + self._parser.finish() if new.finish_reason else events

    def whole(self, answer: CompletionOutput) -> list[Event]:
        """Return the events of an answer of which nothing has been pushed.

        They and the count are those of `push`, but reasoning with an end tag is not divided at all of its tokens.
        """
        section = self._form.section
        ends = () if section is None else section.ends
        found = [at + len(tag) for tag in ends if (at := answer.text.find(tag)) >= 0]
        if not found:
            return self.push(answer)
        begun = self._parser.push(answer.text[: min(found)])
        if not all(isinstance(event, ReasoningDelta) for event in begun):
            self._parser = self._form.parser()
            return self.push(answer)
        self._reasoning.count = self._tokens_of(answer, min(found))
        return begun + self._parser.push(answer.text[min(found) :]) + self._parser.finish()

    def _tokens_of(self, answer: CompletionOutput, length: int) -> int:
        """Return the number of the first tokens whose text has at least `length` characters."""
        detokenizer, at = self._new_detokenizer(), 0
        for count, token in enumerate(answer.token_ids, 1):
            at += len(detokenizer.push((token,)))
            if at >= length:
                return count
        return len(answer.token_ids)

    def _divided(self, new: CompletionOutput) -> list[Event]:
        assert self._texts is not None
        events: list[Event] = []
        for text, _, tokens in self._texts.split(new):
            parsed = self._parser.push(text)
            self._reasoning.add(text, tokens, parsed)
            events += parsed
            if self._reasoning.ended:
                events += self._parser.push(self._texts.rest)
                self._texts = None
                break
        return events
