"""Conversion of prompts as users write them: a text, token ids, or a mapping with either."""

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np

from jaxserve.core.errors import RequestError
from jaxserve.engine.client import Prompt, TextPrompt, TokensPrompt

PromptLike = str | Sequence[int] | Mapping[str, Any]


def as_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    """Return one prompt or many as a list of engine prompts. Raise `RequestError` for any other value."""
    if isinstance(prompts, (str, bytes, bytearray, Mapping)) or not isinstance(prompts, Iterable):
        return [as_prompt(prompts)]
    several = list(prompts)
    single = bool(several) and isinstance(several[0], (int, np.integer))
    return [as_prompt(several)] if single else [as_prompt(prompt) for prompt in several]


def as_prompt(prompt: Any) -> Prompt:
    """Return a prompt as an engine prompt. Raise `RequestError` for any other value."""
    match prompt:
        case str():
            return TextPrompt(prompt)
        case {"prompt_token_ids": token_ids}:
            return TokensPrompt(_token_ids(token_ids), prompt.get("prompt"))
        case {"prompt": str() as text}:
            return TextPrompt(text)
        case Mapping():
            raise RequestError("a prompt mapping needs 'prompt' or 'prompt_token_ids'", field="prompt", value=prompt)
    return TokensPrompt(_token_ids(prompt))


def _token_ids(value: Any) -> tuple[int, ...]:
    try:
        if isinstance(value, bytes | bytearray):
            raise TypeError("bytes are not token ids")
        return tuple(index(token) for token in value)
    except TypeError as error:
        message = "a prompt is a text, a list of token ids, or a mapping with 'prompt' or 'prompt_token_ids'"
        raise RequestError(message, field="prompt", value=value) from error
