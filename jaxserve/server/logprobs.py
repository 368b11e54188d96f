"""Log-probabilities in the shapes of OpenAI's two endpoints."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.core.request import Detokenizer, Logprob, TokenLogprobs
from jaxserve.engine.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no minus infinity; what other servers send for it


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


def for_chat(steps: Sequence[TokenLogprobs], tokenizer: Tokenizer, alternatives: int) -> dict[str, Any]:
    """The `logprobs` of a chat choice. Each step has the sampled token first."""
    content = []
    for step in steps:
        sampled = next(iter(step))
        top = sorted(step, key=lambda token: -_finite(step[token]))[:alternatives]
        entry = _entry(sampled, step[sampled], tokenizer)
        content.append({**entry, "top_logprobs": [_entry(token, step[token], tokenizer) for token in top]})
    return {"content": content, "refusal": None}


def for_completion(
    steps: Sequence[TokenLogprobs | None],
    token_ids: Sequence[int],
    tokenizer: Tokenizer,
    alternatives: int,
    offsets: Offsets,
) -> dict[str, Any]:
    """The `logprobs` of a completion choice; a prompt's first step is None. Mutates `offsets`."""
    tokens, chosen, tops, starts = [], [], [], []
    for token_id, step in zip(token_ids, steps, strict=True):
        tokens.append(tokenizer.token(token_id))
        starts.append(offsets.take(token_id))
        chosen.append(None if step is None else _finite(step[token_id]))
        tops.append(None if step is None else _tops(step, tokenizer, alternatives))
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


def _tops(step: TokenLogprobs, tokenizer: Tokenizer, alternatives: int) -> dict[str, float]:
    """The most likely tokens by text, with the sampled one; of two tokens with one text the likelier stays."""
    sampled = next(iter(step))
    best = sorted(step, key=lambda token: -_finite(step[token]))[:alternatives]
    top: dict[str, float] = {}
    for token in [*best, sampled]:
        top.setdefault(tokenizer.token(token), _finite(step[token]))
    return top


def _entry(token: int, value: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(value), "bytes": list(data)}


def _finite(value: Logprob) -> float:
    return value.logprob if math.isfinite(value.logprob) else LOWEST
