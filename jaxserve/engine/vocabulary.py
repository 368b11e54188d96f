"""The vocabulary of a model: its tokens and their bytes, and the conversion of text to token ids."""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from tokenizers import Tokenizer as HfTokenizer

from jaxserve.core.errors import RequestError
from jaxserve.core.keywords import explains_keywords
from jaxserve.core.panics import LibraryPanicked, panics_as_exceptions
from jaxserve.engine.token_bytes import SPACE, token_bytes
from jaxserve.engine.transformers_names import ENCODE

PROBE = "a"  # a text that is encoded to find the special tokens around it
# A character that no token has in common with others: what follows it is encoded as inside a text.
ALONE = "\u263a"
MAX_SHOWN = 80  # characters of a value that is no text, in an error


class Vocabulary:
    """The tokens of a model. Thread-safe: encoding does not hold the interpreter's lock."""

    def __init__(
        self,
        tokenizer: HfTokenizer,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int],
        add_bos: bool | None,
        add_eos: bool | None,
    ):
        """`special_tokens`: the texts of special tokens by names such as "eos_token".

        `add_bos`, `add_eos`: whether `encode` puts these tokens around a text; None: as tokenizer.json says.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.special_tokens_map: Mapping[str, str] = dict(special_tokens)
        self.special_ids = frozenset(id for id, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self._bytes = token_bytes(tokenizer)
        vocabulary = tokenizer.get_vocab()
        self._longest_token = max(map(len, vocabulary), default=1)
        self._end = max(vocabulary.values(), default=-1) + 1  # of the ids, some of which may be skipped
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of("bos_token")
        eos = self._id_of("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if eos is None else [eos])]))
        whole, bare = self._probed(True), self._probed(False)
        self._adds_space = bool(bare) and str(tokenizer.id_to_token(bare[0])).startswith(SPACE)
        self._bos = _Edge(self.bos_token_id, add_bos, self.bos_token_id in whole[:1] and whole[:1] != bare[:1])
        self._eos = _Edge(eos, add_eos, eos in whole[-1:] and whole[-1:] != bare[-1:])
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)

    def __len__(self) -> int:
        return self.vocab_size

    @explains_keywords(ENCODE, "the tokenizer's encode")
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raise `RequestError` for what is no text, or not valid Unicode."""
        ids = self._encode(text, add_special_tokens)
        return self._with_edges(ids) if add_special_tokens else ids

    def encode_inside(self, text: str) -> list[int]:
        """Return the token ids of a text inside another: without the space that sentencepiece puts before a text.

        Raise `RequestError` as `encode`.
        """
        if not self._adds_space:
            return self.encode(text, add_special_tokens=False)
        start = self._encode(ALONE, False)
        return self.encode(ALONE + text, add_special_tokens=False)[len(start) :]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary writes it, or None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    def written(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it, or None if there is no such token."""
        return self._tokenizer.id_to_token(token_id) if 0 <= token_id < self._end else None

    @property
    def bos_ids(self) -> tuple[int, ...]:
        """The bos token if `encode` begins texts with it."""
        return (self.bos_token_id,) if self._bos.wanted and self.bos_token_id is not None else ()

    @property
    def knows_bytes(self) -> bool:
        """True if the bytes of every token are known: what it adds to a text, whatever is before it."""
        return self._bytes is not None

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens, as the vocabulary writes them."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def ordinary_ids(self) -> list[int]:
        """Return the sorted ids of the vocabulary without added tokens, special or not."""
        added = self._tokenizer.get_added_tokens_decoder().keys()
        return sorted(set(self._tokenizer.get_vocab(with_added_tokens=False).values()) - added)

    def token(self, token_id: int) -> str:
        """Return the text of one token inside a text, with U+FFFD for an incomplete character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def max_characters(self, num_tokens: int) -> int:
        """Return an upper bound on the characters of a text of `num_tokens` tokens."""
        return num_tokens * max(self._longest_token, 16)

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of all special tokens by their texts."""
        return {text: id for id in sorted(self.special_ids) if (text := self._tokenizer.id_to_token(id)) is not None}

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(f"the text is {repr(text)[:MAX_SHOWN]}: it must be a string", field="prompt")
        try:
            with panics_as_exceptions():
                return self._tokenizer.encode(text, add_special_tokens=bool(add_special_tokens)).ids
        except (TypeError, UnicodeError) as error:
            raise RequestError("the text is not valid Unicode (it has a lone surrogate)", field="prompt") from error
        except Exception as error:  # such as a bare Exception for a character that no token has
            raise RequestError(f"the model's tokenizer cannot encode this text: {error}", field="prompt") from error

    def _probed(self, add_special_tokens: bool) -> list[int]:
        """Return the token ids of the probe, none if the vocabulary has no token for it."""
        try:
            return self._encode(PROBE, add_special_tokens)
        except RequestError:
            return []

    def _with_edges(self, ids: list[int]) -> list[int]:
        """Add the bos and eos tokens, or remove those that tokenizer.json added, as the configuration says.

        A bos with which the text itself begins stays, and no second one is added.
        """
        bos, eos = self._bos, self._eos
        if bos.extra:
            ids = ids[1:]
        if eos.extra:
            ids = ids[:-1]
        if bos.missing and bos.id is not None and ids[:1] != [bos.id]:
            ids = [bos.id, *ids]
        if eos.missing and eos.id is not None and ids[-1:] != [eos.id]:
            ids = [*ids, eos.id]
        return ids

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the library's text of tokens, or the tokens as the vocabulary writes them where its decoder fails."""
        try:
            with panics_as_exceptions():
                return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except LibraryPanicked:
            if len(token_ids) > 1:
                return "".join(self._decode([token], skip_special_tokens) for token in token_ids)
            hidden = self.special_ids if skip_special_tokens else ()
            return "".join(self.written(token) or "" for token in token_ids if token not in hidden)

    def _token_bytes(self, token_id: int) -> bytes:
        token = self.written(token_id)
        if token is None:
            return b""
        return self._decode([token_id], False).encode() if self._bytes is None else self._bytes.of(token)

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self.special_ids else self.token_bytes(token_id)

    def _id_of(self, name: str) -> int | None:
        """Return the id of a special token by a name such as "eos_token"; None if there is none."""
        token: Any = self.special_tokens_map.get(name)
        return None if token is None else self.token_id(token)


class _Edge(NamedTuple):
    """A special token at one end of every text."""

    id: int | None
    asked: bool | None  # whether the configuration wants it; None: as tokenizer.json does
    added: bool  # whether tokenizer.json adds it

    @property
    def wanted(self) -> bool:
        return self.id is not None and (self.added if self.asked is None else self.asked)

    @property
    def missing(self) -> bool:
        return self.wanted and not self.added

    @property
    def extra(self) -> bool:
        return self.added and not self.wanted
