"""Rendering and tokenizing of a request's texts and messages, off the event loop if they are large."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from jaxserve.core.errors import PromptTooLong
from jaxserve.engine.client import EngineClient, TokensPrompt
from jaxserve.engine.fim import FillInMiddle
from jaxserve.engine.limits import check_prompt, context_length
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.server.errors import rename_error_fields
from jaxserve.server.offload import MAX_INLINE_SIZE, off_loop_if_large
from jaxserve.server.schemas.chat import Conversation

TokenIds = Sequence[int]
MAX_INLINE_MESSAGES = 32  # more messages of a conversation count as large


async def encode(
    client: EngineClient,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    keep: int | None = None,
    check: Callable[[TokenIds], None] = lambda token_ids: None,
) -> list[list[int]]:
    """Return the token ids of texts: the last `keep` of each text, or all of them.

    `check` is called with each text's token ids before the next text is tokenized, and may raise. Raise PromptTooLong
    without tokenizing if a text has too many characters to fit the context.
    """
    if keep is None:
        _check_characters(client, texts)

    def encode_all() -> list[list[int]]:
        encoded = []
        for text in texts:
            encoded.append(_encode_last(client.tokenizer, text, add_special_tokens, keep))
            check(encoded[-1])
        return encoded

    return await off_loop_if_large(sum(map(len, texts)), encode_all)


def _check_characters(client: EngineClient, texts: Sequence[str]) -> None:
    """Raise PromptTooLong if a text has more characters than a context full of tokens can have."""
    limit = client.tokenizer.max_characters(client.info.max_model_len)
    for text in texts:
        if len(text) > limit:
            raise PromptTooLong(
                f"{context_length(client.info)} However, the prompt has {len(text)} characters, "
                f"and a context of this length holds at most {limit}",
                field="prompt",
                value=len(text),
                limit=limit,
            )


async def tokens_prompts(
    client: EngineClient,
    prompts: Sequence[str | tuple[int, ...]],
    *,
    add_special_tokens: bool,
    keep: int | None = None,
    embed: bool = False,
) -> list[TokensPrompt]:
    """Return prompts for the engine: the last `keep` tokens of each prompt, or all of them.

    With `embed`, no room for generated tokens is required. Raise RequestError if a prompt breaks the model's limits.
    """
    check = partial(check_prompt, client.info, embed=embed)
    cut = [prompt if isinstance(prompt, str) or keep is None else prompt[-keep:] for prompt in prompts]
    for prompt in cut:
        if not isinstance(prompt, str):
            check(prompt)
    texts = [prompt for prompt in cut if isinstance(prompt, str)]
    encoded: Iterator[list[int]] = iter(())
    if texts:  # token ids need no tokenizer
        encoded = iter(await encode(client, texts, add_special_tokens=add_special_tokens, keep=keep, check=check))
    return [
        TokensPrompt(tuple(next(encoded)), prompt if keep is None else None)
        if isinstance(prompt, str)
        else TokensPrompt(prompt)
        for prompt in cut
    ]


async def fim_prompts(
    client: EngineClient,
    fim: FillInMiddle,
    prompts: Sequence[str | tuple[int, ...]],
    suffix: str,
    *,
    add_special_tokens: bool,
    keep: int | None = None,
) -> tuple[list[TokensPrompt], list[slice]]:
    """Return the prompts for the gaps between each prompt and a suffix, and where in them the given prompts are.

    With `keep`, the tokens nearest to the gap are kept. Raise RequestError if a prompt breaks the model's limits.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if keep is None:
        _check_characters(client, texts)
        with rename_error_fields({"prompt": "suffix"}):
            _check_characters(client, [suffix])

    def build() -> tuple[list[TokensPrompt], list[slice]]:
        with rename_error_fields({"prompt": "suffix"}):
            after = fim.encode_suffix(suffix, keep)
        built, places = [], []
        for prompt in prompts:
            made = fim.prompt(prompt, after, add_special_tokens=add_special_tokens, keep=keep)
            check_prompt(client.info, made.token_ids)
            built.append(TokensPrompt(made.token_ids, prompt if isinstance(prompt, str) and keep is None else None))
            places.append(made.prefix)
        return built, places

    return await off_loop_if_large(sum(map(len, texts)) + len(suffix), build)


async def conversation_prompt(
    client: EngineClient, body: Conversation, *, add_special_tokens: bool, keep: int | None = None
) -> TokensPrompt:
    """Return the prompt of a conversation, rendered with the model's chat template.

    Raise RequestError if the prompt breaks the model's limits.
    """
    with rename_error_fields({"prompt": "messages"}):
        text = await render(client, body)
        (prompt,) = await tokens_prompts(client, [text], add_special_tokens=add_special_tokens, keep=keep)
    return prompt


async def render(client: EngineClient, body: Conversation) -> str:
    """Return the text of a conversation. Raise RequestError if the template or the model cannot take a message."""
    contents = [message.content or "" for message in body.messages[:MAX_INLINE_MESSAGES]]
    size = MAX_INLINE_SIZE + 1 if len(body.messages) > MAX_INLINE_MESSAGES else sum(map(_content_size, contents))
    return await off_loop_if_large(size, _apply_template, client, body)


def _apply_template(client: EngineClient, body: Conversation) -> str:
    messages = [message.as_dict(f"messages.{index}") for index, message in enumerate(body.messages)]
    return client.tokenizer.apply_chat_template(messages, **body.template_variables())


def _content_size(content: str | list[dict[str, Any]]) -> int:
    """Return roughly the characters of a message's content. Many parts count as large."""
    if isinstance(content, str):
        return len(content)
    if len(content) > MAX_INLINE_MESSAGES:
        return MAX_INLINE_SIZE + 1
    return sum(len(str(part.get("text"))) for part in content)


def _encode_last(tokenizer: Tokenizer, text: str, add_special_tokens: bool, keep: int | None) -> list[int]:
    """Return the last `keep` token ids of a text, without tokenizing what lies far before them."""
    if keep is None:
        return tokenizer.encode(text, add_special_tokens)
    return tokenizer.encode(text[-tokenizer.max_characters(2 * keep + 1) :], add_special_tokens)[-keep:]
