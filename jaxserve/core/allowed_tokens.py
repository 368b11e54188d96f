"""The only tokens that an answer may have (`SamplingParams.allowed_token_ids`): the ids, and their matcher."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from jaxserve.core.errors import RequestError
from jaxserve.core.structured import NOTHING_LEFT, Matcher

FIELD = "allowed_token_ids"
MAX_ID = 2**31 - 1


class AllowedTokens(Sequence[int]):
    """Token ids, sorted and each once. There may be as many as the vocabulary has, so they are checked all at once.

    Raise `RequestError` if the ids are not integers of at least 0, or if there are none.
    """

    def __init__(self, ids: Sequence[int]):
        if not isinstance(ids, (list, tuple)) or not ids:
            raise RequestError(f"{FIELD} must be a list of at least one token id", field=FIELD, value=ids)
        if not set(map(type, ids)) <= {int} or min(ids) < 0 or max(ids) > MAX_ID:
            wrong = next(token for token in ids if type(token) is not int or not 0 <= token <= MAX_ID)
            raise RequestError(f"{FIELD} has {wrong!r}: its entries must be token ids", field=FIELD, value=wrong)
        self._ids = np.unique(np.array(ids, np.int32))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: Any) -> Any:
        return self._ids[index].tolist()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AllowedTokens) and np.array_equal(self._ids, other._ids)

    def __hash__(self) -> int:
        return hash(self._ids.tobytes())

    def __repr__(self) -> str:
        return f"AllowedTokens({len(self)} ids)"

    def mask(self, vocab: int) -> np.ndarray:
        """Return a bit for each token of a vocabulary, uint32 [ceil(vocab / 32)], as `Matcher.fill` writes them."""
        allowed = np.zeros(-(-vocab // 32) * 32, bool)
        allowed[self._ids] = True
        return np.packbits(allowed, bitorder="little").view(np.uint32)


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

    def forced(self) -> Sequence[int]:
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
