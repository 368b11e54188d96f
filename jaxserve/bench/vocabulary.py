"""Prompts of a wanted length for any model, from its tokenizer alone. Imports no JAX."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as HfTokenizer

from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.errors import CheckpointError, ConfigError
from jaxserve.engine.tokenizer import Tokenizer

MAX_PROMPT_TOKENS = 100_000_000  # of a prompt: no model takes more, and no memory
TOKENIZER = "tokenizer.json"  # a model's, on the hub
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

    def text_of_length(
        self, rng: np.random.Generator, n: int, *, head: str = "", head_tokens: int | None = None
    ) -> tuple[str, int]:
        """Random text that encodes to `n` tokens, special ones included, and the number that it really encodes to.

        The text begins with `head`, of about `head_tokens` tokens if that is known. Tokens put side by side as text
        are often not the ones that it encodes to, so the end is cut or made longer until the number is right; with
        some tokenizers it never is.
        """
        if not head:
            return self._adjusted(rng, "", self._more(rng, max(n - self.num_special, 0)), n)
        missing = n - (len(self.encode(head)) if head_tokens is None else head_tokens)
        if missing <= 0:
            return head, len(self.encode(head))
        tail = self.continuation(rng, missing).removeprefix(" ")  # to begin with what is right but for where they meet
        body, count = self._adjusted(rng, f"{head} ", self.encode(tail, special=False), n)
        return f"{head} {body}", count

    def continuation(self, rng: np.random.Generator, n: int) -> str:
        """Random text that adds about `n` tokens to a text. It begins with a space, so that words do not meld."""
        return f" {self._adjusted(rng, ' ', self._more(rng, n), n + self.num_special)[0]}"

    def _adjusted(self, rng: np.random.Generator, front: str, ids: Sequence[int], n: int) -> tuple[str, int]:
        """Text that begins with that of `ids` and makes `front` one of `n` tokens, and the number it really makes."""
        for left in range(ROUNDS, -1, -1):
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
        """Ids whose text is whole characters that can be seen: the rest rarely survives being encoded again."""
        textual = [id for id in self._ids if (text := self._tokenizer.token(id)).isprintable() and "\ufffd" not in text]
        return np.array(textual, dtype=object) if textual else self._ids


def _drawn(ids: NDArray[np.object_], rng: np.random.Generator, n: int) -> tuple[int, ...]:
    """From an array of Python's own integers, so that millions of tokens in prompts share them."""
    if not 0 <= n <= MAX_PROMPT_TOKENS:
        raise ConfigError(
            f"a prompt of {n} tokens cannot be made: the limit is {MAX_PROMPT_TOKENS} (--input-len, --clip-lengths)"
        )
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
        return Tokenizer(HfTokenizer.from_file(_hub_file(name)))
    except Exception as error:  # whatever the hub's client raises
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{missing}, and Hugging Face's hub did not give it: {reason} (--tokenizer)") from error


def _hub_file(name: str) -> str:
    """The path of a model's tokenizer.json, from the hub or, where the hub does not give it, from its client's cache.

    The hub is asked once first: the download itself would try to reach it for half a minute.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    try:
        get_hf_file_metadata(hf_hub_url(name, TOKENIZER))
        return hf_hub_download(name, TOKENIZER)
    except Exception:
        cached = try_to_load_from_cache(name, TOKENIZER)
        if not isinstance(cached, str):
            raise
        return cached
