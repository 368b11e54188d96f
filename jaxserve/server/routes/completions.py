"""POST /v1/completions."""

from fastapi import APIRouter, Request, Response

from jaxserve.core.errors import RequestError
from jaxserve.core.request import TraceContext
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import EngineClient, TokensPrompt
from jaxserve.engine.limits import cap_max_tokens, check_params
from jaxserve.server.completion import CompletionResponse
from jaxserve.server.errors import rename_error_fields
from jaxserve.server.generation import Job
from jaxserve.server.prompts import tokens_prompts
from jaxserve.server.routes.json_route import JsonRoute
from jaxserve.server.schemas.common import answer_tokens, prompt_tokens_to_keep
from jaxserve.server.schemas.completions import DEFAULT_MAX_TOKENS, CompletionBody
from jaxserve.server.schemas.prompts import parse_prompts
from jaxserve.server.state import State, new_id
from jaxserve.server.streaming import EventStream, while_connected

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionBody, request: Request, state: State) -> Response:
    """Continue one or more prompts."""
    client, model = state.client(), state.check_model(body.model)
    body.check()
    given = parse_prompts(body.prompt, "prompt", state.settings.max_prompts)
    window, clamp = client.info.max_model_len, state.settings.clamp_max_tokens
    keep = prompt_tokens_to_keep(body.truncate_prompt_tokens, window - max(body.max_tokens or 1, 1))
    with rename_error_fields(body.client_names):
        # Refuse bad parameters before many prompts are tokenized.
        _params(client, body, room=window, clamp=clamp)
        prompts = await tokens_prompts(client, given, add_special_tokens=body.add_special_tokens, keep=keep)
        params = [_params_for(client, body, prompt, clamp=clamp) for prompt in prompts]
    trace = TraceContext("text_completion", request.headers)
    job = Job(new_id("cmpl"), prompts, params, body.priority, body.cache_salt or "", trace)
    response = CompletionResponse(client, job, body, model, state.timestamp())
    headers = {"x-request-id": job.id}
    if body.stream:
        return await EventStream.start(request, response.events(), headers)
    whole = await while_connected(request, response.whole())
    return Response(whole, headers=headers, media_type="application/json")


def _params_for(client: EngineClient, body: CompletionBody, prompt: TokensPrompt, *, clamp: bool) -> SamplingParams:
    """Return the parameters for one prompt. Raise RequestError if they break a limit."""
    length = len(prompt.token_ids)
    params = _params(client, body, room=client.info.max_model_len - length, clamp=clamp)
    check_params(client.info, params, length)
    return params


def _params(client: EngineClient, body: CompletionBody, room: int, *, clamp: bool) -> SamplingParams:
    """Return the parameters for a prompt after which `room` tokens fit.

    The default of max_tokens is limited to `room`, and with `clamp` the client's max_tokens is too.
    """
    if body.scores_only and body.stream:
        raise RequestError("max_tokens 0 cannot be streamed", field="max_tokens", value=0, limit=1)
    default = min(max(DEFAULT_MAX_TOKENS, body.min_tokens or 0), room)
    asked = 1 if body.scores_only else default if body.max_tokens is None else body.max_tokens
    logprobs = 0 if body.ranked and body.logprobs is None else body.logprobs
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return body.sampling_params(
        client.info.default_sampling,
        n=body.candidates,
        max_tokens=cap_max_tokens(
            client.info, answer_tokens(asked, room, clamp=clamp), client.info.max_model_len - room
        ),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
