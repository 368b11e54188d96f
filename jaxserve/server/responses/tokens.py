"""The tokens of an answer: the text of each of them, and how many belong to the reasoning."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

from jaxserve.core.reasoning import ReasoningSection
from jaxserve.core.request import CompletionOutput, Detokenizer, TokenLogprobs
from jaxserve.parsing.events import Event, ReasoningDelta


@dataclass
class TokenTexts:
    """Divides the text of an answer at its tokens, however many of them arrive at once.

    `detokenizer`: a new one, which shows the same special tokens as the text. A token without visible text has the
    text "". What cannot be divided, such as a text that a stop string has cut, is one piece at the end.
    """

    detokenizer: Detokenizer
    _waiting: deque[tuple[int, TokenLogprobs | None]] = field(default_factory=deque)  # lengths of texts to come
    _text: str = ""

    def split(self, new: CompletionOutput) -> Iterator[tuple[str, list[TokenLogprobs], int]]:
        """Yield (text, log-probabilities, number of tokens) of each piece that is complete."""
        for token, logprobs in zip_longest(new.token_ids, new.logprobs or ()):
            self._waiting.append((len(self.detokenizer.push((token,))), logprobs))
        text, at = self._text + new.text, 0
        while self._waiting and at + self._waiting[0][0] <= len(text):
            length, logprobs = self._waiting.popleft()
            yield text[at : at + length], [] if logprobs is None else [logprobs], 1
            at += length
        self._text = text[at:]
        if new.finish_reason and (self._text or self._waiting):
            rest = [logprobs for _, logprobs in self._waiting if logprobs is not None]
            yield self._text, rest, len(self._waiting)


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
    _ended: bool = False
    _found: bool = False  # some reasoning, even if empty
    _tail: str = ""

    def add(self, text: str, tokens: int, events: list[Event]) -> None:
        """Add the next tokens and the events that their text completes."""
        if self._ended or self.section is None:
            return
        self._tail += text
        end = any(tag in self._tail for tag in self.section.ends)
        self._tail = self._tail[-max(map(len, self.section.ends)) :]
        self._found |= end or any(isinstance(event, ReasoningDelta) for event in events)
        self._ended = end or not all(isinstance(event, ReasoningDelta) for event in events)
        if self._found or not self._ended:
            self.count += tokens
        else:
            self.count = 0
