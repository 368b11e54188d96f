"""The only tokens that an answer may have (`SamplingParams.allowed_token_ids`)."""

from array import array
from collections.abc import Sequence
from typing import Any

from jaxserve.core.errors import RequestError

FIELD = "allowed_token_ids"
MAX_ID = 2**31 - 1


class AllowedTokens(Sequence[int]):
    """Token ids, sorted and each once. There may be as many as the vocabulary has, so they are checked all at once.

    Raise `RequestError` if the ids are not integers of at least 0, or if there are none.
    """

    def __init__(self, ids: Sequence[int]):
        if not isinstance(ids, (list, tuple, AllowedTokens)) or not ids:
            raise RequestError(f"{FIELD} must be a list of at least one token id", field=FIELD, value=ids)
        if not set(map(type, ids)) <= {int} or min(ids) < 0 or max(ids) > MAX_ID:
            wrong = next(token for token in ids if type(token) is not int or not 0 <= token <= MAX_ID)
            raise RequestError(
                f"{FIELD} has {wrong!r}: its entries must be token ids of the model", field=FIELD, value=wrong
            )
        self.ids = array("i", sorted(set(ids)))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        return self.ids[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AllowedTokens) and self.ids == other.ids

    def __hash__(self) -> int:
        return hash(self.ids.tobytes())

    def __repr__(self) -> str:
        return f"AllowedTokens({len(self)} ids)"
