"""Log-probabilities in the JSON forms of OpenAI's chat and text completions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.core.request import Detokenizer, Logprob, TokenLogprobs
from jaxserve.engine.tokenizer import Tokenizer

# Sent for minus infinity, which JSON lacks, as other servers do.
MIN_LOGPROB = -9999.0

TokenText = Callable[[int], str]  # token id -> the form in which responses write the token


@dataclass
class Offsets:
    """The positions at which the tokens of one choice begin in its text, in characters.

    Special tokens that the text does not show have no length. A token that completes a character begins where the
    character begins.
    """

    detokenizer: Detokenizer
    length: int = 0  # characters of the tokens taken

    def take(self, token_id: int) -> int:
        """Append the next token and return the position at which it begins."""
        start = self.length
        self.length += len(self.detokenizer.push((token_id,)))
        return start


def token_as_id(token: int) -> str:
    """Return the form of a token for clients that ask for ids (`return_tokens_as_token_ids`)."""
    return f"token_id:{token}"


def token_writer(tokenizer: Tokenizer) -> TokenText:
    """Return a function from a token to its text, or to OpenAI's form of its bytes if they are not UTF-8."""

    def text(token: int) -> str:
        data = tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in data)

    return text


def format_chat_logprobs(
    steps: Sequence[TokenLogprobs], tokenizer: Tokenizer, alternatives: int, *, ids: bool = False
) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice. With `ids`, tokens are written as ids.

    The first token of each step must be the sampled one.
    """
    text = token_as_id if ids else tokenizer.token
    content = []
    for step in steps:
        sampled = next(iter(step))
        top = sorted(step, key=lambda token: -_finite(step[token]))[:alternatives]
        entry = _token_entry(sampled, step[sampled], tokenizer, text)
        content.append({**entry, "top_logprobs": [_token_entry(token, step[token], tokenizer, text) for token in top]})
    return {"content": content, "refusal": None}


def format_completion_logprobs(
    steps: Sequence[TokenLogprobs | None],
    token_ids: Sequence[int],
    text: TokenText,
    alternatives: int,
    offsets: Offsets,
) -> dict[str, Any]:
    """Return the `logprobs` of a completion choice, and advance `offsets` by its tokens.

    The step of a prompt's first token is None.
    """
    tokens, chosen, tops, starts = [], [], [], []
    for token_id, step in zip(token_ids, steps, strict=True):
        tokens.append(text(token_id))
        starts.append(offsets.take(token_id))
        chosen.append(None if step is None else _finite(step[token_id]))
        tops.append(None if step is None else _top_logprobs(step, text, alternatives))
    return {
        "tokens": tokens,
        "token_logprobs": chosen,
        "top_logprobs": tops if alternatives else None,
        "text_offset": starts,
    }


def format_prompt_logprobs(steps: Sequence[TokenLogprobs | None], tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each prompt token its alternatives by id, and None for the first token."""
    return [
        None
        if step is None
        else {
            str(token): {"logprob": _finite(entry), "rank": entry.rank, "decoded_token": tokenizer.token(token)}
            for token, entry in step.items()
        }
        for step in steps
    ]


def _top_logprobs(step: TokenLogprobs, text: TokenText, alternatives: int) -> dict[str, float]:
    """Return the log-probabilities of the most likely tokens and the sampled token, by text.

    If several tokens have equal text, it stands for the sampled or else the likeliest one. The others are written as
    ids.
    """
    sampled = next(iter(step))
    best = sorted(step, key=lambda token: -_finite(step[token]))[:alternatives]
    owners = {text(token): token for token in reversed([sampled, *best])}
    return {
        name if owners[name := text(token)] == token else token_as_id(token): _finite(step[token])
        for token in dict.fromkeys([*best, sampled])
    }


def _token_entry(token: int, value: Logprob, tokenizer: Tokenizer, text: TokenText) -> dict[str, Any]:
    return {"token": text(token), "logprob": _finite(value), "bytes": list(tokenizer.token_bytes(token))}


def _finite(value: Logprob) -> float:
    return value.logprob if math.isfinite(value.logprob) else MIN_LOGPROB
