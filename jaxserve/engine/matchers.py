"""The matchers of a request's answers, and the errors for requests whose demands leave no token."""

from collections import abc
from itertools import takewhile

import numpy as np

from jaxserve.core.allowed_tokens import AllowedTokens
from jaxserve.core.errors import GrammarTooComplex, JaxserveError, NonFiniteOutput, RequestError
from jaxserve.core.request import Request, Sequence
from jaxserve.core.structured import NOTHING_LEFT, Matcher


def matchers_of(request: Request, vocab: int) -> list[Matcher | None]:
    """Return the matcher of each of the n answers: of its grammar, its allowed tokens, or both; None for free text."""
    params = request.params
    grammars = [None if request.grammar is None else request.grammar.start() for _ in range(params.n)]
    if params.allowed_token_ids is None:
        return list(grammars)
    assert isinstance(params.allowed_token_ids, AllowedTokens)
    mask = mask_of(params.allowed_token_ids, vocab)
    return [AllowedTokensMatcher(mask, grammar) for grammar in grammars]


def mask_of(allowed: AllowedTokens, vocab: int) -> np.ndarray:
    """Return a bit for each token of a vocabulary, uint32 [ceil(vocab / 32)], as `Matcher.fill` writes them."""
    bits = np.zeros(-(-vocab // 32) * 32, bool)
    bits[np.frombuffer(allowed.ids, np.int32)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


class AllowedTokensMatcher:
    """The `Matcher` of an answer that may only have the tokens of a mask, and that may follow a grammar as well."""

    def __init__(self, mask: np.ndarray, grammar: Matcher | None):
        self._mask, self._grammar = mask, grammar
        self.static = grammar is None
        self._error = ""

    @property
    def ended(self) -> bool:
        return self._grammar is not None and self._grammar.ended

    @property
    def error(self) -> str:
        return self._error or (self._grammar.error if self._grammar is not None else "")

    def accept(self, token: int) -> None:
        if not self._allows(token):
            self._error = NOTHING_LEFT
        elif self._grammar is not None:
            self._grammar.accept(token)

    def forced(self) -> abc.Sequence[int]:
        return () if self._grammar is None else list(takewhile(self._allows, self._grammar.forced()))

    def fill(self, mask: np.ndarray) -> None:
        size = self._mask.size
        if self._grammar is None:
            mask[:size], mask[size:] = self._mask, 0
            return
        self._grammar.fill(mask)
        mask[:size] &= self._mask
        mask[size:] = 0
        if not self.error and not mask.any():
            self._error = NOTHING_LEFT

    def _allows(self, token: int) -> bool:
        word, bit = divmod(token, 32)
        return word < self._mask.size and bool(int(self._mask[word]) >> bit & 1)


def accepts(matcher: Matcher, token: int) -> bool:
    """Take a sampled token, and return False if the answer cannot go on after it.

    It may be forbidden, because other parameters left no other one, or the grammar has become too complex.
    """
    matcher.accept(token)
    return not matcher.error


def no_token(sequence: Sequence) -> JaxserveError:
    """Return why an answer has no next token: the logits are not finite, or the matcher allows no token."""
    structured, error = sequence.params.structured, "" if sequence.matcher is None else sequence.matcher.error
    if error == NOTHING_LEFT:
        return _nothing_allowed(sequence)
    if not error or structured is None:
        return NonFiniteOutput("logits")
    return GrammarTooComplex(f"{structured.name} cannot go on: {error}", field=structured.name)


def _nothing_allowed(sequence: Sequence) -> RequestError:
    """Return the error for a request whose parameters contradict each other."""
    params = sequence.params
    names = [] if params.structured is None else [params.structured.name]
    names += [] if params.allowed_token_ids is None else ["allowed_token_ids"]
    names += [] if params.reasoning is None or params.reasoning.max_tokens is None else ["reasoning.max_tokens"]
    allow = "allows" if len(names) == 1 else "together allow"
    message = f"{' and '.join(names)} {allow} no token that bad_words, min_tokens and logit_bias do not forbid"
    return RequestError(message, field=names[0])
