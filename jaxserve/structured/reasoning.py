"""The matcher of answers that begin with reasoning, which a grammar does not constrain, but a budget may end."""

from collections.abc import Sequence
from enum import Enum

import numpy as np

from jaxserve.core.reasoning import ReasoningSection
from jaxserve.core.structured import NOTHING_LEFT, Grammar, Matcher
from jaxserve.engine.tokenizer import Tokenizer

ALL = np.uint32(0xFFFFFFFF)


class ReasonedGrammar:
    """A grammar, or free text (None), for what follows the reasoning (`core.structured.Grammar`)."""

    def __init__(
        self, grammar: Grammar | None, section: ReasoningSection, tokenizer: Tokenizer, eos_token_ids: Sequence[int]
    ):
        self._grammar = grammar
        self._tags = _Tags(section, tokenizer, eos_token_ids)

    def start(self) -> "ReasonedAnswer":
        return ReasonedAnswer(None if self._grammar is None else self._grammar.start(), self._tags)


class _Tags:
    """The tags of a section as tokens and bytes."""

    def __init__(self, section: ReasoningSection, tokenizer: Tokenizer, eos_token_ids: Sequence[int]):
        self.begun, self.max_tokens = section.begun, section.max_tokens
        self.starts = tuple(tag.encode() for tag in section.starts)
        self.ends = tuple(tag.encode() for tag in section.ends)
        self.longest_end = max(map(len, self.ends))
        self.end_ids = tokenizer.encode(section.end, add_special_tokens=False)
        start_ids = tokenizer.encode(section.start, add_special_tokens=False)
        self.start_id = start_ids[0] if len(start_ids) == 1 else None
        self.eos_token_ids = eos_token_ids
        self.token_bytes = tokenizer.token_bytes


class _Phase(Enum):
    OPEN = 0  # the answer may begin with the start tag or with the text
    REASONING = 1
    CLOSING = 2  # the budget is spent, and the end tag is being written
    TEXT = 3


class ReasonedAnswer:
    """The state of one answer (`core.structured.Matcher`)."""

    static = False

    def __init__(self, text: Matcher | None, tags: _Tags):
        self._text, self._tags = text, tags
        self._phase = _Phase.OPEN
        self._seen = b""  # the end of the reasoning, as long as the longest end tag, or the beginning of an open answer
        self._count = 0  # tokens of reasoning
        self._closing: list[int] = []  # tokens of the end tag still to come
        self._error = ""
        if tags.begun:
            self._begin()

    @property
    def ended(self) -> bool:
        return self._phase is _Phase.TEXT and self._text is not None and self._text.ended

    @property
    def error(self) -> str:
        return self._error or ("" if self._text is None else self._text.error)

    def accept(self, token: int) -> None:
        match self._phase:
            case _Phase.OPEN:
                self._accept_first(token)
            case _Phase.REASONING:
                self._accept_reasoning(token)
            case _Phase.CLOSING:
                if token != self._closing[0]:
                    self._error = NOTHING_LEFT  # other parameters forbid the end tag
                self._closing = self._closing[1:]
                if not self._closing:
                    self._phase = _Phase.TEXT
            case _Phase.TEXT:
                if self._text is not None:
                    self._text.accept(token)

    def forced(self) -> Sequence[int]:
        if self._phase is _Phase.CLOSING:
            return self._closing
        return self._text.forced() if self._phase is _Phase.TEXT and self._text is not None else ()

    def fill(self, mask: np.ndarray) -> None:
        match self._phase:
            case _Phase.CLOSING:
                mask[:] = 0
                _set(mask, self._closing[0])
            case _Phase.REASONING:
                mask[:] = ALL
                if self._text is not None:  # the text is still missing
                    for token in self._tags.eos_token_ids:
                        _clear(mask, token)
            case _ if self._text is None:
                mask[:] = ALL
            case _:
                self._text.fill(mask)
                if self._phase is _Phase.OPEN and self._tags.start_id is not None:
                    _set(mask, self._tags.start_id)

    def _begin(self) -> None:
        self._phase, self._seen = _Phase.REASONING, b""
        self._check_budget()

    def _check_budget(self) -> None:
        if self._tags.max_tokens is not None and self._count >= self._tags.max_tokens:
            self._phase, self._closing = _Phase.CLOSING, self._tags.end_ids

    def _accept_first(self, token: int) -> None:
        if self._text is not None:
            if token == self._tags.start_id:
                self._begin()
            else:
                self._phase = _Phase.TEXT
                self._text.accept(token)
            return
        self._seen += self._tags.token_bytes(token)
        begin = self._seen.lstrip()
        if begin.startswith(self._tags.starts):
            self._begin()
        elif not any(tag.startswith(begin) for tag in self._tags.starts):
            self._phase = _Phase.TEXT

    def _accept_reasoning(self, token: int) -> None:
        self._count += 1
        seen = self._seen + self._tags.token_bytes(token)
        if any(tag in seen for tag in self._tags.ends):
            self._phase = _Phase.TEXT
            return
        self._seen = seen[-self._tags.longest_end :]
        self._check_budget()


def _set(mask: np.ndarray, token: int) -> None:
    mask[token // 32] |= np.uint32(1 << token % 32)


def _clear(mask: np.ndarray, token: int) -> None:
    mask[token // 32] &= ~np.uint32(1 << token % 32)
