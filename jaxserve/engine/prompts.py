"""Prompts as the library's users write them: a text, token ids, or a mapping with either."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.core.errors import RequestError
from jaxserve.engine.client import Prompt, TextPrompt, TokensPrompt

PromptLike = str | Sequence[int] | Mapping[str, Any]


def as_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    """One prompt or many, as the engine takes them. Raises `RequestError` for what is neither."""
    single = isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer)))
    return [as_prompt(prompt) for prompt in ([prompts] if single else prompts)]


def as_prompt(prompt: Any) -> Prompt:
    """One prompt as the engine takes it. Raises `RequestError` for what is not one."""
    match prompt:
        case str():
            return TextPrompt(prompt)
        case {"prompt_token_ids": token_ids}:
            return TokensPrompt(tuple(int(token) for token in token_ids), prompt.get("prompt"))
        case {"prompt": str() as text}:
            return TextPrompt(text)
        case Mapping():
            raise RequestError("a prompt mapping needs 'prompt' or 'prompt_token_ids'", field="prompt", value=prompt)
    return TokensPrompt(tuple(int(token) for token in prompt))
