"""From a request's texts and messages to token ids; long texts are tokenized outside the event loop."""

import asyncio

from jaxserve.core.errors import PromptTooLong
from jaxserve.engine.client import EngineClient, TokensPrompt
from jaxserve.engine.limits import check_prompt
from jaxserve.server.schemas.chat import Conversation

LONG_TEXT = 4096  # characters; shorter ones cost less than the way to another thread


async def encode(client: EngineClient, text: str, *, add_special_tokens: bool) -> list[int]:
    """The token ids of a text. Raises PromptTooLong, without tokenizing it, if it cannot fit."""
    limit = client.info.max_model_len
    most = client.tokenizer.max_characters(limit)
    if len(text) > most:
        raise PromptTooLong(
            f"the prompt has {len(text)} characters, more than {limit} tokens (max_model_len) can have",
            field="prompt",
            value=len(text),
            limit=most,
        )
    if len(text) <= LONG_TEXT:
        return client.tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(client.tokenizer.encode, text, add_special_tokens)


async def text_or_tokens(
    client: EngineClient, prompt: str | tuple[int, ...], *, add_special_tokens: bool
) -> TokensPrompt:
    """A prompt for the engine, within the model's limits. Raises RequestError."""
    if isinstance(prompt, str):
        token_ids = tuple(await encode(client, prompt, add_special_tokens=add_special_tokens))
        made = TokensPrompt(token_ids, prompt)
    else:
        made = TokensPrompt(prompt)
    check_prompt(client.info, made.token_ids)
    return made


async def conversation(client: EngineClient, body: Conversation, *, add_special_tokens: bool) -> TokensPrompt:
    """The prompt of a conversation, rendered by the model's chat template. Raises RequestError."""
    messages = [message.as_dict() for message in body.messages]
    text = client.tokenizer.apply_chat_template(messages, **body.template_variables())
    return await text_or_tokens(client, text, add_special_tokens=add_special_tokens)
