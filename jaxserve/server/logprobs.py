"""Log-probabilities in the shapes of OpenAI's two endpoints."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.core.request import Detokenizer, Logprob, TokenLogprobs
from jaxserve.engine.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no minus infinity; what other servers send for it

TokenText = Callable[[int], str]  # how a token is written in the log-probabilities


@dataclass
class Offsets:
    """Where the tokens of one choice begin in its text. Mutated by `take`.

    Special tokens that the text does not show take no room in it; a token that ends a character begins where it does.
    """

    detokenizer: Detokenizer
    length: int = 0  # characters of the tokens taken

    def take(self, token_id: int) -> int:
        """Where the next token begins. Mutates."""
        start = self.length
        self.length += len(self.detokenizer.push((token_id,)))
        return start


def as_id(token: int) -> str:
    """Return how a token is written where clients ask for ids (return_tokens_as_token_ids)."""
    return f"token_id:{token}"


def as_text(tokenizer: Tokenizer) -> TokenText:
    """Return a function from a token to its text, or to its bytes, as OpenAI writes them, if they are no text."""

    def text(token: int) -> str:
        data = tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in data)

    return text


def for_chat(
    steps: Sequence[TokenLogprobs], tokenizer: Tokenizer, alternatives: int, *, ids: bool = False
) -> dict[str, Any]:
    """The `logprobs` of a chat choice. Each step has the sampled token first. `ids`: tokens are written as ids."""
    text = as_id if ids else tokenizer.token
    content = []
    for step in steps:
        sampled = next(iter(step))
        top = sorted(step, key=lambda token: -_finite(step[token]))[:alternatives]
        entry = _entry(sampled, step[sampled], tokenizer, text)
        content.append({**entry, "top_logprobs": [_entry(token, step[token], tokenizer, text) for token in top]})
    return {"content": content, "refusal": None}


def for_completion(
    steps: Sequence[TokenLogprobs | None],
    token_ids: Sequence[int],
    text: TokenText,
    alternatives: int,
    offsets: Offsets,
) -> dict[str, Any]:
    """The `logprobs` of a completion choice; a prompt's first step is None. Mutates `offsets`."""
    tokens, chosen, tops, starts = [], [], [], []
    for token_id, step in zip(token_ids, steps, strict=True):
        tokens.append(text(token_id))
        starts.append(offsets.take(token_id))
        chosen.append(None if step is None else _finite(step[token_id]))
        tops.append(None if step is None else _tops(step, text, alternatives))
    return {
        "tokens": tokens,
        "token_logprobs": chosen,
        "top_logprobs": tops if alternatives else None,
        "text_offset": starts,
    }


def for_prompt(steps: Sequence[TokenLogprobs | None], tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as in vLLM: per prompt token, its alternatives by id; None for the first."""
    return [
        None
        if step is None
        else {
            str(token): {"logprob": _finite(entry), "rank": entry.rank, "decoded_token": tokenizer.token(token)}
            for token, entry in step.items()
        }
        for step in steps
    ]


def _tops(step: TokenLogprobs, text: TokenText, alternatives: int) -> dict[str, float]:
    """The most likely tokens by text, with the sampled one.

    Tokens may have the same text: it stands for the sampled one, or else the likeliest, and the others go by their ids.
    """
    sampled = next(iter(step))
    best = sorted(step, key=lambda token: -_finite(step[token]))[:alternatives]
    owners = {text(token): token for token in reversed([sampled, *best])}
    return {
        name if owners[name := text(token)] == token else as_id(token): _finite(step[token])
        for token in dict.fromkeys([*best, sampled])
    }


def _entry(token: int, value: Logprob, tokenizer: Tokenizer, text: TokenText) -> dict[str, Any]:
    return {"token": text(token), "logprob": _finite(value), "bytes": list(tokenizer.token_bytes(token))}


def _finite(value: Logprob) -> float:
    return value.logprob if math.isfinite(value.logprob) else LOWEST
