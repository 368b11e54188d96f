"""Random prompts of a chosen length for any model, made from its tokenizer alone."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.errors import CheckpointError, ConfigError
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.hub import Need, fetch, hub_name

MAX_PROMPT_TOKENS = 100_000_000  # more fit neither a model nor memory
MAX_ADJUSTMENTS = 10  # of a text's length; more than three are rare


class Vocabulary:
    """A tokenizer as a source of random prompts."""

    def __init__(self, tokenizer: Tokenizer, name: str):
        self.name = name
        self._tokenizer = tokenizer
        self.num_special = len(tokenizer.encode(""))

    @classmethod
    def load(cls, source: str | Path | None = None) -> "Vocabulary":
        """Load from a folder, a tokenizer.json, the bundled model's name (the default) or a name on Hugging Face's hub.

        Raise ConfigError if `source` is none of these, or if the hub cannot be reached.
        """
        if source is None:
            source = bundled_model_path()
        if Path(source).exists():
            return cls(Tokenizer.load(source), str(source))
        bundled = _bundled()
        if bundled is not None and str(source) == bundled.name:
            return cls(Tokenizer.load(bundled), str(source))
        return cls(_from_hub(source, bundled), str(source))

    @property
    def size(self) -> int:
        """The number of tokens that random prompts are drawn from."""
        return len(self._ids)

    def random_ids(self, rng: np.random.Generator, n: int) -> tuple[int, ...]:
        """Return `n` random token ids, drawn from all that stand for text: neither special nor added tokens."""
        return _drawn(self._ids, rng, n)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return self._tokenizer.decode(token_ids)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text, with those that a server adds to a prompt unless `special` is False."""
        return self._tokenizer.encode(text, add_special_tokens=special)

    def text_of_length(
        self, rng: np.random.Generator, n: int, *, head: str = "", head_tokens: int | None = None
    ) -> tuple[str, int]:
        """Return random text of `n` tokens, special tokens included, and the number of tokens it really encodes to.

        The text begins with `head`, which has about `head_tokens` tokens if that is known. The text of tokens joined
        together often encodes to other tokens, so the end is cut or extended until the number is right. With some
        tokenizers it never is.
        """
        if not head:
            return self._adjusted(rng, "", self._more(rng, max(n - self.num_special, 0)), n)
        missing = n - (len(self.encode(head)) if head_tokens is None else head_tokens)
        if missing <= 0:
            return head, len(self.encode(head))
        # The tail has the right length but for tokens where head and tail meet.
        tail = self.continuation(rng, missing).removeprefix(" ")
        body, count = self._adjusted(rng, f"{head} ", self.encode(tail, special=False), n)
        return f"{head} {body}", count

    def continuation(self, rng: np.random.Generator, n: int) -> str:
        """Return random text that adds about `n` tokens to a text. It begins with a space, so that words stay apart."""
        return f" {self._adjusted(rng, ' ', self._more(rng, n), n + self.num_special)[0]}"

    def _adjusted(self, rng: np.random.Generator, front: str, ids: Sequence[int], n: int) -> tuple[str, int]:
        """Return text made from `ids` with which `front` has `n` tokens, and the number it really has."""
        for left in range(MAX_ADJUSTMENTS, -1, -1):
            text = self.text(ids)
            count = len(self.encode(front + text))
            if count == n or not left or (count > n and not ids):
                break
            ids = self.encode(text, special=False)
            ids = ids[: max(len(ids) - (count - n), 0)] if count > n else [*ids, *self._more(rng, n - count)]
        return text, count

    def _more(self, rng: np.random.Generator, n: int) -> tuple[int, ...]:
        return _drawn(self._textual_ids, rng, n)

    @cached_property
    def _ids(self) -> NDArray[np.object_]:
        return np.array(self._tokenizer.ordinary_ids(), dtype=object)

    @cached_property
    def _textual_ids(self) -> NDArray[np.object_]:
        """The ids whose text is whole, printable characters. Other ids rarely survive decoding and encoding."""
        textual = [id for id in self._ids if (text := self._tokenizer.token(id)).isprintable() and "\ufffd" not in text]
        return np.array(textual, dtype=object) if textual else self._ids


def _drawn(ids: NDArray[np.object_], rng: np.random.Generator, n: int) -> tuple[int, ...]:
    """Draw from an array of Python integers, which millions of prompt tokens then share."""
    if not 0 <= n <= MAX_PROMPT_TOKENS:
        raise ConfigError(
            f"a prompt of {n} tokens is too long: the limit is {MAX_PROMPT_TOKENS} (--input-len, --clip-lengths)"
        )
    return tuple(ids[rng.integers(len(ids), size=n)])


def _bundled() -> Path | None:
    try:
        return bundled_model_path()
    except CheckpointError:
        # Some installations have no bundled model.
        return None


def _from_hub(source: str | Path, bundled: Path | None) -> Tokenizer:
    also = f" or {bundled.name} (the bundled model)" if bundled else ""
    missing = f"unknown tokenizer {str(source)!r}: give a folder, a tokenizer.json, a name on the hub{also}"
    name = hub_name(source, short=True)
    if name is None:
        raise ConfigError(f"{missing} (--tokenizer)")
    try:
        return Tokenizer.load(fetch(name, Need.TOKENIZER).folder)
    except CheckpointError as error:
        raise ConfigError(f"{missing}; {error} (--tokenizer)") from error
