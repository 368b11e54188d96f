"""From a request's texts and messages to token ids; much text is rendered and tokenized outside the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxserve.core.errors import PromptTooLong
from jaxserve.engine.client import EngineClient, TokensPrompt
from jaxserve.engine.limits import check_prompt
from jaxserve.server.offload import off_loop
from jaxserve.server.schemas.chat import Conversation

MUCH_TEXT = 4096  # characters; fewer cost less than the way to another thread
MANY_MESSAGES = 32


async def encode(
    client: EngineClient,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    check: Callable[[Sequence[int]], None] = lambda token_ids: None,
) -> list[list[int]]:
    """The token ids of texts. Raises PromptTooLong, without tokenizing, for one that cannot fit.

    `check` raises for token ids that are refused, before the next text is tokenized.
    """
    tokenizer, limit = client.tokenizer, client.info.max_model_len
    most = tokenizer.max_characters(limit)
    for text in texts:
        if len(text) > most:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, more than {limit} tokens (max_model_len) can have",
                field="prompt",
                value=len(text),
                limit=most,
            )

    def encode_all() -> list[list[int]]:
        encoded = []
        for text in texts:
            encoded.append(tokenizer.encode(text, add_special_tokens))
            check(encoded[-1])
        return encoded

    return encode_all() if sum(map(len, texts)) <= MUCH_TEXT else await asyncio.to_thread(encode_all)


async def tokens_prompts(
    client: EngineClient, prompts: Sequence[str | tuple[int, ...]], *, add_special_tokens: bool
) -> list[TokensPrompt]:
    """Prompts for the engine, within the model's limits. Raises RequestError."""
    check = partial(check_prompt, client.info)
    for prompt in prompts:
        if not isinstance(prompt, str):
            check(prompt)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(await encode(client, texts, add_special_tokens=add_special_tokens, check=check) if texts else ())
    return [
        TokensPrompt(tuple(next(encoded)), prompt) if isinstance(prompt, str) else TokensPrompt(prompt)
        for prompt in prompts
    ]


async def conversation(client: EngineClient, body: Conversation, *, add_special_tokens: bool) -> TokensPrompt:
    """The prompt of a conversation, rendered by the model's chat template. Raises RequestError."""
    text = await render(client, body)
    return (await tokens_prompts(client, [text], add_special_tokens=add_special_tokens))[0]


async def render(client: EngineClient, body: Conversation) -> str:
    """The text of a conversation. Raises RequestError for what the chat template or the model cannot take."""
    contents = [message.content or "" for message in body.messages[:MANY_MESSAGES]]
    long = len(body.messages) > MANY_MESSAGES or sum(map(_weight, contents)) > MUCH_TEXT
    return await off_loop(_render, client, body) if long else _render(client, body)


def _render(client: EngineClient, body: Conversation) -> str:
    messages = [message.as_dict() for message in body.messages]
    return client.tokenizer.apply_chat_template(messages, **body.template_variables())


def _weight(content: str | list[dict[str, Any]]) -> int:
    """Roughly the characters of a message's content, with those of at most a few parts counted."""
    if isinstance(content, str):
        return len(content)
    return MUCH_TEXT + 1 if len(content) > MANY_MESSAGES else sum(len(str(part.get("text"))) for part in content)
