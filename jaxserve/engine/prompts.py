"""Conversion of prompts as users write them: a text, token ids, or a mapping with either."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from jaxserve.core.errors import RequestError, UnknownKeyword
from jaxserve.core.keywords import translate
from jaxserve.core.plain_values import plain
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.vllm_names import PROMPT
from jaxserve.engine.chat_template import RENDERED
from jaxserve.engine.client import ModelInfo, Prompt, TextPrompt, TokensPrompt
from jaxserve.engine.token_ids import as_token_ids
from jaxserve.engine.tokenizer import Tokenizer

PROMPT_KEYS = ("prompt", "prompt_token_ids")
RESERVED = RENDERED | {"chat_template", "optional"}  # no variables of a template

PromptLike = str | Sequence[int] | Mapping[str, Any]


def as_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    """Return one prompt or many as a list of engine prompts. Raise `RequestError` for any other value."""
    prompts = prompts if isinstance(prompts, Mapping) else plain(prompts)
    if isinstance(prompts, (str, bytes, bytearray, Mapping)) or not isinstance(prompts, Iterable):
        return [as_prompt(prompts)]
    if isinstance(prompts, set | frozenset) or hasattr(prompts, "columns"):
        kind = type(prompts).__name__
        message = f"prompts are of type {kind}, not a list: a set has no order, and of a table give one column"
        raise RequestError(message, field="prompts")
    several = list(prompts)
    single = bool(several) and isinstance(several[0], Integral)
    return [as_prompt(several)] if single else [as_prompt(prompt) for prompt in several]


def as_prompt(prompt: Any) -> Prompt:
    """Return a prompt as an engine prompt. Raise `RequestError` for any other value."""
    if isinstance(prompt, Mapping) and any(prompt.get(key) is not None for key in PROMPT_KEYS):
        prompt = translate("a prompt", {k: v for k, v in prompt.items() if v is not None}, PROMPT_KEYS, PROMPT)
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


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    chat_template_kwargs: Mapping[str, Any] | None,
    variables: Mapping[str, Any],
    **parameters: Any,
) -> Prompt:
    """Return the prompt of a conversation.

    `variables` and `parameters` are the keyword arguments of `Tokenizer.conversation_text`; `chat_template_kwargs`
    takes precedence over `variables`. Raise `UnknownKeyword` for a variable that the template does not read.
    """
    overriding = chat_template_kwargs or {}
    if not isinstance(overriding, Mapping):
        raise RequestError(
            f"chat_template_kwargs is {overriding!r}: it must be a mapping", field="chat_template_kwargs"
        )
    if reserved := overriding.keys() & RESERVED:
        name = min(reserved)
        raise UnknownKeyword(f"chat_template_kwargs may not set {name}: give it as a keyword argument", field=name)
    _check_tools(parameters.get("tools", variables.get("tools")))
    text = tokenizer.conversation_text(messages, **parameters, **{**variables, **overriding})
    return TextPrompt(text, add_special_tokens=False)  # the template writes special tokens itself


def _check_tools(tools: Any) -> None:
    """Raise `RequestError` for a list of tools of which one does not have OpenAI's form."""
    for index, tool in enumerate(tools if isinstance(tools, list | tuple) else ()):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
            form = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}'
            raise RequestError(f"tools.{index} is {str(tool)[:80]!r}: it must have the form {form}", field="tools")


def default_params(info: ModelInfo) -> SamplingParams:
    """Return the sampling parameters of requests that give none: the model's own defaults."""
    return SamplingParams(**info.default_sampling)


def as_params(sampling_params: Any) -> SamplingParams:
    """Return the sampling parameters of one request. Raise `RequestError` for anything else."""
    if not isinstance(sampling_params, SamplingParams):
        given = type(sampling_params).__name__
        message = f"sampling_params is of type {given}: it must be SamplingParams"
        raise RequestError(message, field="sampling_params", value=sampling_params)
    return sampling_params


def _token_ids(value: Any) -> tuple[int, ...]:
    try:
        return as_token_ids(value)
    except TypeError as error:
        message = "a prompt is a text, a list of token ids, or a mapping with 'prompt' or 'prompt_token_ids'"
        raise RequestError(message, field="prompt", value=value) from error
