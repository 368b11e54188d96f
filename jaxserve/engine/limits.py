"""What a model and an engine allow a single request, checked before it is queued. Pure."""

from collections.abc import Sequence
from typing import Any

from jaxserve.core.errors import PromptTooLong, RequestError
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import ModelInfo


def check_prompt(info: ModelInfo, token_ids: Sequence[int]) -> None:
    """Raises RequestError unless the prompt is non-empty, in the vocabulary, and leaves room for one token."""
    if not token_ids:
        raise RequestError("the prompt is empty", field="prompt", value=0, limit="at least one token")
    if len(token_ids) >= info.max_model_len:
        raise PromptTooLong(
            f"the prompt has {len(token_ids)} tokens, with at least one generated token the limit is "
            f"{info.max_model_len} (max_model_len)",
            field="prompt",
            value=len(token_ids),
            limit=info.max_model_len - 1,
        )
    _check_vocabulary(info, "prompt", token_ids)


def check_params(info: ModelInfo, params: SamplingParams, prompt_tokens: int) -> None:
    """Raises RequestError if the parameters ask for more than the engine gives to one request."""
    _check_most("n", params.n, info.max_n, " (max_n)")
    _check_most("n", params.n, info.max_queued_requests, " (max_queued_requests)")  # more would never fit the queue
    _check_most("logprobs", params.logprobs, info.max_logprobs)
    _check_most("prompt_logprobs", params.prompt_logprobs, info.max_logprobs)
    _check_most("stop", len(params.stop_strings), info.max_stop_strings, " strings")
    _check_vocabulary(info, "stop_token_ids", params.stop_token_ids or ())
    _check_vocabulary(info, "logit_bias", tuple(params.logit_bias or ()))
    room = info.max_model_len - prompt_tokens
    reason = f" tokens (max_model_len {info.max_model_len} less {prompt_tokens} of the prompt)"
    _check_most("max_tokens", params.max_tokens, room, reason)
    _check_most("min_tokens", params.min_tokens, room, reason)


def _check_most(name: str, value: Any, limit: int, unit: str = "") -> None:
    if value is not None and value > limit:
        raise RequestError(f"{name} is {value}, the limit is {limit}{unit}", field=name, value=value, limit=limit)


def _check_vocabulary(info: ModelInfo, name: str, token_ids: Sequence[int]) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < info.vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < info.vocab_size)
        raise RequestError(
            f"{name} has the token id {wrong}, the vocabulary goes from 0 to {info.vocab_size - 1}",
            field=name,
            value=wrong,
            limit=info.vocab_size - 1,
        )
