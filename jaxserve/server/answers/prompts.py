"""Rendering and tokenizing of a request's texts and messages, off the event loop if they are large."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxserve.core.errors import PromptTooLong, RequestError, UnknownKeyword
from jaxserve.engine.client import EngineClient, TokensPrompt
from jaxserve.engine.fim import FillInMiddle
from jaxserve.engine.limits import check_prompt, context_length
from jaxserve.server.errors import rename_error_fields
from jaxserve.server.http.body import MAX_ITEMS, count_items
from jaxserve.server.http.offload import MAX_INLINE_SIZE, off_loop_if_large
from jaxserve.server.schemas.chat import Conversation

TokenIds = Sequence[int]
MAX_INLINE_MESSAGES = 32  # more messages of a conversation count as large


@dataclass(frozen=True)
class Encoded:
    """The token ids of a text, or if it was `cut` of its end."""

    token_ids: list[int]
    cut: bool = False


async def encode(
    client: EngineClient,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    keep: int | None = None,
    check: Callable[[TokenIds], None] = lambda token_ids: None,
) -> list[Encoded]:
    """Return the token ids of texts: the last `keep` of each text, or all of them.

    `check` is called with each text's token ids before the next text is tokenized, and may raise. Raise PromptTooLong
    without tokenizing if a text has too many characters to fit the context. Of a text that is cut, only the end is
    tokenized: as many characters as a context can have.
    """
    if keep is None:
        _check_characters(client, texts)
    longest = client.tokenizer.max_characters(client.info.max_model_len + 1)  # more tokens than are ever kept

    def encode_all() -> list[Encoded]:
        encoded = []
        for text in texts:
            encoded.append(_last(client.tokenizer.encode(text[-longest:], add_special_tokens), keep))
            check(encoded[-1].token_ids)
        return encoded

    return await off_loop_if_large(sum(map(len, texts)), encode_all)


def _last(token_ids: list[int], keep: int | None) -> Encoded:
    return Encoded(token_ids) if keep is None or len(token_ids) <= keep else Encoded(token_ids[-keep:], cut=True)


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
    generates: bool = True,
) -> list[TokensPrompt]:
    """Return prompts for the engine: the last `keep` tokens of each prompt, or all of them.

    Unless the request `generates` tokens, no room for them is required. Raise RequestError if a prompt breaks the
    model's limits.
    """
    check = partial(check_prompt, client.info, generates=generates)
    cut = [prompt if isinstance(prompt, str) or keep is None else prompt[-keep:] for prompt in prompts]
    for prompt in cut:
        if not isinstance(prompt, str):
            check(prompt)
    texts = [prompt for prompt in cut if isinstance(prompt, str)]
    encoded: Iterator[Encoded] = iter(())
    if texts:  # token ids need no tokenizer
        encoded = iter(await encode(client, texts, add_special_tokens=add_special_tokens, keep=keep, check=check))
    return [_of_text(prompt, next(encoded)) if isinstance(prompt, str) else TokensPrompt(prompt) for prompt in cut]


def _of_text(text: str, encoded: Encoded) -> TokensPrompt:
    return TokensPrompt(tuple(encoded.token_ids), None if encoded.cut else text)


async def first_tokens(
    client: EngineClient, texts: Sequence[str], most: int, *, add_special_tokens: bool
) -> list[str | tuple[int, ...]]:
    """Return texts of at most `most` tokens unchanged, and of others the ids of their first `most` tokens.

    Special tokens, with `add_special_tokens`, are not counted: those before and after a text stay.
    """
    longest = client.tokenizer.max_characters(most + 1)

    def shortened(text: str) -> str | tuple[int, ...]:
        begun = text[:longest]
        own = client.tokenizer.encode(begun, False)
        if len(own) <= most:
            return text
        ids = client.tokenizer.encode(begun, True) if add_special_tokens else own
        before = next((i for i in range(len(ids) - len(own) + 1) if ids[i : i + len(own)] == own), 0)
        return (*ids[: before + most], *ids[before + len(own) :])

    size = sum(min(len(text), longest) for text in texts)
    return await off_loop_if_large(size, lambda: [shortened(text) for text in texts])


async def fim_prompts(
    client: EngineClient,
    fim: FillInMiddle,
    prompts: Sequence[str | tuple[int, ...]],
    suffix: str,
    *,
    add_special_tokens: bool,
    keep: int | None = None,
    generates: bool = True,
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
            check_prompt(client.info, made.token_ids, generates=generates)
            built.append(TokensPrompt(made.token_ids, prompt if isinstance(prompt, str) and keep is None else None))
            places.append(made.prefix)
        return built, places

    return await off_loop_if_large(sum(map(len, texts)) + len(suffix), build)


async def render(client: EngineClient, body: Conversation, defaults: Mapping[str, Any]) -> str:
    """Return the text of a conversation. Raise RequestError if the template or the model cannot take a message.

    `defaults`: variables of the template for requests that give none.
    """
    return await off_loop_if_large(_size(body), _apply_template, client, body, defaults)


async def count_prompt_tokens(client: EngineClient, body: Conversation, defaults: Mapping[str, Any]) -> int:
    """Return the number of tokens of a conversation's prompt. Raise RequestError as `render` and `encode` do."""
    text = await render(client, body, defaults)
    (encoded,) = await encode(client, [text], add_special_tokens=False)
    return len(encoded.token_ids)


def _size(body: Conversation) -> int:
    """Return roughly the characters of a conversation. Many messages count as large, and so do tools and calls."""
    few = len(body.messages) <= MAX_INLINE_MESSAGES and not body.tools
    if not few or any(message.tool_calls for message in body.messages):
        return MAX_INLINE_SIZE + 1
    return sum(_content_size(message.content or "") for message in body.messages)


def _apply_template(client: EngineClient, body: Conversation, defaults: Mapping[str, Any]) -> str:
    messages = [message.as_dict(f"messages.{index}") for index, message in enumerate(body.messages)]
    _check_arguments(messages)
    variables, optional = body.template_variables(defaults), body.optional_variables() | defaults.keys()
    try:
        return client.tokenizer.conversation_text(messages, **variables, optional=optional)
    except UnknownKeyword as error:
        error.field = "chat_template_kwargs"
        raise


def _check_arguments(messages: Sequence[dict[str, Any]]) -> None:
    """Raise RequestError if the arguments of all calls, which are JSON in strings, have too many items together.

    The template gets them parsed, as it gets the body, whose items have been counted without those in strings.
    """
    items = 0
    for place, message in enumerate(messages):
        for index, call in enumerate(message.get("tool_calls", ())):
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                items += count_items(arguments.encode(), MAX_ITEMS, check_digits=False)
            if items > MAX_ITEMS:
                field = f"messages.{place}.tool_calls.{index}.function.arguments"
                raise RequestError(
                    f"{field}: the arguments of all calls so far have {items} items (list entries, fields, objects): "
                    f"the limit is {MAX_ITEMS}",
                    field=field,
                    value=items,
                    limit=MAX_ITEMS,
                )


def _content_size(content: str | list[dict[str, Any]]) -> int:
    """Return roughly the characters of a message's content. Many parts count as large."""
    if isinstance(content, str):
        return len(content)
    if len(content) > MAX_INLINE_MESSAGES:
        return MAX_INLINE_SIZE + 1
    return sum(len(str(part.get("text"))) for part in content)
