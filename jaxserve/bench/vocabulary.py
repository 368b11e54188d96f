"""Prompts of a wanted length for any model, from its tokenizer alone. Imports no JAX."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as HfTokenizer

from jaxserve.bundled import bundled_model_path
from jaxserve.core.errors import CheckpointError, ConfigError
from jaxserve.engine.tokenizer import Tokenizer

ROUNDS = 10  # of adjusting a text's length; more than three are rare


class Vocabulary:
    """A tokenizer seen as a source of random prompts."""

    def __init__(self, tokenizer: Tokenizer, name: str):
        self.name = name
        self._tokenizer = tokenizer
        self.num_special = len(tokenizer.encode(""))

    @classmethod
    def load(cls, source: str | Path | None = None) -> "Vocabulary":
        """From a folder, a tokenizer.json, the bundled model's name (the default) or a name on Hugging Face's hub.

        Raises ConfigError when `source` is none of them, or the hub cannot be reached.
        """
        if source is None:
            source = bundled_model_path()
        if Path(source).exists():
            return cls(Tokenizer.load(source), str(source))
        bundled = _bundled()
        if bundled is not None and str(source) == bundled.name:
            return cls(Tokenizer.load(bundled), str(source))
        return cls(_from_hub(str(source), bundled), str(source))

    @property
    def size(self) -> int:
        """Tokens that a random prompt is drawn from."""
        return len(self._ids)

    def random_ids(self, rng: np.random.Generator, n: int) -> tuple[int, ...]:
        """`n` token ids, each drawn from all that stand for text: no special and no added token."""
        return _drawn(self._ids, rng, n)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self._tokenizer.decode(token_ids)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of a text, with those that a server puts around a prompt unless `special` is False."""
        return self._tokenizer.encode(text, add_special_tokens=special)

    def text_of_length(self, rng: np.random.Generator, n: int, *, head: str = "") -> tuple[str, int]:
        """Random text that encodes to `n` tokens, special ones included, and the number that it really encodes to.

        The text begins with `head`. Tokens put side by side as text are often not the ones that it encodes to, so
        the end is cut or made longer until the number is right; with some tokenizers it never is.
        """
        count = len(self.encode(head))
        text, tail = head, list(_drawn(self._textual_ids, rng, max(n - count, 0)))
        for _ in range(ROUNDS):
            text = head + self.text(tail)
            count = len(self.encode(text))
            if count == n or (count > n and not tail):
                break
            tail = self.encode(self.text(tail), special=False)
            if count > n:
                del tail[max(len(tail) - (count - n), 0) :]
            else:
                tail += _drawn(self._textual_ids, rng, n - count)
        return text, count

    @cached_property
    def _ids(self) -> NDArray[np.object_]:
        return np.array(self._tokenizer.ordinary_ids(), dtype=object)

    @cached_property
    def _textual_ids(self) -> NDArray[np.object_]:
        """Ids whose text is whole characters that can be seen: the rest rarely survives being encoded again."""
        textual = [id for id in self._ids if (text := self._tokenizer.token(id)).isprintable() and "\ufffd" not in text]
        return np.array(textual, dtype=object) if textual else self._ids


def _drawn(ids: NDArray[np.object_], rng: np.random.Generator, n: int) -> tuple[int, ...]:
    """From an array of Python's own integers, so that millions of tokens in prompts share them."""
    return tuple(ids[rng.integers(len(ids), size=n)])


def _bundled() -> Path | None:
    try:
        return bundled_model_path()
    except CheckpointError:  # an installation without one
        return None


def _from_hub(name: str, bundled: Path | None) -> Tokenizer:
    also = f", nor the bundled model ({bundled.name})" if bundled else ""
    missing = f"there is no tokenizer {name!r}: it is no folder and no file{also}"
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"{missing} (--tokenizer)")
    try:
        return Tokenizer(HfTokenizer.from_pretrained(name))
    except Exception as error:  # whatever the hub's client raises; often a bare Exception
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{missing}, and Hugging Face's hub did not give it: {reason} (--tokenizer)") from error
