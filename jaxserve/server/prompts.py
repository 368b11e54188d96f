"""From a request's texts and messages to token ids; large inputs are rendered and tokenized off the event loop."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from jaxserve.core.errors import PromptTooLong
from jaxserve.engine.client import EngineClient, TokensPrompt
from jaxserve.engine.limits import check_prompt, context_length
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.server.errors import rename_error_fields
from jaxserve.server.offload import off_loop
from jaxserve.server.schemas.chat import Conversation

T = TypeVar("T")
TokenIds = Sequence[int]
MUCH_TEXT = 4096  # characters or tokens; fewer cost less than the way to another thread
MANY_MESSAGES = 32


async def off_loop_if_large(size: int, work: Callable[..., T], *args: object) -> T:
    """Return `work(*args)`, computed in another thread if its input has many characters or tokens."""
    return await off_loop(work, *args) if size > MUCH_TEXT else work(*args)


async def encode(
    client: EngineClient,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    keep: int | None = None,
    check: Callable[[TokenIds], None] = lambda token_ids: None,
) -> list[list[int]]:
    """Return the token ids of texts: the last `keep` of each, or all.

    `check` raises for token ids that are refused, before the next text is tokenized. Raises PromptTooLong, without
    tokenizing, for a text that cannot fit as a whole.
    """
    if keep is None:
        check_characters(client, texts)

    def encode_all() -> list[list[int]]:
        encoded = []
        for text in texts:
            encoded.append(_last(client.tokenizer, text, add_special_tokens, keep))
            check(encoded[-1])
        return encoded

    return await off_loop_if_large(sum(map(len, texts)), encode_all)


def check_characters(client: EngineClient, texts: Sequence[str]) -> None:
    """Raise PromptTooLong for a text of more characters than the tokens of the model's context can have."""
    most = client.tokenizer.max_characters(client.info.max_model_len)
    for text in texts:
        if len(text) > most:
            raise PromptTooLong(
                f"{context_length(client.info)} However, the prompt has {len(text)} characters, "
                f"and so many tokens have at most {most}",
                field="prompt",
                value=len(text),
                limit=most,
            )


async def tokens_prompts(
    client: EngineClient,
    prompts: Sequence[str | tuple[int, ...]],
    *,
    add_special_tokens: bool,
    keep: int | None = None,
    embed: bool = False,
) -> list[TokensPrompt]:
    """Return prompts for the engine, within the model's limits: the last `keep` tokens of each, or all.

    `embed`: nothing is to be generated. Raises RequestError.
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


async def conversation(
    client: EngineClient, body: Conversation, *, add_special_tokens: bool, keep: int | None = None
) -> TokensPrompt:
    """Return the prompt of a conversation, rendered by the model's chat template. Raises RequestError."""
    with rename_error_fields({"prompt": "messages"}):
        text = await render(client, body)
        (prompt,) = await tokens_prompts(client, [text], add_special_tokens=add_special_tokens, keep=keep)
    return prompt


async def render(client: EngineClient, body: Conversation) -> str:
    """Return the text of a conversation. Raises RequestError for what the template or the model cannot take."""
    contents = [message.content or "" for message in body.messages[:MANY_MESSAGES]]
    size = MUCH_TEXT + 1 if len(body.messages) > MANY_MESSAGES else sum(map(_weight, contents))
    return await off_loop_if_large(size, _render, client, body)


def _render(client: EngineClient, body: Conversation) -> str:
    messages = [message.as_dict(f"messages.{index}") for index, message in enumerate(body.messages)]
    return client.tokenizer.apply_chat_template(messages, **body.template_variables())


def _weight(content: str | list[dict[str, Any]]) -> int:
    """Return roughly the characters of a message's content; many parts count as much text."""
    if isinstance(content, str):
        return len(content)
    return MUCH_TEXT + 1 if len(content) > MANY_MESSAGES else sum(len(str(part.get("text"))) for part in content)


def _last(tokenizer: Tokenizer, text: str, add_special_tokens: bool, keep: int | None) -> list[int]:
    """Return the last `keep` token ids of a text; what lies far before them is not tokenized."""
    if keep is None:
        return tokenizer.encode(text, add_special_tokens)
    return tokenizer.encode(text[-tokenizer.max_characters(2 * keep + 1) :], add_special_tokens)[-keep:]
