"""POST /v1/completions."""

from functools import partial

from fastapi import APIRouter, Request, Response

from jaxserve.core.request import TraceContext
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import EngineClient, TokensPrompt
from jaxserve.engine.fim import FillInMiddle
from jaxserve.engine.limits import cap_max_tokens, check_params
from jaxserve.server.answers.completion import CompletionResponse
from jaxserve.server.answers.generation import Job
from jaxserve.server.answers.prompts import fim_prompts, tokens_prompts
from jaxserve.server.errors import rename_error_fields
from jaxserve.server.http.auth import sender_of
from jaxserve.server.http.streaming import EventStream, while_connected
from jaxserve.server.routes.json_route import JsonRoute
from jaxserve.server.schemas.common import answer_tokens, prompt_tokens_to_keep
from jaxserve.server.schemas.completions import DEFAULT_MAX_TOKENS, CompletionBody
from jaxserve.server.schemas.prompts import parse_prompts
from jaxserve.server.state import State, new_id

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionBody, request: Request, state: State) -> Response:
    """Continue one or more prompts."""
    client, model = state.client(), state.check_model(body.model)
    body.check()
    given = parse_prompts(body.prompt, "prompt", state.settings.max_prompts)
    window, clamp = client.info.max_model_len, state.settings.clamp_max_tokens
    leave = body.tokens_to_leave(DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    keep = prompt_tokens_to_keep(body.truncate_prompt_tokens, window, leave)
    with rename_error_fields({"prompt": "suffix"}):
        fim = FillInMiddle(client.tokenizer) if body.suffix else None
    with rename_error_fields(body.client_names):
        params_for = partial(_params, client, body, clamp=clamp, ends=fim.end_token_ids if fim else ())
        # Refuse bad parameters before many prompts are tokenized.
        params_for(room=window)
        prompts, echoed = await _prompts(client, body, fim, given, keep)
        params = [params_for(room=window - len(prompt.token_ids)) for prompt in prompts]
        for prompt, each in zip(prompts, params, strict=True):
            check_params(client.info, each, len(prompt.token_ids))
    trace = TraceContext("text_completion", request.headers)
    sender = sender_of(request.scope, state.settings.api_keys)
    job = Job(new_id("cmpl"), prompts, params, body.priority, body.cache_salt or "", trace, sender)
    response = CompletionResponse(client, job, body, model, state.timestamp(), echoed=echoed)
    headers = {"x-request-id": job.id}
    if body.stream:
        return await EventStream.start(request, response.events(), headers)
    whole = await while_connected(request, response.whole())
    return Response(whole, headers=headers, media_type="application/json")


async def _prompts(
    client: EngineClient,
    body: CompletionBody,
    fim: FillInMiddle | None,
    given: list[str | tuple[int, ...]],
    keep: int | None,
) -> tuple[list[TokensPrompt], list[slice]]:
    """Return the prompts for the engine, and the part of each that is the client's prompt."""
    special, generates = body.add_special_tokens, body.max_tokens != 0
    if fim is not None and body.suffix:
        return await fim_prompts(
            client, fim, given, body.suffix, add_special_tokens=special, keep=keep, generates=generates
        )
    prompts = await tokens_prompts(client, given, add_special_tokens=special, keep=keep, generates=generates)
    return prompts, [slice(None)] * len(prompts)


def _params(
    client: EngineClient, body: CompletionBody, *, room: int, clamp: bool, ends: tuple[int, ...]
) -> SamplingParams:
    """Return the parameters for a prompt after which `room` tokens fit.

    The default of max_tokens is limited to `room`, and with `clamp` the client's max_tokens is too. `ends` are tokens
    that end an answer beside those of the client, unless it wants answers to go on.
    """
    default = min(max(DEFAULT_MAX_TOKENS, body.min_tokens or 0), room)
    asked = default if body.max_tokens is None else body.max_tokens
    logprobs = 0 if body.ranked and body.logprobs is None else body.logprobs
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    stop_token_ids = body.stop_token_ids
    if ends and not body.ignore_eos:
        stop_token_ids = [*dict.fromkeys([*(stop_token_ids or ()), *ends])]
    return body.sampling_params(
        client.info.default_sampling,
        stop_token_ids=stop_token_ids,
        n=body.candidates,
        max_tokens=cap_max_tokens(
            client.info, answer_tokens(asked, room, clamp=clamp), client.info.max_model_len - room
        ),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
