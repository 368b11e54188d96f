"""Limits of a model and an engine on a single request, checked before it is queued."""

import asyncio
from collections.abc import Sequence

from jaxserve.core.errors import ContextLengthExceeded, NoTokenizer, PromptTooLong, RequestError
from jaxserve.core.sampling import SamplingParams
from jaxserve.core.structured import Grammar, GrammarCompiler
from jaxserve.engine.client import ModelInfo


def check_prompt(info: ModelInfo, token_ids: Sequence[int], *, generates: bool = True) -> None:
    """Raise `RequestError` unless the prompt is non-empty, in the vocabulary, and leaves room for one token.

    If it does not generate any token, the prompt may fill the model's context.
    """
    if not token_ids:
        raise RequestError("the prompt is empty", field="prompt", value=0, limit="at least one token")
    limit = info.max_model_len - 1 if generates else info.max_model_len
    if len(token_ids) > limit:
        raise PromptTooLong(
            f"{context_length(info)} However, the prompt has {len(token_ids)} tokens"
            + (", and at least one more must be left for the answer" if generates else ""),
            field="prompt",
            value=len(token_ids),
            limit=limit,
        )
    check_vocabulary(info, "prompt", token_ids)


def context_length(info: ModelInfo) -> str:
    """Return the sentence by which clients recognise a prompt that is too long for the model."""
    text = f"This model's maximum context length is {info.max_model_len} tokens (max_model_len)."
    if info.merged_len is not None and info.merged_len > info.max_model_len:
        text += f" With enough instances, the policy tp_transform merges some to hold {info.merged_len} tokens."
    if info.instance_len is None or info.instance_len >= info.max_model_len:
        return text
    return f"{text} Its instances can hold {info.instance_len} tokens now, and that many after a change of the plan."


def grammar_of(params: SamplingParams, compiler: GrammarCompiler | None) -> Grammar | None:
    """Return the compiled grammar of a request, None if it needs none. Wait until it is compiled.

    Raise `RequestError` if the grammar is invalid, unsupported or too large, or the model has no tokenizer.
    """
    if not params.constrained:
        return None
    compiler = _usable(compiler)
    grammar = None if params.structured is None else compiler.compile(params.structured)
    return _after_reasoning(grammar, params, compiler)


async def grammar_in_turn(params: SamplingParams, compiler: GrammarCompiler | None, sender: str) -> Grammar | None:
    """Return the compiled grammar of a request as `grammar_of`, while the event loop goes on.

    Senders have turns. Raise also `QueueFull`.
    """
    if not params.constrained:
        return None
    compiler = _usable(compiler)
    grammar = None
    if params.structured is not None:
        compiling = compiler.submit(params.structured, sender)
        grammar = compiling.result() if compiling.done() else await asyncio.wrap_future(compiling)
    return _after_reasoning(grammar, params, compiler)


def _usable(compiler: GrammarCompiler | None) -> GrammarCompiler:
    if compiler is None:
        raise NoTokenizer
    return compiler


def _after_reasoning(grammar: Grammar | None, params: SamplingParams, compiler: GrammarCompiler) -> Grammar | None:
    return grammar if params.reasoning is None else compiler.after_reasoning(grammar, params.reasoning)


def check_params(info: ModelInfo, params: SamplingParams, prompt_tokens: int) -> None:
    """Raise `RequestError` if a parameter exceeds the engine's limits on one request."""
    _check_max("n", params.n, info.max_n, "max_n")
    _check_max("n", params.n, info.max_queued_requests, "max_queued_requests")  # more would never fit into the queue
    _check_max("logprobs", params.logprobs, info.max_logprobs, "max_logprobs")
    _check_max("prompt_logprobs", params.prompt_logprobs, info.max_logprobs, "max_logprobs")
    _check_max("stop", len(params.stop_strings), info.max_stop_strings, "max_stop_strings", "has {} strings")
    check_vocabulary(info, "stop_token_ids", params.stop_token_ids or ())
    check_vocabulary(info, "logit_bias", tuple(params.logit_bias or ()))
    check_vocabulary(info, "allowed_token_ids", (params.allowed_token_ids or ())[-1:])  # the largest one
    _check_room(info, "max_tokens", params.max_tokens, prompt_tokens)
    _check_room(info, "min_tokens", params.min_tokens, prompt_tokens)


def _check_room(info: ModelInfo, name: str, value: int | None, prompt_tokens: int) -> None:
    room = info.max_model_len - prompt_tokens
    if value is not None and value > room:
        raise ContextLengthExceeded(
            f"{name} is {value}, the limit is {room}. {context_length(info)} "
            f"The prompt has {prompt_tokens} tokens and leaves {room} for the answer",
            field=name,
            value=value,
            limit=room,
        )


def cap_max_tokens(info: ModelInfo, max_tokens: int | None, prompt_tokens: int) -> int | None:
    """Return `max_tokens` of a request, limited to `max_new_tokens` of the model's generation_config.json."""
    if info.max_new_tokens is None:
        return max_tokens
    if max_tokens is None:
        return min(info.max_new_tokens, info.max_model_len - prompt_tokens)
    return min(max_tokens, info.max_new_tokens)


def _check_max(name: str, value: int | None, limit: int, option: str, got: str = "is {}") -> None:
    if value is not None and value > limit:
        message = f"{name} {got.format(value)}, the limit is {limit} ({option})"
        raise RequestError(message, field=name, value=value, limit=limit)


def check_vocabulary(info: ModelInfo, name: str, token_ids: Sequence[int]) -> None:
    """Raise `RequestError` if a token is not in the model's vocabulary, which may be smaller than the tokenizer's."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < info.vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < info.vocab_size)
        raise RequestError(
            f"{name} has the token id {wrong}: token ids are 0 to {info.vocab_size - 1}",
            field=name,
            value=wrong,
            limit=info.vocab_size - 1,
        )
